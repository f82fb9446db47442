"""A Triton launch with bound arguments, except for a few numbers.

Triton's own ``kernel[grid](...)`` took 100 us of host time for 60 keyword arguments (a CPU core; nothing was launched):
it binds them, inspects the type and alignment of each, and looks up the compiled kernel.  Here that happens once, and
later launches go to the compiled kernel's launcher.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from triton import knobs
from triton.compiler import CompiledKernel

from .compile_ahead import launch_or_compile


class BoundLaunch:
    """One kernel with its arguments, compiled for them at its first launch.

    Tensors are passed as addresses, so these must not change, and the caller keeps the tensors alive.
    """

    def __init__(
        self,
        kernel: Any,
        device: torch.device,
        arguments: Mapping[str, Any],
        changing: Sequence[str],
        warps: int,
        registers: int | None = None,
    ):
        """
        Args:
            arguments: of the kernel, by name, all but ``changing``.
            changing: those that each launch passes, in this order.  Triton compiles for their first values: a number
                that it may specialise on, or an address with another alignment, needs a separate launch.
            registers: of a thread, at most; None: as many as the compiler likes.
        """
        names = parameters_of(kernel.fn)
        self._kernel, self._settings = kernel, {"num_warps": warps}
        if registers is not None:
            self._settings["maxnreg"] = registers
        self._at = [names.index(name) for name in changing]
        self._given = [arguments.get(name) for name in names]
        self._words = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in self._given]
        missing = [name for name in names if name not in arguments and name not in changing]
        if missing or len(arguments) + len(changing) != len(names):
            raise TypeError(f"{kernel.fn.__name__} lacks {missing}, or was given arguments that it does not take")
        self._device, self._index = device, device.index if device.type == "cuda" else None
        self._compiled: Any = None
        self._run: Callable[..., None] | None = None  # of a compiled kernel: its own launcher

    @property
    def ready(self) -> bool:
        """Whether :meth:`__call__` can launch it; never in the interpreter."""
        return self._compiled is not None

    def first(self, grid: tuple[int, int, int], changing: Sequence[Any], stream: torch.cuda.Stream | None) -> None:
        """Compile and launch; within :func:`.compile_ahead` no launch, and it is not ready behind it.

        Args:
            changing: tensors in the place of addresses.
        """
        given = list(self._given)
        for at, value in zip(self._at, changing, strict=True):
            given[at] = value
        device = torch.cuda.device(self._device) if self._index is not None else contextlib.nullcontext()
        beside = torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext()
        with device, beside:
            compiled = self._compiled = launch_or_compile(self._kernel, grid, *given, **self._settings)
        if isinstance(compiled, CompiledKernel):
            self._run = compiled.run

    def __call__(self, grid: tuple[int, int, int], changing: Sequence[int], stream: torch.cuda.Stream | None) -> None:
        """Launch on a stream, or on the current one of the device."""
        words = self._words
        for at, value in zip(self._at, changing):  # noqa: B905  strict costs as much as the loop
            words[at] = value
        if self._index is None or torch.cuda.current_device() == self._index:
            self._launch(grid, stream)
            return
        with torch.cuda.device(self._device):
            self._launch(grid, stream)

    def _launch(self, grid: tuple[int, int, int], stream: torch.cuda.Stream | None) -> None:
        """Launch on the current device."""
        if self._run is None or _watched():
            self._compiled[grid](*self._words, stream=stream.cuda_stream if stream is not None else None)
            return
        index = self._index if self._index is not None else torch.cuda.current_device()
        raw = stream.cuda_stream if stream is not None else torch._C._cuda_getCurrentRawStream(index)
        compiled, (x, y, z) = self._compiled, grid
        # as compiled[grid](...) does, without what it prepares for hooks
        self._run(x, y, z, raw, compiled.function, compiled.packed_metadata, None, None, None, *self._words)


class BoundLaunches:
    """One kernel, bound once for each form of the arguments that change: Triton compiles for the types and alignments
    of tensors."""

    def __init__(self, kernel: Any, device: torch.device, changing: Sequence[str], warps: int):
        """
        Args:
            changing: arguments that each launch passes, in this order; of the numbers among them none that Triton
                specialises on.
        """
        self._kernel, self._device, self._changing, self._warps = kernel, device, changing, warps
        self._bound: dict[Hashable, BoundLaunch] = {}
        self._known: dict[Hashable, BoundLaunch] = {}

    def again(self, known: Hashable, grid: tuple[int, int, int], words: Sequence[int]) -> bool:
        """Launch as an earlier call with ``known`` did, with addresses for tensors; whether there was one."""
        launch = self._known.get(known)
        if launch is None:
            return False
        launch(grid, words, None)
        return True

    def __call__(
        self,
        form: Hashable,
        grid: tuple[int, int, int],
        changing: Sequence[torch.Tensor | int],
        arguments: Callable[[], Mapping[str, Any]],
        known: Hashable = None,
    ) -> None:
        """Launch on the current stream of the device.

        Args:
            form: what the other arguments depend on.
            arguments: makes them, by name, for a form that is new.
            known: the form, with the dtype of each tensor and its address modulo 16, for :meth:`again`.
        """
        words, key = [], [form]
        for value in changing:
            if isinstance(value, torch.Tensor):
                words.append(value.data_ptr())
                key += (value.dtype, words[-1] & 15)
            else:
                words.append(value)
        launch = self._bound.get(tuple(key))
        if launch is not None and launch.ready:
            launch(grid, words, None)
        else:
            launch = BoundLaunch(self._kernel, self._device, arguments(), self._changing, self._warps)
            self._bound[tuple(key)] = launch
            launch.first(grid, changing, None)
        if known is not None and launch.ready:
            self._known[known] = launch


def _watched() -> bool:
    """Whether something, such as a profiler, wants to be told of launches."""
    for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


@functools.cache
def parameters_of(function: Callable[..., Any]) -> list[str]:
    """The names of a kernel's parameters, in order."""
    return list(inspect.signature(function).parameters)
