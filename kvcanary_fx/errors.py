"""Every error of the package except :class:`~.violation.KVCacheViolation`: one class, one message template each."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence


class CanaryError(Exception):
    """Base of all errors raised by kvcanary_fx."""


class CoverageError(CanaryError):
    """Checks that were compiled into the model did not run."""


class MissedChecksError(CoverageError):
    """A guarded graph ran, and some of its checks did not."""

    def __init__(self, graph: str, missing: Sequence[str]):
        super().__init__(
            f"{graph} ran, but these checks in it did not: {', '.join(missing)}. Something between our pass and "
            "the device removed them: an inner backend that drops ops it does not know, or an artifact that was "
            "compiled without them. Compile with the inner backend 'inductor', 'aot_eager' or 'eager', and clear "
            "the compile cache (TORCHINDUCTOR_FORCE_DISABLE_CACHES=1) once."
        )


class UnguardedForwardError(CoverageError):
    """A protected module, or a compiled function, ran without any of its checks."""

    def __init__(self, module: str, layers: Sequence[str], why: str | None = None):
        """
        Args:
            layers: the layers that were guarded before.
            why: the cause and the way out; None if Dynamo does not say.
        """
        named = ", ".join(layers[:4]) + (f" and {len(layers) - 4} more" if len(layers) > 4 else "")
        before = f", although these were guarded before: {named}" if layers else ""
        unknown = (
            "Dynamo passed over it, so it ran eagerly. A graph break that cannot be resumed from (in a loop, in a "
            "`with` or `try`), torch.compiler.disable, the recompile limit, or an earlier call that could not be "
            "compiled does that: TORCH_LOGS=recompiles,graph_breaks shows which, torch._dynamo.reset() tries again"
        )
        super().__init__(f"{module} ran without a single check of its KV cache{before}: {why or unknown}.")


class RecompileLimitError(CoverageError):
    """Dynamo gave up compiling a guarded function: from now on it runs eagerly, unguarded."""

    def __init__(self, function: str, limit: str, value: object, reason: object):
        super().__init__(
            f"{function} hit torch._dynamo.config.{limit} ({value}): what is not compiled of it yet runs eagerly from "
            f"here on, without a check of the KV cache. Last reason to recompile: {reason}. {_fewer_compiles(reason)}, "
            f"or raise torch._dynamo.config.{limit}."
        )


def _fewer_compiles(reason: object) -> str:
    """How to make Dynamo recompile a function less often, by its last reason to recompile."""
    text = str(reason)
    if "BACKEND_MATCH" in text or "different backend" in text:
        return (
            "Every backend object compiles the function for itself: use one for all models "
            "(torch.compile(backend='kvcanary') shares one)"
        )
    if "size" in text or "stride" in text or "shape" in text:
        return "Mark the size that varies as dynamic (torch.compile(dynamic=True), torch._dynamo.mark_dynamic)"
    return "Keep what that names constant, pass numbers that vary as tensors, use one backend object for all models"


class UnrecordedLayersError(CoverageError):
    """Layers of an engine's pool wrote slots, and nothing fingerprinted them; or they wrote none, where others did."""

    def __init__(self, layers: Sequence[str], stopped: Sequence[str] = ()):
        """
        Args:
            layers: those whose slots have no fingerprint.
            stopped: others, whose slots have that of an earlier write.
        """
        told = []
        if layers:
            told.append(f"the last forward left no fingerprint in {first_of(layers)}")
        if stopped:
            told.append(
                f"of {first_of(stopped)} no write was recorded for health_every steps in which other layers had some: "
                "attention there reads what earlier tokens left in these slots, unless they are written unguarded"
            )
        super().__init__(
            "; ".join(told) + ". Either these layers write nothing, or the model that writes them is not compiled with "
            "session.backend, its graph came from a cache that was filled without the canary, or it writes other "
            "tensors than those of the KVPool. session.summary() lists what is guarded; checks without 'content' "
            "guard identity alone"
        )


