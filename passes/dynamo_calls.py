"""The private contracts around a *call* of a compiled function, all in this file, each pinned by a test.

Torch's public API for these is either global, where a thread needs its own state, or only in its logs.

Seen on the versions of torch that pyproject.toml allows, or from the one that is named:

* ``TracingContext`` belongs to a thread, and is set while it is in Dynamo, in AOTAutograd or in non-strict export.
  ``torch.compiler.is_compiling()`` is true in every thread while any of them compiles (2.13).
* Dynamo skips every function that is called under a functorch transform, under a TorchDispatchMode that is not torch's
  own, or while it is disabled, and skips the same code from then on.
* ``enter_exit_hooks`` of a compiled callable run around each of its calls, in whatever stance, compiled or not.  What
  was compiled is ``fn`` there.
* A module with ``nn.Module``'s ``__call__``, and with neither hooks nor a ``forward`` of its own, is traced from its
  class's ``forward`` on: Dynamo does not look at ``_compiled_call_impl``, which Python's call does, nor guards on it.
* The function that compiles a frame, ``_compile``, has its backend in ``compiler_fn``, in wrappers.
* The sizes that a code object has seen are in ``pgo.get_code_state()``, by which the next compilation decides which
  are dynamic; without ``automatic_dynamic_shapes`` they are kept there, too.
* An isolated callable (2.13) is not affected by what was skipped in others, and has its own recompile limit.  Not so
  if two threads call isolated callables at the same time: which one is called is kept for all threads.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._dynamo import pgo
from torch._guards import TracingContext
from torch.utils._python_dispatch import any_torch_dispatch_mode_on_stack


def tracing_here() -> bool:
    """Whether this thread's code is traced by Dynamo, for which the result is a constant, or run for torch.export."""
    return torch.compiler.is_dynamo_compiling() or TracingContext.try_get() is not None


def isolation() -> dict[str, Any]:
    """The argument that gives a compiled callable a cache of its own, where torch.compile has it."""
    known = inspect.signature(torch.compile).parameters
    return {"isolate_recompiles": True} if "isolate_recompiles" in known else {}


def limit_for(callables: int) -> dict[str, Any]:
    """The argument that lets so many callables share a cache, where torch.compile has it: each may be compiled as often
    as one alone may."""
    known = inspect.signature(torch.compile).parameters
    limit: int = torch._dynamo.config.recompile_limit * callables
    return {"recompile_limit": limit} if "recompile_limit" in known else {}


def recompile_limit_at_least(limit: int) -> contextlib.AbstractContextManager[Any]:
    """Within, this thread's functions may be compiled so often.  It takes 30 us."""
    current: int = torch._dynamo.config.recompile_limit
    patched: contextlib.AbstractContextManager[Any] = torch._dynamo.config.patch(recompile_limit=max(limit, current))
    return patched


def obstacle() -> str | None:
    """What makes Dynamo skip every function that this thread calls now, and the remedy; None if nothing does."""
    if torch._C._functorch.get_dynamic_layer_stack_depth():
        return (
            "it was called under a function transform (torch.vmap, torch.func), where Dynamo compiles nothing: call it "
            "outside of the transform, or compile the function that transforms it with backend='kvcanary'"
        )
    if torch._C._len_torch_dispatch_stack() and any_torch_dispatch_mode_on_stack():
        return (
            "a TorchDispatchMode is active (a counter of FLOPs, a debugger), under which Dynamo compiles nothing: call "
            "it outside of that mode"
        )
    return disabled() if torch._dynamo.config.disable else None


def disabled() -> str | None:
    """Why torch.compile leaves everything as it is now, and the remedy; None if it compiles.

    It asks for TORCHDYNAMO_DISABLE when it is called, and for the setting whenever what it made is called.
    """
    if not torch._dynamo.config.disable and os.environ.get("TORCHDYNAMO_DISABLE") != "1":
        return None
    return (
        "compilation is disabled (torch._dynamo.config.disable, TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE): "
        "enable it, or set mode='off' where nothing is to be guarded"
    )


def backend_at_work() -> tuple[Any, Mapping[str, Any]] | None:
    """The backend that Dynamo is compiling for in this thread, and its options; None if it compiles or traces for none.

    What is exported has no backend.
    """
    for frame in _stack():
        if frame.f_code.co_name == "_compile" and "compiler_fn" in frame.f_locals:
            return None if frame.f_locals.get("export") else _unwrapped(frame.f_locals["compiler_fn"])
    return None


def behind_a_break(function: Callable[..., Any], why: str) -> Callable[..., Any]:
    """``function`` as Dynamo does not trace it: it breaks the graph and calls it as it is."""
    disabled: Callable[..., Any] = torch.compiler.disable(function, reason=why)
    return disabled


