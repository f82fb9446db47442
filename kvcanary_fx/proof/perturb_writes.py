"""Faults of the writes inside a compiled graph: the graph is right, the execution is not.

``FaultyWrites`` replaces the compiler: an inner backend that runs the rewritten graph eagerly, and lets a
perturbation replace one assignment ``pool[slots] = values`` (not for pools with two slot axes)::

    writes = FaultyWrites()
    session = install_canary(pool, inner=writes)
    ...
    SkippedWrite(probability=0.01).strike(session.pool, spots, writes)  # acts in the next forward
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence

import torch

from ..engine.guarded_pool import EnginePool
from .perturbation import Perturbation, Spot, Strike, same_bytes


@dataclasses.dataclass(frozen=True)
class Fault:
    """An armed fault: the write of one slot in one tensor.

    Attributes:
        act: does the faulty write, given ``(tensor, slots, values, place of the slot)``.
    """

    tensor: torch.Tensor
    slot: int
    act: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], None]

    def concerns(self, tensor: torch.Tensor, slots: object, values: torch.Tensor) -> bool:
        """Whether a write is ``pool[slots] = values`` with one row of values per slot, in this tensor."""
        if not isinstance(slots, torch.Tensor) or slots.dim() != 1 or values.shape[:1] != slots.shape:
            return False
        return tensor.data_ptr() == self.tensor.data_ptr() and tensor.shape == self.tensor.shape


class _Write(torch.nn.Module):
    """Replaces an indexed assignment in a graph."""

    def __init__(self, writes: FaultyWrites):
        super().__init__()
        self._writes = writes

    def forward(self, tensor: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
        fault = self._writes.armed
        if fault is not None and fault.concerns(tensor, slots, values):
            hits = (slots == fault.slot).nonzero()
            if hits.numel():
                self._writes.armed = None
                return fault.act(tensor, slots, values, int(hits[0]))
        tensor[slots] = values
        return None


class FaultyWrites:
    """An inner backend that runs a graph unchanged, except for the write of an armed fault.

    Attributes:
        armed: the fault waiting for its write.
    """

    def __init__(self) -> None:
        self.armed: Fault | None = None

    def __call__(
        self, graph: torch.fx.GraphModule, example_inputs: Sequence[torch.Tensor]
    ) -> Callable[..., torch.Tensor]:
        graph.add_submodule("kvcanary_faulty_write", _Write(self))
        for node in graph.graph.nodes:
            if node.op == "call_function" and node.target is operator.setitem:
                node.op, node.target = "call_module", "kvcanary_faulty_write"
        graph.recompile()
        forward: Callable[..., torch.Tensor] = graph.forward
        return forward


class WritePerturbation(Perturbation):
    """Base: chooses the write of a slot in one tensor, and stays armed until that write."""

    def strike(
        self, pool: EnginePool, spots: Sequence[Spot], writes: FaultyWrites, step: int | None = None
    ) -> Fault | None:
        """Arm for the next write of one of ``spots``; it acts, and is recorded, if it changes any byte."""
        numbers, chosen = self.halves(pool), [s for s in spots if self.wants(s)]
        if not numbers or not chosen or not self.due():
            return None
        number, spot = self.random.choice(numbers), self.random.choice(chosen)

        def act(tensor: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, place: int) -> None:
            if self.matters(tensor[spot.slot], values[place]):
                self._noted(pool, number, spot, self.write(tensor, slots, values, place), step)
            else:
                tensor[slots] = values

        writes.armed = Fault(pool.views[number], spot.slot, act)
        return writes.armed

    def matters(self, row: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether the fault is visible, given the slot's contents and the values to write."""
        return not same_bytes(row, value)

    def write(self, tensor: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, place: int) -> int | None:
        """Do the write, wrongly at ``place``; the slot where that value went instead, if there is one."""
        raise NotImplementedError

    def _noted(self, pool: EnginePool, number: int, spot: Spot, landed: int | None, step: int | None) -> Strike:
        info, partner = pool.halves[number].info, Spot(landed) if landed is not None else None
        what = self.kind.replace("_", " ") + (f" to slot {landed}" if landed is not None else "")
        where = dict(pool=pool.name, layer=info.layer, half=info.half, partner=partner, step=step)
        return self.note(what, spot, **where)


class Operand(WritePerturbation):
    """A write that lands in another slot than the graph says."""

    kind = "operand"

    def write(self, tensor: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, place: int) -> int | None:
        taken, count = set(slots.tolist()), tensor.shape[0]
        elsewhere = slots.clone()
        elsewhere[place] = landed = self.random.choice([s for s in range(count) if s not in taken])
        tensor[elsewhere] = values
        return landed


class SkippedWrite(WritePerturbation):
    """A write that does not happen."""

    kind = "skipped_write"

    def write(self, tensor: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, place: int) -> int | None:
        others = torch.arange(slots.shape[0], device=slots.device) != place
        tensor[slots[others]] = values[others]
        return None


class Nan(WritePerturbation):
    """A NaN among the values that the model writes."""

    kind = "nan"

    def matters(self, row: torch.Tensor, value: torch.Tensor) -> bool:
        return value.dtype.is_floating_point

    def write(self, tensor: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, place: int) -> int | None:
        row = values[place]
        changed = row.float().reshape(-1)
        changed[self.random.randrange(changed.numel())] = torch.nan
        row.copy_(changed.view(row.shape))
        tensor[slots] = values
        return None
