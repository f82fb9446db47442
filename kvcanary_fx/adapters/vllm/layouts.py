"""Where a slot's bytes lie in a page of vLLM's KV cache.

A page's layout depends on the attention backend: on CPUs K lies transposed, for example.  It is found by writing:
the backend itself stores known bits into a scratch page, slot by slot, and the places where they appear give the
strides of a view ``[pages, page_size, heads, dim]``.  Nothing is assumed about a backend, and a layout in which a
slot's bytes are not such a view is detected rather than misread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

#: ``(key, value, cache, slots)``: how a backend stores tokens.
Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]

#: Elements of one write, which differ in their bits, and the bits of element 0: ordinary numbers in each type.
_AT_ONCE = 8192
_FIRST = {torch.bfloat16: 0x3C00, torch.float16: 0x3C00, torch.float32: 0x3C000000}
_BITS = {2: torch.int16, 4: torch.int32}


@dataclasses.dataclass(frozen=True)
class HalfLayout:
    """The layout of one half of a layer in its cache, in elements.

    Attributes:
        shape: of a slot's row, such as ``(heads, dim)``.
        offset: of the first page's first slot in the cache.
        slot: stride from one slot of a page to the next.
        strides: of the row.
    """

    shape: tuple[int, ...]
    offset: int
    slot: int
    strides: tuple[int, ...]

    def view(self, cache: torch.Tensor, page_size: int) -> torch.Tensor:
        """The half in a cache ``[pages, ...]``, as ``[pages, page_size, *shape]``."""
        return torch.as_strided(
            cache,
            (cache.shape[0], page_size, *self.shape),
            (cache.stride(0), self.slot, *self.strides),
            cache.storage_offset() + self.offset,
        )


def find(
    cache: torch.Tensor, page_size: int, shapes: tuple[tuple[int, ...], tuple[int, ...]], write: Write
) -> tuple[HalfLayout, HalfLayout] | None:
    """The layouts of K and V (of the latent and the rotary part) in a cache.

    Args:
        cache: ``[pages, ...]`` of a floating-point type; it is not changed.
        shapes: of one token's key and value.

    Returns:
        None if a slot's bytes are not a strided view, or the cache holds other numbers than were written.
    """
    if cache.dtype not in _FIRST:
        return None
    scratch = torch.empty_strided((2, *cache.shape[1:]), cache.stride(), dtype=cache.dtype, device=cache.device)
    halves = []
    for half in range(2):
        places = _places(scratch, page_size, shapes, half, write)
        layout = None if places is None else _strides(places, scratch.stride(0))
        if layout is None:
            return None
        halves.append(layout)
    return halves[0], halves[1]


def _places(
    scratch: torch.Tensor, page_size: int, shapes: tuple[tuple[int, ...], ...], half: int, write: Write
) -> torch.Tensor | None:
    """Where each element of each slot of page 1 is stored: int64 ``[page_size, *shape]``; None if not found."""
    first, bits = _FIRST[scratch.dtype], _BITS[scratch.dtype.itemsize]
    memory = torch.as_strided(scratch, (scratch.untyped_storage().nbytes() // scratch.dtype.itemsize,), (1,), 0)
    count = int(torch.Size(shapes[half]).numel())
    places = torch.full((page_size, count), -1, dtype=torch.int64, device=scratch.device)
    for slot in range(page_size):
        for begin in range(0, count, _AT_ONCE):
            some = min(_AT_ONCE, count - begin)
            given = [torch.zeros(1, *shape, dtype=scratch.dtype, device=scratch.device) for shape in shapes]
            marks = torch.arange(first, first + some, dtype=bits, device=scratch.device)
            given[half].view(-1)[begin : begin + some] = marks.view(scratch.dtype)
            memory.zero_()
            write(given[0], given[1], scratch, torch.tensor([page_size + slot], device=scratch.device))
            stored = memory.view(bits)
            hits = ((stored >= first) & (stored < first + some)).nonzero().flatten()
            if hits.numel() != some:
                return None
            places[slot, (stored[hits] - first).to(torch.int64) + begin] = hits
    return None if bool((places < 0).any()) else places.view(page_size, *shapes[half])


def _strides(places: torch.Tensor, page_stride: int) -> HalfLayout | None:
    """The strided view formed by the places of page 1; None if they form none."""
    origin = int(places.flatten()[0])
    steps = [_step(places, axis, origin) for axis in range(places.dim())]
    expected = torch.full_like(places, origin)
    for axis, step in enumerate(steps):
        along = torch.arange(places.shape[axis], device=places.device) * step
        expected += along.view([-1 if a == axis else 1 for a in range(places.dim())])
    if not torch.equal(expected, places):
        return None
    return HalfLayout(tuple(places.shape[1:]), origin - page_stride, steps[0], tuple(steps[1:]))


def _step(places: torch.Tensor, axis: int, origin: int) -> int:
    if places.shape[axis] < 2:
        return 0
    return int(places.select(axis, 1).flatten()[0]) - origin
