"""Gathers a step's copies from host to device: one launch that reads pinned memory, and scatters it."""

from __future__ import annotations

import dataclasses
import struct
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..kernels.staging import Staging, lasting, packing

if TYPE_CHECKING:
    from ..kernels.handed import Handed, Part, Places
    from ..kernels.waiting import Put, Waiting

#: Dtypes of tensors of the device that the launch copies which brings the numbers of the host.
COPIED = frozenset((torch.int32, torch.int64))

#: Sequences that hold nothing but whole numbers, if an array takes them.
_PLAIN = (list, tuple, range)


@dataclasses.dataclass(frozen=True)
class Sent:
    """Numbers of the host that are sent again and again to the same places.

    Attributes:
        landing: where they arrive, in one piece; ``parts`` of it go to ``outs``.
    """

    landing: torch.Tensor
    outs: list[torch.Tensor]
    parts: list[torch.Tensor]


class Gathered:
    """Copies that are sent to a device together.

    Their destinations are usually those of the step before, so the views are kept.
    """

    def __init__(self, device: torch.device):
        self._staging, self._device = Staging(device), device
        self._handed: Handed | None = None
        self._landing = lasting(0, dtype=torch.int64, device=device)
        self._words = array("q")
        self._places: list[tuple[torch.Tensor, int, int]] = []  # a buffer, its first entry and how many, for the words
        self._known: list[tuple[int, int, int]] = []  # the places of ``_sent``
        self._sent: Sent | Places = Sent(self._landing, [], [])
        self._kept: list[torch.Tensor] = []  # the buffers of the views: as long as they live their ids are theirs
        self._copies: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def numbers(self, out: torch.Tensor, start: int, words: array[int]) -> None:
        """Copy numbers of the host.

        Args:
            out: int64 on the device, contiguous; the numbers go to its entries from ``start`` on.
            words: as many as those entries have, at least one.
        """
        entries = len(words) if out.dim() == 1 else len(words) // (out[0].numel() or 1)
        self._places.append((out, start, entries))
        self._words.extend(words)

    def tensor(self, out: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a tensor of the device to one of the same shape; nothing may write to it before :meth:`send`."""
        outs, sources = self._copies.setdefault(source.dtype, ([], []))
        outs.append(out)
        sources.append(source)

    def send(self) -> None:
        """Launch the copies, in the current stream."""
        if self._places:
            self._send_numbers()
        if self._copies:
            self._send_copies()

    def _send_copies(self) -> None:
        for outs, sources in self._copies.values():
            torch._foreach_copy_(outs, sources)
        self._copies.clear()

    def places(
        self,
        places: Sequence[tuple[torch.Tensor, int, int]],
        copied: Sequence[tuple[torch.Tensor, torch.dtype]] = (),
    ) -> Sent | Places:
        """Places that numbers are going to be sent to again: an int64 buffer, its first entry, and how many.

        On a GPU numbers are read where they are, which is one launch, and nothing is allocated.

        Args:
            copied: as of :class:`.Places`; only where numbers are handed over.
        """
        outs = [out[start : start + entries] for out, start, entries in places]
        if hands_over(self._device):
            from ..kernels.handed import Handed, Places  # only where there is Triton

            if self._handed is None:
                self._handed = Handed(self._device)
            return Places(self._handed, outs, copied)
        sizes = [out.numel() for out in outs]
        self._make_room(sum(sizes))
        parts = self._landing[: sum(sizes)].split(sizes)
        return Sent(self._landing, outs, [part.view(out.shape) for part, out in zip(parts, outs, strict=True)])

    def holds(self, sent: Sent | Places) -> bool:
        """Whether the numbers of ``sent`` still arrive where it says."""
        return not isinstance(sent, Sent) or sent.landing is self._landing

    def put(self, sent: Sent | Places, parts: Sequence[Part]) -> array[int] | Put:
        """Numbers to known places, for :meth:`send_to`, which is next.

        Raises:
            TypeError, OverflowError, struct.error: there are others than whole numbers of 64 bits.
        """
        if not isinstance(sent, Sent):
            return sent.put(*parts)
        words = array("q")
        for part in parts:
            words.extend(part if isinstance(part, array) else packed(part))
        return words

    def send_to(self, sent: Sent | Places, numbers: array[int] | Put, waiting: Waiting | None = None) -> None:
        """Launch the copies, those of numbers to known places.

        Args:
            waiting: numbers that a kernel reads where they are wait there instead; None: they are launched, too.
        """
        if isinstance(numbers, array):
            self._fill(sent, numbers)
        elif waiting is None:
            numbers.launch(numbers.grid, numbers.at)
        else:
            waiting.add(numbers)
        if self._copies:
            self._send_copies()

    def _send_numbers(self) -> None:
        places, words = self._places, self._words
        self._words, self._places = array("q"), []
        known = [(id(out), start, entries) for out, start, entries in places]
        if known != self._known or not self.holds(self._sent):
            self._sent = self.places(places)
            self._known, self._kept = known, [out for out, _, _ in places]
        self._fill(self._sent, words)

    def _fill(self, sent: Sent | Places, words: array[int]) -> None:
        if isinstance(sent, Sent):
            self._staging.send(words, sent.landing)
            torch._foreach_copy_(sent.outs, sent.parts)
        else:
            sent.fill(words)

    def _make_room(self, words: int) -> None:
        if self._landing.shape[0] < words:
            room = max(1024, 1 << (words - 1).bit_length())
            self._landing = lasting(room, dtype=torch.int64, device=self._landing.device)


def hands_over(device: torch.device) -> bool:
    """Whether kernels of a device read the host's memory."""
    return device.type == "cuda"


def plain_numbers(values: Any) -> array[int] | None:
    """A sequence of whole numbers as an array; None for anything else, which is then checked in full."""
    if not isinstance(values, _PLAIN) or not values or isinstance(values[0], bool):
        return None
    try:
        return packed(values)
    except (TypeError, OverflowError):
        return None  # nested, or no integers


def packed(numbers: Sequence[int]) -> array[int]:
    """Whole numbers as an array, like ``array("q", numbers)``, which takes more than twice as long for hundreds of them
    in Python 3.11, and half as long again in 3.12.

    Raises:
        TypeError, OverflowError: there are others among them.
    """
    try:
        return array("q", packing(len(numbers)).pack(*numbers))
    except struct.error:
        return array("q", numbers)  # says what is wrong


def numbers_of(tensor: torch.Tensor) -> array[int]:
    """The integers of a host tensor, row by row."""
    listed = array("q")
    listed.frombytes(tensor.numpy().astype("int64", copy=False).tobytes())
    return listed
