"""Bugs of layouts, scales, ranks and hardware (I, J, K, L)."""
