"""Random lives of a slot space: an engine that mostly does the right thing, and now and then does not.

    python tests/kernels/random_plans.py --plans 100000 [--jobs 8] [--device cuda --kernels triton]

Each plan is one forward (walk, check_writes, store) between random allocations, with random corruption of the
request table, of the plan and of the shadow.  Two implementations must leave the same bits behind; at the first
difference it prints the command that shows it again, and exits with 1.  On a CPU ``--kernels triton`` needs
``TRITON_INTERPRET=1``.

What Triton compiles for (a :class:`Form`) is drawn for each plan.  On a GPU that would be a compilation for nearly
every launch, so there a form is kept for ``--group`` plans, and all else differs from plan to plan.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from shares import Shares

from kvcanary_fx.kernels.checks import CHECKS, Check, bits_of
from kvcanary_fx.kernels.ring import BY_BUDGET, Control, Word
from kvcanary_fx.kernels.slots import (
    checks as request_checks,
)
from kvcanary_fx.kernels.slots import (
    gpu as gpu_requests,
)
from kvcanary_fx.kernels.slots import (
    life as slot_life,
)
from kvcanary_fx.kernels.slots import (
    naive as space_reference,
)
from kvcanary_fx.kernels.slots.space import Column, Flag, RequestPlan, SlotSpace

ALL = bits_of(tuple(CHECKS))


_CHECKS = ("walk", "check_writes", "check_received", "check_reads", "check_indices")


def _together(checks: ModuleType) -> Any:
    """An implementation under one name, as the reference is."""
    return SimpleNamespace(
        **{n: getattr(checks, n) for n in (*_CHECKS, "store")},
        **{n: getattr(slot_life, n) for n in ("allocate", "release", "share", "hand_over", "name", "reject", "forget")},
    )


#: The vectorised code, and the Triton kernels (interpreted where there is no GPU).
IMPLEMENTATIONS = {"torch": _together(request_checks), "triton": _together(gpu_requests)}
#: Sizes, for :func:`use_sizes`: those that engines get, and small ones.
SIZES = ("BLOCK_POSITIONS", "WALK_POSITIONS", "BLOCK_TOKENS", "BLOCK_REQUESTS", "BLOCK_SUMS", "PROGRAMS")
USUAL, SMALL = tuple(getattr(gpu_requests, name) for name in SIZES), (2, 2, 2, 2, 2, 6)
OWNERS = (0, 11, 22, 33)
#: Of one seed, in one space.
PLANS = 10


@dataclasses.dataclass(frozen=True)
class Form:
    """What kernels are compiled for: the same for every plan of a group."""

    page_size: int
    integer: torch.dtype  # of rows and table
    positions: bool
    namespaces: bool
    history: bool
    by_row: bool
    slot_map: bool
    padding_row: bool
    ring: bool  # where the space has a window that a row has room for
    by_budget: bool

    @classmethod
    def draw(cls, rng: random.Random) -> Form:
        return cls(
            page_size=rng.choice([1, 1, 4]),
            integer=rng.choice([torch.int32, torch.int64]),
            positions=rng.random() < 0.8,
            namespaces=rng.random() < 0.5,
            history=rng.random() < 0.4,
            by_row=rng.random() < 0.4,
            slot_map=rng.random() < 0.2,
            padding_row=rng.random() < 0.4,
            ring=rng.random() < 0.5,
            by_budget=rng.random() < 0.25,
        )


def random_space(rng: random.Random, form: Form | None = None) -> SlotSpace:
    form, checks = form or Form.draw(rng), ALL
    for check in Check:
        if rng.random() < 0.1:
            checks &= ~check
    slots = rng.choice([1, 5, 12, 40])
    return SlotSpace.allocate(
        slots,
        torch.device("cpu"),
        Control.allocate(rng.choice([3, 4096]), torch.device("cpu")),
        7,
        checks,
        reserved=rng.choice([(), (0,), (0, 3) if slots > 3 else ()]),
        token_offset=rng.choice([0, 0, 1]),
        window=rng.choice([None, None, 1, 3]),
        chunk=rng.choice([None, None, None, 1, 4, 5]),
        once=rng.random() < 0.2,
        owner_known=rng.random() < 0.8,
        history=slots % 3 * 2,
        verify_every=BY_BUDGET if form.by_budget else rng.choice([1, 2, 3]),
    )


def random_plan(rng: random.Random, space: SlotSpace, unique: bool, form: Form | None = None) -> RequestPlan:
    """A forward over up to four requests; ``unique`` keeps its slots apart, as a scatter's order is not defined."""
    form = form or Form.draw(rng)
    size, width = form.page_size, rng.randint(1, 6)
    requests, table_rows = rng.randint(0, 4), rng.randint(1, 5)
    prefix = [rng.randint(0, width * size - 1 if rng.random() < 0.95 else width * size + 2) for _ in range(requests)]
    extend = [rng.randint(0, 3) for _ in range(requests)]
    tokens, padding = sum(extend), rng.choice([0, 0, 2])
    odd = (lambda: rng.random() < 0.05) if rng.random() < 0.5 else (lambda: False)

    def integers(n: int, low: int, high: int, wild: int = 0) -> torch.Tensor:
        return torch.tensor([wild if odd() else rng.randint(low, high) for _ in range(n)], dtype=torch.int64)

    def token_ids(n: int) -> torch.Tensor:
        """Some are larger than a slot keeps them, with the same bits in what it keeps."""
        above = torch.tensor([rng.choice([1 << 31, 1 << 40, -(1 << 35)]) if odd() else 0 for _ in range(n)])
        return integers(n, 0, 3) + above.to(torch.int64)

    table = integers(table_rows * width, 0, max((space.slots - 1) // size, 0), rng.choice([-1, 999]))
    rows = integers(requests + padding, 0, table_rows - 1, rng.choice([-1, 99]))
    slots = integers(tokens + padding, 0, space.slots - 1, rng.choice([-1, 999]))
    if unique:
        drawn = rng.sample(range(space.slots), min(space.slots, tokens))
        slots = torch.tensor((drawn + [-1] * (tokens + padding))[: tokens + padding], dtype=torch.int64)
    expected = [p + k for p, e in zip(prefix, extend, strict=True) for k in range(e)]  # of a tree some are wrong
    positions = torch.tensor([e + odd() for e in expected] + [0] * padding, dtype=torch.int64)
    ring = form.ring and space.window is not None and width * size >= space.window
    return RequestPlan(
        counts=torch.tensor([requests, tokens, rng.randint(0, 5)]),
        rows=rows.to(form.integer),
        prefix_lens=torch.tensor(prefix + [0] * padding, dtype=torch.int32),
        extend_lens=torch.tensor(extend + [1] * padding, dtype=torch.int32),
        tokens=token_ids(2 * (tokens + padding))[::2] if rng.random() < 0.2 else token_ids(tokens + padding),
        slots=slots,
        positions=positions if form.positions else None,
        owners=torch.tensor([rng.choice(OWNERS) for _ in range(requests + padding)], dtype=torch.int64),
        namespaces=integers(requests + padding, 0, 1) if form.namespaces else None,
        table=table.view(table_rows, width).to(form.integer),
        columns=max(prefix, default=0) + rng.randint(0, 3),
        page_size=size,
        ring=ring,
        slot_map=integers(space.slots, -1, space.slots - 1) if form.slot_map else None,
        history=token_ids((table_rows if form.by_row else requests + padding) * 8).view(-1, 8)
        if form.history
        else None,
        history_by_row=form.by_row,
        history_lens=integers(requests + padding, 0, 9),
        parents=random_trees(rng, extend, padding) if rng.random() < 0.25 else None,
        padding_row=rng.choice([0, 1]) if form.padding_row else None,
        in_flight=rng.random() < 0.2,
    )


def random_trees(rng: random.Random, extend: list[int], padding: int) -> torch.Tensor:
    """For each token an earlier one of its request, or the prefix; now and then something that is neither."""
    places = [k for e in extend for k in range(e)]
    parents = [rng.randint(-1, k - 1) if rng.random() < 0.95 else rng.choice([-9, k, 99]) for k in places]
    return torch.tensor(parents + [0] * padding, dtype=torch.int64)


def random_indices(rng: random.Random, plan: RequestPlan) -> tuple[torch.Tensor, int, int, int]:
    """What attention may gather: mostly the rows of memory of the request table's own slots."""
    lengths = (plan.prefix_lens + plan.extend_lens).tolist()
    unit, layers = rng.choice([1, plan.page_size, 4]), rng.randint(1, 3)
    if plan.table.numel() and lengths:
        slots = [
            request_checks.table_slots(plan, torch.tensor([[request]]), torch.arange(length).unsqueeze(0)).flatten()
            for request, length in enumerate(lengths)
        ]
        page, offset = (f(torch.cat(slots), unit) for f in (torch.floor_divide, torch.remainder))
        index = page * unit * layers + offset
    else:
        index = torch.zeros(sum(lengths), dtype=torch.int64)
    if index.numel() and rng.random() < 0.3:
        index[rng.randrange(index.shape[0])] += rng.choice([1, unit, -1])
    if rng.random() < 0.2:
        index = index[: rng.randint(0, index.shape[0])]
    return index, max(lengths, default=0), unit, unit * layers


def random_pages(rng: random.Random, plan: RequestPlan) -> tuple[torch.Tensor, torch.Tensor, int]:
    """What an attention kernel may get: mostly the request table's own pages."""
    lengths = (plan.prefix_lens + plan.extend_lens).clone()
    rows = plan.rows.long().clamp(0, plan.table.shape[0] - 1)
    pages = plan.table[rows].clone()[:, : rng.choice([None, None, 1])]
    if pages.numel() and rng.random() < 0.3:
        pages[rng.randrange(pages.shape[0]), rng.randrange(pages.shape[1])] += 1
    if lengths.numel() and rng.random() < 0.3:
        lengths[rng.randrange(lengths.shape[0])] += rng.choice([-1, 1])
    if pages.numel() and rng.random() < 0.3:
        pages, lengths = torch.cat((pages, pages[:1] + 1)), torch.cat((lengths, lengths[:1]))
    return pages, lengths, plan.page_size


def make_it_true(rng: random.Random, space: SlotSpace, plan: RequestPlan) -> None:
    """Let most of a plan's slots be what it says, so that the checks behind the first ones are reached."""
    for request in range(int(plan.counts[0])):
        chain = space_reference.namespace_seed(space_reference._namespace(plan, request))
        for position in range(int(plan.prefix_lens[request])):
            slot = space_reference._table_slot(plan, request, position)
            if not 0 <= slot < space.slots or rng.random() < 0.05:
                continue
            token = rng.randint(0, 3)
            chain = space_reference.as_int64(chain + space_reference.mix(token, position))
            space.tokens[slot], space.positions[slot] = token, position
            space.chain[slot] = chain + (rng.random() < 0.05)
            space.owners[slot] = int(plan.owners[request]) if rng.random() < 0.9 else 0
            space.flags[slot] = rng.choice([256, 257, 257, 257, 257, 513, 261, 265, 1])


def play(
    rng: random.Random, space: SlotSpace, impls: list[tuple[Any, SlotSpace]], plans: int, form: Form | None = None
) -> None:
    """Drive all implementations alike; raises AssertionError where they part.

    Args:
        form: of every plan; None draws one for each.
    """
    for number in range(plans):
        for _ in range(rng.randint(0, 2)):
            _random_life(rng, space, impls)
        lived = [Snapshot(own) for _, own in impls]  # what follows may make all of them equal again
        drawn = form or Form.draw(rng)
        plan = random_plan(rng, space, unique=True, form=drawn)
        if rng.random() < 0.7:
            make_it_true(rng, space, plan)
            for _, own in impls[1:]:
                own.block[:, : Column.READS].copy_(space.block[:, : Column.READS])
                own.block[:, Column.CHAIN :].copy_(space.block[:, Column.CHAIN :])
        writes = plan if rng.random() < 0.5 else random_plan(rng, space, unique=False, form=drawn)
        received = (writes.slots + (rng.random() < 0.2))[: rng.choice([None, -1])]
        reads, gathered = random_pages(rng, plan), random_indices(rng, plan)
        times = rng.choice([1, 1, 1, 2])
        done = [_forward(impl, own, (plan, writes), received, reads, gathered, number, times) for impl, own in impls]
        for before, after, (impl, own) in zip(lived[1:], done[1:], impls[1:], strict=True):
            fetch(before, after)
            compare(lived[0], before, number)
            compare(done[0], after, number)
            compare_real_slots(after, writes)
            if impl is IMPLEMENTATIONS["triton"] or own.block.device.type == "cpu":
                assert after.listed() == after.reads(), f"plan {number}: slots that were listed, and read"
        for _, own in impls:
            own.control.words[Word.DRAINED] = own.control.words[Word.HEAD]


def _forward(
    impl: Any,
    own: SlotSpace,
    plans: tuple[RequestPlan, RequestPlan],
    received: torch.Tensor,
    reads: tuple[torch.Tensor, torch.Tensor, int],
    gathered: tuple[torch.Tensor, int, int, int],
    number: int,
    times: int,
) -> Snapshot:
    """Forwards that are to write as the second plan says, and read and write as the first does; if it is more than one,
    the launches of the first are kept for the others."""
    device = own.block.device
    here = moved(plans[0], device)
    there = here if plans[1] is plans[0] else moved(plans[1], device)
    if times > 1:
        here.keep_launches()
        there.keep_launches()
    for _ in range(times):
        for each, plan in zip((here, there)[: 1 + (there is not here)], plans):  # noqa: B905
            impl.walk(own, each)
            if each.ends is not None:  # a captured launch sees what an earlier step left of larger batches
                each.ends[int(plan.counts[0]) :] = poison(number)
        impl.check_writes(own, there)
        impl.check_received(own, there, received.to(device), 9)
        if not here.ring:
            impl.check_reads(own, here, *(t.to(device) for t in reads[:2]), reads[2])
            impl.check_indices(own, here, gathered[0].to(device), *gathered[1:])
        impl.store(own, here)
    own.control.words[Word.STEP] += 1
    own.control.words[Word.FORWARD] = number % 3 - 1
    own.control.words[Word.EVERY] = 1 << number % 3
    return Snapshot(own, there)


def _random_life(rng: random.Random, space: SlotSpace, impls: list[tuple[Any, SlotSpace]]) -> None:
    what = rng.choice(["allocate", "allocate", "release", "share", "hand_over", "name", "reject", "forget"])
    some = [rng.randint(0, space.slots - 1) if rng.random() < 0.97 else -3 for _ in range(rng.randint(0, 4))]
    if what == "name":
        slots = torch.tensor(sorted(set(some)), dtype=torch.int64)
        who = tuple(torch.tensor([rng.randint(0, 9) for _ in slots]) for _ in range(3))
        marks = torch.tensor([rng.choice([0, 1, 5, 9]) for _ in slots], dtype=torch.int32)
        given: tuple[Any, ...] = (marks, rng.choice([None, who]), rng.choice(OWNERS))
    else:
        slots = torch.tensor(some, dtype=torch.int64)
        given = () if what in ("reject", "forget") else (rng.choice(OWNERS),)
    for impl, own in impls:
        device = own.tokens.device
        here = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), given)  # noqa: B023
        getattr(impl, what)(own, slots.to(device), *here)


