"""Random calls of an allocator, for the kernel that does many in one launch: against the reference, one by one."""

from __future__ import annotations

import copy
import dataclasses
import random

import torch
from random_plans import OWNERS, make_it_true, random_plan, random_space, state

from kvcanary_fx.kernels.ring import Control, Word
from kvcanary_fx.kernels.slots import gpu_life, naive_life
from kvcanary_fx.kernels.slots.events import RENEWING, STACK_UNIT, Event, EventRow, Events
from kvcanary_fx.kernels.slots.space import REFERENCE, SlotSpace

PLANES = 3
#: Slots of a program and entries looked through together: as engines get them, and small ones.
BLOCKS = ((gpu_life.BLOCK_SLOTS, gpu_life.SCAN), (4, 8))


@dataclasses.dataclass
class Call:
    """One call: what happened to which pages, and who is named in it."""

    event: Event
    pages: list[int]
    owner: int
    stack: int = 0


def random_calls(rng: random.Random, pages: int) -> list[Call]:
    """Calls that name pages again and again, also one twice, and some that the pool does not have."""
    calls = []
    for _ in range(rng.choice([1, 3, 9])):
        event = rng.choice([*Event, Event.ALLOCATE, Event.RELEASE])
        named = [rng.randint(0, pages - 1) if rng.random() < 0.95 else rng.choice([-3, 999]) for _ in range(4)]
        whose = 0 if event in (Event.REJECT, Event.FORGET) else rng.choice(OWNERS)
        calls.append(Call(event, named[: rng.randint(1, 4)], whose, len(calls)))
    return calls


def as_events(calls: list[Call], page_size: int, device: str) -> Events:
    rows = torch.zeros(len(calls), len(EventRow), dtype=torch.int64)
    begin = 0
    for row, call in zip(rows, calls, strict=True):
        row[EventRow.EVENT], row[EventRow.BEGIN], row[EventRow.OWNER] = (
            call.event + call.stack * STACK_UNIT,
            begin,
            call.owner,
        )
        begin += len(call.pages)
    entries = torch.tensor([page for call in calls for page in call.pages])
    return Events(rows.to(device), entries.to(device), page_size)


def with_room(rng: random.Random, events: Events) -> tuple[Events, torch.Tensor]:
    """The calls at the head of larger memory, where earlier ones have left theirs; and how many there are."""
    counts = torch.tensor([events.rows.shape[0], events.entries.shape[0]], device=events.rows.device)
    rows, entries = (
        torch.cat((t, t.flip(0).repeat(*[rng.randint(1, 3), *[1] * (t.dim() - 1)])))
        for t in (events.rows, events.entries)
    )
    return Events(rows, entries, events.page_size), counts


def play_one_by_one(
    space: SlotSpace, calls: list[Call], size: int, digests: torch.Tensor, imported: torch.Tensor
) -> list[tuple[int, int, int]]:
    """The reference; the slots that became free, with whose they were and the positions in them, in any order; not
    those whose bytes had been forgotten before."""
    gone, renewed = [], set()
    for call in calls:
        slots = torch.tensor([page * size + k for page in call.pages for k in range(size)])
        inside = slots[(slots >= 0) & (slots < space.slots)]
        flags, owners, positions = space.flags.clone(), space.owners.clone(), space.positions.clone()
        owner = () if call.event in (Event.REJECT, Event.FORGET) else (call.owner,)
        getattr(naive_life, call.event.name.lower())(space, slots, *owner, stack=call.stack)
        if call.event in RENEWING:
            digests[:, :, inside], imported[inside] = 0, False
            renewed.update(inside.tolist())
        if call.event is Event.RELEASE:
            freed = (flags[inside] >= REFERENCE) & (space.flags[inside] < REFERENCE)
            found = [slot for slot in inside[freed].unique().tolist() if slot not in renewed]
            gone += [(slot, int(owners[slot]), int(positions[slot])) for slot in found]
    return sorted(gone)


def run_events(seed: int, device: str = "cpu", rounds: int = 4) -> int:
    """Both over some rounds of calls; raises AssertionError where they part.  How many violations there were."""
    rng = random.Random(seed)
    space = random_space(rng)
    make_it_true(rng, space, random_plan(rng, space, unique=True))
    other = copy.deepcopy(space)
    control = Control(*[getattr(other.control, n).to(device) for n in ("words", "ring", "stamps")])
    other = dataclasses.replace(other.to(device), control=control)
    size = rng.choice([1, 1, 2, 3, 8])
    gpu_life.BLOCK_SLOTS, gpu_life.SCAN = rng.choice(BLOCKS)
    for number in range(rounds):
        calls = random_calls(rng, -(-space.slots // size))
        digests = torch.ones(2, PLANES, space.slots, dtype=torch.int32)
        imported = torch.ones(space.slots + 1, dtype=torch.bool)
        there = [digests.clone().to(device), imported.clone().to(device)]
        events = as_events(calls, size, device)
        named, counts = events.slots, None
        if rng.random() < 0.5:
            events, counts = with_room(rng, events)
        places = torch.full((3, events.slots + 2), -7, device=device)
        places = places if rng.random() < 0.7 else None
        with_imported = rng.random() < 0.5
        apply = gpu_life.Apply(other, there[0])
        apply(events, there[1] if with_imported else None, places, counts)
        if places is not None:
            assert there[0].all(), "not before their bytes were compared"
            assert there[1].all()
            apply.renew(events, there[1] if with_imported else None, counts)
        gone = play_one_by_one(space, calls, size, digests, imported)
        expected, got = state(space), state(other)
        for key, value in expected.items():
            assert got[key] == value, f"round {number}: {key} is {got[key]}, the reference has {value}"
        assert torch.equal(there[0].cpu(), digests)
        assert not with_imported or torch.equal(there[1].cpu(), imported)
        if places is not None:
            told = places[:, :named].T.tolist()
            assert sorted(tuple(each) for each in told if each[0] >= 0) == gone
            assert places[:, named:].eq(-7).all()
        for own in (space, other):
            own.control.words[Word.DRAINED] = own.control.words[Word.HEAD]
    return int(space.control.words[Word.HEAD])
