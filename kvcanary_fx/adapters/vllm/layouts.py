"""Where a slot's bytes lie in a page of vLLM's KV cache.

A page's layout depends on the attention backend: on CPUs K lies transposed, for example.  It is found by writing:
the backend itself stores known bits into a scratch page, slot by slot, and the places where they appear give the
strides of a view ``[pages, page_size, heads, dim]``.  Nothing is assumed about a backend, and a layout in which a
slot's bytes are not such a view is detected rather than misread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

#: ``(key, value, cache, slots)``: how a backend stores tokens.
Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]

#: What a cache of 8 bits is found with: with any usual scale it is stored as no zero.
_LARGE = 64.0

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
        cache: ``[pages, ...]`` of a floating-point type, or of one with 8 bits; it is not changed.
        shapes: of one token's key and value.

    Returns:
        None if a slot's bytes are not a strided view, or the cache holds other numbers than were written.
    """
    if cache.dtype not in _FIRST and cache.dtype.itemsize != 1:
        return None
    scratch = torch.empty_strided((2, *cache.shape[1:]), cache.stride(), dtype=cache.dtype, device=cache.device)
    halves = []
    for half in range(2):
        layout: HalfLayout | None
        if cache.dtype.itemsize == 1:
            layout = _of_bytes(scratch.view(torch.uint8), page_size, shapes, half, write)
        else:
            places = _places(scratch, page_size, shapes, half, write)
            layout = None if places is None else _strides(places, scratch.stride(0))
        if layout is None:
            return None
        halves.append(layout)
    return halves[0], halves[1]


