"""Bugs of transfers and off-load (D)."""
