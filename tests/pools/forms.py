"""How a layer keeps its K and V: the tensors, and what a model does to write and read them.

A form makes the tensors of one layer as an engine would allocate them, and says which views of them hold one half
each, with the slot axes first.  A model writes rows of raw bytes' worth of elements: what the numbers mean is nothing
to a canary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from kvcanary_fx import register_kv_write

HEADS, DIM, PAGE = 2, 6, 4
FP8 = torch.float8_e4m3fn

_LIBRARY = torch.library.Library("pool_forms", "FRAGMENT")
_LIBRARY.define("store(Tensor(a!) pool, Tensor value, Tensor slots, Tensor shift) -> ()")
register_kv_write("pool_forms::store", slots="slots", pools={"pool": "value"})


def put(view: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Rows into slots of a view ``[slots, ...]`` or, told by the rows, ``[pages, page_size, ...]``."""
    if view.dim() == rows.dim() + 1:
        view[slots // view.shape[1], slots % view.shape[1]] = rows
    else:
        view[slots] = rows


def _store(pool: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, shift: torch.Tensor) -> None:
    """A store kernel; ``shift`` makes it miss."""
    put(pool, value, torch.where(slots > 0, slots + shift, slots))


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("store", _store, _device)
torch.library.register_fake("pool_forms::store", lambda *_: None, lib=_LIBRARY)


Tensors = tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to keep a layer.

    Attributes:
        make: from a number of slots to a layer's tensors.
        halves: from a layer's tensors to its halves as the model addresses them, slot axes first.
        declared: from a layer's tensors to what ``KVPool.layers`` has for it.
        pool: the fields of ``KVPool`` that describe it.
    """

    make: Callable[[int], Tensors]
    halves: Callable[[Tensors], Tensors] = lambda tensors: tensors
    declared: Callable[[Tensors], Tensors] = lambda tensors: tensors
    pool: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def paged(self) -> bool:
        return bool(self.pool.get("paged"))


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def pair(*row: int, dtype: torch.dtype = torch.float32) -> Callable[[int], Tensors]:
    """K and V as ``[slots, *row]``."""
    return lambda slots: (zeros(slots, *row, dtype=dtype), zeros(slots, *row, dtype=dtype))


def paged_pair(hnd: bool = False, dtype: torch.dtype = torch.bfloat16) -> Callable[[int], Tensors]:
    row = (HEADS, PAGE, DIM) if hnd else (PAGE, HEADS, DIM)
    return lambda slots: (zeros(slots // PAGE, *row, dtype=dtype), zeros(slots // PAGE, *row, dtype=dtype))


def _packed_pages(slots: int) -> Tensors:
    """DeepSeek-V4: a page has the 576 bytes of each of its tokens first, then their scales of 8 bytes."""
    raw = zeros(slots // PAGE, PAGE * 584, dtype=torch.uint8)
    pages, stride = raw.shape[0], raw.stride(0)
    rows = raw.as_strided((pages, PAGE, 576), (stride, 576, 1))
    return rows, raw.as_strided((pages, PAGE, 8), (stride, 8, 1), PAGE * 576)


FORMS: dict[str, Form] = {
    "nhd": Form(pair(HEADS, DIM)),
    "gqa": Form(pair(1, 33, dtype=torch.float16)),
    "nhd pages": Form(paged_pair(), pool={"paged": True}),
    "hnd pages": Form(
        paged_pair(hnd=True),
        halves=lambda t: tuple(x.transpose(1, 2) for x in t),
        pool={"paged": True, "order": "HND"},
    ),
    "mla": Form(lambda slots: (zeros(slots, 1, 20, dtype=torch.bfloat16),), pool={"half_names": ("latent",)}),
    "mla in parts": Form(
        lambda slots: (zeros(slots, 20, dtype=torch.bfloat16),),
        halves=lambda t: (t[0][:, :16], t[0][:, 16:]),
        declared=lambda t: (t[0][:, :16], t[0][:, 16:]),
        pool={"half_names": ("latent", "rope")},
    ),
    "mla in two": Form(
        lambda slots: (zeros(slots, 16, dtype=torch.bfloat16), zeros(slots, 5, dtype=torch.bfloat16)),
        pool={"half_names": ("latent", "rope")},
    ),
    "interleaved": Form(
        lambda slots: (zeros(slots, 2, HEADS, DIM),), halves=lambda t: t[0].unbind(1), pool={"kv_axis": 1}
    ),
    "stacked": Form(lambda slots: (zeros(2, slots, HEADS, DIM),), halves=lambda t: t[0].unbind(0), pool={"kv_axis": 0}),
    "interleaved pages": Form(
        lambda slots: (zeros(slots // PAGE, 2, PAGE, HEADS, DIM),),
        halves=lambda t: t[0].unbind(1),
        pool={"kv_axis": 1, "paged": True},
    ),
    "fp8": Form(pair(HEADS, 8, dtype=FP8)),
    "fp8, token scales": Form(
        lambda slots: (*pair(HEADS, 8, dtype=FP8)(slots), *pair(HEADS)(slots)),
    ),
    "fp8, block scales": Form(
        lambda slots: (*pair(HEADS, 16, dtype=FP8)(slots), *pair(HEADS, 4, dtype=torch.float32)(slots)),
    ),
    "4 bit": Form(
        lambda slots: (*pair(HEADS, 5, dtype=torch.uint8)(slots), *pair(HEADS, dtype=torch.float16)(slots)),
    ),
    "584 bytes": Form(lambda slots: (zeros(slots, 584, dtype=torch.uint8),), pool={"half_names": ("row",)}),
    "584 bytes in pages": Form(_packed_pages, pool={"paged": True, "half_names": ("row", "scale")}),
    "indexer": Form(lambda slots: (zeros(slots, 132, dtype=torch.uint8),), pool={"half_names": ("index K",)}),
    "states": Form(lambda slots: (zeros(slots, 5, 3), zeros(slots, HEADS, 3, 4)), pool={"half_names": ("conv", "ssm")}),
}
