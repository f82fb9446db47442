"""Random lives of a slot space: an engine that mostly does the right thing, and now and then does not.

    python tests/kernels/random_plans.py --plans 100000 [--device cuda --kernels triton]

Each plan is one forward (walk, check_writes, store) between random allocations, with random corruption of the
request table, of the plan and of the shadow.  Two implementations must leave the same bits behind.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import random
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

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
from kvcanary_fx.kernels.slots.space import Flag, RequestPlan, SlotSpace

ALL = bits_of(tuple(CHECKS))


def _together(checks: ModuleType) -> Any:
    """An implementation under one name, as the reference is."""
    return SimpleNamespace(
        **{n: getattr(checks, n) for n in ("walk", "check_writes", "check_received", "check_reads", "store")},
        **{n: getattr(slot_life, n) for n in ("allocate", "release", "share", "hand_over", "name", "reject", "forget")},
    )


#: The vectorised code, and the Triton kernels (interpreted where there is no GPU).
IMPLEMENTATIONS = {"torch": _together(request_checks), "triton": _together(gpu_requests)}
#: Sizes of blocks, for :func:`use_blocks`: those that engines get, and small ones.
BLOCKS = (
    (gpu_requests.BLOCK_POSITIONS, gpu_requests.BLOCK_TOKENS, gpu_requests.BLOCK_REQUESTS, gpu_requests.BLOCK_SUMS),
    (2, 2, 2, 2),
)
OWNERS = (0, 11, 22, 33)


def random_space(rng: random.Random) -> SlotSpace:
    checks = ALL
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
        once=rng.random() < 0.2,
        owner_known=rng.random() < 0.8,
        verify_every=rng.choice([1, BY_BUDGET, 2, 3]),
    )


def random_plan(rng: random.Random, space: SlotSpace, unique: bool) -> RequestPlan:
    """A forward over up to four requests; ``unique`` keeps its slots apart, as a scatter's order is not defined."""
    size, width = rng.choice([1, 1, 4]), rng.randint(1, 6)
    requests, table_rows = rng.randint(0, 4), rng.randint(1, 5)
    prefix = [rng.randint(0, width * size - 1 if rng.random() < 0.95 else width * size + 2) for _ in range(requests)]
    extend = [rng.randint(0, 3) for _ in range(requests)]
    tokens, padding = sum(extend), rng.choice([0, 0, 2])
    odd = (lambda: rng.random() < 0.05) if rng.random() < 0.5 else (lambda: False)

    def integers(n: int, low: int, high: int, wild: int = 0) -> torch.Tensor:
        return torch.tensor([wild if odd() else rng.randint(low, high) for _ in range(n)], dtype=torch.int64)

    table = integers(table_rows * width, 0, max((space.slots - 1) // size, 0), rng.choice([-1, 999]))
    rows = integers(requests + padding, 0, table_rows - 1, rng.choice([-1, 99]))
    slots = integers(tokens + padding, 0, space.slots - 1, rng.choice([-1, 999]))
    if unique:
        drawn = rng.sample(range(space.slots), min(space.slots, tokens))
        slots = torch.tensor((drawn + [-1] * (tokens + padding))[: tokens + padding], dtype=torch.int64)
    expected = [p + k for p, e in zip(prefix, extend, strict=True) for k in range(e)]  # of a tree some are wrong
    positions = torch.tensor([e + odd() for e in expected] + [0] * padding, dtype=torch.int64)
    integer = rng.choice([torch.int32, torch.int64])
    return RequestPlan(
        counts=torch.tensor([requests, tokens, rng.randint(0, 5)]),
        rows=rows.to(integer),
        prefix_lens=torch.tensor(prefix + [0] * padding, dtype=torch.int32),
        extend_lens=torch.tensor(extend + [1] * padding, dtype=torch.int32),
        tokens=integers(2 * (tokens + padding), 0, 3)[::2] if rng.random() < 0.2 else integers(tokens + padding, 0, 3),
        slots=slots,
        positions=positions if rng.random() < 0.8 else None,
        owners=torch.tensor([rng.choice(OWNERS) for _ in range(requests + padding)], dtype=torch.int64),
        namespaces=integers(requests + padding, 0, 1) if rng.random() < 0.5 else None,
        table=table.view(table_rows, width).to(integer),
        columns=max(prefix, default=0) + rng.randint(0, 3),
        page_size=size,
        ring=space.window is not None and width * size >= space.window and rng.random() < 0.5,
        slot_map=integers(space.slots, -1, space.slots - 1) if rng.random() < 0.2 else None,
        history=integers((requests + padding) * 8, 0, 3).view(-1, 8) if rng.random() < 0.4 else None,
        history_lens=integers(requests + padding, 0, 9),
        parents=random_trees(rng, extend, padding) if rng.random() < 0.25 else None,
        padding_row=rng.choice([None, None, None, 0, 1]),
        in_flight=rng.random() < 0.2,
    )


def random_trees(rng: random.Random, extend: list[int], padding: int) -> torch.Tensor:
    """For each token an earlier one of its request, or the prefix; now and then something that is neither."""
    places = [k for e in extend for k in range(e)]
    parents = [rng.randint(-1, k - 1) if rng.random() < 0.95 else rng.choice([-9, k, 99]) for k in places]
    return torch.tensor(parents + [0] * padding, dtype=torch.int64)


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
            chain = space_reference._signed(chain + space_reference.mix(token, position))
            space.tokens[slot], space.positions[slot] = token, position
            space.chain[slot] = chain + (rng.random() < 0.05)
            space.owners[slot] = int(plan.owners[request]) if rng.random() < 0.9 else 0
            space.flags[slot] = rng.choice([256, 257, 257, 257, 257, 513, 261, 265, 1])


def play(rng: random.Random, space: SlotSpace, impls: list[tuple[ModuleType, SlotSpace]], plans: int) -> int:
    """Drive all implementations alike; raises AssertionError where they part.  How many plans ran."""
    for number in range(plans):
        for _ in range(rng.randint(0, 2)):
            _random_life(rng, space, impls)
        compare(impls, number)  # what follows may make all of them equal again
        plan = random_plan(rng, space, unique=True)
        if rng.random() < 0.7:
            make_it_true(rng, space, plan)
            for _, own in impls[1:]:
                for buffer in ("tokens", "positions", "chain", "owners", "flags"):
                    getattr(own, buffer).copy_(getattr(space, buffer))
        writes = plan if rng.random() < 0.5 else random_plan(rng, space, unique=False)
        received = (writes.slots + (rng.random() < 0.2))[: rng.choice([None, -1])]
        pages, lengths, size = random_pages(rng, plan)
        for impl, own in impls:
            device = own.tokens.device
            here, there = moved(plan, device), moved(writes, device)
            _walk(impl, own, [here] if writes is plan else [here, there], number)
            impl.check_writes(own, there)
            impl.check_received(own, there, received.to(device), 9)
            if not plan.ring:
                impl.check_reads(own, here, pages.to(device), lengths.to(device), size)
            impl.store(own, here)
            own.control.words[Word.STEP] += 1
            own.control.words[Word.FORWARD] = number % 3 - 1
            own.control.words[Word.EVERY] = 1 << number % 3
            if impl is not space_reference:
                compare_real_slots(own, there)
            if impl is IMPLEMENTATIONS["triton"] or (impl is not space_reference and device.type == "cpu"):
                listed = sorted(own.listed[: int(own.listed_count)].tolist())
                assert listed == (own.reads[:-1] == own.clock).nonzero().flatten().tolist(), f"plan {number}"
        compare(impls, number)
        for _, own in impls:
            own.control.words[Word.DRAINED] = own.control.words[Word.HEAD]
    return plans


def _walk(impl: ModuleType, space: SlotSpace, plans: list[RequestPlan], number: int) -> None:
    for plan in plans:
        impl.walk(space, plan)
        if plan.ends is not None:  # a captured launch sees what an earlier step left of larger batches
            plan.ends[int(plan.counts[0]) :] = poison(number)


def _random_life(rng: random.Random, space: SlotSpace, impls: list[tuple[ModuleType, SlotSpace]]) -> None:
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
    fields = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    return RequestPlan(**{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in fields.items()})


def poison(number: int) -> int:
    """Something that no end of a request is."""
    return (-7, 0, 10**6)[number % 3]


def compare_real_slots(space: SlotSpace, plan: RequestPlan) -> None:
    """What the layers take their slots from is the plan's slots, without padding and what is outside; an op that hides
    where it writes may reach those and the reserved ones."""
    may = {s for s in range(space.slots) if int(space.flags[s]) & Flag.RESERVED}
    if plan.slots.shape[0] and plan.rows.shape[0]:
        real = {i for i, _, _ in space_reference._tokens(plan)}
        expected = [s if i in real and 0 <= s < space.slots else -1 for i, s in enumerate(plan.slots.tolist())]
        assert plan.real_slots is not None
        assert plan.real_slots.tolist() == expected
        may |= {s for s in expected if s >= 0}
    assert request_checks.planned_slots(space, plan)[:-1].nonzero().flatten().tolist() == sorted(may)


def state(space: SlotSpace) -> dict[str, Any]:
    """Everything a check may change, violations in a fixed order."""
    ring, words = space.control.ring.cpu(), space.control.words.cpu()
    control, space = dataclasses.replace(space.control, ring=ring, words=words), space.to("cpu")
    head, drained = (int(control.words[w]) for w in (Word.HEAD, Word.DRAINED))
    kept = min(head - drained, control.capacity)
    place = torch.arange(drained, drained + kept) % control.capacity
    # which rows a full ring keeps depends on the order in which violations were found
    ring = sorted(control.ring[place].tolist()) if kept == head - drained else kept
    names = ("tokens", "positions", "chain", "owners", "flags", "reads")
    return {
        **{n: getattr(space, n)[:-1].tolist() for n in names},
        "clock": space.clock.tolist(),
        "counters": space.counters.tolist(),
        "words": control.words.tolist(),
        "ring": ring,
    }


def compare(impls: list[tuple[ModuleType, SlotSpace]], number: int) -> None:
    expected = state(impls[0][1])
    for _, own in impls[1:]:
        got = state(own)
        for key, value in expected.items():
            assert got[key] == value, f"plan {number}: {key} is {got[key]}, the reference has {value}"


def use_blocks(positions: int, tokens: int, requests: int, sums: int) -> None:
    """Let the kernels work in blocks of these sizes; small ones show what happens between blocks."""
    gpu_requests.BLOCK_POSITIONS, gpu_requests.BLOCK_TOKENS = positions, tokens
    gpu_requests.BLOCK_REQUESTS, gpu_requests.BLOCK_SUMS = requests, sums


def run_plans(seed: int, plans: int, device: str = "cpu", kernels: str = "torch") -> int:
    """The reference and one of :data:`IMPLEMENTATIONS` over random plans; how many violations the reference found."""
    rng = random.Random(seed)
    if kernels == "triton":
        use_blocks(*BLOCKS[seed // 10 % 2])
    space = random_space(rng)
    other = copy.deepcopy(space)
    if device != "cpu":
        control = Control(*[getattr(other.control, n).to(device) for n in ("words", "ring", "stamps")])
        other = dataclasses.replace(other.to(device), control=control)
    play(rng, space, [(space_reference, space), (IMPLEMENTATIONS[kernels], other)], plans)
    return int(space.control.words[Word.HEAD])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=100_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kernels", choices=IMPLEMENTATIONS, default="torch")
    parser.add_argument("--first", type=int, default=0, help="seed of the first plans, to share the work")
    args = parser.parse_args()
    started, done, found, shown = time.time(), 0, 0, 0.0
    while done < args.plans:
        found += run_plans(args.first + done, 10, args.device, args.kernels)
        done += 10
        if time.time() - shown > 5:
            shown = time.time()
            print(f"{done} of {args.plans} plans, {found} violations, bit-equal so far", flush=True)
    what, seconds = f"{done} random plans on {args.device} ({args.kernels})", time.time() - started
    print(f"{what}, {found} violations: bit-equal, {seconds:.0f} s")


if __name__ == "__main__":
    main()
