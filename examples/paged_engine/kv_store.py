"""The KV tensors of a group of layers, and how K and V are written to them and read from them."""

from __future__ import annotations

import dataclasses

import torch
from config import EngineConfig

#: Largest number that the float8 type holds.
FP8_MAX = 448.0

KV = list[list[torch.Tensor]]


@dataclasses.dataclass
class Group:
    """Layers that share slot numbers.

    Attributes:
        name: as the canary's pool is called.
        layers: for each layer K and V, ``[slots, heads, dim]``; in float8 two scales ``[slots, 1]`` follow.
        names: what each layer is called, in reports and by opaque attention; no two layers share one.
        window: tokens that attention sees, None for all.
    """

    name: str
    layers: KV
    names: list[str]
    window: int | None = None


def make_group(
    name: str, layers: int, slots: int, row: tuple[int, int], config: EngineConfig, window: int | None = None
) -> Group:
    """Zeroed KV tensors; ``row`` is ``(heads, dim)``."""
    kind = torch.float8_e4m3fn if config.fp8 else torch.float32

    def tensors() -> list[torch.Tensor]:
        scales = [torch.zeros(slots, 1, device=config.device) for _ in range(2)] if config.fp8 else []
        return [torch.zeros(slots, *row, dtype=kind, device=config.device) for _ in range(2)] + scales

    prefix = "" if name == "kv" else f"{name}."
    return Group(name, [tensors() for _ in range(layers)], [f"{prefix}layers.{i}" for i in range(layers)], window)


def write(
    layer: list[torch.Tensor], slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: torch.Tensor | None = None
) -> None:
    """Store K and V, ``[n, heads, dim]``, at ``slots`` ``[n]``; in float8 as ``stored * scale``.

    Args:
        scale: ``[n, 1]``; None: as large as each row needs.
    """
    if len(layer) == 2:
        layer[0][slots] = k
        layer[1][slots] = v
        return
    for half, value in enumerate((k, v)):
        chosen = value.abs().amax((1, 2)).clamp(min=1e-6).unsqueeze(1) / FP8_MAX if scale is None else scale
        layer[half][slots] = (value / chosen.unsqueeze(2)).to(layer[half].dtype)
        layer[2 + half][slots] = chosen


def read(layer: list[torch.Tensor], slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of slots, ``[..., heads, dim]`` in float32."""
    if len(layer) == 2:
        return layer[0][slots], layer[1][slots]
    k, v = (layer[h][slots].float() * layer[2 + h][slots].unsqueeze(-1) for h in range(2))
    return k, v


def seen(positions: torch.Tensor, width: int, window: int | None) -> torch.Tensor:
    """bool ``[n, width]``: the positions that a token at each of ``positions`` attends to."""
    place, mine = torch.arange(width, device=positions.device), positions.unsqueeze(1)
    mask = place <= mine
    return mask if window is None else mask & (place > mine - window)