def moved(plan: RequestPlan, device: torch.device) -> RequestPlan:
    """The plan on a device."""
    fields = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan) if f.init}
    return RequestPlan(**{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in fields.items()})


def poison(number: int) -> int:
    """Something that no end of a request is."""
    return (-7, 0, 10**6)[number % 3]


class Snapshot:
    """What the buffers of a space hold at a time.  It stays on their device until :func:`fetch`."""

    COLUMNS = ("tokens", "positions", "chain", "owners", "flags", "reads")

    def __init__(self, space: SlotSpace, plan: RequestPlan | None = None):
        """
        Args:
            plan: what the layers take their slots from is kept as well.
        """
        control = space.control
        tensors = {name: getattr(space, name)[:-1] for name in self.COLUMNS}
        tensors["past"] = space.past[:-1]
        tensors |= dict(clock=space.clock, counters=space.counters, words=control.words, ring=control.ring)
        if plan is not None:
            tensors |= dict(listed=space.listed, count=space.listed_count)
            tensors["may_write"] = request_checks.planned_slots(space, plan)[:-1]
            if plan.real_slots is not None:
                tensors["real_slots"] = plan.real_slots
        self._shapes = {name: t.shape for name, t in tensors.items()}
        self.packed = torch.cat([t.reshape(-1).to(torch.int64) for t in tensors.values()])

    def values(self) -> dict[str, torch.Tensor]:
        parts = self.packed.split([shape.numel() for shape in self._shapes.values()])
        return {name: p.view(shape) for p, (name, shape) in zip(parts, self._shapes.items(), strict=True)}

    def listed(self) -> list[int]:
        values = self.values()
        return sorted(values["listed"][: int(values["count"])].tolist())

    def reads(self) -> list[int]:
        values = self.values()
        return (values["reads"] == values["clock"]).nonzero().flatten().tolist()

    def state(self) -> dict[str, Any]:
        """Everything a check may change, violations in a fixed order."""
        values = self.values()
        ring, words = values["ring"], values["words"]
        capacity, head, drained = ring.shape[0] - 1, int(words[Word.HEAD]), int(words[Word.DRAINED])
        kept = min(head - drained, capacity)
        place = torch.arange(drained, drained + kept) % capacity
        # which rows a full ring keeps depends on the order in which violations were found
        rows = sorted(ring[place].tolist()) if kept == head - drained else kept
        return {n: values[n].tolist() for n in (*self.COLUMNS, "past", "clock", "counters", "words")} | {"ring": rows}


