"""Adapters: one per engine, imported only where that engine is used."""
