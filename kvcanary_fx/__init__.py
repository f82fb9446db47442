"""kvcanary_fx: an AddressSanitizer for the KV cache of LLM inference.

``torch.compile(model, backend="kvcanary")`` guards every KV cache that the model writes.
"""

from .backend import CanaryBackend, kvcanary_backend, session, sessions
from .config import CanaryConfig
from .context import ForwardContext, forward_context, get_forward_context, has_forward_context
from .errors import (
    CanaryError,
    CaptureError,
    ConcurrentUseError,
    CoverageError,
    InvalidSettingError,
    KVCacheViolation,
    LintError,
    MissingContextError,
    UnknownSettingError,
)
from .passes.write_ops import register_kv_write
from .protect import protect, session_of
from .session import CanarySession, Stats
from .violations import Violation

__all__ = [
    "CanaryBackend",
    "CanaryConfig",
    "CanaryError",
    "CanarySession",
    "CaptureError",
    "ConcurrentUseError",
    "CoverageError",
    "ForwardContext",
    "InvalidSettingError",
    "KVCacheViolation",
    "LintError",
    "MissingContextError",
    "Stats",
    "UnknownSettingError",
    "Violation",
    "forward_context",
    "get_forward_context",
    "has_forward_context",
    "kvcanary_backend",
    "protect",
    "register_kv_write",
    "session",
    "session_of",
    "sessions",
]
__version__ = "0.1.0"
