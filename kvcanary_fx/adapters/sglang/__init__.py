"""SGLang: a plugin (``sglang.srt.plugins``) that guards the pools of every model runner.

It does nothing unless ``KVCANARY_MODE`` is ``raise`` or ``log``.
"""

from .plugin import register

__all__ = ["register"]
