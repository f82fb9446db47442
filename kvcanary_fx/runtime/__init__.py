"""A guarded call: caches are bound, checks run, what changed is judged."""
