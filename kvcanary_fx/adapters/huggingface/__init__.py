"""Hugging Face transformers: one call guards a model's ``generate`` and ``generate_batch``."""

from .generate import Protection, attach, batch_session, protect, unprotect

__all__ = ["Protection", "attach", "batch_session", "protect", "unprotect"]
