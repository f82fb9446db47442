"""Bugs of padding, reserved slots and NaN (H)."""
