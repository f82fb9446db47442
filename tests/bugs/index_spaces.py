"""Bugs of slot mappings and index spaces (B)."""
