"""From a write's indices to its slots and rows, on a GPU: launches of the kernels.  Equal to :mod:`.plan`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from ..compile_ahead import launch_or_compile
from . import triton_resolve as kernels
from .geometry import on_device
from .layout import SlotLayout
from .plan import AxisIndex, Resolved, Select, WritePlan

#: Tokens that a program looks at together.
BLOCK_TOKENS = 256

#: Dimensions of the grid of tokens that the kernel unravels.
_GRID_DIMS = 3


@dataclasses.dataclass(frozen=True)
class TokenGrid:
    """How the kernels find the slots of a write: from index tensors, or by counting.

    Attributes:
        n: tokens.
        grid: the shape of the tokens, with three dimensions.
        shape: the same as the write has it.
        axes: slot axes that have an index of their own.
        steps: arguments of the kernels, all but the addresses of indices.
        found: those, by the argument's name: the indices, and which of the write's index tensors that is.
    """

    n: int
    grid: tuple[int, int, int]
    shape: tuple[int, ...]
    axes: int
    wraps: bool
    skips: bool
    steps: dict[str, Any]
    found: dict[str, tuple[torch.Tensor, int]]

    def arguments(self, unused: torch.Tensor) -> dict[str, Any]:
        """``steps``, with any tensor for the address of an axis that is counted."""
        return {name: unused for name in ("a_ptr", "b_ptr") if name not in self.found} | self.steps


def token_grid(
    plan: WritePlan, layout: SlotLayout, index: list[torch.Tensor], extent: list[int], device: torch.device
) -> TokenGrid | None:
    """The tokens of this step's write; None for what the kernels do not take: none of them, many axes, or an index on
    another device."""
    flat = plan.selectors[0].kind is Select.FLAT
    if flat:
        given = index[0].reshape(-1)
        axes, sizes = [AxisIndex(given, 0, 0, 0, tuple(given.shape))], [layout.slots]
    else:
        axes, sizes = plan.axes(layout, index, extent), [layout.shape[a] for a in layout.slot_axes]
    shape = torch.broadcast_shapes(*(axis.shape for axis in axes))
    dims = [d for d, size in enumerate(shape) if size != 1]
    elsewhere = any(axis.tensor is not None and axis.tensor.device != device for axis in axes)
    n = math.prod(shape)
    if len(dims) > _GRID_DIMS or elsewhere or n == 0:
        return None
    grid = [1] * (_GRID_DIMS - len(dims)) + [shape[d] for d in dims]
    steps: dict[str, Any] = {}
    found: dict[str, tuple[torch.Tensor, int]] = {}
    for name, k in (("a", 0), ("b", -1)):
        steps |= _axis_args(name, axes[k], sizes[k], shape, dims)
        indices = axes[k].tensor
        if indices is not None:
            found[f"{name}_ptr"] = indices, plan.selectors[k].operand
    return TokenGrid(
        n=n,
        grid=(grid[0], grid[1], grid[2]),
        shape=tuple(index[0].shape) if flat else tuple(shape),
        axes=len(axes),
        wraps=plan.wraps and not flat,
        skips=plan.skips and flat,
        steps=steps,
        found=found,
    )


def resolve(
    plan: WritePlan, layout: SlotLayout, index: list[torch.Tensor], extent: list[int], device: torch.device
) -> Resolved:
    """The slots of this step's write, see :meth:`.plan.WritePlan.resolve`; one launch for what models do."""
    tokens = token_grid(plan, layout, index, extent, device)
    if tokens is None:
        return plan.resolve(layout, index, extent, device)
    slots, raw = (torch.empty(tokens.n, dtype=torch.int64, device=device) for _ in range(2))
    with on_device(slots):
        launch_or_compile(
            kernels.resolve_kernel,
            (-(-tokens.n // BLOCK_TOKENS),),
            slot_ptr=slots,
            raw_ptr=raw,
            **resolve_args(tokens, slots),
            **{name: indices for name, (indices, _) in tokens.found.items()},
        )
    return Resolved(slots, raw, tokens.shape)


def resolve_args(tokens: TokenGrid, unused: torch.Tensor) -> dict[str, Any]:
    """Arguments of ``resolve_kernel``, all but the addresses of slots and indices."""
    return dict(
        n=tokens.n,
        n1=tokens.grid[1],
        n2=tokens.grid[2],
        TWO_AXES=tokens.axes == 2,
        WRAPS=tokens.wraps,
        SKIPS=tokens.skips,
        BLOCK=BLOCK_TOKENS,
        **tokens.arguments(unused),
    )


def _axis_args(name: str, axis: AxisIndex, size: int, shape: torch.Size, dims: list[int]) -> dict[str, Any]:
    """One slot axis as kernel arguments: strides of its indices, or a start and steps, over the dims of the grid."""
    if axis.tensor is not None:
        spread = axis.tensor.expand(shape)
        steps = [spread.stride(d) for d in dims]
    else:
        steps = [int(axis.count > 1 and d == axis.dim) for d in dims]
    steps = [0] * (_GRID_DIMS - len(dims)) + steps
    return {
        f"{name.upper()}_TENSOR": axis.tensor is not None,
        f"{name}_start": axis.start,
        f"{name}_size": size,
        **{f"{name}{d}": step for d, step in enumerate(steps)},
    }


def first_positions(layout: SlotLayout, slots: torch.Tensor) -> torch.Tensor | None:
    """int32 ``[rows]``: the lowest position written in each row, see :func:`.plan.first_positions`."""
    if not layout.has_rows:
        return None
    first = torch.empty(layout.rows, dtype=torch.int32, device=slots.device)
    if layout.rows:
        with on_device(slots):
            launch_or_compile(
                kernels.first_kernel, (layout.rows,), slots, slots.shape[0], first, layout.positions, BLOCK=BLOCK_TOKENS
            )
    return first


def update_rows(
    layout: SlotLayout,
    rows: torch.Tensor,
    slots: torch.Tensor,
    last_position: torch.Tensor | None,
    moved: int | None,
) -> None:
    """Note a write in the rows it touched, see :func:`.row_state.update_rows`."""
    if not layout.has_rows or slots.numel() == 0 or layout.rows == 0:
        return
    source = kernels.FROM_INDICES if moved is None else kernels.FROM_WINDOW
    if last_position is not None:
        source = kernels.FROM_POSITIONS
    with on_device(slots):
        launch_or_compile(
            kernels.rows_kernel,
            (layout.rows,),
            slots.contiguous(),
            slots.shape[0],
            rows,
            layout.positions,
            last_position if last_position is not None else rows,
            last_position.stride(0) if last_position is not None else 0,
            moved if moved is not None else -1,
            SOURCE=source,
            BLOCK=BLOCK_TOKENS,
        )
