"""kvcanary_fx: an AddressSanitizer for the KV cache of LLM inference.

``torch.compile(model, backend="kvcanary")`` guards every KV cache that the model writes.

What is here is imported when it is first asked for.  An engine that has the package installed and the canary off needs
little of it: all of it took 0.45 s in each process of vLLM (CPU core).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compile.backend import CanaryBackend, kvcanary_backend, session, sessions
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

#: Where each name is.
_PLACES = {
    ".compile.backend": "CanaryBackend kvcanary_backend session sessions",
    ".compile.protect": "protect session_of",
    ".config": "CanaryConfig",
    ".engine.batch_fields": "Batch",
    ".engine.guarded_pool": "EnginePool",
    ".engine.kv_pool": "KVPool",
    ".engine.observers.windows": "GroupReport WindowReport",
    ".engine.prefixes": "Prefix",
    ".engine.session": "EngineSession",
    ".engine.step_inputs": "StepInputs",
    ".engine.step_view": "StepView",
    ".engine.transfer": "ShadowSlice",
    ".errors": (
        "CanaryError CaptureError ConcurrentUseError CoverageError EngineError IncidentError "
        "InvalidSettingError LintError MissingContextError SelfTestError SessionStateError StepInputError "
        "UnknownLayerError UnknownSettingError"
    ),
    ".install": "forward install_canary step",
    ".kernels.context": (
        "ForwardContext forward_context get_forward_context has_forward_context override_forward_context"
    ),
    ".passes.attention_ops": "register_attention_op",
    ".passes.write_ops": "register_kv_write",
    ".reports.violation": "KVCacheViolation Violation",
    ".runtime.session": "CanarySession Stats",
}
_PLACE_OF = {name: place for place, names in _PLACES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """A name of :data:`__all__`, or a module of the package."""
    place = _PLACE_OF.get(name)
    if place is None and (name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}") is None):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = importlib.import_module(f".{name}" if place is None else place, __name__)
    if place is not None:
        found = globals()[name] = getattr(found, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _register_name() -> None:
    """Register ``backend="kvcanary"`` if no installed package does by its entry point, as in a checkout."""
    if not importlib.metadata.entry_points(group="torch_dynamo_backends", name="kvcanary"):
        from .compile.backend import register_name  # and all that it imports

        register_name()


_register_name()
