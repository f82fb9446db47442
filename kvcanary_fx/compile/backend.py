"""The backend: ``torch.compile(model, backend=kvcanary_backend)``, or ``backend="kvcanary"`` by name."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from ..config import CanaryConfig, require_config, resolve
from ..errors import AnalysisError, CaptureError
from ..kernels.ops import import_gpu_kernels
from ..passes import dynamo_calls
from ..passes.accesses import DependsOnDataError
from ..passes.functional_cache import REPLACED, WRAPPED
from ..passes.graph_plan import GraphPlan
from ..passes.pipeline import passes, run_passes
from ..runtime.session import CanarySession
from ..runtime.stack_room import with_stack_room
from . import coverage
from .cache_names import begin_with_dynamo, computing_names
from .collector import no_full_collections
from .rehearsal import rehearse

_SESSIONS: dict[tuple[object, ...], CanarySession] = {}
_LOCK = threading.Lock()


def session(config: CanaryConfig | None = None) -> CanarySession:
    """The session shared by all models compiled with these settings.

    Args:
        config: None takes the settings of the environment; if only one session exists, that one.
    """
    with _LOCK:
        if config is None and len(_SESSIONS) == 1:
            return next(iter(_SESSIONS.values()))
        settings = CanaryConfig.from_env() if config is None else require_config(config, "session()")
        return _SESSIONS.setdefault(settings.runtime_key(), CanarySession(settings))


def sessions() -> list[CanarySession]:
    """Every shared session so far."""
    with _LOCK:
        return list(_SESSIONS.values())


def kvcanary_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """A torch.compile backend that guards every KV cache the graph writes, then compiles with Inductor.

    Args:
        mode: as torch.compile's, passed to the inner backend (``"reduce-overhead"``).
        options: as torch.compile's, passed to the inner backend; keys that start with ``kvcanary.`` are
            settings of :class:`CanaryConfig` (``{"kvcanary.mode": "log"}``).

    Raises:
        UnknownSettingError, InvalidSettingError: a setting that does not exist, or a value it cannot have.
        LintError: ``kvcanary.lint="raise"`` and the compiled code copies a pool.
    """
    config, rest = resolve(None, options)
    return compile_graph(gm, example_inputs, config, session(config), mode, rest)


def _reset() -> None:
    """Called by torch._dynamo.reset(), through the attribute that it looks for on a backend."""
    for shared in sessions():
        coverage.forget_watched(shared)


def _session_for(options: Mapping[str, Any]) -> CanarySession:
    """The session of the graphs that are compiled with these options."""
    return session(resolve(None, options)[0])


kvcanary_backend.reset = _reset  # type: ignore[attr-defined]
kvcanary_backend.is_kvcanary = True  # type: ignore[attr-defined]  # no inner backend of itself
kvcanary_backend.session_for = _session_for  # type: ignore[attr-defined]


def register_name() -> None:
    """Register ``backend="kvcanary"``, where no entry point names it."""
    with contextlib.suppress(AssertionError):  # it is registered: the package was imported again
        torch._dynamo.register_backend(kvcanary_backend, name="kvcanary")


class CanaryBackend:
    """A backend with its own settings and session.

    Example::

        backend = kvcanary_fx.CanaryBackend(CanaryConfig(mode="log"))
        model = torch.compile(model, backend=backend)
        print(backend.session.summary())
    """

    is_kvcanary = True  # may not be the inner backend of another

    def __init__(self, config: CanaryConfig | None = None, owner: CanarySession | None = None):
        """
        Args:
            owner: the session to use, such as an engine's; None makes one.
        """
        self.config = CanaryConfig.from_env() if config is None else require_config(config, "CanaryBackend()")
        self.session = owner or CanarySession(self.config)
        why = dynamo_calls.disabled() if owner is None and self.config.mode != "off" else None
        if why is not None:  # nobody will call this backend
            self.session.lose_coverage(f"what is compiled with this backend runs unguarded: {why}")
        coverage.listen()
        begin_with_dynamo()

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        config, rest = resolve(self.config, options)
        return compile_graph(gm, example_inputs, config, self.session, mode, rest)

    def reset(self) -> None:
        """Called by torch._dynamo.reset()."""
        coverage.forget_watched(self.session)

    def session_for(self, options: Mapping[str, Any]) -> CanarySession:
        """The session of the graphs that are compiled with these options."""
        return self.session

    def __deepcopy__(self, memo: dict[int, Any]) -> CanaryBackend:
        return self  # Hugging Face's CompileConfig copies its backend; the session must stay the same

    def __copy__(self) -> CanaryBackend:
        return self

    def __reduce__(self) -> tuple[type[CanaryBackend], tuple[CanaryConfig]]:
        """A saved backend, as in ``torch.save(compiled)``, has a new session when it is read: it is of other memory."""
        if type(self.session) is not CanarySession:
            raise TypeError(
                "a backend with an engine's session cannot be pickled: the session knows this process's pools. Save "
                "the model as it was before torch.compile, and compile it with the session of the process that reads it"
            )
        return type(self), (self.config,)


@with_stack_room
def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: CanaryConfig,
    owner: CanarySession,
    mode: str | None,
    options: Mapping[str, Any],
) -> Callable[..., Any]:
    """Rewrite a graph, compile it with the inner backend, and bracket its calls."""
    plain = functools.partial(inner_compile, gm, example_inputs, config, mode, options)
    if config.mode == "off":
        return plain()
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise CaptureError("this graph is not compiled yet")
    side, recorded = config.beside, owner.registry.records
    declared = owner.registry.declared_axes
    chain, pools_in = "chain" in config.checks, owner.hooks.pools_in
    ordered = passes(chain, config.rewrite, pools_in, side, config.checks_at_once, recorded, declared)
    try:
        with computing_names(example_inputs, config.inner):
            rewritten, plan = run_passes(gm, example_inputs, ordered, config.dump)
    except DependsOnDataError as e:
        return _depends_on_data(e, plain, owner)
    except Exception as e:
        # Not every exception may reach Dynamo: it treats some as graph breaks, and runs on unguarded.
        owner.report_lost(AnalysisError(e), e)
        return _unguarded(plain(), owner)
    _announce(plan, owner)
    if not plan.guarded:
        owner.add_graph(plan)
        return _unguarded(plain(), owner)
    coverage.watch_recompile_limit(owner)
    if not owner.calls_are_judged:
        coverage.watch_calls(owner)
    binding = owner.add_graph(plan)
    if owner.hooks.pools_in is None:  # an engine compiles before its warm-up
        ahead = rehearse(rewritten, example_inputs, plan, config)
        if ahead is not None:
            binding.before_first_call(ahead.wait)
    inputs = [*example_inputs, *binding.states]
    with no_full_collections():
        compiled = inner_compile(rewritten, inputs, config, mode, options, plan)

    entered, run = owner.entered, owner.runner()

    def guarded(*args: Any) -> Any:
        entered.guarded += 1
        return run(binding, compiled, args)

    return guarded


def _depends_on_data(
    cause: DependsOnDataError, plain: Callable[[], Callable[..., Any]], owner: CanarySession
) -> Callable[..., Any]:
    """Compile as without the canary a graph that cannot run on fake tensors, and say what that leaves unguarded.

    Backends that trace it raise what Dynamo takes for a graph break; it calls us again for the pieces.

    Args:
        plain: compiles it so.
    """
    how = "To guard it, index with a tensor that has an axis: cache[:, :, pos.view(1)] = k, or index_copy_"
    try:
        compiled = plain()
    except (DataDependentOutputException, DynamicOutputShapeException):
        owner.lose_coverage(
            f"{cause.what}, so Dynamo breaks the graph there, as without the canary: not guarded. {how}"
        )
        raise
    owner.lose_coverage(f"{cause.what}, so its graph runs unguarded. {how}")
    return _unguarded(compiled, owner)


def _unguarded(compiled: Callable[..., Any], owner: CanarySession) -> Callable[..., Any]:
    """Counts calls of a graph without checks: it is compiled, so its function does not run eagerly."""
    entered = owner.entered

    def unguarded(*args: Any) -> Any:
        entered.unguarded += 1
        return compiled(*args)

    return unguarded


def inner_compile(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    config: CanaryConfig,
    mode: str | None,
    options: Mapping[str, Any],
    plan: GraphPlan | None = None,
) -> Callable[..., Any]:
    """Compile a graph with the inner backend; ``mode`` and ``options`` are as torch.compile passes them."""
    if config.inner == "inductor":
        from .inductor import compile_with_inductor

        return compile_with_inductor(gm, inputs, mode, options, plan, config.lint)
    inner = torch._dynamo.lookup_backend(config.inner) if isinstance(config.inner, str) else config.inner
    arguments = {k: v for k, v in (("mode", mode), ("options", dict(options))) if v}
    if arguments and isinstance(config.inner, str) and config.inner in ("eager", "aot_eager"):
        arguments = {}  # these backends take neither, and torch.compile's wrapper, which would say so, is not used here
    compiled: Callable[..., Any] = inner(gm, list(inputs), **arguments)
    return compiled


def _announce(plan: GraphPlan, owner: CanarySession) -> None:
    """Log what cannot be guarded, and what to do about it: once for each cache, and once if there is no cache."""
    replaced = [name for name, why in plan.unguarded if why == REPLACED]
    wrapped = [name for name, why in plan.unguarded if why == WRAPPED]
    if replaced:
        owner.warn_once(
            f"replaced {replaced}",
            f"kvcanary.unguarded {plan.name}: {_some(replaced)}: replaced each step by a new tensor that is computed "
            "as a whole, so it is not guarded. Write it in place (state.copy_(new)), and it is.",
        )
    if wrapped:
        owner.warn_once(
            f"wrapped {wrapped}",
            f"kvcanary.unguarded {plan.name}: {_some(wrapped)}: {WRAPPED}, so it is not guarded. Keep the plain tensor "
            "as the cache (of a DTensor cache.to_local()), and it is.",
        )
    if plan.functional:
        owner.warn_once(
            f"rebuilt {plan.functional}",
            f"kvcanary.unguarded {plan.name}: the cache is rebuilt by cat each step ({_some(plan.functional)}), so "
            "there is nothing to guard between steps. Use a cache that is written in place: Hugging Face's "
            "StaticCache (generate(..., cache_implementation='static')), or a preallocated tensor and index_copy_.",
        )
    elif plan.born:
        owner.warn_once(
            f"born {plan.born}",
            f"kvcanary.unguarded {plan.name}: the cache is created inside this graph ({_some(plan.born)}), so this "
            "call is not guarded; later ones are, if the cache is passed in. Allocate it before the first call: "
            "Hugging Face's cache.early_initialization(...).",
        )
    elif not plan.guarded and not replaced and not wrapped:
        why = _some([f"{name}: {why}" for name, why in plan.unguarded], "; ") or "it writes none of its inputs"
        owner.warn_once(
            "no cache",  # a model with graph breaks has many such graphs, and the summary lists them
            f"kvcanary.unguarded {plan.name}: no KV cache is written in this graph, nothing is guarded in it ({why}). "
            "If the model has a cache, it is guarded where the graph writes it in place (index_copy_), or returns it "
            "with some slots written (index_copy, or an op with an argument called a cache); `python -m kvcanary_fx "
            "explain` shows what each graph writes.",
        )


def _some(names: Sequence[str], separator: str = ", ") -> str:
    """The first few of many names."""
    return separator.join(names[:4]) + (f"{separator}and {len(names) - 4} more" if len(names) > 4 else "")


coverage.listen()
begin_with_dynamo()
import_gpu_kernels()  # not in the first call
