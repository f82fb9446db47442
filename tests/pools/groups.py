"""What an engine does with the slots of a group of layers: which slot a token gets, and when it gives it back."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from forms import FORMS, PAGE, Form, Tensors

from kvcanary_fx import Batch, EnginePool, KVPool
from kvcanary_fx.kernels.slots.space import REFERENCE, Flag

SLOTS, ROWS, WIDTH, LAYERS = 48, 4, 32, 2


@dataclasses.dataclass
class Work:
    """What a forward does to one request in one group.

    Attributes:
        planned: slots for the batch's field, one a token; -1 where a token gets none.
        written: slots that the model's write gets; None where it does not write.
        taken: which of the request's new tokens' rows it writes there.
        reads: slots that attention reads.
    """

    planned: list[int]
    written: list[int] | None
    taken: list[int]
    reads: list[int]


class Group:
    """Layers with one slot per token, in slots of their own; the kinds below differ from it.

    Attributes:
        field: of the batch, with its slots.
        namespaced: tokens of a request after which a wrong namespace shows.
        slot_per_token: every token of the batch has a slot.
    """

    field = "slots"
    namespaced = 3
    slot_per_token = True

    def __init__(self, name: str, form: str, layers: int = LAYERS, **declared: Any):
        self.name, self.form, self.declared = name, FORMS[form], declared
        self.kv: list[Tensors] = [self.form.make(SLOTS) for _ in range(layers)]
        self.table = torch.zeros(ROWS, WIDTH, dtype=torch.int32)
        self.free = self.all_free()
        self.layer_names = [f"{name}.{i}" for i in range(layers)]
        self.guard: EnginePool | None = None

    def pool(self) -> KVPool:
        form: Form = self.form
        layers = [form.declared(tensors) for tensors in self.kv]
        settings = {**form.pool, "layer_names": self.layer_names, "slots_from": self.field, **self.declared}
        return KVPool(layers, self.table, name=self.name, **settings)

    def reset(self) -> None:
        """Nothing stored, nothing handed out."""
        self.table.zero_()
        self.free[:] = self.all_free()
        for tensors in self.kv:
            for tensor in tensors:
                tensor.zero_()
        space = self.guard.space
        space.flags.zero_()
        space.owners.zero_()
        for slot in self.guard.declared.reserved:
            space.flags[slot] = Flag.RESERVED | REFERENCE

    def all_free(self) -> list[int]:
        return list(range(1, SLOTS))

    @property
    def bytes_of(self) -> list[Tensors]:
        """Each layer's halves, slot axes first."""
        return [self.form.halves(tensors) for tensors in self.kv]

    def take(self, owner: str, count: int) -> list[int]:
        slots = [self.free.pop(0) for _ in range(count)]
        assert self.guard is not None
        self.guard.allocate(slots, owner=owner)
        return slots

    def give_back(self, owner: str, slots: list[int]) -> None:
        assert self.guard is not None
        if slots:
            self.guard.release(slots, owner=owner)
            self.free[:0] = slots  # at the front: they are used again at once

    def plan(self, owner: str, row: int, start: int, count: int) -> Work:
        """The next tokens of a request get their slots."""
        slots = self.take(owner, count)
        self.table[row, start : start + count] = torch.tensor(slots, dtype=torch.int32)
        return Work(slots, slots, list(range(count)), self.table[row, : start + count].tolist())

    def after(self, owner: str, row: int, total: int) -> None:
        """A forward ended, and the request has ``total`` tokens."""

    def finish(self, owner: str, row: int, total: int) -> None:
        self.give_back(owner, self.table[row, :total].tolist())

    def live(self, row: int, total: int) -> int:
        """A slot that the next forward reads, and that is not its last."""
        return int(self.table[row, total - 2])

    def columns(self, total: int) -> tuple[int, int]:
        """``(column of an entry that the next forward reads, column of another one)`` of a request's row."""
        width = self.table.shape[1]
        return (total - 2) % width, (total - 3) % width

    def unused(self) -> int:
        """A slot that nobody has."""
        return self.free[-1]

    def sub_batch(self, work: Work, row: int, owner: str) -> Batch | None:
        return None


