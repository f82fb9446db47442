"""The launches of :mod:`.state_checks`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....kernels.bound_launch import BoundLaunch
from ....kernels.content.digest import coefficients
from ....kernels.content.triton_half import as_signed
from ....kernels.ring import Control
from ....kernels.staging import lasting
from .state_memory import CHUNK, HEAD, OWNER_AND_POSITION, TILE, StateHalf, words_of
from .triton_state_checks import states_kernel


class Launches:
    """Bound to the memory of one :class:`~.state_checks.StateChecks`: each takes few numbers of the host.

    Args:
        groups: how many groups the halves are in.
        step: what the host says of a step.
        most: requests of the largest batch.
    """

    def __init__(
        self,
        given: Sequence[StateHalf],
        groups: int,
        control: Control,
        step: torch.Tensor,
        most: int,
    ):
        self._keep: list[torch.Tensor] = []  # the launches have addresses
        self._halves, self._groups, self._device = len(given), groups, step.device
        rows, longest, aligned = [], 1, True
        for half in given:
            row, words, fits = _row(half)
            rows.append(row)
            longest, aligned = max(longest, words), aligned and fits
        self._chunks = -(-longest // CHUNK)
        sums = lasting(most * self._halves * 4, dtype=torch.int32, device=self._device).zero_()
        halves = self._sent(rows)
        common: dict[str, Any] = dict(
            step_ptr=step, words_ptr=control.words, ring_ptr=control.ring, capacity=control.capacity
        )
        planes = given[0].site.half.digest.shape[0]
        self._states = [
            BoundLaunch(
                states_kernel,
                self._device,
                dict(
                    half_ptr=halves,
                    coef_ptr=coefficients(longest, self._device),
                    coef_words=longest,
                    sums_ptr=sums,
                    halves=self._halves,
                    GROUPS=self._groups,
                    HEAD=HEAD,
                    ROW=OWNER_AND_POSITION,
                    PLANES=planes,
                    CHUNK=CHUNK,
                    TILE=TILE,
                    ALIGNED=aligned,
                    COMPARES=compares,
                    **common,
                ),
                ("first",),
                warps=4,
            )
            for compares in (False, True)
        ]

    def _sent(self, rows: list[list[int]]) -> torch.Tensor:
        self._keep.append(torch.tensor(rows, dtype=torch.int64, device="cpu").to(self._device))
        return self._keep[-1]

    def run(self, first: int, count: int, compares: bool) -> None:
        """Compare or record so many requests of the step, from ``first`` on."""
        launch = self._states[compares]
        (launch if launch.ready else launch.first)((self._chunks, self._halves, count), (first,), None)


def _row(half: StateHalf) -> tuple[list[int], int, bool]:
    """A state in the table of a launch, see :data:`.triton_state_checks.COLUMNS`; its words, and whether sixteen bytes
    of it may be loaded at once."""
    words, site = words_of(half.view), half.site
    assert words is not None
    address, stride, digest = words.data_ptr(), words.stride(0), site.half.digest
    seeds = as_signed(site.seed1), as_signed(site.seed2)
    row = [address, stride, words.shape[1], digest.data_ptr(), digest.stride(0), *seeds, site.half_id]
    return [*row, site.counters.data_ptr(), half.group], words.shape[1], address % 16 == 0 and stride % 4 == 0
