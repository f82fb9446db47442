"""Compiles Triton kernels in worker processes of Inductor's, which leave them in Triton's cache.

Threads are not enough: of the 0.5 s that a variant of ours takes (sm_90, Triton 3.7, a CPU core), 90 ms are Python, in
which its first representation is made, and a model's first call waits for Python, too, which traces it meanwhile.  A
process that finds a kernel in the cache needs 5 ms of Python for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

log = logging.getLogger("kvcanary")

#: Seconds after which a variant is compiled here after all.
PATIENCE = 30.0

#: With fewer cores there is nobody to compile elsewhere.
FEW_CORES = 4


class Variant(NamedTuple):
    """What Triton compiles, for another process.

    Attributes:
        module, name: of the kernel.
        signature, constants, attributes: the types of its arguments, the values of its constants, and what is known of
            alignments, as ``triton.compiler.ASTSource`` takes them.
        target: backend, architecture and warp size.
        options: as ``triton.compile`` takes them.
        environment: the variables that are part of a name in the cache.
        cache: Triton's directory.
    """

    module: str
    name: str
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    target: tuple[Any, ...]
    options: dict[str, Any]
    environment: dict[str, Any]
    cache: str


def variant_of(compiling: Callable[..., Any]) -> Variant | None:
    """What a function compiles that Triton gives to the executor of its ``AsyncCompileMode``; None if it is in Triton's
    cache.

    Raises:
        KeyError, AttributeError, TypeError, ImportError: another Triton.  None of this is a public interface: the
            function's closure says what it compiles.
    """
    import triton

    found = {
        name: cell.cell_contents
        for name, cell in zip(compiling.__code__.co_freevars, compiling.__closure__ or (), strict=True)
    }
    source, target, options, environment = (found[name] for name in ("src", "target", "options", "env_vars"))
    if _is_cached(source, target, options, environment):
        return None
    return Variant(
        source.fn.fn.__module__,
        source.fn.fn.__name__,
        source.signature,
        source.constants,
        source.attrs,
        (target.backend, target.arch, target.warp_size),
        dict(vars(options)),
        environment,
        triton.knobs.cache.dir,
    )


def _is_cached(source: Any, target: Any, options: Any, environment: Any) -> bool:
    """As ``triton.compile`` finds it."""
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import get_cache_key, get_cache_manager

    key = get_cache_key(source, make_backend(target), options, environment)
    name = f"{source.name[:150]}.json"
    found = get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(name)
    return bool(found) and name in found


def compile_variant(variant: Variant) -> None:
    """Compile it in this process, for Triton's cache; it needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(variant.module), variant.name)
    source = ASTSource(kernel, variant.signature, variant.constants, variant.attributes)
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = variant.cache
        triton.compile(
            source, target=GPUTarget(*variant.target), options=variant.options, _env_vars=variant.environment
        )


class _Own:
    """Processes of our own, in a process whose engine lets Inductor have none."""

    pool: Any = None


def start_workers(most: int = 16) -> None:
    """Start processes of our own, where Inductor has none: a second or two before :func:`.compile_ahead` needs them.

    vLLM compiles its graphs in one process (it sets ``TORCHINDUCTOR_COMPILE_THREADS=1``), and our kernels behind them.
    Again, it does nothing; :func:`stop_workers` ends them.

    Args:
        most: processes, of which there are at most as many as cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if _Own.pool is not None or cores < FEW_CORES or workers() is not None:
        return
    try:
        from torch._inductor.compile_worker.subproc_pool import SubprocPool

        _Own.pool = SubprocPool(min(most, cores))
    except Exception as error:  # without them threads compile, as before
        log.debug("kvcanary.compile no processes: %r", error)


def stop_workers() -> None:
    """End those that :func:`start_workers` started."""
    pool, _Own.pool = _Own.pool, None
    if pool is not None:
        pool.shutdown()


def workers() -> Any:
    """The pool of processes: Inductor's, which is started when Inductor is imported; else ours; else None.

    Its processes have imported PyTorch and Triton.
    """
    inductor = sys.modules.get("torch._inductor.async_compile")
    if inductor is not None and os.environ.get("TORCH_WARM_POOL", "1") == "1":
        with contextlib.suppress(Exception):
            if inductor.get_compile_threads() > 1:
                return inductor.AsyncCompile.process_pool()
    return _Own.pool


def compiled_elsewhere(compiling: Callable[..., Any], pool: Any) -> bool:
    """Let a process of the pool compile what ``compiling`` will, and wait for it; whether Triton's cache has it now."""
    try:
        variant = variant_of(compiling)
        if variant is not None:
            pool.submit(compile_variant, variant).result(PATIENCE)
    except Exception as error:  # of any kind: the kernel is compiled here, and what is wrong with it is said there
        log.debug("kvcanary.compile a kernel is not compiled by a process of Inductor's: %r", error)
        return False
    return True
