"""The commands of ``python -m kvcanary_fx``, one module each."""
