"""All that the checks of one layer need, made once per graph; each forward adds its plan, K and V.

All callers of a layer's checks use such a record: the ops around opaque attention, those in an engine's own graphs, and
engines that run their layers from Python.  Here in plain torch, for the CPU; on a GPU :mod:`.gpu_layer` has bound
launches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from ..buffers import Site
from ..checks import Check
from ..slots.space import RequestPlan
from .cpu import record_halves, verify_halves
from .layer_tables import LayerTables

#: Number of the write in the stamps of slots written twice; the writes that a graph shows count from 0.
WRITE = 65535


@dataclasses.dataclass(frozen=True)
class LayerHalf:
    """One tensor of a layer, as its checks need it.

    Attributes:
        place: 0 for K, 1 for V, and so on.
        reader: another layer writes the tensor, this one only reads it.
    """

    site: Site
    view: torch.Tensor
    place: int
    reader: bool = False


class LayerRecord:
    """One layer in one graph.

    Attributes:
        halves: its tensors.
        space: of their pool; by its number a forward's plan is found.
        verifies: whether :meth:`verify` has anything to compare.  If not, it is not called, and :meth:`record` counts
            for both: on an H200, kernels that only counted were 209 us of a decode step of 4.9 ms, beside it.
        writes: whether the layer writes any of its tensors; one that reads what another layer writes does not.
        ops: how many ops of the layer :meth:`record` counts for.
    """

    def __init__(self, halves: Sequence[LayerHalf]):
        self.halves = tuple(halves)
        self.verified = [h for h in halves if h.site.checks & Check.CONTENT and h.site.layout.slots]
        self.written = [h for h in halves if not h.reader]
        space = halves[0].site.space  # the halves of a layer are of one pool
        assert space is not None
        self.space = space
        self.verifies, self.writes = bool(self.verified), bool(self.written)
        self.gate = halves[0].site.gate
        self.ops = 1 if self.verifies else 2

    def verify(self, in_flight: bool, stream: torch.cuda.Stream | None = None) -> None:
        """Compare the bytes of the slots that the forward reads with their digests.

        Args:
            in_flight: the forward reads what it writes itself, and has not yet.
            stream: where to launch; None for the current one.
        """
        verify_halves([h.site for h in self.verified], [h.view for h in self.verified], 1, in_flight)

    def record(
        self,
        plan: RequestPlan,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Fingerprint the slots that the forward planned to write.

        Args:
            plan: with its ``real_slots``.
            key, value: ``[n, ...]``, one row per planned token in the order of the batch; more rows are padding.
        """
        assert plan.real_slots is not None
        values = [rows_of(half, (key, value), plan) for half in self.written]
        sites, views = [h.site for h in self.written], [h.view for h in self.written]
        record_halves(sites, views, plan.real_slots, values, WRITE, self.ops)


class WrittenLayers:
    """Layers that have written, each once, and what each was given, as :meth:`LayerRecord.record` takes it.

    Columns, since there are dozens of layers in each forward that runs from Python.

    Attributes:
        records: the layers, in order.
        keys, values: of each.
    """

    def __init__(
        self,
        records: Sequence[LayerRecord] = (),
        keys: Sequence[torch.Tensor | None] = (),
        values: Sequence[torch.Tensor | None] = (),
    ):
        self.records, self.keys, self.values = list(records), list(keys), list(values)
        self._places: dict[int, int] = {}  # by the record's id, as far as they were needed

    def __len__(self) -> int:
        return len(self.records)

    def put(self, record: LayerRecord, key: torch.Tensor | None, value: torch.Tensor | None) -> None:
        """A layer has written, again perhaps: then what it was given first is forgotten."""
        if len(self._places) < len(self.records):
            self._places = {id(known): at for at, known in enumerate(self.records)}
        at = self._places.setdefault(id(record), len(self.records))
        if at < len(self.records):
            self.keys[at], self.values[at] = key, value
            return
        self.records.append(record)
        self.keys.append(key)
        self.values.append(value)

    def extend(self, other: WrittenLayers) -> bool:
        """Take in other layers; False: one of them is here already, and nothing was done."""
        if not set(map(id, self.records)).isdisjoint(map(id, other.records)):
            return False
        self.records += other.records
        self.keys += other.keys
        self.values += other.values
        return True


class HeldRecords:
    """Layers of one pool that are recorded together, once the model has run.

    Where the host launches each of a model's kernels, a step waits for each launch of ours: with one in each of 32
    layers such a step took 20.6 ms in the place of 14.5 (8B, a prompt of 512 tokens among decodes, H200).

    Attributes:
        shaped: a view of K or V as they are given here, as :meth:`LayerRecord.record` takes it; None: they are such.
            For layers of one memory layout it is made once: two views of each took 3 us of the host.
    """

    def __init__(self, records: Sequence[LayerRecord], tables: LayerTables | None = None):
        """
        Args:
            records: of one pool and one graph, which write.
            tables: of the graph, whose memory then has what a launch is told; None: it is sent, and after a capture
                by :meth:`settle`.
        """
        self.records = tuple(records)
        self.shaped: Callable[[torch.Tensor], torch.Tensor] | None = None

    def whole(self, given: torch.Tensor | None) -> torch.Tensor | None:
        """K or V as :meth:`LayerRecord.record` takes it."""
        return given if given is None or self.shaped is None else self.shaped(given)

    def __call__(self, plan: RequestPlan, held: WrittenLayers) -> None:
        """Record some of them.

        Args:
            plan: with its ``real_slots``.
            held: at least one.
        """
        for record, key, value in zip(held.records, held.keys, held.values, strict=True):
            record.record(plan, self.whole(key), self.whole(value))

    def settle(self) -> None:
        """Tell the device what the calls that were captured since the last time were given."""


def rows_of(
    half: LayerHalf, operands: tuple[torch.Tensor | None, torch.Tensor | None], plan: RequestPlan
) -> torch.Tensor | None:
    """The operand of a half as the slots' rows, if it has one per planned token and is of the pool's type."""
    layout, n = half.site.layout, plan.slots.shape[0]
    operand = operands[half.place] if half.place < len(operands) else None
    if plan.taken is not None:  # a slot of several tokens holds the K or V of none
        return None
    if operand is None or not half.site.checks & Check.OPERAND or operand.dtype != layout.dtype:
        return None
    operand = operand[:n]  # a batch is padded at its end
    if operand.numel() * layout.dtype.itemsize != n * layout.row_bytes:
        return None
    return operand.reshape(n, *layout.row_shape)
