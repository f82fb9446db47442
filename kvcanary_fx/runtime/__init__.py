"""A guarded call: binds caches, runs checks, and judges changes."""
