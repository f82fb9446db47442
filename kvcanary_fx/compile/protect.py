"""``protect``: guard a module's KV cache by compiling its calls with the canary backend.

It works on a class, as a decorator, and on an instance.  In both cases the module's type and state are unchanged: the
compiled call lives in the hook that ``nn.Module.compile`` uses, outside state_dict and pickle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..config import CanaryConfig, override
from ..errors import InvalidSettingError, UnguardedForwardError
from ..passes import dynamo_calls
from ..runtime.session import CanarySession
from .backend import CanaryBackend
from .left_out import LeftOut
from .module_call import ModuleCall

M = TypeVar("M", bound=nn.Module)


_WHY_APART = (
    "a module that kvcanary_fx.protect guards keeps its own graphs: compile it with backend='kvcanary', or without "
    "fullgraph=True"
)


class GuardedCall:
    """The compiled call of one module, and the proof that its checks ran.

    Attributes:
        session: the module's own session.
    """

    def __init__(self, module: nn.Module, backend: CanaryBackend, compile_options: dict[str, Any]):
        self._module = module
        self.session: CanarySession = backend.session
        self.session.calls_are_judged = True
        self._backend, self._options = backend, compile_options
        self._left_out = LeftOut(module, self.session)
        self._compiled = self._compile_with(compile_options)
        self._forward = dynamo_calls.traced_from_its_call(module) if self.session.config.mode != "off" else None
        self._apart = dynamo_calls.behind_a_break(_call, _WHY_APART)
        dynamo_calls.constant(_inlined)

    def _compile_with(self, options: dict[str, Any]) -> Callable[..., Any]:
        """The module's call, compiled with the canary and these options of torch.compile."""
        return ModuleCall(self._module._call_impl, self._backend, options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's call.

        Raises:
            UnguardedForwardError: mode ``raise``, and Dynamo did not compile the forward.
        """
        if torch.compiler.is_dynamo_compiling():
            if self.session.config.mode != "off" and not _inlined():
                return self._apart(self, *args, **kwargs)
        elif self._forward is not None and self._forward.__func__ is not type(self._module).forward:
            self._follow_the_class()
        return self._guard(self._compiled, args, kwargs)

    def _follow_the_class(self) -> None:
        """The class of the module was given another ``forward``."""
        self.traced_as_usual()
        self._forward = dynamo_calls.traced_from_its_call(self._module)

    def traced_as_usual(self) -> None:
        """Leave no trace in the module: it is no longer guarded."""
        dynamo_calls.traced_as_usual(self._module, self._forward)

    def _guard(self, compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's call through ``compiled``."""
        if dynamo_calls.tracing_here() or self.session.config.mode == "off":
            return self._module._call_impl(*args, **kwargs)
        obstacle = dynamo_calls.obstacle()
        if obstacle is not None:  # Dynamo would skip this code from now on
            self._ran_eagerly(obstacle)
            return self._module._call_impl(*args, **kwargs)
        entered = self.session.entered
        guarded, unguarded = entered.guarded, entered.unguarded
        look = self._left_out.begin()
        result = compiled(*args, **kwargs)
        if look is not None:
            look()
        if (entered.guarded, entered.unguarded) == (guarded, unguarded):
            self._called_no_graph(result, args, kwargs)
        return result

    def __del__(self) -> None:
        """``module.compile(...)`` replaced this call with its own: restore the guard."""
        module = self.__dict__.get("_module")
        now = module.__dict__.get("_compiled_call_impl") if module is not None else None
        if now is None or isinstance(now, GuardedCall) or self.session.config.mode == "off":
            return
        kept = object.__new__(type(self))
        kept.__dict__.update(self.__dict__)
        module.__dict__["_compiled_call_impl"] = kept
        kept.say_that_it_stays()

    def say_that_it_stays(self) -> None:
        """Log that ``module.compile(...)`` does nothing on a guarded module."""
        name = type(self._module).__name__
        self.session.warn_once(
            "compiled again",
            f"kvcanary.kept {name}.compile(...) would have replaced the guard, so the guard stays, and the call "
            "changes nothing. Give protect what it asked for (compile_mode=, compile_options=, dynamic=, fullgraph=, "
            "inner=), or take the guard off before: protect(model, mode='off').",
        )

    def _called_no_graph(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Dynamo compiled nothing of the forward: it skipped it, or there is nothing to compile."""
        why = dynamo_calls.stance() or dynamo_calls.disabled()
        if why is not None or not self._passes_on(result, (args, kwargs)):
            self._ran_eagerly(why)

    def _passes_on(self, result: Any, given: Any) -> bool:
        """Whether a result has only the module's inputs, parameters and buffers: a forward without an operation."""
        held = [*pytree.tree_leaves(given), *self._module.parameters(), *self._module.buffers()]
        known = {id(leaf) for leaf in held}
        leaves = pytree.tree_leaves(result)
        return all(id(leaf) in known or isinstance(leaf, str | int | float | None) for leaf in leaves)

    def _ran_eagerly(self, why: str | None) -> None:
        """Report it, unless nothing compiled for the module so far had anything to guard."""
        plans = self.session.plans
        if plans and not any(plan.guarded for plan in plans):
            return
        layers = list(dict.fromkeys(s.layer for p in plans for s in p.sites))
        error = self.session.limit_hit if why is None else None
        self.session.report_lost(error or UnguardedForwardError(type(self._module).__name__, layers, why))


def _call(guarded: GuardedCall, *args: Any, **kwargs: Any) -> Any:
    return guarded(*args, **kwargs)


def _inlined() -> bool:
    """Whether a protected module may be part of the graph that Dynamo is tracing: an export, or a guarded graph."""
    at_work = dynamo_calls.backend_at_work()
    return at_work is None or hasattr(at_work[0], "session_for")


class _ClassHook:
    """Class attribute that gives each instance a :class:`GuardedCall` of its own on first use.

    The call is kept where ``nn.Module.compile`` keeps its own, an instance attribute that ``__getstate__``
    leaves out: it holds its module, so any other place would keep both alive.
    """

    def __init__(self, config: CanaryConfig, compile_options: dict[str, Any]):
        self._config, self._options = config, compile_options
        # Dynamo cannot trace the locks that it makes
        self._make_apart: Callable[[nn.Module], GuardedCall] = dynamo_calls.behind_a_break(self._make, _WHY_APART)
        dynamo_calls.constant(_inlined)

    def __get__(self, instance: nn.Module | None, owner: type) -> GuardedCall | None:
        if instance is None or (torch.compiler.is_dynamo_compiling() and (self._config.mode == "off" or _inlined())):
            return None
        return self._make_apart(instance)

    def _make(self, instance: nn.Module) -> GuardedCall:
        call = GuardedCall(instance, CanaryBackend(self._config), self._options)
        instance.__dict__["_compiled_call_impl"] = call
        return call


@overload
def protect(target: type[M], **settings: Any) -> type[M]: ...


@overload
def protect(target: M, **settings: Any) -> M: ...


@overload
def protect(target: None = None, **settings: Any) -> Callable[[Any], Any]: ...


def protect(target: Any = None, **settings: Any) -> Any:
    """Guard the KV cache of a module: ``@protect`` on its class, or ``protect(model)``.

    The module is compiled with :class:`CanaryBackend` at its first call and runs guarded; state_dict,
    pickling, ``isinstance``, subclasses, ``.to`` and hooks work as before.  An instance is guarded in
    place and returned; a copy of it is unguarded until it is protected itself, while copies of an
    instance of a protected class are protected.

    The guard stays if the module is compiled again: ``module.compile(...)`` changes nothing, and the graph of another
    backend breaks around the module, be it compiled itself, called in a function, or part of a bigger model.  A graph
    that the canary compiles takes the module in.

    Args:
        target: an ``nn.Module`` class or instance; None when settings are given to the decorator.
        settings: settings of :class:`CanaryConfig` (``mode="log"``), and of torch.compile: ``dynamic``,
            ``fullgraph``, ``compile_mode`` (its ``mode``) and ``compile_options`` (its ``options``).

    Raises:
        UnknownSettingError, InvalidSettingError: a setting that does not exist, or a value it cannot have.
        TypeError: ``target`` is not a module.

    Example::

        @kvcanary_fx.protect
        class Decoder(nn.Module): ...

        model = kvcanary_fx.protect(model, mode="log")
        print(kvcanary_fx.session_of(model).summary())
    """
    compile_options = take_compile_options(settings)
    config = override(CanaryConfig.from_env(), settings, "protect()")
    if target is None:
        return functools.partial(_protect, config=config, compile_options=compile_options)
    return _protect(target, config, compile_options)


def _protect(target: Any, config: CanaryConfig, compile_options: dict[str, Any]) -> Any:
    if isinstance(target, type) and issubclass(target, nn.Module):
        target.compile = _keeping_the_guard(target.compile)  # type: ignore[method-assign]
        target._compiled_call_impl = _ClassHook(config, compile_options)  # type: ignore[assignment]
        if config.mode != "off":
            dynamo_calls.traced_from_its_call(target)
        return target
    if isinstance(target, nn.Module):
        # nn.Module keeps this attribute out of pickles and state dicts
        target._compiled_call_impl = GuardedCall(target, CanaryBackend(config), compile_options)
        return target
    raise TypeError(f"protect takes an nn.Module class or instance, not {type(target).__name__}")


_COMPILE_OPTIONS = {
    "dynamic": ((bool, type(None)), "True, False or None"),
    "fullgraph": ((bool,), "True or False"),
    "compile_mode": ((str, type(None)), "a mode of torch.compile, or None"),
    "compile_options": ((dict, type(None)), "a dict of options of torch.compile, or None"),
}


def _keeping_the_guard(compile_module: Callable[..., None]) -> Callable[..., None]:
    """``nn.Module.compile`` of a protected class: it would replace the guard."""

    @functools.wraps(compile_module)
    def compile_guarded(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        call = self._compiled_call_impl
        if isinstance(call, GuardedCall) and call.session.config.mode != "off":
            call.say_that_it_stays()
        else:
            compile_module(self, *args, **kwargs)

    return compile_guarded


def take_compile_options(settings: dict[str, Any]) -> dict[str, Any]:
    """Take torch.compile's settings out of ``settings``, under torch.compile's names."""
    names = {"dynamic": "dynamic", "fullgraph": "fullgraph", "compile_mode": "mode", "compile_options": "options"}
    for name, (kinds, expected) in _COMPILE_OPTIONS.items():
        if name in settings and not isinstance(settings[name], kinds):
            raise InvalidSettingError(name, "protect()", settings[name], expected)
    return {theirs: settings.pop(ours) for ours, theirs in names.items() if ours in settings}


def session_of(module: nn.Module) -> CanarySession:
    """The session of a protected module.

    Raises:
        TypeError: the module is not protected.
    """
    call = getattr(module, "_compiled_call_impl", None)
    if not isinstance(call, GuardedCall):
        raise TypeError(
            f"{type(module).__name__} is not protected: call kvcanary_fx.protect(model) first, or ask "
            "kvcanary_fx.session() for the session of models compiled with backend='kvcanary'"
        )
    return call.session
