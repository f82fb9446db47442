"""Bugs of the life of slots: use after free, double free (C)."""
