"""The launch of :mod:`.state_places`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....kernels.bound_launch import BoundLaunch
from ....kernels.checks import Check
from ....kernels.ring import Control
from .state_memory import PLACES, StateTable, StepInputs
from .triton_state_places import places_kernel


class Launch:
    """Bound to the memory of one :class:`~.state_places.StatePlaces`."""

    def __init__(self, tables: Sequence[StateTable], inputs: StepInputs, page: int, control: Control, checks: Check):
        device = control.words.device
        rows = [
            [
                each.table.data_ptr(),
                each.table.stride(0),
                each.planned.data_ptr(),
                each.planned.stride(0),
                min(each.planned.shape[1], each.table.shape[1]),
                each.space.block.data_ptr(),
                each.space.slots,
                each.half_id,
                each.space.space_id,
            ]
            for each in tables
        ]
        self._keep = torch.tensor(rows, dtype=torch.int64, device="cpu").to(device), inputs  # the launch has addresses
        arguments = dict(
            row_ptr=inputs.rows,
            owner_ptr=inputs.owners,
            prefix_ptr=inputs.prefix_lens,
            extend_ptr=inputs.extend_lens,
            page=page,
            table_ptr=self._keep[0],
            checks=int(checks),
            words_ptr=control.words,
            ring_ptr=control.ring,
            capacity=control.capacity,
            GROUPS=len(tables),
            BLOCK=PLACES,
        )
        self._launch = BoundLaunch(places_kernel, device, arguments, ("counts_ptr",), warps=4)

    def check(self, counts: torch.Tensor) -> None:
        """One program: it tells the step's number before it reports."""
        if self._launch.ready:
            self._launch((1, 1, 1), (counts.data_ptr(),), None)
        else:
            self._launch.first((1, 1, 1), (counts,), None)
