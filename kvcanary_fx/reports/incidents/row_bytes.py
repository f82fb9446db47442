"""What the bytes of a damaged row show: the one bit that was flipped, NaN, zeros."""

from __future__ import annotations

import torch

from ...kernels.content.cpu import digest_words, packed, rows_as_words
from ...kernels.content.digest import MASK32, ZERO_STANDS_FOR, as_int32, coefficients
from ...kernels.slots.chain import MASK64
from ...kernels.writes.layout import FLOAT_DTYPES, SlotLayout


def digests_of(rows: torch.Tensor, seeds: tuple[int, int], planes: int) -> torch.Tensor:
    """int64 ``[n]``: the digests of uint8 ``[n, row_bytes]`` as a violation has them."""
    return packed(digest_words(_words(rows), seeds, planes))


def flipped_bit(row: torch.Tensor, seeds: tuple[int, int], stored: int) -> int | None:
    """The bit of a row (uint8 ``[row_bytes]``) that has to be flipped to get the digest ``stored``.

    A digest is a sum with one term for each word, so a flip of one bit is found by its term alone.  Of a row of 2,048
    bytes, one in 260,000 changes that are no flip of a bit passes for one.

    Returns:
        The number of the bit, counted from the lowest of byte 0; None if no bit does, or several do.
    """
    words = _words(row[None])[0]
    c, d = coefficients(words.shape[0], words.device)
    before = _terms(words, c, d)
    device = words.device
    wanted = torch.tensor(as_int32(stored & MASK32), dtype=torch.int32, device=device) - before.sum(dtype=torch.int32)
    wanted = wanted - as_int32(seeds[0])
    masks = [1 << bit if bit < 31 else -(1 << 31) for bit in range(32)]
    wide = torch.tensor(masks, dtype=torch.int32, device=device)
    found = []
    for bit, mask in enumerate(wide):
        for word in (_terms(words ^ mask, c, d) - before == wanted).nonzero().flatten().tolist():
            found.append(32 * word + bit)
    found = [bit for bit in found if bit < 8 * row.shape[0]]
    return found[0] if len(found) == 1 else None


def poisoned(row: torch.Tensor, dtype: torch.dtype) -> int:
    """How many elements of a row (uint8 ``[row_bytes]``) are NaN or Inf."""
    if dtype not in FLOAT_DTYPES:
        return 0
    return int((~row.clone().view(dtype).to(torch.float32).isfinite()).sum())


def sum_of(stored: int, seeds: tuple[int, int]) -> int | None:
    """What is left of a digest without the half's seed, the same for equal rows of all halves; None if it was zero."""
    low = stored & MASK32
    return None if low == ZERO_STANDS_FOR else (low - seeds[0]) & MASK32


def packed_equal(one: int, other: int) -> bool:
    """Whether two digests are the same, as signed or unsigned numbers."""
    return one & MASK64 == other & MASK64


def shown(digest: int) -> str:
    """A digest in hexadecimal."""
    return f"{digest & MASK64:#x}"


def _words(rows: torch.Tensor) -> torch.Tensor:
    layout = SlotLayout(tuple(rows.shape), (0,), torch.uint8)
    return rows_as_words(rows, layout)


def _terms(words: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``mixed(w_i, a_i, b_i)`` of each word, int32; see :mod:`kvcanary_fx.kernels.content.digest`."""
    u = (words ^ ((words >> 16) & 0xFFFF)) * a
    return (u ^ ((u >> 15) & 0x1FFFF)) * b