class Known:
    """The layouts that some layers of an engine were found to have.

    A layer like one of them is only asked whether it has its layout, by one write or two; to find one takes hundreds of
    launches, and the device is waited for in each slot and half.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], tuple[HalfLayout, HalfLayout]] = {}

    def find(
        self, cache: torch.Tensor, page_size: int, shapes: tuple[tuple[int, ...], tuple[int, ...]], write: Write
    ) -> tuple[HalfLayout, HalfLayout] | None:
        """As :func:`find`, with what other layers were found to have."""
        form = cache.dtype, cache.shape[1:], cache.stride(), page_size, shapes
        known = self._found.get(form)
        if known is not None and _has(known, cache, page_size, shapes, write):
            return known
        found = find(cache, page_size, shapes, write)
        if found is not None:
            self._found[form] = found
        return found


def _has(
    layouts: tuple[HalfLayout, HalfLayout],
    cache: torch.Tensor,
    page_size: int,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    write: Write,
) -> bool:
    """Whether what a backend writes to a page, numbers at random, is where the layouts say, and nothing else is."""
    made, device = torch.Generator().manual_seed(0), cache.device
    scratch, expected = (
        torch.empty_strided((2, *cache.shape[1:]), cache.stride(), dtype=cache.dtype, device=device) for _ in range(2)
    )
    slots = torch.arange(page_size, 2 * page_size, device=device)
    if cache.dtype.itemsize == 1:
        for half, layout in enumerate(layouts):
            chosen = (torch.rand((page_size, *shapes[half]), generator=made) < 0.5).to(device)
            shown = _stored_bytes(scratch.view(torch.uint8), page_size, shapes, half, write, chosen)
            memory = _memory(expected.view(torch.uint8)).zero_()
            layout.view(expected.view(torch.uint8), page_size)[1] = chosen.to(torch.uint8)
            if not torch.equal(shown, memory != 0):
                return False
        return True
    first, bits = _FIRST[cache.dtype], _BITS[cache.dtype.itemsize]
    given = [
        torch.randint(first, first + _AT_ONCE, (page_size, *shape), generator=made, dtype=bits).to(device)
        for shape in shapes
    ]
    for memory in (scratch, expected):
        _memory(memory).zero_()
    write(given[0].view(cache.dtype), given[1].view(cache.dtype), scratch, slots)
    for layout, values in zip(layouts, given, strict=True):
        layout.view(expected, page_size)[1] = values.view(cache.dtype)
    return torch.equal(_memory(scratch).view(bits), _memory(expected).view(bits))


def _memory(scratch: torch.Tensor) -> torch.Tensor:
    """All elements of a scratch cache's storage."""
    return torch.as_strided(scratch, (scratch.untyped_storage().nbytes() // scratch.dtype.itemsize,), (1,), 0)


def find_with_scales(
    cache: torch.Tensor, page_size: int, shapes: tuple[tuple[int, ...], tuple[int, ...]], write: Write
) -> tuple[HalfLayout, HalfLayout] | None:
    """The layouts of K and V in a cache that is quantised for each token and head, both with their scales: in bytes.

    vLLM's Triton backend keeps, for each head and slot, the bytes of K, its scale, those of V, and its scale.  So it is
    shown by writing: a write changes all bytes of its slot, and none else.

    Args:
        cache: ``[pages, heads, page_size, bytes]``, of elements of one byte; it is not changed.
        shapes: of one token's key and value.

    Returns:
        None if it is something else.
    """
    if cache.dtype.itemsize != 1 or cache.dim() != 4 or cache.shape[2] != page_size or cache.shape[3] % 2:
        return None
    _, heads, _, both = cache.shape
    of_head, of_slot = cache.stride(1), cache.stride(2)
    halves = [HalfLayout((heads, both // 2), k_or_v * (both // 2), of_slot, (of_head, 1)) for k_or_v in range(2)]
    scratch = torch.empty_strided((2, *cache.shape[1:]), cache.stride(), dtype=cache.dtype, device=cache.device)
    memory = torch.as_strided(scratch.view(torch.uint8), (scratch.untyped_storage().nbytes(),), (1,), 0)
    made = torch.Generator().manual_seed(0)
    given = [torch.randn(1, *shape, generator=made).to(cache.device, torch.bfloat16) for shape in shapes]

    def changed(slot: int, before: int) -> torch.Tensor:
        memory.fill_(before)
        write(given[0], given[1], scratch, torch.tensor([page_size + slot], device=cache.device))
        return memory != before

    changed(0, 0)  # what a backend makes at its first write
    for slot in range(page_size):
        written = changed(slot, 0x55) | changed(slot, 0xAA)
        memory.zero_()
        for half in halves:
            half.view(scratch, page_size)[1, slot] = 1
        if not torch.equal(written, memory != 0):
            return None
    return halves[0], halves[1]


def _places(
    scratch: torch.Tensor, page_size: int, shapes: tuple[tuple[int, ...], ...], half: int, write: Write
) -> torch.Tensor | None:
    """Where each element of each slot of page 1 is stored: int64 ``[page_size, *shape]``; None if not found."""
    first, bits = _FIRST[scratch.dtype], _BITS[scratch.dtype.itemsize]
    memory = _memory(scratch)
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


def _of_bytes(
    scratch: torch.Tensor, page_size: int, shapes: tuple[tuple[int, ...], ...], half: int, write: Write
) -> HalfLayout | None:
    """The strided view of a half whose elements are a byte each, quantised: their bits cannot all differ.

    One element at a time gives the strides; then elements at random must show where the view says, and nowhere else.
    """
    shape = (page_size, *shapes[half])

    def stored(chosen: torch.Tensor) -> torch.Tensor:
        return _stored_bytes(scratch, page_size, shapes, half, write, chosen)

    def place(*index: int) -> int | None:
        chosen = torch.zeros(shape, dtype=torch.bool, device=scratch.device)
        chosen[index] = True
        hits = stored(chosen).nonzero().flatten()
        return int(hits) if hits.numel() == 1 else None

    axes, steps = range(len(shape)), []
    origin = place(*(0 for _ in axes))
    if origin is None:
        return None
    for axis in axes:
        following = place(*(int(a == axis) for a in axes)) if shape[axis] > 1 else origin
        if following is None:
            return None
        steps.append(following - origin)
    if min(steps) < 0:  # no view of torch's
        return None
    for seed in range(3):
        made = torch.Generator().manual_seed(seed)
        chosen = (torch.rand(shape, generator=made) < 0.5).to(scratch.device)
        shown = stored(chosen)
        if int(shown.sum()) != int(chosen.sum()) or not torch.equal(
            torch.as_strided(shown, shape, steps, origin), chosen
        ):
            return None
    return HalfLayout(shape[1:], origin - scratch.stride(0), steps[0], tuple(steps[1:]))


def _stored_bytes(
    scratch: torch.Tensor,
    page_size: int,
    shapes: tuple[tuple[int, ...], ...],
    half: int,
    write: Write,
    chosen: torch.Tensor,
) -> torch.Tensor:
    """Where bytes are not 0 after ``chosen`` elements of a half were written to page 1, and all others as 0.

    Args:
        chosen: bool ``[page_size, *shape]``.
    """
    given = [torch.zeros(page_size, *s, dtype=torch.bfloat16, device=scratch.device) for s in shapes]
    given[half][chosen] = _LARGE
    memory = _memory(scratch).zero_()
    write(given[0], given[1], scratch, torch.arange(page_size, 2 * page_size, device=scratch.device))
    return memory != 0


def _strides(places: torch.Tensor, page_stride: int) -> HalfLayout | None:
    """The strided view formed by the places of page 1; None if they form none."""
    origin = int(places.flatten()[0])
    steps = [_step(places, axis, origin) for axis in range(places.dim())]
    expected = torch.full_like(places, origin)
    for axis, step in enumerate(steps):
        along = torch.arange(places.shape[axis], device=places.device) * step
        expected += along.view([-1 if a == axis else 1 for a in range(places.dim())])
    if min(steps) < 0 or not torch.equal(expected, places):  # torch has no negative strides
        return None
    return HalfLayout(tuple(places.shape[1:]), origin - page_stride, steps[0], tuple(steps[1:]))


def _step(places: torch.Tensor, axis: int, origin: int) -> int:
    if places.shape[axis] < 2:
        return 0
    return int(places.select(axis, 1).flatten()[0]) - origin
