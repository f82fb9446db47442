"""Scales that apply to every slot of a pool: per tensor, per head, per layer."""

from __future__ import annotations

import torch

from ..kernels.buffers import HalfBuffers, RowState
from ..kernels.checks import Check, Phase
from ..kernels.content.cpu import digest_rows, packed
from ..kernels.content.digest import coefficients, seeds
from ..kernels.findings import Findings
from ..kernels.slots.space import SlotSpace
from ..kernels.writes.layout import SlotLayout
from ..reports.violation import HalfInfo
from ..runtime.pool_half import Place, PoolHalf
from ..runtime.registry import PoolRegistry
from .kv_pool import KVPool


class Scales:
    """The scales of a pool: fingerprinted once, compared before each forward."""

    def __init__(self, declared: KVPool, registry: PoolRegistry, space: SlotSpace, planes: int):
        self._space = space
        self._parts: list[tuple[PoolHalf, torch.Tensor]] = []
        for name, tensor in declared.scales.items():
            # read in place: a flat copy would not show later writes to the tensor
            layout = SlotLayout((1, *tensor.shape), (0,), tensor.dtype)
            half_id = registry.new_id()
            half = PoolHalf(
                id=half_id,
                info=HalfInfo(half_id, name, "scale", declared.name, None, 1),
                place=Place(int(tensor.storage_offset()) * tensor.element_size(), (0, *tensor.stride()), layout),
                buffers=HalfBuffers(
                    digest=torch.zeros(planes, 1, dtype=torch.int32, device=tensor.device),
                    rows=torch.zeros(1, len(RowState), dtype=torch.int32, device=tensor.device),
                ),
                seeds=seeds(0, 2),
                layer_number=0,
                address=tensor.data_ptr(),
            )
            registry.name(half)
            coefficients(layout.words, tensor.device)
            self._parts.append((half, tensor))
        self.adopt()

    def adopt(self) -> None:
        """Accept the scales as they are now, for example after a calibration."""
        for half, tensor in self._parts:
            half.buffers.digest.copy_(_digest(half, tensor))

    def check(self) -> None:
        """Compare the scales with what they were; a difference is reported once.  Does not wait for the device."""
        for half, tensor in self._parts:
            stored, found = half.buffers.digest.clone(), _digest(half, tensor)
            bad = (stored != found).any(0)
            findings = Findings(torch.ones_like(bad), self._space.checks)
            findings.add(Check.CONTENT, bad, packed(stored), packed(found))
            findings.report(self._space.control, half.id, Phase.PRE, torch.zeros_like(bad, dtype=torch.int64))
            half.buffers.digest.copy_(found)


def _digest(half: PoolHalf, tensor: torch.Tensor) -> torch.Tensor:
    """int32 ``[planes, 1]``."""
    only = torch.zeros(1, dtype=torch.int64, device=tensor.device)
    return digest_rows(half.place.layout, tensor.unsqueeze(0), only, half.seeds, half.buffers.digest.shape[0])