def first_of(names: Sequence[str]) -> str:
    """The first few of many names."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


class MissingContextError(CanaryError):
    """A canary op ran outside a guarded forward."""

    def __init__(self) -> None:
        super().__init__(
            f"no ForwardContext is published in thread {threading.current_thread().name!r}. Canary ops run inside a "
            "model compiled with backend='kvcanary' (or wrapped by kvcanary_fx.protect), in the thread that called "
            "it; a context belongs to one thread. Call the compiled model, not a piece of its graph."
        )


class ConcurrentUseError(CanaryError):
    """Two threads ran forwards over the same KV cache at once."""

    def __init__(self, pool: str, owner: str):
        super().__init__(
            f"thread {threading.current_thread().name!r} entered a forward over the KV cache {pool!r} while thread "
            f"{owner!r} is inside one. A cache serves one forward at a time: give each thread a cache of its own, "
            "or take turns."
        )


class CaptureError(CanaryError):
    """A CUDA graph is being captured over a graph or cache that was not prepared."""

    def __init__(self, what: str):
        super().__init__(
            f"a CUDA graph is being captured, and {what}: memory allocated during the capture would belong to the "
            "graph. Run the same forward once, over the same cache, before capturing."
        )


class UnknownSettingError(CanaryError, ValueError):
    """A setting that does not exist."""

    def __init__(self, name: str, where: str, valid: Iterable[str]):
        super().__init__(f"unknown setting {name!r} in {where}. Valid settings: {', '.join(sorted(valid))}.")


class InvalidSettingError(CanaryError, ValueError):
    """A setting with an invalid value."""

    def __init__(self, name: str, where: str, value: object, expected: str):
        super().__init__(f"setting {name!r} in {where} is {value!r}; it must be {expected}.")


class LintError(CanaryError):
    """The lint found something, and ``lint="raise"`` is set."""

    def __init__(self, findings: Sequence[str]):
        super().__init__(
            "the compiled graph breaks a rule (kvcanary.lint='raise'):\n" + "\n".join(f"- {f}" for f in findings)
        )


class AnalysisError(CanaryError):
    """A pass failed on a graph."""

    def __init__(self, cause: BaseException):
        super().__init__(
            f"the graph could not be analysed ({type(cause).__name__}: {cause}). This is a bug in kvcanary_fx; please "
            "report it with the graph, which KVCANARY_DUMP=<directory> writes. kvcanary.mode='log' leaves such a "
            "graph unguarded and goes on."
        )


class MissingExtraError(CanaryError, ImportError):
    """A command needs a package that is not installed."""

    def __init__(self, package: str, extra: str, purpose: str):
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed: pip install 'kvcanary-fx[{extra}]'"
        )


class IncidentError(CanaryError):
    """The file of an incident cannot be written where it was asked for, or read."""

    def __init__(self, path: object, problem: str, remedy: str):
        super().__init__(f"{path}: {problem}. {remedy}.")


class EndpointError(CanaryError):
    """``top`` was given no endpoint, or one that says nothing about the canary."""

    def __init__(self, url: str, problem: str, remedy: str):
        super().__init__(f"{url}: {problem}. {remedy}.")


class UnloadableTargetError(CanaryError):
    """``explain`` was given something it cannot load."""

    def __init__(self, target: str, reason: str):
        super().__init__(
            f"cannot load {target!r}: {reason}. Give FILE.py:NAME, where NAME is a function that returns "
            "(model, inputs), or a module or function with an attribute 'example_inputs'."
        )


class EngineError(CanaryError, ValueError):
    """An engine described its pools, or used a session, in a way that is invalid."""


class RequestIdError(EngineError, TypeError):
    """What an engine gave for a request's id is none."""

    def __init__(self, given: object):
        super().__init__(f"a request id is a string or an int, not {type(given).__name__}: {given!r}")


class UnknownLayerError(CanaryError, LookupError):
    """An opaque attention op names a layer that no pool has."""

    def __init__(self, layer: str, known: Sequence[str]):
        named = ", ".join(known[:6]) + (f" and {len(known) - 6} more" if len(known) > 6 else "")
        super().__init__(
            f"an attention op names the layer {layer!r}, and no KVPool has it. The layers are: {named}. Give the names "
            "that the op uses as KVPool(layer_names=...)"
        )


class SelfTestError(CanaryError, RuntimeError):
    """A check did not report a planted fault, or reported one that was not there."""

    def __init__(self, failed: Sequence[tuple[str, str, Sequence[str]]]):
        lines = [
            f"- {check}: planted {fault}, reported {', '.join(told) or 'nothing'}" for check, fault, told in failed
        ]
        super().__init__(
            "the canary's own checks do not work here, so it will not pretend to guard:\n"
            + "\n".join(lines)
            + "\n`python -m kvcanary_fx doctor` shows each check; please report this with your torch version"
        )


class SessionStateError(CanaryError, RuntimeError):
    """A session was used out of order: a forward outside a step, a step after close, and the like."""


class StepInputError(CanaryError, ValueError):
    """The inputs of a step do not fit their slots, or a slot was declared wrongly."""

    def __init__(self, problem: str, remedy: str):
        super().__init__(f"{problem}. {remedy}.")
