"""The checks as vectorised torch, used on the CPU.  Bit-equal to :mod:`.naive`.

Sizes that depend on data (``nonzero``, ``unique``) are free here, and on a GPU they would be a host
sync each: there :mod:`.gpu` does the same work.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..buffers import NOT_WRITTEN, Count, Gate, IdentityBuffers, RowState, Site
from ..checks import Check, Phase, Why
from ..counting import count_op
from ..ring import UNKNOWN, Word, append
from ..slots.identity import identify_with
from ..slots.planned import is_planned, lost_writes
from ..slots.space import Flag, SlotSpace
from ..turns import taking_turns
from ..writes.layout import SlotLayout, poison_mask
from ..writes.plan import Resolved, WritePlan
from ..writes.plan import first_positions as first_positions
from ..writes.row_state import update_rows
from .digest import ZERO_STANDS_FOR, as_int32, coefficients, empty_digest

#: Words digested at a time: bounds the scratch memory of a check at about 64 MiB.
CHUNK_WORDS = 1 << 22


def rows_as_words(rows: torch.Tensor, layout: SlotLayout) -> torch.Tensor:
    """``rows`` (``[n, *row_shape]``, the pool's dtype) as int32 ``[n, words]``, zero-padded."""
    n, elements = rows.shape[0], layout.row_bytes // layout.dtype.itemsize
    flat = rows.reshape(n, elements)
    if flat.stride() != (elements, 1):  # also where a size of 1 left a stride that view() will not take
        flat = torch.empty(n, elements, dtype=rows.dtype, device=rows.device).copy_(flat)
    raw = flat.view(torch.uint8)
    tail = -layout.row_bytes % 4
    if tail:
        raw = torch.nn.functional.pad(raw, (0, tail))
    return raw.view(torch.int32)


def digest_words(words: torch.Tensor, seeds: tuple[int, int], planes: int) -> torch.Tensor:
    """Digests of int32 ``[n, words]``, in stored form: int32 ``[planes, n]``."""
    c, d = coefficients(words.shape[1], words.device)
    first = _mixed_sum(words, c, d) + as_int32(seeds[0])
    first.masked_fill_(first == 0, as_int32(ZERO_STANDS_FOR))
    if planes == 1:
        return first.unsqueeze(0)
    return torch.stack((first, _mixed_sum(words, d, c) + as_int32(seeds[1])))


def _mixed_sum(words: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``sum(mixed(w_i, a_i, b_i))`` of each row, int32 ``[n]``; see :mod:`.digest`."""
    u = (words >> 16).bitwise_and_(0xFFFF).bitwise_xor_(words).mul_(a)
    return _weighted((u >> 15).bitwise_and_(0x1FFFF).bitwise_xor_(u), b)


def _weighted(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``words @ weights`` modulo 2**32: int32 ``[n]``."""
    if words.is_cuda:  # which has no integer mv
        return (words * weights).sum(1, dtype=torch.int32)
    return torch.mv(words, weights)


def digest_rows(
    layout: SlotLayout,
    view: torch.Tensor,
    slots: torch.Tensor,
    seeds: tuple[int, int],
    planes: int,
    ascending: bool = False,
) -> torch.Tensor:
    """Digests of the rows of ``slots`` (int64 ``[n]``): int32 ``[planes, n]``.  Works on any device.

    Args:
        ascending: as of :meth:`.SlotLayout.gather`.
    """
    chunk = max(1, CHUNK_WORDS // max(1, layout.words))
    parts = [
        digest_words(rows_as_words(layout.gather(view, some, ascending), layout), seeds, planes)
        for some in slots.split(chunk)
    ]
    if not parts:
        return torch.empty(planes, 0, dtype=torch.int32, device=view.device)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def digest_slots(site: Site, view: torch.Tensor, slots: torch.Tensor, ascending: bool = False) -> torch.Tensor:
    """Digests of the rows of ``slots`` in the site's pool: int32 ``[planes, n]``.  See :func:`digest_rows`."""
    return digest_rows(site.layout, view, slots, _seeds(site), site.half.digest.shape[0], ascending)


def _seeds(site: Site) -> tuple[int, int]:
    return site.seed1, site.seed2


def packed(digests: torch.Tensor) -> torch.Tensor:
    """int32 ``[planes, n]`` as one int64 each: h1 in the low half, h2 (if kept) in the high one."""
    low = digests[0].to(torch.int64) & 0xFFFFFFFF
    return low if digests.shape[0] == 1 else low | (digests[1].to(torch.int64) << 32)


def _origins(site: Site, slots: torch.Tensor) -> torch.Tensor:
    rows = slots // site.layout.positions if site.layout.has_rows else torch.zeros_like(slots)
    return site.half.rows[rows, RowState.ORIGIN].to(torch.int64)


def report(
    site: Site,
    phase: Phase,
    check: Check,
    slots: torch.Tensor,
    stored: torch.Tensor | int,
    found: torch.Tensor | int,
    detail: torch.Tensor | int = 0,
    lenient: bool = False,
    why: Why = Why.NONE,
) -> None:
    """Append one ring row per slot in ``slots``; rows for which there is no room are counted and dropped."""
    if slots.numel() == 0:  # as almost always
        return
    who = site.space if check is Check.CONTENT or why else None  # may have changed when this is read
    append(
        site.control,
        torch.ones_like(slots, dtype=torch.bool),
        half=site.half_id,
        check=int(check),
        phase=phase,
        lenient=lenient,
        slot=slots,
        origin=_origins(site, slots.clamp(min=0)),
        stored=stored,
        found=found,
        detail=detail,
        request=who.owners[slots] if who is not None else 0,
        position=who.positions[slots] if who is not None else UNKNOWN,
        why=int(why),
    )


def begin(control_words: torch.Tensor, gate: torch.Tensor, counts: torch.Tensor | None = None) -> None:
    """Start one call of a guarded graph.

    Args:
        counts: of the plan, :attr:`.RequestPlan.counts`, where it may be that of no forward: nothing begins then.
    """
    if counts is not None and counts[0] < 0:
        return
    control_words[Word.STEP] += 1
    gate[Gate.STEP] += 1
    gate[Gate.LENIENT_NOW] = gate[Gate.LENIENT_NEXT]
    gate[Gate.LENIENT_NEXT] = 0
    count_op(gate)


def resolve(
    plan: WritePlan, layout: SlotLayout, index: list[torch.Tensor], extent: list[int], device: torch.device
) -> Resolved:
    """The slots of this step's write."""
    return plan.resolve_in_range(layout, index, extent, device) or plan.resolve(layout, index, extent, device)


def check_plan(site: Site, slots: torch.Tensor, raw: torch.Tensor, write_id: int, phase: Phase) -> None:
    """Bounds: indices outside the pool, and two tokens sent to one slot.

    Args:
        slots: int64 ``[n]``, the slot each token goes to as PyTorch resolves it; -1 for none.
        raw: int64 ``[n]``, equal to ``slots`` where the index was in range, else the index itself.
        write_id: tells this write from the others of the graph.
    """
    epoch, reached = _epoch(site, write_id), slots[slots >= 0]
    site.control.stamps[0, reached] = epoch
    twice = _duplicates(reached)
    if twice.numel():
        site.control.stamps[1, twice] = epoch
    if not site.checks & Check.BOUNDS:
        return
    if raw is not slots and not torch.equal(raw, slots):
        outside = raw != slots
        report(site, phase, Check.BOUNDS, slots[outside], raw[outside], slots[outside])
    if twice.numel():
        offenders = twice[~takes_padding(site, twice)]
        report(site, phase, Check.BOUNDS, offenders, offenders, offenders, detail=1)


def takes_padding(site: Site, slots: torch.Tensor) -> torch.Tensor:
    """bool ``[n]``: slots to which an engine sends all padding of a batch; slot 0 of a pool without rows, unless the
    engine declared others."""
    if site.space is not None:
        return (slots >= 0) & ((site.space.flags[slots.clamp(min=0)] & int(Flag.RESERVED)) != 0)
    return torch.zeros_like(slots, dtype=torch.bool) if site.layout.has_rows else slots == 0


def verify_write(*_: object) -> bool:
    """No launches to save here: :mod:`.gpu_write`."""
    return False


def record_write(*_: object) -> bool:
    """As :func:`verify_write`."""
    return False


def identify_write(*_: object) -> bool:
    """As :func:`verify_write`."""
    return False


def verify_layers(*_: object) -> bool:
    """As :func:`verify_write`."""
    return False


def record_layers(*_: object) -> bool:
    """As :func:`verify_write`."""
    return False


def _epoch(site: Site, write_id: int) -> torch.Tensor:
    return site.control.words[Word.STEP] * 65536 + write_id


def _duplicates(slots: torch.Tensor) -> torch.Tensor:
    """The slots that are named more than once, in order: int64 ``[m]``."""
    if slots.numel() < 2:  # a token of one request, as most often
        return slots[:0]
    unique, counts = slots.unique(return_counts=True)
    twice: torch.Tensor = unique[counts > 1]
    return twice


def verify(
    site: Site,
    view: torch.Tensor,
    first: torch.Tensor | None,
    ops: int = 0,
    coming: int | None = None,
    in_flight: bool = False,
    own_rows: bool = False,
) -> None:
    """Content: compare every due slot with its digest, and keep what was found.

    A mismatch is reported once, because the digest found replaces the one stored.

    Args:
        view: the pool half, shape ``site.layout.shape``.
        first: int32 ``[rows]``, the lowest position about to be written in each row (``NOT_WRITTEN``:
            none).  A row whose next write does not continue the last one was changed from outside; where that is
            possible (lenient) its slots are adopted instead of reported.
        ops: how many ops to count as run, see :mod:`.kernels.counting`.
        coming: number of the write to come, whose slots :func:`check_plan` has stamped: they are always due, since the
            record of the write replaces their digests.
        in_flight: the forward reads slots that it has yet to write itself.
        own_rows: only rows with a ``first`` are checked: a loop over sequences checks each before its own write.

    In an engine's pool the slots that the walk listed are due, and nothing is adopted: the engine reports its other
    writes. A planned slot without a digest was never written.
    """
    site.counters[Count.VERIFY_RUNS] += 1
    count_op(site.gate, ops)
    if site.space is None:
        slots, shifted = _due_slots(site, first, coming)
        if own_rows and first is not None:
            slots = slots[(first != NOT_WRITTEN)[slots // site.layout.positions]]
        if site.half.baseline is not None:
            site.half.baseline.copy_(site.half.digest[0])
    else:
        slots, shifted = _read_slots(site, site.space, in_flight), None
    if not site.checks & Check.CONTENT:
        slots = slots[:0]
    found, stored = digest_slots(site, view, slots, ascending=site.space is None), site.half.digest[:, slots]
    recorded = None if site.space is None else stored[0] != 0  # without an engine no others are due
    if not torch.equal(found, stored):
        bad = (found != stored).any(0)
        if recorded is not None:
            lost, bad = bad & ~recorded, bad & recorded
            report(site, Phase.PRE, Check.POISON, slots[lost], 0, 0, why=Why.NEVER_WRITTEN)
            site.half.digest[:, slots[lost]] = found[:, lost]
        _tell_changed(site, slots[bad], found[:, bad], shifted)
    site.counters[Count.CHECKED] += slots.numel() if recorded is None else recorded.sum()
    if first is not None and not _all_recorded(site.layout, slots, first):
        adopt(site, view, first)


def _all_recorded(layout: SlotLayout, slots: torch.Tensor, first: torch.Tensor) -> bool:
    """Whether recorded slots, in order, are seen to have all below the coming write among them: of one row, as most
    often."""
    if not layout.has_rows or layout.rows != 1:
        return False
    below = int(first[0])
    return below <= slots.numel() and (below == 0 or int(slots[below - 1]) == below - 1)


def _read_slots(site: Site, space: SlotSpace, in_flight: bool) -> torch.Tensor:
    """Slots of an engine's pool that are due, and that have a digest or should have: int64 ``[n]``."""
    slots = space.listed[: int(space.listed_count)].to(torch.int64)
    recorded = site.half.digest[0, slots] != 0
    if not site.checks & Check.POISON or not int(site.half.rows[0, RowState.NEXT]) or bool(recorded.all()):
        return slots[recorded]
    return slots[recorded | lost_writes(space, slots, in_flight)]


def _due_slots(site: Site, first: torch.Tensor | None, coming: int | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Recorded slots that are due: int64 ``[n]``; and where a change may be legal, :func:`_shifted_slots`."""
    now = bool(site.gate[Gate.LENIENT_NOW])
    shifted = _shifted_slots(site, first) if now or site.lenient else None
    due = site.half.digest[0] != 0
    every = int(site.control.every(site.verify_every))
    if every > 1 and not now:
        slot = torch.arange(due.numel(), device=due.device)
        turn = (slot + site.gate[Gate.STEP]) % every == 0
        if coming is not None:
            turn |= site.control.stamps[0, : due.numel()] == _epoch(site, coming)
        due &= turn if shifted is None else turn | shifted
    return due.nonzero().squeeze(1), shifted


def _tell_changed(site: Site, slots: torch.Tensor, found: torch.Tensor, shifted: torch.Tensor | None) -> None:
    """Report the slots whose bytes have changed, or adopt them where that may be legal; keep what was found."""
    adopted = torch.zeros_like(slots, dtype=torch.bool) if shifted is None else shifted[slots]
    stored, blamed = site.half.digest[:, slots], ~adopted
    report(
        site,
        Phase.PRE,
        Check.CONTENT,
        slots[blamed],
        packed(stored)[blamed],
        packed(found)[blamed],
        lenient=shifted is not None,
    )
    _keep(site, slots, found)
    site.counters[Count.ADOPTED] += adopted.sum()


def _keep(site: Site, slots: torch.Tensor, found: torch.Tensor) -> None:
    """Take ``found`` for what slots hold before this step's write."""
    site.half.digest[:, slots] = found
    if site.half.baseline is not None and site.space is None:
        site.half.baseline[slots] = found[0]


@taking_turns
def verify_halves(sites: Sequence[Site], views: Sequence[torch.Tensor], ops: int = 0, in_flight: bool = False) -> None:
    """:func:`verify` for all halves of a layer of an engine's pool; ``ops`` are counted once."""
    for site, view in zip(sites, views, strict=True):
        verify(site, view, None, ops, in_flight=in_flight)
        ops = 0


def _shifted_slots(site: Site, first: torch.Tensor | None) -> torch.Tensor:
    """bool ``[slots]``: slots of rows whose coming write does not continue the last one."""
    layout = site.layout
    if first is None or not layout.has_rows:
        return torch.zeros(layout.slots, dtype=torch.bool, device=site.half.digest.device)
    shifted = (first != NOT_WRITTEN) & (first != site.half.rows[:, RowState.NEXT])
    return shifted.repeat_interleave(layout.positions)


def adopt(site: Site, view: torch.Tensor, first: torch.Tensor) -> None:
    """Record, unverified, the unrecorded slots below the coming write: they were written outside.

    Those of a row whose write leaves a gap behind the last one, and those whose turn it is.
    """
    layout = site.layout
    if not layout.has_rows:
        return
    empty = (site.half.digest[0] == 0).view(layout.rows, layout.positions)
    position = torch.arange(layout.positions, device=empty.device)
    below = (position < first.unsqueeze(1)) & (first != NOT_WRITTEN).unsqueeze(1)
    slots = (empty & below).view(-1).nonzero().squeeze(1)
    if slots.numel() == 0:  # as in every step but the first
        return
    every, now = int(site.control.every(site.verify_every)), bool(site.gate[Gate.LENIENT_NOW])
    if every > 1 and not now:
        gap = (first > site.half.rows[:, RowState.NEXT])[slots // layout.positions]
        slots = slots[gap | ((slots + site.gate[Gate.STEP]) % every == 0)]
    _keep(site, slots, digest_slots(site, view, slots))
    site.counters[Count.ADOPTED] += slots.numel()


def record(
    site: Site,
    view: torch.Tensor,
    slots: torch.Tensor,
    values: torch.Tensor | None,
    write_id: int,
    last_position: torch.Tensor | None = None,
    moved: int | None = None,
    ops: int = 0,
    planned: bool = False,
) -> None:
    """Fingerprint the slots just written; compare them with the operand; look for NaN and Inf.

    Args:
        view: the pool half after the write.
        slots: int64 ``[n]``; -1 is skipped.
        values: ``[n, *row_shape]`` in the pool's dtype, what the write was given, or None.
        last_position: int64 ``[rows]``, the token position of the last token of each row, if known.
        moved: None for a write at chosen slots; for a write of all slots (a window that rolls), the tokens
            it took in, 0 if unknown.
        ops: how many ops to count as run, see :mod:`.kernels.counting`.
        planned: the slots are what a write received.  Those outside the forward's plan keep their digest, so that the
            next read finds the stray write.
    """
    live = slots >= 0
    site.counters[Count.RECORD_RUNS] += 1
    count_op(site.gate, ops)
    site.counters[Count.RECORDED] += live.sum()
    if not bool(live.all()):
        values = None if values is None else values[live]
        slots = slots[live]
    layout = site.layout
    words = rows_as_words(layout.gather(view, slots), layout)
    planes = site.half.digest.shape[0]
    found = digest_words(words, _seeds(site), planes)
    update_rows(site, slots, last_position, moved)
    if site.checks & Check.POISON:
        _check_poison(site, slots, words)
    if values is not None and site.checks & Check.OPERAND:
        _check_operand(site, slots, words, rows_as_words(values, layout), found, write_id)
    if site.space is not None:
        site.half.rows[0, RowState.NEXT] = 1
        if planned:
            kept = is_planned(site.space, slots)
            slots, found = slots[kept], found[:, kept]
    site.half.digest[:, slots] = found


def _check_operand(
    site: Site, slots: torch.Tensor, words: torch.Tensor, given: torch.Tensor, found: torch.Tensor, write_id: int
) -> None:
    """Compare what was written (int32 ``[n, words]``, its digests ``found``) with what the write was given."""
    if torch.equal(given, words):
        return
    bad = (given != words).any(1) & (site.control.stamps[1, slots] != _epoch(site, write_id))
    if site.space is not None:  # a store kernel may leave reserved slots alone
        bad &= ~takes_padding(site, slots)
    expected = packed(digest_words(given[bad], _seeds(site), found.shape[0]))
    report(site, Phase.POST, Check.OPERAND, slots[bad], expected, packed(found)[bad])


@taking_turns
def record_halves(
    sites: Sequence[Site],
    views: Sequence[torch.Tensor],
    slots: torch.Tensor,
    values: Sequence[torch.Tensor | None],
    write_id: int,
    ops: int = 0,
) -> None:
    """:func:`record` for all halves of a layer of an engine's pool, written at the same slots; ``ops`` count once."""
    for site, view, value in zip(sites, views, values, strict=True):
        record(site, view, slots, value, write_id, ops=ops)
        ops = 0


def _check_poison(site: Site, slots: torch.Tensor, words: torch.Tensor) -> None:
    bad = poisoned_words(words, site.layout)
    hit = bad.any(1)
    if bool(hit.any()):
        at = bad[hit].to(torch.int8).argmax(1)
        found = words[hit].gather(1, at.unsqueeze(1)).squeeze(1).to(torch.int64) & 0xFFFFFFFF
        report(site, Phase.POST, Check.POISON, slots[hit], 0, found, detail=at)


def poisoned_words(words: torch.Tensor, layout: SlotLayout) -> torch.Tensor:
    """bool ``[n, words]``: words that hold a NaN or an Inf of the pool's dtype."""
    mask, bits = poison_mask(layout.dtype)
    size = layout.dtype.itemsize
    if size >= 4:
        bad = (words & as_int32(mask)) == as_int32(bits)
        if size == 8:  # the exponent is in the high word
            bad[:, ::2] = False
        return bad
    bad = torch.zeros_like(words, dtype=torch.bool)
    for shift in range(0, 32, 8 * size):
        bad |= ((words >> shift) & mask) == bits
    return bad


def snapshot(site: Site, view: torch.Tensor) -> None:
    """Keep the digest of every slot, written or not: the state before a write that we cannot read.

    Unrecorded slots that hold anything but zeros were written outside, and are adopted: nothing shows how far a
    sequence goes.  Not in an engine's pool, where the engine reports such writes.
    """
    assert site.half.baseline is not None
    every = torch.arange(site.layout.slots, device=view.device)
    found = digest_slots(site, view, every)
    site.half.baseline.copy_(found[0])
    if site.space is None:
        empty = torch.tensor(empty_digest(_seeds(site)), dtype=torch.int32, device=found.device)[: found.shape[0]]
        fresh = (site.half.digest[0] == 0) & (found != empty.unsqueeze(1)).any(0)
        site.half.digest[:, fresh] = found[:, fresh]
        site.counters[Count.ADOPTED] += fresh.sum()


def record_changed(site: Site, view: torch.Tensor, planned: torch.Tensor | None = None) -> None:
    """Fingerprint the slots whose bytes differ from :func:`snapshot`, and look for NaN and Inf in them.

    Without a plan also those that an earlier write of the step changed and this one restored: a row that is cleared,
    then filled with the same token.

    Args:
        planned: bool ``[slots + 1]``, the slots that this forward may write, in an engine's pool.  A change of any
            other slot is a violation, and the slot keeps its digest.
    """
    assert site.half.baseline is not None
    site.counters[Count.RECORD_RUNS] += 1
    every = torch.arange(site.layout.slots, device=view.device)
    now = digest_slots(site, view, every)
    changed = now[0] != site.half.baseline
    if planned is None:
        changed |= (site.half.digest[0] != 0) & (now[0] != site.half.digest[0])
    slots = changed.nonzero().squeeze(1)
    if planned is not None:
        stray, slots = slots[~planned[slots]], slots[planned[slots]]
        if site.checks & Check.INDEX:
            report(site, Phase.POST, Check.INDEX, stray, packed(site.half.digest[:, stray]), packed(now[:, stray]))
    site.half.digest[:, slots] = now[:, slots]
    site.counters[Count.RECORDED] += slots.numel()
    if site.checks & Check.POISON and slots.numel():
        _check_poison(site, slots, rows_as_words(site.layout.gather(view, slots), site.layout))


def identify(
    site: Site, identity: IdentityBuffers, slots: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor
) -> None:
    """Chain: does a decoded token's position follow its predecessor's?  See :mod:`.slots.identity`."""
    identify_with(_report_masked, site, identity, slots, tokens, positions)


def _report_masked(
    site: Site,
    phase: Phase,
    check: Check,
    mask: torch.Tensor,
    slots: torch.Tensor,
    stored: torch.Tensor,
    found: torch.Tensor,
    detail: torch.Tensor,
) -> None:
    report(site, phase, check, slots[mask], stored[mask], found[mask], detail[mask])
