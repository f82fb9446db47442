"""kvcanary_fx: an AddressSanitizer for the KV cache of LLM inference.

``torch.compile(model, backend="kvcanary")`` guards every KV cache that the model writes.
"""

from .backend import CanaryBackend, kvcanary_backend, register_name, session, sessions
from .config import CanaryConfig
from .context import (
    ForwardContext,
    forward_context,
    get_forward_context,
    has_forward_context,
    override_forward_context,
)
from .engine import forward, install_canary, step
from .engine_plan import Batch
from .engine_pools import EnginePool
from .engine_session import EngineSession
from .errors import (
    CanaryError,
    CaptureError,
    ConcurrentUseError,
    CoverageError,
    EngineError,
    InvalidSettingError,
    KVCacheViolation,
    LintError,
    MissingContextError,
    SelfTestError,
    SessionStateError,
    StepInputError,
    UnknownLayerError,
    UnknownSettingError,
)
from .passes.attention_ops import register_attention_op
from .passes.write_ops import register_kv_write
from .pool_layout import KVPool
from .prefixes import Prefix
from .protect import protect, session_of
from .session import CanarySession, Stats
from .step_inputs import StepInputs
from .step_view import StepView
from .transfer import ShadowSlice
from .violations import Violation
from .window_report import GroupReport, WindowReport

__all__ = [
    "Batch",
    "CanaryBackend",
    "CanaryConfig",
    "CanaryError",
    "CanarySession",
    "CaptureError",
    "ConcurrentUseError",
    "CoverageError",
    "EngineError",
    "EnginePool",
    "EngineSession",
    "ForwardContext",
    "GroupReport",
    "InvalidSettingError",
    "KVCacheViolation",
    "KVPool",
    "LintError",
    "MissingContextError",
    "Prefix",
    "SelfTestError",
    "SessionStateError",
    "ShadowSlice",
    "Stats",
    "StepInputError",
    "StepInputs",
    "StepView",
    "UnknownLayerError",
    "UnknownSettingError",
    "Violation",
    "WindowReport",
    "forward",
    "forward_context",
    "get_forward_context",
    "has_forward_context",
    "install_canary",
    "kvcanary_backend",
    "override_forward_context",
    "protect",
    "register_attention_op",
    "register_kv_write",
    "session",
    "session_of",
    "sessions",
    "step",
]
__version__ = "0.1.0"

register_name()
