"""What surrounds a violation, read from the devices for an incident: the slots, their neighbours, the batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from ..kernels.ring import UNKNOWN
from ..kernels.slots.space import REFERENCE, Flag, SlotSpace
from ..reports.incidents import row_bytes
from ..reports.incidents.incident import (
    STATES,
    Evidence,
    HalfScene,
    PoolScene,
    RequestScene,
    SlotScene,
)
from . import prefix_fit
from .groups import Damage, Group
from .registry import PoolRegistry
from .row_search import RowSearch

#: Damaged slots of a pool that are shown in detail, and how many slots on either side of each.
DAMAGED, BESIDE = 32, 2

#: Bytes of slots in a file; damaged tensors come first.
MOST_BYTES = 32 << 20

#: Slots of a pool up to which the state of each is kept.
MOST_MAPPED = 1 << 22

#: Requests of a batch, and entries of their tables, tokens and slots.
REQUESTS, ENTRIES = 64, 4_096

#: Owners by name in a map.
OWNERS = 1_000


def pool_scene(
    group: Group, registry: PoolRegistry, damage: Sequence[Damage], search: RowSearch, room: int = MOST_BYTES
) -> PoolScene:
    """One pool, around the slots that failed a check.

    Args:
        search: in this pool.
        room: bytes that may be taken from the slots.
    """
    struck = list(dict.fromkeys(d.slot for d in damage if 0 <= d.slot < group.slots))[:DAMAGED]
    beside = {s + k for s in struck for k in range(-BESIDE, BESIDE + 1)}
    elsewhere = {row.slot for d in damage[:DAMAGED] for row in search.same(d, damage)}
    elsewhere |= {slot for d in damage[:DAMAGED] for slot in search.moved(d, damage)}
    slots = sorted(s for s in beside | elsewhere if 0 <= s < group.slots)
    near = torch.tensor(slots, dtype=torch.int64, device="cpu")
    states, owners = _states(group), None
    names: tuple[str | int, ...] = ()
    if group.space is not None and group.name_of is not None and group.slots <= MOST_MAPPED:
        owners, names = _owners(group.space, group.name_of)
    layout = group.halves[0].place.layout
    return PoolScene(
        name=group.name,
        slots=group.slots,
        positions=layout.positions if layout.two_axes else 0,
        halves=tuple(_halves(group, near, {d.number for d in damage}, room)),
        near=tuple(_near(group, registry, near, states, struck)),
        map=states if group.slots <= MOST_MAPPED else None,
        owners=owners,
        owner_names=names,
        batch=tuple(_requests(group)) if group.plan is not None else (),
    )


def evidence(pool: PoolScene, damage: Damage, search: RowSearch, others: Sequence[Damage]) -> Evidence | None:
    """What the bytes of a slot show; None if they are not at hand, or the check was not about bytes.

    Args:
        search: in this pool.
        others: what else failed.
    """
    half = next((h for h in pool.halves if h.id == damage.number), None)
    place = pool.place(damage.slot)
    if half is None or half.rows is None or half.recorded is None or place is None:
        return None
    row = half.rows[place]
    nonzero, poisoned = int((row != 0).sum()), row_bytes.poisoned(row, getattr(torch, half.dtype))
    if damage.poison:
        return Evidence(unchanged=poisoned > 0, bit=None, nonzero=nonzero, poisoned=poisoned)
    if not damage.digests:
        return None
    now = row_bytes.digests_of(row[None], half.seeds, half.recorded.shape[0]).tolist()
    return Evidence(
        unchanged=row_bytes.packed_equal(now[0], damage.found),
        bit=row_bytes.flipped_bit(row, half.seeds, damage.stored),
        nonzero=nonzero,
        poisoned=poisoned,
        same_as=tuple(search.same(damage, others)),
        moved_to=tuple(search.moved(damage, others)),
    )


def _states(group: Group) -> torch.Tensor:
    """uint8 ``[slots]`` on the host, each a number of :data:`STATES`."""
    number = {name: i for i, name in enumerate(STATES)}
    if group.space is None:
        recorded = torch.stack([h.buffers.digest[0] != 0 for h in group.halves]).any(0)
        return recorded.to("cpu", torch.uint8) * number["written"]
    flags = group.space.flags[:-1].cpu()
    states = torch.where((flags & int(Flag.WRITTEN)) != 0, number["written"], number["empty"])
    states[flags >= 2 * REFERENCE] = number["shared"]
    states[(flags & int(Flag.REJECTED)) != 0] = number["rejected"]
    states[flags < REFERENCE] = number["free"]
    states[(flags & int(Flag.RESERVED)) != 0] = number["reserved"]
    return states.to(torch.uint8)


def _owners(space: SlotSpace, name_of: Callable[[int], str | int | None]) -> tuple[torch.Tensor, tuple[str | int, ...]]:
    """int32 ``[slots]``, an index into the names, -1 for nobody."""
    hashes, place = space.owners[:-1].cpu().unique(return_inverse=True)
    names: list[str | int] = []
    numbers = torch.full((len(hashes),), -1, dtype=torch.int32, device="cpu")
    for i, hashed in enumerate(hashes.tolist()):
        name = name_of(hashed)
        if name is not None and len(names) < OWNERS:
            numbers[i] = len(names)
            names.append(name)
    return numbers[place], tuple(names)


def _near(
    group: Group, registry: PoolRegistry, near: torch.Tensor, states: torch.Tensor, struck: Sequence[int]
) -> Iterable[SlotScene]:
    space, known = group.space, _identities(group, registry, near)
    fit = prefix_fit.fits(space, group.plan, struck) if space is not None and group.plan is not None else {}
    imported = group.imported[near.to(group.imported.device)].tolist() if group.imported is not None else None
    pasts = group.histories(near.tolist()) if group.histories is not None else [None] * near.numel()
    for i, slot in enumerate(near.tolist()):
        token, position = (known[name][i] if known else UNKNOWN for name in ("tokens", "positions"))
        owner = group.name_of(known["owners"][i]) if group.name_of is not None and "owners" in known else None
        yield SlotScene(
            slot=slot,
            state=STATES[int(states[slot])],
            references=known["flags"][i] // REFERENCE if "flags" in known else None,
            owner=owner,
            token=token if token >= 0 else None,
            position=position if position != UNKNOWN else None,
            imported=imported is not None and imported[i],
            fits=fit.get(slot),
            past=pasts[i],
        )


def _identities(group: Group, registry: PoolRegistry, near: torch.Tensor) -> dict[str, list[int]]:
    """What is stored of who is in each of the slots, by name; without an engine's slot space not owners and flags."""
    space, identity = group.space, registry.identity_of(group.halves[0])
    if space is not None:
        columns = dict(tokens=space.tokens, positions=space.positions, owners=space.owners, flags=space.flags)
    elif identity is not None and identity.tokens.shape[0] > group.slots:
        columns = dict(tokens=identity.tokens, positions=identity.positions)
    else:
        return {}
    return {name: column[near.to(column.device)].tolist() for name, column in columns.items()}


