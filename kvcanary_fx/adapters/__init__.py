"""Adapters: one per engine, imported only by who uses that engine."""
