"""Gathers a step's copies from host to device: one copy from pinned memory, one launch that scatters it."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

import torch

from ..kernels.staging import Staging, lasting

#: Sequences that hold nothing but whole numbers, if an array takes them.
_PLAIN = (list, tuple, range)


class Gathered:
    """Copies that are sent to a device together.

    Their destinations are usually those of the step before, so the views are kept.
    """

    def __init__(self, device: torch.device):
        self._staging = Staging(device)
        self._landing = lasting(0, dtype=torch.int64, device=device)
        self._words = array("q")
        self._places: list[tuple[torch.Tensor, int, int]] = []  # a buffer, its first entry and how many, for the words
        self._known: list[tuple[int, int, int]] = []  # the places of the views
        self._views: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
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
        for outs, sources in self._copies.values():
            torch._foreach_copy_(outs, sources)
        self._copies.clear()

    def _send_numbers(self) -> None:
        words, places = torch.frombuffer(self._words, dtype=torch.int64), self._places
        known = [(id(out), start, entries) for out, start, entries in places]
        self._words, self._places = array("q"), []
        if self._landing.shape[0] < words.shape[0]:
            room = max(1024, 1 << (words.shape[0] - 1).bit_length())
            self._landing = lasting(room, dtype=torch.int64, device=self._landing.device)
            self._known = []
        if known != self._known:
            outs = [out[start : start + entries] for out, start, entries in places]
            parts = self._landing[: words.shape[0]].split([out.numel() for out in outs])
            self._views = outs, [part.view(out.shape) for part, out in zip(parts, outs, strict=True)]
            self._known, self._kept = known, [out for out, _, _ in places]
        self._staging.send(words, self._landing)
        torch._foreach_copy_(*self._views)


def plain_numbers(values: Any) -> array[int] | None:
    """A sequence of whole numbers as an array; None for anything else, which is then checked in full."""
    if not isinstance(values, _PLAIN) or not values or isinstance(values[0], bool):
        return None
    try:
        return array("q", values)
    except (TypeError, OverflowError):
        return None  # nested, or no integers


def numbers_of(tensor: torch.Tensor) -> array[int]:
    """The integers of a host tensor, row by row."""
    given = tensor.to(torch.int64).contiguous()
    listed = array("q")
    if given.numel():
        listed.frombytes(ctypes.string_at(given.data_ptr(), 8 * given.numel()))
    return listed