def traced_from_its_call(module: torch.nn.Module | type[torch.nn.Module]) -> types.MethodType | None:
    """Let Dynamo trace a module, or those of a class, from ``__call__`` on, where ``_compiled_call_impl`` is looked at.

    Without it a guarded module was taken into another backend's graph, and nobody got to know.

    Returns:
        Of a module, its class's ``forward``, which is now an attribute of its own; copies and pickles do not have it.
        Dynamo guards on whether a module has one, so what it compiled for another instance, without a guard, is not
        taken for this one.  None if nothing was changed: it has one already.
    """
    if isinstance(module, type):
        if module.__call__ is torch.nn.Module.__call__:
            module.__call__ = _call  # type: ignore[assignment]
        return None
    kind = type(module)
    forward = inspect.getattr_static(kind, "forward", None)
    if kind.__call__ is not torch.nn.Module.__call__ or "forward" in module.__dict__:
        return None
    if not isinstance(forward, types.FunctionType):
        return None
    own = types.MethodType(forward, module)

    def state() -> Any:
        """What a copy has: the method is bound to this module."""
        found: Any = kind.__getstate__(module)
        if not isinstance(found, dict):
            return found
        return {name: value for name, value in found.items() if value is not own and value is not state}

    module.__dict__.update(forward=own, __getstate__=state)
    return own


def traced_as_usual(module: torch.nn.Module, own: types.MethodType | None) -> None:
    """Undo :func:`traced_from_its_call` of a module, if nobody has given it another ``forward``."""
    if own is not None:
        module.__dict__.pop("__getstate__", None)
        if module.__dict__.get("forward") is own:
            del module.__dict__["forward"]


def _call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return torch.nn.Module.__call__(self, *args, **kwargs)  # which torch.fx replaces for as long as it traces


def constant(function: Callable[[], bool]) -> Callable[[], bool]:
    """``function`` such that Dynamo calls it while tracing, and treats its result as a constant."""
    marked: Callable[[], bool] = torch.compiler.assume_constant_result(function)
    return marked


def _unwrapped(compiler_fn: Any) -> tuple[Any, Mapping[str, Any]]:
    """The backend that was given to torch.compile, and the options given with it."""
    backend = torch._dynamo.eval_frame.innermost_backend(compiler_fn)
    options = getattr(backend, "kwargs", {}).get("options", {})
    return getattr(backend, "compiler_fn", backend), options


def enter_hooks() -> tuple[list[Callable[[], Callable[[], None]]], int] | None:
    """What runs around every call of the compiled callable that this thread is in, and the number of its own cache.

    Returns:
        A list of functions that are called before, each returns one that is called afterwards; and the number, -1 for
        the cache that callables share.  None if the thread is in no compiled callable.
    """
    for frame in _stack():
        context: Any = frame.f_locals.get("self") if frame.f_code.co_name == "compile_wrapper" else None
        if hasattr(context, "enter_exit_hooks"):
            return context.enter_exit_hooks, getattr(context, "_isolate_recompiles_id", -1)
    return None


def module_called() -> torch.nn.Module | None:
    """The module whose method is the compiled callable that this thread is in; None if it is another function."""
    for frame in _stack():
        if frame.f_code.co_name == "compile_wrapper" and "fn" in frame.f_locals:
            owner = getattr(frame.f_locals["fn"], "__self__", None)
            return owner if isinstance(owner, torch.nn.Module) else None
    return None


@contextlib.contextmanager
def sizes_forgotten() -> Iterator[None]:
    """Forget the sizes that Dynamo sees within, in any thread.

    It makes a size dynamic where the same code has seen another; all models of transformers share the code.
    """
    seen = pgo.get_code_state()
    before = copy.deepcopy(dict(seen))
    try:
        yield
    finally:
        seen.clear()
        seen.update(before)


def at_recompile_limit(code: types.CodeType, cache: int) -> bool:
    """Whether Dynamo has compiled a function as often as it may in the cache with this number."""
    entries = getattr(torch._dynamo.eval_frame, "_get_cache_entries_for_region", None)
    shared = torch._dynamo.eval_frame._debug_get_cache_entry_list
    found = entries(code, cache) if entries is not None else shared(code)
    return len(found) >= torch._dynamo.config.recompile_limit


def _stack() -> Iterator[types.FrameType]:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def stance() -> str | None:
    """What the compiler's stance keeps from being compiled as it was asked for, and the remedy; None in the default
    stance."""
    now = torch._dynamo.eval_frame._stance
    name: str = now.stance
    if name == "default":
        forced = getattr(now, "backend", None)
        if forced is None:
            return None
        return (
            f"torch.compiler.set_stance(force_backend={forced!r}) is in force, which compiles it in the place of the "
            "canary: leave it for forwards that are to be guarded"
        )
    return (
        f"torch.compiler.set_stance({name!r}) is in force, in which compiled functions run eagerly: leave it for "
        "forwards that are to be guarded"
    )
