"""Faults that are planted to prove the checks, and small models to plant them in."""
