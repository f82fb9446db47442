"""kvcanary_fx: an AddressSanitizer for the KV cache of LLM inference.

``torch.compile(model, backend="kvcanary")`` guards every KV cache that the model writes.
"""

from .compile.backend import CanaryBackend, kvcanary_backend, register_name, session, sessions
from .compile.protect import protect, session_of
from .config import CanaryConfig
from .engine.batch_fields import Batch
from .engine.guarded_pool import EnginePool
from .engine.kv_pool import KVPool
from .engine.observers.windows import GroupReport, WindowReport
from .engine.prefixes import Prefix
from .engine.session import EngineSession
from .engine.step_inputs import StepInputs
from .engine.step_view import StepView
from .engine.transfer import ShadowSlice
from .errors import (
    CanaryError,
    CaptureError,
    ConcurrentUseError,
    CoverageError,
    EngineError,
    IncidentError,
    InvalidSettingError,
    LintError,
    MissingContextError,
    SelfTestError,
    SessionStateError,
    StepInputError,
    UnknownLayerError,
    UnknownSettingError,
)
from .install import forward, install_canary, step
from .kernels.context import (
    ForwardContext,
    forward_context,
    get_forward_context,
    has_forward_context,
    override_forward_context,
)
from .kernels.ops import import_gpu_kernels
from .passes.attention_ops import register_attention_op
from .passes.write_ops import register_kv_write
from .reports.violation import KVCacheViolation, Violation
from .runtime.session import CanarySession, Stats

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
    "IncidentError",
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
import_gpu_kernels()
