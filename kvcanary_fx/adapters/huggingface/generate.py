"""The guarded ``generate`` of one model, and the managers of its batches."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...compile.backend import CanaryBackend
from ...compile.protect import GuardedCall
from ...config import CanaryConfig
from ...engine.session import EngineSession
from ...passes import dynamo_calls
from ...runtime.stack_room import with_stack_room
from ..hooks import hook, unhook
from .batching import GuardedManager
from .caches import (
    ReorderedInPlace,
    cache_argument,
    has_tensors,
    make_room,
    needed_length,
    setting,
    sizes_of,
    why_not_static,
)
from .causal import CausalPrefills
from .kept_cache import KeptCache

log = logging.getLogger("kvcanary")

_WRAPPED = (
    "generate",
    "generate_batch",
    "init_continuous_batching",
    "compile",
    "get_compiled_call",
    "_prepare_static_cache",
)

#: Fields of a CompileConfig that are passed to torch.compile; the backend is ours.
_OF_THEIR_CONFIG = ("fullgraph", "dynamic", "mode", "options")


#: How often Dynamo may compile the forward of a protected model.  Calls of ``generate`` differ in their sizes: prefills
#: and steps, each for one sequence and for several, with sizes that become dynamic one after the other, were more than
#: Dynamo's default of 8 after ten calls.
VARIANTS = 64


class _Beams(threading.local):
    """The caches of the beam search that the thread is in; None: it is in none."""

    running: ReorderedInPlace | None = None


class Protection(GuardedCall):
    """The guarded calls of one model: the compiled forward, and the managers of its batches.

    Attributes:
        batch_session: session over the paged cache of the last ``generate_batch`` or manager; None before.
        before_batch: called with transformers' processor when a batch is prepared, before the check, so that faults
            can be planted.
    """

    before_batch: Callable[[Any], None] | None = None

    def __init__(
        self,
        model: nn.Module,
        config: CanaryConfig,
        options: dict[str, Any],
        install: dict[str, Any],
        require_batches: Callable[[], None],
    ):
        super().__init__(model, CanaryBackend(config), options)
        self._config, self._install, self._require_batches = config, install, require_batches
        self._manager: GuardedManager | None = None
        self._not_static: str | None = None  # why the running generate has no static cache
        self._ready_cache: Callable[[], Any] | None = (
            None  # a weak reference to the last cache whose layers all have tensors
        )
        self._kept = KeptCache(self.session)
        self._causal = CausalPrefills(model)
        self._beams = _Beams()
        self._sizes: set[tuple[Any, ...]] = set()  # of the forwards so far
        self._forwards = 0  # of the model itself, guarded or not
        self._decoder: tuple[dict[str, Any], Callable[..., Any]] | None = None  # the last one, with its options

    @property
    def batch_session(self) -> EngineSession | None:
        return self._manager.session if self._manager is not None else None

    def wrap(self, model: Any) -> None:
        wrappers = (
            *(self._generate, self._generate_batch, self._start),
            *(self._compile, self._compiled_call, self._prepare_cache),
        )
        for i, name in enumerate(_WRAPPED):
            hook(model, name, wrappers[i])

    def _guard(self, compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._forwards += 1
        if dynamo_calls.tracing_here() or "write_index" in kwargs:  # a batch over a paged cache is guarded at update
            return self._module._call_impl(*args, **kwargs)
        name = cache_argument(kwargs)
        cache = kwargs[name] if name is not None else None
        if cache is not None and not self._known_ready(cache) and not self._ready(cache, args, kwargs):
            return self._module._call_impl(*args, **kwargs)
        if self._beams.running is not None:
            self._beams.running.add(cache)
        tokens = kwargs.get("input_ids", kwargs.get("inputs_embeds", args[0] if args else None))
        sizes = sizes_of(tokens, cache)
        if sizes not in self._sizes:
            with dynamo_calls.recompile_limit_at_least(VARIANTS):
                result = self._guard_forward(compiled, cache, tokens, args, kwargs)
            self._sizes.add(sizes)  # not where it raised: it may not have been compiled
            return result
        return self._guard_forward(compiled, cache, tokens, args, kwargs)

    def _guard_forward(
        self,
        compiled: Callable[..., Any],
        cache: Any,
        tokens: torch.Tensor | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self._causal.need_no_mask(cache, tokens, kwargs.get("attention_mask")):
            with self._causal.without_mask():
                return super()._guard(compiled, args, kwargs)
        return super()._guard(compiled, args, kwargs)

    def _known_ready(self, cache: Any) -> bool:
        """Whether the last forward was over this cache, too."""
        known = self._ready_cache
        return known is not None and known() is cache and has_tensors(cache.layers[-1])

    def _ready(self, cache: Any, args: tuple[Any, ...], inputs: dict[str, Any]) -> bool:
        """Whether a forward over this cache can run compiled; gives a new cache its tensors first."""
        if not getattr(cache, "is_compileable", True):
            self.session.lose_coverage(
                self._not_static
                or f"{type(cache).__name__} is rebuilt in each step, so there is nothing that keeps its place to "
                "guard: use cache_implementation='static'"
            )
            return False
        layers = getattr(cache, "layers", None)
        if layers is None:  # a pair of caches: their tensors are made in the prefill, which also runs the encoder
            parts = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
            return all(has_tensors(layer) for part in parts if part is not None for layer in part.layers)
        if not all(has_tensors(layer) for layer in layers):
            self._make_tensors(cache, {"input_ids": args[0]} | inputs if args else inputs)
        if layers:
            self._ready_cache = weakref.ref(cache)
        return True

    def _make_tensors(self, cache: Any, inputs: dict[str, Any]) -> None:
        """One token through the plain model.  A cache's tensors made inside a graph would be its outputs, unguarded."""
        given = {name: inputs.get(name) for name in ("input_ids", "inputs_embeds")}
        first = {name: tokens[:, :1] for name, tokens in given.items() if tokens is not None}
        name = cache_argument(inputs)
        assert name is not None
        with torch.no_grad():
            self._module._call_impl(**first, **{name: cache}, use_cache=True)
        cache.reset()

    def _generate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``generate`` over a cache with fixed addresses, with every forward through the guarded call."""
        model = self._module
        cached = kwargs.get("use_cache", True) and setting(model, kwargs, "cache_implementation") is None
        name = cache_argument(kwargs)
        passed = kwargs[name] if name is not None else None
        outer, self._not_static = self._not_static, why_not_static(model, kwargs)
        beams, self._beams.running = self._beams.running, None
        if int(setting(model, kwargs, "num_beams") or 1) > 1:
            self._beams.running = ReorderedInPlace(self.session)
        if self.session.pace is not None:
            self.session.pace.new_sequence()
        if passed is not None:
            tokens = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
            make_room(passed, model, needed_length(model, kwargs, tokens))
        elif cached and self._not_static is None:
            kwargs["cache_implementation"] = "static"
        # no token is visible before generate returns, unless it is streamed
        late, forwards = kwargs.get("streamer") is None, self._forwards
        try:
            with self._kept.around(), self.session.deferring() if late else contextlib.nullcontext():
                generated = with_stack_room(original)(*args, **kwargs)
            if self._config.mode == "log":
                self.session.look()
            if self._forwards == forwards:
                self._say_that_another_generated()
            return generated
        finally:
            self._not_static = outer  # early-exit drafting calls generate within generate
            if self._beams.running is not None:
                self._beams.running.end()
            self._beams.running = beams

    def _say_that_another_generated(self) -> None:
        """Seen of Blip2, whose generate calls that of its language model: nothing was guarded, and nothing logged."""
        name = type(self._module).__name__
        self.session.lose_coverage(
            f"{name}.generate called no forward of {name}, but modules inside it: what they did is not guarded. "
            "Protect the one whose generate it calls, such as model.language_model"
        )

    def _prepare_cache(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        fresh = original(*args, **kwargs)
        model: Any = self._module
        batch = kwargs.get("batch_size")
        if batch is None or type(fresh).__name__ != "StaticCache" or getattr(fresh, "offloading", False):
            return fresh
        return self._kept.instead_of(fresh, batch, model.device, model.dtype)

    def _compiled_call(self, original: Callable[..., Any], compile_config: Any = None) -> Callable[..., Any]:
        """The callable for the decode steps of ``generate`` if transformers compiles them, as on a GPU.

        It is compiled as transformers would, with CUDA graphs, unless ``protect`` got options.
        """
        theirs = original(compile_config)
        told = {"mode", "options"} & self._options.keys() or self._config.inner != "inductor"
        if told or theirs == self._module.__call__:  # models whose decode step transformers does not compile either
            return self
        config = compile_config or self._module._last_compile_config
        options = {name: getattr(config, name) for name in _OF_THEIR_CONFIG} | self._options
        if self._decoder is None or self._decoder[0] != options:
            self._decoder = options, self._compile_with(options)
        return functools.partial(self._call_through, self._decoder[1])

    def _call_through(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._guard(compiled, args, kwargs)

    def _start(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._require_batches()
        manager = original(*args, **kwargs)
        if self._manager is None or self._manager.of is not manager:
            self._manager = GuardedManager(manager, self._config, self._install, self._about_to_run)
        return manager

    def _compile(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.say_that_it_stays()

    def _about_to_run(self, processor: Any) -> None:
        if self.before_batch is not None:
            self.before_batch(processor)

    def _generate_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._require_batches()
        results = original(*args, **kwargs)
        if self._manager is not None:
            self._manager.raise_what_ended_it()
        return results


def has_its_own_generate(model: Any) -> bool:
    """Whether ``generate`` of a model is not that of ``GenerationMixin`` (DiffusionGemma): methods are missing."""
    return not all(hasattr(model, name) for name in _WRAPPED)


def attach(
    model: Any,
    config: CanaryConfig,
    options: dict[str, Any],
    install: dict[str, Any],
    require_batches: Callable[[], None] = lambda: None,
) -> Any:
    """The part of :func:`protect` after its arguments are resolved.

    Args:
        require_batches: called before a batch begins; raises if the adapter cannot guard one.
    """
    protection = Protection(model, config, options, install, require_batches)
    model._compiled_call_impl = protection
    protection.wrap(model)
    return model


def unprotect(model: Any) -> Any:
    """Remove the guard from a model; returns the model."""
    if isinstance(model._compiled_call_impl, Protection):
        model._compiled_call_impl.traced_as_usual()
        model._compiled_call_impl = None
        for name in _WRAPPED:
            unhook(model, name)
    return model


def batch_session(model: Any) -> EngineSession:
    """The session over the paged cache of the model's last ``generate_batch`` or manager.

    Raises:
        TypeError: the model is not protected, or had no batch yet.
    """
    protection = model._compiled_call_impl
    session = protection.batch_session if isinstance(protection, Protection) else None
    if session is None:
        raise TypeError(
            f"{type(model).__name__} has no session over a paged cache: call huggingface.protect(model), then "
            "generate_batch or a manager of init_continuous_batching makes one"
        )
    return session