class Pages(Group):
    """A table of pages."""

    def __init__(self, name: str, form: str, **declared: Any):
        super().__init__(name, form, table_page_size=PAGE, reserved=tuple(range(PAGE)), **declared)

    def all_free(self) -> list[int]:
        return list(range(1, SLOTS // PAGE))

    def _slots(self, pages: list[int]) -> list[int]:
        return [page * PAGE + i for page in pages for i in range(PAGE)]

    def plan(self, owner: str, row: int, start: int, count: int) -> Work:
        had, needed = -(-start // PAGE), -(-(start + count) // PAGE)
        pages = [self.free.pop(0) for _ in range(needed - had)]
        self.guard.allocate(self._slots(pages), owner=owner)
        self.table[row, had:needed] = torch.tensor(pages, dtype=torch.int32)
        every = self._slots(self.table[row, :needed].tolist())[: start + count]
        return Work(every[start:], every[start:], list(range(count)), every)

    def finish(self, owner: str, row: int, total: int) -> None:
        pages = self.table[row, : -(-total // PAGE)].tolist()
        self.guard.release(self._slots(pages), owner=owner)
        self.free[:0] = pages

    def live(self, row: int, total: int) -> int:
        position = total - 2
        return int(self.table[row, position // PAGE]) * PAGE + position % PAGE

    def columns(self, total: int) -> tuple[int, int]:
        return (total - 2) // PAGE, 0

    def unused(self) -> int:
        return self.free[-1] * PAGE


class Mapped(Group):
    """A sliding window with slots of its own: a map leads there from the slots of another group."""

    def __init__(self, name: str, form: str, base: Group, window: int, **declared: Any):
        self.base, self.window = base, window
        self.map = torch.zeros(SLOTS, dtype=torch.int64)
        super().__init__(name, form, slot_map=self.map, window=window, **declared)
        self.table = base.table

    def all_free(self) -> list[int]:
        return super().all_free()[::-1]  # equal numbers would hide what is mixed up

    def reset(self) -> None:
        super().reset()
        self.map.zero_()

    def plan(self, owner: str, row: int, start: int, count: int) -> Work:
        own = self.take(owner, count)
        self.map[self.table[row, start : start + count].long()] = torch.tensor(own, device=self.map.device)
        reads = self.map[self.table[row, max(0, start - self.window + 1) : start + count].long()].tolist()
        return Work(own, own, list(range(count)), reads)

    def _left(self, owner: str, row: int, stop: int) -> None:
        full = self.table[row, : max(stop, 0)].long()
        full = full[self.map[full] != 0]
        self.give_back(owner, self.map[full].tolist())
        self.map[full] = 0

    def after(self, owner: str, row: int, total: int) -> None:
        self._left(owner, row, total - self.window + 1)

    def finish(self, owner: str, row: int, total: int) -> None:
        self._left(owner, row, total)

    def live(self, row: int, total: int) -> int:
        return int(self.map[int(self.table[row, total - 2])])


class Ring(Group):
    """A sliding window as a ring of slots for each request."""

    field = "ring_slots"

    def __init__(self, name: str, form: str, window: int, **declared: Any):
        super().__init__(name, form, ring=True, window=window, **declared)
        self.window, self.table = window, torch.zeros(ROWS, window, dtype=torch.int32)

    def plan(self, owner: str, row: int, start: int, count: int) -> Work:
        if start == 0:
            self.table[row] = torch.tensor(self.take(owner, self.window), dtype=torch.int32)
        total, ring = start + count, self.table[row].tolist()
        kept = [p for p in range(start, total) if p > total - 1 - self.window]  # a long prefill keeps its end
        planned = [ring[p % self.window] if p in kept else 0 for p in range(start, total)]
        reads = [ring[p % self.window] for p in range(max(0, total - self.window), total)]
        return Work(planned, planned, list(range(count)), reads)

    def finish(self, owner: str, row: int, total: int) -> None:
        self.give_back(owner, self.table[row].tolist())

    def live(self, row: int, total: int) -> int:
        return int(self.table[row, (total - 2) % self.window])


class Neighbour(Group):
    """A sliding window that shares the tensors of another group, in slots that the other does not have."""

    field = "neighbour_slots"

    def __init__(self, name: str, base: Group, window: int, **declared: Any):
        super().__init__(name, "nhd", window=window, **declared)
        self.form, self.kv, self.free, self.window = base.form, base.kv, base.free, window

    def plan(self, owner: str, row: int, start: int, count: int) -> Work:
        work = super().plan(owner, row, start, count)
        work.reads = work.reads[max(0, start - self.window + 1) :]
        return work

    def after(self, owner: str, row: int, total: int) -> None:
        stop = max(total - self.window + 1, 0)
        self.give_back(owner, [s for s in self.table[row, :stop].tolist() if s])
        self.table[row, :stop] = 0

    def finish(self, owner: str, row: int, total: int) -> None:
        self.give_back(owner, [s for s in self.table[row, :total].tolist() if s])


class Chunked(Group):
    """Attention sees the tokens of a chunk: slots of the chunks before it are given back, and their entries stay."""

    field = "chunk_slots"

    def __init__(self, name: str, form: str, chunk: int, **declared: Any):
        super().__init__(name, form, chunk=chunk, **declared)
        self.chunk, self.had = chunk, dict[int, int]()

    def plan(self, owner: str, row: int, start: int, count: int) -> Work:
        work = super().plan(owner, row, start, count)
        work.reads = work.reads[start // self.chunk * self.chunk :]
        return work

    def after(self, owner: str, row: int, total: int) -> None:
        first, stop = self.had.get(row, 0), total // self.chunk * self.chunk
        self.give_back(owner, self.table[row, first:stop].tolist())
        self.had[row] = stop

    def finish(self, owner: str, row: int, total: int) -> None:
        self.give_back(owner, self.table[row, self.had.pop(row, 0) : total].tolist())


class Compressed(Group):
    """One slot for ``ratio`` tokens, written when the last of them is."""

    namespaced = 8
    slot_per_token = False

    def __init__(self, name: str, form: str, ratio: int, **declared: Any):
        self.field, self.ratio = f"{name}_slots", ratio
        super().__init__(name, form, tokens_per_slot=ratio, **declared)

    def plan(self, owner: str, row: int, start: int, count: int) -> Work:
        had, needed = start // self.ratio, (start + count) // self.ratio
        slots = self.take(owner, needed - had) if needed > had else []
        self.table[row, had:needed] = torch.tensor(slots, dtype=torch.int32)
        waiting = list(slots)
        planned = [waiting.pop(0) if (p + 1) % self.ratio == 0 else 0 for p in range(start, start + count)]
        return Work(planned, planned, list(range(count)), self.table[row, :needed].tolist() or [0])

    def finish(self, owner: str, row: int, total: int) -> None:
        self.give_back(owner, self.table[row, : total // self.ratio].tolist())

    def live(self, row: int, total: int) -> int:
        return int(self.table[row, 0])

    def columns(self, total: int) -> tuple[int, int]:
        return 0, 1


class State(Group):
    """One slot for a request's recurrent state."""

    namespaced = 1

    def __init__(self, name: str, form: str, **declared: Any):
        super().__init__(name, form, state=True, **declared)
        self.table = torch.zeros(ROWS, 1, dtype=torch.int32)

    def plan(self, owner: str, row: int, start: int, count: int) -> Work:
        if start == 0:
            self.table[row, 0] = self.take(owner, 1)[0]
        slot = int(self.table[row, 0])
        return Work([], [slot], [count - 1], [slot])

    def finish(self, owner: str, row: int, total: int) -> None:
        self.give_back(owner, [int(self.table[row, 0])])

    def live(self, row: int, total: int) -> int:
        return int(self.table[row, 0])


class Cross(Group):
    """The encoder's K and V: written in a request's first forward, read in all."""

    length = 4

    def __init__(self, name: str, form: str, **declared: Any):
        super().__init__(name, form, written_once=True, batch="encoder", **declared)
        self.field = "slots"

    def plan(self, owner: str, row: int, start: int, count: int) -> Work:
        if start:
            return Work([], None, [], self.table[row, : self.length].tolist())
        return super().plan(owner, row, 0, self.length)

    def finish(self, owner: str, row: int, total: int) -> None:
        self.give_back(owner, self.table[row, : self.length].tolist())

    def live(self, row: int, total: int) -> int:
        return int(self.table[row, 1])

    def columns(self, total: int) -> tuple[int, int]:
        return 1, 2

    def sub_batch(self, work: Work, row: int, owner: str) -> Batch | None:
        tokens = [100 + row + i for i in range(self.length)]
        new = len(work.planned)
        return Batch(
            input_ids=tokens[:new],
            slots=work.planned,
            request_rows=[row],
            prefix_lens=[self.length - new],
            extend_lens=[new],
            request_ids=[owner],
            history=torch.tensor([tokens]),
            history_lens=[self.length],
        )
