"""Bugs of prefix identity, of drafts and of windows (E, F, G)."""
