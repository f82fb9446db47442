"""K and V of layers that have written, held until one launch records them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from .content.layer import HeldRecords, LayerRecord, WrittenLayers
from .side_stream import SideStream
from .slots.space import RequestPlan

#: Bytes of memory that are held at most, V with the product that it is a part of: 290 tokens of an 8B model, and on a
#: large GPU a share of its memory.  A prompt of 1,000 tokens is then one launch on 80 GiB, which takes the host 0.3 ms;
#: with more tokens the host is ahead of the device, and several are hidden.
LIMIT, SHARE = 128 << 20, 160


def limit_on(device: torch.device) -> int:
    """Bytes that are held at most on a device."""
    if device.type != "cuda":
        return LIMIT
    return max(LIMIT, torch.cuda.get_device_properties(device).total_memory // SHARE)


class NamedLayers(NamedTuple):
    """Layers by their names.

    Attributes:
        given: what the ops were given as them.
        layers: in which they were looked up.
        records: of :func:`records_of`.
    """

    given: list[object]
    names: list[str]
    layers: Mapping[str, LayerRecord]
    records: list[LayerRecord] | None


def records_of(names: Sequence[str], layers: Mapping[str, LayerRecord]) -> list[LayerRecord] | None:
    """Some layers, in order; None: some are not guarded, do not write, come twice, or are of another pool than the
    first."""
    records = [layers.get(name) for name in names]
    found = [record for record in records if record is not None and record.writes]
    alike = len(found) == len(set(names)) == len(names) and len({record.space.space_id for record in found}) == 1
    return found if alike else None


class Held:
    """For forwards whose layers run from Python, and whose K and V nothing overwrites before the model has run.

    A CUDA graph is such a forward, and so are the pieces of one, if K and V were held while it was captured, too: its
    memory then has room for all of them.  So what is held at a time depends on the shapes of K and V only.

    Attributes:
        taken: layers that have written since :meth:`begin`.
        deferred: takes in what layers of the forward wrote that only noted it, before :meth:`flush` records anything.
        named: the layers that noted it last, for those that come again.
        keeps: the next :meth:`flush` does not free K and V, which took the host 0.1 ms of a prompt's step: somebody
            calls :meth:`let_go` where the device is busy.
    """

    deferred: Callable[[], None] | None = None
    keeps = False
    named: NamedLayers | None = None

    def __init__(
        self,
        together: Mapping[int, HeldRecords],
        limit: int = LIMIT,
        ready: Callable[[], None] = lambda: None,
    ):
        """
        Args:
            together: what records the layers of a pool, by the number of its slot space.
            limit: bytes.
            ready: lets the current stream wait for what the launches need, if it has not.
        """
        self._together, self._ready = together, ready
        self._waiting: dict[int, tuple[RequestPlan, WrittenLayers]] = {}  # by pool
        self._bytes, self._limit = 0, limit
        self._each = 0  # bytes of a layer
        self._known: dict[tuple[torch.Size | None, ...], int] = {}  # the same, by the shapes of K and V
        self._kept: list[tuple[RequestPlan, WrittenLayers]] = []  # they were recorded
        self.begin()

    def take_as(self, shaped: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        """From now on K and V are given as :attr:`.HeldRecords.shaped` takes them."""
        for together in self._together.values():
            together.shaped = shaped

    def begin(self, layers: int = 0, side: SideStream | None = None, meets_at: int = 0) -> None:
        """A forward that is captured as a whole begins, or it is over.

        Args:
            layers: once so many have written, all that is held is recorded beside the rest of the model, which is a
                projection and an MLP behind the last attention.
            side: where; whoever captures joins it.  None: nothing is recorded beside the model.
            meets_at: once so many have written, the model's stream waits for what the launches need; 0: only they do.
        """
        self.taken = 0
        self._last, self._side = layers if side is not None else 0, side
        self._meets_at = meets_at

    def take(
        self, record: LayerRecord, plan: RequestPlan, key: torch.Tensor | None, value: torch.Tensor | None
    ) -> None:
        """A layer has written, again perhaps; arguments as of :meth:`.LayerRecord.record`."""
        number = record.space.space_id
        known = self._waiting.get(number)
        if known is not None and known[0] is not plan:
            self.flush()
            known = None
        if known is None:
            if not self._waiting:
                self.let_go()
            known = self._waiting[number] = plan, WrittenLayers()
            self._each = self._bytes_of(key, value)  # layers are alike
        known[1].put(record, key, value)
        self._bytes += self._each
        self.taken += 1
        if self.taken == self._meets_at:
            self._ready()
        if self.taken == self._last:
            self._flush_beside()
        elif self._bytes > self._limit:
            self.flush()

    def take_all(
        self,
        records: Sequence[LayerRecord] | None,
        plans: Mapping[int, RequestPlan],
        keys: Sequence[torch.Tensor | None],
        values: Sequence[torch.Tensor | None],
    ) -> bool:
        """:meth:`take` for each of some layers, where nothing has to happen between them: layers of one pool, in a
        forward that plans slots of it and is not captured, whose K and V may all be held.

        Args:
            records: of :func:`records_of`.
            plans: of the forward, by the number of the slot space.

        Returns:
            False: nothing was done.
        """
        if records is None:
            return False
        number = records[0].space.space_id
        plan = plans.get(number)
        if plan is None or plan.real_slots is None:
            return False
        waiting = self._waiting
        of_plan, held = waiting.get(number, (plan, None))
        bytes_of_one = self._bytes_of(keys[0], values[0])
        size = self._bytes + bytes_of_one * len(records)
        if of_plan is not plan or self._side is not None or self._meets_at or size > self._limit:
            return False
        written = WrittenLayers(records, keys, values)
        if held is None:
            if waiting:  # of other pools
                return False
            waiting[number] = plan, written
        elif len(waiting) > 1 or not held.extend(written):
            return False
        self._each, self._bytes = bytes_of_one, size
        self.taken += len(records)
        return True

    def _bytes_of(self, key: torch.Tensor | None, value: torch.Tensor | None) -> int:
        """Bytes that a layer's K and V keep from being freed.

        As it was first seen, since what a replayed piece of a graph returns does not say how large its memory is.
        """
        shapes = tuple(None if t is None else t.shape for t in (key, value))
        known = self._known.get(shapes)
        if known is None:
            storages = [t.untyped_storage() for t in (key, value) if t is not None]
            known = sum({each.data_ptr(): each.nbytes() for each in storages}.values())  # K and V may be of one product
            self._known[shapes] = known
        return known

    def expect(self, key: torch.Tensor | None, value: torch.Tensor | None) -> None:
        """The layers of a forward begin to be noted; its first one was given these."""
        self.let_go()
        if not self._waiting:
            self._each = self._bytes_of(key, value)

    @property
    def room(self) -> int:
        """How many layers more can be taken before they are recorded; 1 at least.

        Never more: if pieces of the model are CUDA graphs, K and V are overwritten where they were recorded when these
        were captured.  Layers of several pools may differ, so there the largest that was ever seen counts.
        """
        each = self._each if len(self._together) == 1 else max(self._known.values(), default=0)
        return max(1, (self._limit - self._bytes) // each) if each else 1

    def flush(self) -> None:
        """Record what is held, in the current stream, which may be captured."""
        if self.deferred is not None:
            self.deferred()
        waiting, self._waiting, self._bytes = self._waiting, {}, 0
        if waiting:
            self._ready()
        for number, (plan, held) in waiting.items():
            self._together[number](plan, held)
        if self.keeps:
            self.keeps, self._kept = False, list(waiting.values())

    def let_go(self) -> None:
        """Free the K and V that were kept; at the latest where the next forward notes its first layer."""
        self._kept = []

    def _flush_beside(self) -> None:
        assert self._side is not None
        held = [written for _, written in self._waiting.values()]
        with self._side.fork():
            self.flush()
        for written in held:  # or the model would get their memory while it is read
            self._side.hold(*written.keys, *written.values)

    def drop(self) -> None:
        """The forward raised: nothing of it is recorded."""
        self._waiting, self._bytes, self.deferred = {}, 0, None

    def settle(self) -> None:
        """Tell the device what was captured: before a replay whose plan has tokens."""
        for together in self._together.values():
            together.settle()
