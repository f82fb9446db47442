"""The shapes of pools that engines have, each as the groups of one small model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from groups import Chunked, Compressed, Cross, Group, Mapped, Neighbour, Pages, Ring, State

WINDOW, CHUNK = 6, 8


def _sliding() -> list[Group]:
    full = Group("full", "nhd")
    return [full, Mapped("swa", "nhd", full, WINDOW)]


def _hybrid() -> list[Group]:
    full = Group("full", "nhd")
    return [full, Neighbour("swa", full, WINDOW)]


def _deepseek_v4() -> list[Group]:
    return [
        Ring("window", "584 bytes", WINDOW),
        Compressed("c4", "584 bytes", 4),
        Compressed("c8", "584 bytes", 8),  # stands for c128: the requests of these tests are short
        Compressed("indexer", "indexer", 4),
    ]


def _shared_layers() -> list[Group]:
    group = Group("kv", "nhd", layers=3)
    group.kv[1] = group.kv[0]
    return [group]


SHAPES: dict[str, Callable[[], list[Group]]] = {
    "MHA": lambda: [Group("kv", "nhd")],
    "GQA": lambda: [Group("kv", "gqa")],
    "MLA, one tensor": lambda: [Group("kv", "mla")],
    "MLA, one tensor in parts": lambda: [Group("kv", "mla in parts")],
    "MLA, two tensors": lambda: [Group("kv", "mla in two")],
    "NHD pages": lambda: [Pages("kv", "nhd pages")],
    "HND pages": lambda: [Pages("kv", "hnd pages")],
    "K and V interleaved": lambda: [Group("kv", "interleaved")],
    "K and V stacked": lambda: [Group("kv", "stacked")],
    "K and V interleaved in pages": lambda: [Pages("kv", "interleaved pages")],
    "sliding window, own pool and map": _sliding,
    "sliding window, ring": lambda: [Group("full", "nhd"), Ring("swa", "nhd", WINDOW)],
    "hybrid, one storage": _hybrid,
    "chunked local attention": lambda: [Group("full", "nhd"), Chunked("local", "nhd", CHUNK)],
    "fp8, scale per tensor": lambda: [Group("kv", "fp8", scales={"layers.0": torch.tensor(0.5)})],
    "fp8, scale per token": lambda: [Group("kv", "fp8, token scales")],
    "fp8, scale per block": lambda: [Group("kv", "fp8, block scales")],
    "packed 4 bit": lambda: [Group("kv", "4 bit")],
    "DeepSeek-V4 groups": _deepseek_v4,
    "584 bytes, scales behind the page": lambda: [Pages("kv", "584 bytes in pages")],
    "layers that share a cache": _shared_layers,
    "recurrent and conv state": lambda: [Group("full", "nhd"), State("state", "states")],
    "cross-attention": lambda: [Group("self", "nhd"), Cross("cross", "nhd")],
}


def groups_of(shape: str, device: str) -> list[Group]:
    """The groups of a shape, with their tensors on a device."""
    with torch.device(device):
        return SHAPES[shape]()
