"""From a write's indices to its slots and rows, on a GPU: launches of the kernels.  Equal to :mod:`.plan`."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton

from . import triton_resolve as kernels
from .geometry import on_device
from .layout import SlotLayout
from .plan import AxisIndex, Resolved, Select, WritePlan

#: Tokens that a program looks at together.
BLOCK_TOKENS = 256

#: Dimensions of the grid of tokens that the kernel unravels.
_GRID_DIMS = 3


def resolve(
    plan: WritePlan, layout: SlotLayout, index: list[torch.Tensor], extent: list[int], device: torch.device
) -> Resolved:
    """The slots of this step's write, see :meth:`.plan.WritePlan.resolve`; one launch for what models do."""
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
        return plan.resolve(layout, index, extent, device)
    slots, raw = (torch.empty(n, dtype=torch.int64, device=device) for _ in range(2))
    grid = [1] * (_GRID_DIMS - len(dims)) + [shape[d] for d in dims]
    second = axes[1] if len(axes) == 2 else axes[0]
    with on_device(slots):
        kernels.resolve_kernel[(triton.cdiv(n, BLOCK_TOKENS),)](
            slots,
            raw,
            n,
            grid[1],
            grid[2],
            **_axis_args("a", axes[0], sizes[0], shape, dims, slots),
            **_axis_args("b", second, sizes[-1], shape, dims, slots),
            A_TENSOR=axes[0].tensor is not None,
            B_TENSOR=second.tensor is not None,
            TWO_AXES=len(axes) == 2,
            WRAPS=plan.wraps and not flat,
            SKIPS=plan.skips and flat,
            BLOCK=BLOCK_TOKENS,
        )
    return Resolved(slots, raw, tuple(index[0].shape) if flat else tuple(shape))


def _axis_args(
    name: str, axis: AxisIndex, size: int, shape: torch.Size, dims: list[int], dummy: torch.Tensor
) -> dict[str, Any]:
    """One slot axis as kernel arguments: an address and strides, or a start and steps, over the dims of the grid."""
    if axis.tensor is not None:
        spread = axis.tensor.expand(shape)
        steps = [spread.stride(d) for d in dims]
    else:
        steps = [int(axis.count > 1 and d == axis.dim) for d in dims]
    steps = [0] * (_GRID_DIMS - len(dims)) + steps
    return {
        f"{name}_ptr": axis.tensor if axis.tensor is not None else dummy,
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
            kernels.first_kernel[(layout.rows,)](slots, slots.shape[0], first, layout.positions, BLOCK=BLOCK_TOKENS)
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
        kernels.rows_kernel[(layout.rows,)](
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
