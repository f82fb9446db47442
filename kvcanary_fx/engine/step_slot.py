"""One registered input of a step: what it accepts, and its buffer."""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Callable
from typing import Any

import torch

from ..errors import StepInputError
from .gathered import Gathered
from .step_view import Axis

#: Numbers of padding that are rather filled in than copied.
MUCH_PADDING = 1024


@dataclasses.dataclass
class StepSlot:
    """One registered input.

    Attributes:
        trailing: what follows the first dimension; known from the first fill.
        buffer: [capacity, *trailing], padding from ``used`` on.
        replayed: entries that captured graphs write when they are replayed, unseen.
        memory: the slot is memory that kernels fill, with this after the first dimension.
        shape: of the buffer; a tensor makes its own anew each time.
    """

    name: str
    axis: Axis
    dtype: torch.dtype
    pad: int | float
    compute: Callable[[Any, Any], torch.Tensor | array[int] | list[int]] | None
    exposed: bool
    trailing: tuple[int, ...] | None = None
    buffer: torch.Tensor | None = None
    used: int = 0
    replayed: int = 0
    memory: tuple[int, ...] | None = None
    shape: tuple[int, ...] = ()

    def make_buffer(self, capacity: int, trailing: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """The buffer, made anew if it has another shape; then all of it counts as used."""
        shape = (capacity, *trailing)
        if self.buffer is None or self.shape != shape:
            self.shape = shape
            with torch.inference_mode(False):
                self.buffer = torch.empty(shape, dtype=self.dtype, device=device)
            self.used = capacity
        return self.buffer

    def pad_from(self, start: int, captured: bool, gathered: Gathered | None) -> None:
        """Let the buffer be padding from ``start`` on; what is padding already costs no launch.

        Args:
            captured: a CUDA graph is being captured, whose replays fill the buffer up to here.
            gathered: takes the padding of an int64 buffer along; None: it is written at once.
        """
        if captured:
            self.replayed = max(self.replayed, start)
        used = max(self.used, self.replayed)
        if self.buffer is not None and used > start:
            if gathered is None or self.buffer.dtype != torch.int64 or (used - start) * self.row > MUCH_PADDING:
                self.buffer[start:used].fill_(self.pad)
            else:
                gathered.numbers(self.buffer, start, array("q", [int(self.pad)]) * ((used - start) * self.row))
        self.used = start

    @property
    def row(self) -> int:
        """Numbers of an entry of the buffer."""
        return 1 if self.buffer is None else math.prod(self.buffer.shape[1:])


def shape_text(trailing: tuple[int, ...]) -> str:
    """A slot's shape for messages."""
    return f"[{', '.join(['n', *map(str, trailing)])}]"


def require_pad(name: str, pad: int | float, dtype: torch.dtype) -> None:
    """Refuse a padding value that the dtype does not have."""
    if dtype.is_floating_point:
        return
    try:
        fits = torch.tensor(pad, dtype=dtype, device="cpu").item() == pad
    except (TypeError, ValueError, RuntimeError):
        fits = False
    if not fits:
        raise StepInputError(f"slot {name!r} holds {dtype}, and its pad {pad!r} is none", "Give a pad of that type")


def as_tensor(slot: StepSlot, source: Any) -> torch.Tensor:
    """``source`` itself if it is a tensor, else its numbers on the CPU, with the slot's dtype."""
    tensor: torch.Tensor = source
    try:
        if not isinstance(source, torch.Tensor):
            if hasattr(source, "__len__") and not len(source):
                return torch.empty((0, *(slot.trailing or ())), dtype=slot.dtype, device="cpu")
            tensor = torch.tensor(source, device="cpu")
        castable: bool = torch.can_cast(tensor.dtype, slot.dtype)
        if castable and tensor is not source and tensor.dtype != slot.dtype:
            tensor = torch.tensor(source, dtype=slot.dtype, device="cpu")  # from the numbers: finds what overflows
    except (TypeError, ValueError, RuntimeError) as error:
        raise StepInputError(
            f"slot {slot.name!r} holds {slot.dtype} and cannot be made from a {type(source).__name__} ({error})",
            "Give a tensor, or a sequence of numbers in range",
        ) from error
    if not castable:
        raise StepInputError(
            f"slot {slot.name!r} holds {slot.dtype} and was given {tensor.dtype}, which does not convert to it",
            "Convert it in the batch, or register the slot with that dtype",
        )
    return tensor