def fetch(*snapshots: Snapshot) -> None:
    """Bring what they hold to the CPU, in one copy: it is the only time that a plan waits for a GPU to be done."""
    parts = torch.cat([s.packed for s in snapshots]).cpu().split([s.packed.shape[0] for s in snapshots])
    for snapshot, part in zip(snapshots, parts, strict=True):
        snapshot.packed = part


def state(space: SlotSpace) -> dict[str, Any]:
    """:meth:`Snapshot.state` of now."""
    snapshot = Snapshot(space)
    fetch(snapshot)
    return snapshot.state()


def compare(expected: Snapshot, got: Snapshot, number: int) -> None:
    other = got.state()
    for key, value in expected.state().items():
        assert other[key] == value, f"plan {number}: {key} is {other[key]}, the reference has {value}"


def compare_real_slots(snapshot: Snapshot, plan: RequestPlan) -> None:
    """What the layers take their slots from is the plan's slots, without padding and what is outside; an op that hides
    where it writes may reach those and the reserved ones."""
    values = snapshot.values()
    slots = values["flags"].shape[0]
    may = set((values["flags"] & int(Flag.RESERVED)).nonzero().flatten().tolist())
    if plan.slots.shape[0] and plan.rows.shape[0]:
        real = {i for i, _, _ in space_reference._tokens(plan)}
        expected = [s if i in real and 0 <= s < slots else -1 for i, s in enumerate(plan.slots.tolist())]
        assert values["real_slots"].tolist() == expected
        may |= {s for s in expected if s >= 0}
    assert values["may_write"].nonzero().flatten().tolist() == sorted(may)


