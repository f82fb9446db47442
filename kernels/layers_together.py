"""The checks of the layers of one graph at once: their bytes in a launch a pool before the first, their fingerprints in
one behind the last.

For graphs of opaque attention that :mod:`~kvcanary_fx.passes.attention_at_once` has rewritten.  A launch in each layer
takes its latency there: of a decode of one request (8B, 1/256 of the bytes, H100) 32 launches that compare were 430 us
beside the model and 32 that record 80, and the step took 1.2 % longer for them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..errors import UnknownLayerError
from .content.layer import HeldRecords, LayerHalf, LayerRecord, WrittenLayers
from .content.layer_tables import LayerTables
from .content.pool import PoolBytes
from .counting import count_op
from .side_stream import SideStream
from .slots.space import RequestPlan, SlotSpace


@dataclasses.dataclass(frozen=True)
class _Layers:
    """The layers of one pool.

    Attributes:
        bytes: what is compared; None: nothing is.
        held: what records those that write; None: none does.
        only_read: whether a forward writes to none of the slots that it reads.
        readers: of the layers, those that write nothing themselves.
    """

    space: SlotSpace
    bytes: PoolBytes | None
    held: HeldRecords | None
    only_read: Callable[[RequestPlan], bool]
    writers: Mapping[str, LayerRecord]
    readers: int


class LayersTogether:
    """Made once for each graph, outside of its calls: in a capture there would be no memory for the tables."""

    def __init__(
        self,
        names: Sequence[str],
        records: Mapping[str, LayerRecord],
        compared: Mapping[int, Callable[[RequestPlan], bool] | None],
        tables: Mapping[torch.device, LayerTables],
        kernels: tuple[Any, Any],
    ):
        """
        Args:
            names: of the graph's layers, in order.
            records: what the checks of a layer need, by its name; of this graph alone, since each now counts for the
                two ops of its layer.
            compared: for each pool, by the number of its slot space, whether a forward only reads what it reads; None:
                the bytes of the pool are compared elsewhere.
            tables: what the launches of the graph are told in, by device.
            kernels: the implementations of what is compared and of what is recorded, on the device of the layers.

        Raises:
            UnknownLayerError: no pool has one of the layers.
        """
        unknown = [name for name in names if name not in records]
        if unknown:
            raise UnknownLayerError(unknown[0], list(records))
        by_pool: dict[int, dict[str, LayerRecord]] = {}
        for name in names:
            records[name].ops = 2
            by_pool.setdefault(records[name].space.space_id, {})[name] = records[name]
        self._gate = records[names[0]].gate
        self._compares, told = kernels[0], tables[self._gate.device]
        self._pools = [_layers_of(mine, compared[number], told, kernels) for number, mine in by_pool.items()]
        self._place = {name: at for at, name in enumerate(names)}

    def verify(self, plans: Mapping[int, RequestPlan], side: SideStream | None) -> None:
        """Compare the bytes of the slots that a forward reads, in all layers.

        Args:
            plans: of the forward, by the number of the slot space.
            side: where it may run beside the model: if the forward does not write to what it reads.
        """
        for pool in self._pools:
            if pool.bytes is None:
                continue
            plan, stream = plans.get(pool.space.space_id), None
            if side is not None and (plan is None or pool.only_read(plan)):
                side.start()
                stream = side.stream
            elif side is not None:
                side.join()  # what is read was listed there
            self._compares.verify_listed(pool.bytes, plan is not None and plan.in_flight, stream)

    def record(
        self,
        plans: Mapping[int, RequestPlan],
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        side: SideStream | None,
    ) -> None:
        """Fingerprint the slots that a forward planned to write, in all layers.

        Args:
            keys, values: of each layer, as :meth:`.LayerRecord.record` takes them; none at all without operands.
            side: where it runs beside the model, which holds keys and values until it has waited.
        """
        beside = side.fork() if side is not None else contextlib.nullcontext()
        with beside:
            for pool in self._pools:
                plan, uncounted = plans.get(pool.space.space_id), 2 * pool.readers
                if plan is None or plan.real_slots is None or pool.held is None:
                    uncounted += 2 * len(pool.writers)
                else:
                    pool.held(plan, self._written(pool.writers, keys, values))
                if uncounted:
                    count_op(self._gate, uncounted)

    def _written(
        self, writers: Mapping[str, LayerRecord], keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> WrittenLayers:
        places = [self._place[name] for name in writers]
        of_each = ([given[at] if given else None for at in places] for given in (keys, values))
        return WrittenLayers(list(writers.values()), *of_each)


def _layers_of(
    records: Mapping[str, LayerRecord],
    only_read: Callable[[RequestPlan], bool] | None,
    tables: LayerTables,
    kernels: tuple[Any, Any],
) -> _Layers:
    """The layers of one pool, by name."""
    (compares, recording), first = kernels, next(iter(records.values()))
    writers = {name: record for name, record in records.items() if record.writes}
    halves = _each_once(half for record in records.values() for half in record.verified)
    made = None
    if halves and only_read is not None:
        made = PoolBytes(tuple(half.site for half in halves), tuple(half.view for half in halves), first.space)
        if first.gate.device.type == "cuda":
            compares.prepare(made)
    held = None
    if writers:
        held = recording.HeldRecords(list(writers.values()), tables)
    readers = len(records) - len(writers)
    return _Layers(first.space, made, held, only_read or (lambda _: True), writers, readers)


def _each_once(halves: Iterable[LayerHalf]) -> list[LayerHalf]:
    """A tensor that several layers read is one half."""
    return list({half.site.half_id: half for half in halves}.values())
