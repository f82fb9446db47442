"""Compiles the kernels of a warm-up beside each other, before the warm-up itself.

A kernel that Triton's cache lacks takes 0.7 s: ptxas and a C compiler are programs of their own, and several can run
at a time.  One after the other, the 23 kernels of an engine's session made a cold start of vLLM 19 s longer; compiled
beside each other they take 7 s (1B, H200)::

    compile_ahead(warm_up, device)  # launches nothing
    warm_up()

:class:`InBackground` does so while the caller is busy with something else.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

log = logging.getLogger("kvcanary")

#: Threads, at most: a compilation is one program after the other.
THREADS = 32


class _Collecting(threading.local):
    """Of a thread: the mode in which its launches are compiled and left at that, if they are."""

    mode: Any = None


_COLLECTING = _Collecting()


def launch_or_compile(kernel: Any, grid: tuple[int, ...], *arguments: Any, **settings: Any) -> Any:
    """``kernel[grid](...)``; within :func:`compile_ahead` only what it compiles.

    Args:
        settings: arguments by name, and ``num_warps``.

    Returns:
        What Triton returns of a launch; None if there was none.
    """
    from .cache_keys import settle_key  # which needs Triton

    settle_key(kernel)
    if _COLLECTING.mode is not None:
        _COLLECTING.mode.about_to_launch(kernel)
        kernel.warmup(*arguments, grid=grid, **settings)
        return None
    launched = kernel[grid](*arguments, **settings)
    # of a kernel that another thread compiles ahead Triton 3.7 returns what stands for it, though the launch waited
    return launched.result() if hasattr(launched, "result") else launched


def compiling_ahead() -> bool:
    """Whether this thread's launches are compiled and left at that."""
    return _COLLECTING.mode is not None


def compile_ahead(
    run: Callable[[], object], device: torch.device, turn: AbstractContextManager[Any] | None = None
) -> None:
    """Compile what ``run`` would launch from this thread, several kernels at a time; its launches do nothing else.

    Nothing happens on a CPU, or in Triton's interpreter.

    Args:
        run: what it calls of PyTorch is done; it must not capture a graph, nor wait for what a kernel would write.
        turn: entered by each thread that compiles a kernel; not for one that Triton's cache has.
    """
    if _COLLECTING.mode is not None or not compiles_for(device):
        return
    from .compile_mode import CompileMode  # which needs Triton

    threads = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), thread_name_prefix="kvcanary compile")
    with threads, CompileMode(threads, device, turn or nullcontext()) as mode:
        _COLLECTING.mode = mode
        try:
            run()
        finally:
            _COLLECTING.mode = None


def compiles_for(device: torch.device) -> bool:
    """Whether launches on a device compile: on a GPU, outside of Triton's interpreter."""
    if device.type != "cuda":
        return False
    import triton

    return not triton.knobs.runtime.interpret


class _ShortTurns:
    """Threads that run Python take shorter turns while anybody is in it.

    A thread that waits for a file or a program loses its turn, and gets it again when the others' turns are over, which
    is 5 ms by default.  Seen (H200): beside 0.09 s of Python in another thread, Inductor's reading of its cache took
    0.24 s instead of 0.08.
    """

    def __init__(self, seconds: float):
        self._seconds, self._lock = seconds, threading.Lock()
        self._inside, self._before, self._ours = 0, 0.0, 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, self._seconds))
                self._ours = sys.getswitchinterval()
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and sys.getswitchinterval() == self._ours:  # else somebody has set another
                sys.setswitchinterval(self._before)


SHORT_TURNS = _ShortTurns(2e-4)


class _OneAtATime:
    """Lets one thread after the other in; all at once when somebody waits for them."""

    def __init__(self) -> None:
        self._places = threading.Semaphore(1)

    def __enter__(self) -> None:
        self._places.acquire()

    def __exit__(self, *error: object) -> None:
        self._places.release()

    def all_at_once(self) -> None:
        self._places.release(THREADS)


class InBackground:
    """Compiles what functions would launch, one function after the other, while the caller does something else.

    What Triton's cache lacks is compiled one kernel at a time until somebody waits for it, and then all at once:
    compiling a kernel is in part Python, and the caller's Python waits meanwhile.  Seen (H200): AOTAutograd took 2.5
    to 4.4 s beside four kernels at a time, and 1.2 to 1.7 beside none.

    A kernel that cannot be compiled says so when it is launched, as it does without this.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvcanary ahead")
        self._under_way: list[Future[None]] = []
        self._turn = _OneAtATime()

    def compile(self, run: Callable[[], object], device: torch.device) -> None:
        """:func:`compile_ahead`, behind what is under way.

        What ``run`` raises is logged: it prepares launches to come, and what keeps them from being made they raise.
        """
        self._under_way.append(self._thread.submit(_told_of_errors, run, device, self._turn))

    def wait(self) -> None:
        """Until all is compiled; any thread may call it, again as well."""
        self._turn.all_at_once()
        futures.wait(self._under_way)
        self._thread.shutdown(wait=False)


def _told_of_errors(run: Callable[[], object], device: torch.device, turn: AbstractContextManager[Any]) -> None:
    try:
        with SHORT_TURNS:
            compile_ahead(run, device, turn)
    except Exception:
        log.warning("kvcanary.compile kernels are compiled when they are launched, not before", exc_info=True)