def use_sizes(sizes: tuple[int, ...]) -> None:
    """Let the kernels work in blocks of these sizes, and with so many programs; small ones show what happens between
    blocks, and where a program has several."""
    for name, size in zip(SIZES, sizes, strict=True):
        setattr(gpu_requests, name, size)


def run_plans(seed: int, plans: int, device: str = "cpu", kernels: str = "torch", group: int | None = None) -> int:
    """The reference and one of :data:`IMPLEMENTATIONS` over random plans; how many violations the reference found.

    Args:
        group: seeds that have the same :class:`Form`; None draws one for each plan.
    """
    rng, form = random.Random(seed), None
    if group is not None:
        form = Form.draw(random.Random(-1 - seed // group))
    if kernels == "triton":
        use_sizes((USUAL, SMALL)[seed // (group or PLANS) % 2])
    space = random_space(rng, form)
    other = copy.deepcopy(space)
    if device != "cpu":
        control = Control(*[getattr(other.control, n).to(device) for n in ("words", "ring", "stamps")])
        other = dataclasses.replace(other.to(device), control=control)
    play(rng, space, [(space_reference, space), (IMPLEMENTATIONS[kernels], other)], plans, form)
    return int(space.control.words[Word.HEAD])


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=100_000)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, default=0, help=f"of the first {PLANS} plans; the next have {PLANS} more")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kernels", choices=IMPLEMENTATIONS, default="torch")
    parser.add_argument("--group", type=int, help="plans of one form; on a GPU 200, else each has its own")
    args = parser.parse_args(given)
    group = args.group or (200 if args.device != "cpu" else None)
    settings = dict(device=args.device, kernels=args.kernels, group=group)
    seeds = range(args.seed, args.seed + args.plans, PLANS)
    shares = [list(s) for _, s in itertools.groupby(seeds, key=lambda seed: seed // (group or 20 * PLANS))]
    command = f"--device {args.device} --kernels {args.kernels}" + (f" --group {args.group}" if args.group else "")
    repeat = f"python tests/kernels/random_plans.py {command} --plans {PLANS} --seed "
    return Shares(run_plans, PLANS, settings).run(shares, args.jobs, f"{args.device}, {args.kernels}", repeat)


if __name__ == "__main__":
    sys.exit(main())