def _halves(group: Group, near: torch.Tensor, damaged: set[int], room: int) -> Iterable[HalfScene]:
    """The halves in order; bytes of the damaged ones first, as long as there is room."""
    size = {h.id: near.numel() * h.place.layout.row_bytes for h in group.halves}
    taken: set[int] = set()
    for half in sorted(group.halves, key=lambda h: h.id not in damaged):
        if size[half.id] <= room:
            room -= size[half.id]
            taken.add(half.id)
    for half, view in zip(group.halves, group.views, strict=True):
        layout, there = half.place.layout, near.to(half.buffers.digest.device)
        rows = None
        if half.id in taken and view is not None and near.numel():
            gathered = layout.gather(view, there).reshape(near.numel(), -1).contiguous()
            rows = gathered.view(torch.uint8).cpu()
        yield HalfScene(
            id=half.id,
            layer=half.info.layer,
            half=half.info.half,
            pool=half.info.pool,
            heads=half.info.heads,
            dtype=str(layout.dtype).removeprefix("torch."),
            row_shape=layout.row_shape,
            seeds=half.seeds,
            recorded=half.buffers.digest[:, there].cpu(),
            rows=rows,
        )


def _requests(group: Group) -> Iterable[RequestScene]:
    """The real requests of the plan; a plan may be nonsense, since that is what checks are for."""
    plan, name_of = group.plan, group.name_of
    assert plan is not None
    count = min(int(plan.counts[0]), plan.rows.shape[0], REQUESTS)
    columns: Mapping[str, list[int]] = {
        name: getattr(plan, name)[:count].tolist() for name in ("rows", "prefix_lens", "extend_lens", "owners")
    }
    tokens, slots = plan.tokens.tolist(), plan.slots.tolist()
    positions = plan.positions.tolist() if plan.positions is not None else []
    end = 0
    for i in range(count):
        row, prefix, extend = columns["rows"][i], columns["prefix_lens"][i], max(columns["extend_lens"][i], 0)
        begin, end = end, end + extend
        table: list[int] = []
        if 0 <= row < plan.table.shape[0]:
            used = plan.table.shape[1] if plan.ring else -(-(max(prefix, 0) + extend) // plan.page_size)
            with contextlib.suppress(IndexError):
                table = plan.table[row, : min(used, ENTRIES)].tolist()
        yield RequestScene(
            request=name_of(columns["owners"][i]) if name_of is not None else None,
            row=row,
            prefix=prefix,
            extend=extend,
            tokens=tuple(tokens[begin:end][:ENTRIES]),
            slots=tuple(slots[begin:end][:ENTRIES]),
            positions=tuple(positions[begin:end][:ENTRIES]),
            table=tuple(table),
            page_size=plan.page_size,
        )
