"""Telling a legal change made outside the compiled graph from a corruption.

Between two calls of a guarded graph, code that we cannot see may legally rewrite slots: a prefill that is not compiled,
``cache.reset()``, a beam reordering.  PyTorch's version counters say *that* something wrote to a pool, not whether it
was legal: a stray write by an op counts as well.  If something else wrote (or may have: inference tensors have no
version counter, a captured graph runs without us), the change is compared with the recorded state, row by row.  A row
is a sequence; in a paged or flat pool all slots together, for running states each slot.  A slot is *empty* if it holds
zeros or was never recorded, and was not reported.

The first line that fits decides:

==========================================  =========================================================  ==========
what the row holds now                      why                                                        verdict
==========================================  =========================================================  ==========
zeros, in every half of every layer         ``reset()``, a row that is given up                        legal
in every half what one other row held       beams reordered in place                                   legal
zeros in its newest slots                   the next write goes on behind them: attention would read   violation
                                            zeros for tokens; a crop is written over instead
zeros from the next write to the row's end  a crop clears what it cut off                              legal
other bytes in K and V of every layer       a new prompt, a longer prefix: a token's K and V depend    legal
above the first, and in every later slot    on all tokens before it, so what follows changes too;
that is not empty                           the first layer's depend on the token alone
beside that: other bytes from some layer    a new prompt that begins as the last one did: products     legal
on                                          of another size may round otherwise
with one layer, or a latent in two: other   a new prompt, which may share tokens with the old one at   legal
bytes in both halves of the whole row, or   some places
of two slots at least and of half of those
from the lowest on; of two latents, where
a slot changed in both, those of the upper
one alone as well
bytes in slots that were empty              tokens that were added                                     legal
anything else                               a flipped bit, a wrong stride or a bad copy hits one half  violation
                                            or layer, or one slot among older ones
==========================================  =========================================================  ==========

Slots that a crop left behind the row's next write are not asked, unless one of them has changed.  In a paged or flat
pool, and in a cache that no guarded graph writes, the later slots are not considered: their writer may write single
slots.  Nor are they with several layers whose writes do not show their slots; slots after such a write belong to no
sequence.  A running state depends on all tokens, so all of a layer's states change at once.  For a half by
itself: at least two slots and half of those from the lowest on, or bytes in slots that were empty; in a pool also
zeros, if the half holds K and V.  After a break between K and V, where graphs of one half each make up a forward of
several layers, all of them are considered together; in a pool also those of one layer.

While a beam search runs, the second line alone decides, half by half and slot by slot (``exchanges_rows``).

Legal changes are adopted and counted.  So is a change of a reported slot back to the bytes from before: it was
repaired.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

import torch

from ..kernels.buffers import RowState
from ..kernels.checks import Check
from ..kernels.content.digest import MASK32, empty_digest
from ..kernels.ring import Ring
from .agreement import shown_by_all
from .pool_half import PoolHalf
from .registry import PoolRegistry

Row = Sequence[int]


@dataclasses.dataclass
class Verdict:
    """Ring rows sorted: violations, and slots adopted with how many fingerprints that was."""

    violations: list[Row]
    adopted_slots: int = 0
    adopted_fingerprints: int = 0


def judge(rows: Sequence[Row], registry: PoolRegistry, stamps: torch.Tensor, lost: int = 0) -> Verdict:
    """Sort the rows drained from one device's ring, which are in the order the ops wrote them.

    Args:
        stamps: int64 ``[2, slots]`` of the device's control block.
        lost: later rows for which the ring had no room.
    """
    verdict = Verdict([])
    changes, verdict.violations = _changes_by_step(rows, registry)
    # Only the last half to report can have lost some rows; those after it lost all of theirs.
    cut = rows[-1][Ring.HALF] if lost else None
    cleared: dict[tuple[int, int, int], set[int]] = defaultdict(set)  # by step and layout, legally
    for lead, members in changes:
        group = _Group(members, lead, registry, stamps)
        legal = group.legal() if cut not in lead.peers else group.rewritten(group.required(), group.reported - {cut})
        legal = _with_other_layers(group, legal, lead, rows, registry, stamps)
        alike = (group.step, lead.place.layout.slots, lead.place.layout.positions)
        if group.is_unwritten():
            legal |= group.empty() & cleared[alike]
        cleared[alike] |= group.empty() & legal
        exchanged = group.exchanged() if lead.exchanges_rows and cut not in lead.peers else None
        for slot, hits in group.by_slot.items():
            illegal = _illegal(slot, hits, legal, exchanged)
            if not illegal:
                verdict.adopted_slots += 1
                verdict.adopted_fingerprints += len(hits)
                group.settle(slot)
            else:
                for row in illegal:
                    _settle(row, registry, verdict)
    if cut is not None and rows[-1][Ring.LENIENT]:
        verdict.adopted_fingerprints += lost  # more of the same rewrite
    verdict.violations.sort(key=lambda r: r[Ring.STEP])
    for row in verdict.violations:
        half = registry.by_id(row[Ring.HALF])
        if half is not None and row[Ring.CHECK] == Check.CONTENT:
            half.reported.setdefault(row[Ring.SLOT], row[Ring.STORED])
    return verdict


def _changes_by_step(rows: Sequence[Row], registry: PoolRegistry) -> tuple[list[tuple[PoolHalf, list[Row]]], list[Row]]:
    """Changes that may be legal, those of a step and of halves that are judged together in one list; and all others.

    Each list comes with the half of its first row.
    """
    groups: dict[tuple[int, frozenset[int]], tuple[PoolHalf, list[Row]]] = {}
    others: list[Row] = []
    for row in rows:
        half = registry.by_id(row[Ring.HALF])
        if half is None or row[Ring.CHECK] != Check.CONTENT:
            others.append(row)
            continue
        if half.takes_turns:
            half.changed[row[Ring.SLOT]] = row[Ring.STEP]
        if row[Ring.LENIENT]:
            groups.setdefault((row[Ring.STEP], frozenset(half.peers)), (half, []))[1].append(row)
        else:
            others.append(row)
    return list(groups.values()), others


def _illegal(
    slot: int, hits: list[Row], legal: Collection[int], exchanged: Collection[tuple[int, int]] | None
) -> list[Row]:
    """Those of a slot's rows that are violations.

    Args:
        legal: slots whose change is.
        exchanged: halves and slots whose change is, if it is judged half by half.
    """
    if exchanged is not None:
        return [row for row in hits if (row[Ring.HALF], slot) not in exchanged]
    return [] if slot in legal else hits


def _with_other_layers(
    group: _Group,
    legal: set[int],
    lead: PoolHalf,
    rows: Sequence[Row],
    registry: PoolRegistry,
    stamps: torch.Tensor,
) -> set[int]:
    """What is legal by a group alone, less what other layers do not show, and what they show or this one writes."""
    held = legal & group.held()
    legal = legal - (held - shown_by_all(held, lead, group.step, rows, registry, stamps))
    if group.asks_other_layers():
        shown = shown_by_all(group.shown(), lead, group.step, rows, registry, stamps, incomparable_vetoes=True)
        legal |= group.without_gaps(shown)
    return legal | group.shown_beside()


def _settle(row: Row, registry: PoolRegistry, verdict: Verdict) -> None:
    """Adopt a change of a slot back to what it was before it was reported: it was repaired.  Any other is a violation.

    Seen with cross-attention: after a report the same prompt was encoded again, into the same bytes but for the slot
    whose corrupted bytes had been fingerprinted when they were reported.
    """
    half = registry.by_id(row[Ring.HALF])
    if half is None or half.reported.get(row[Ring.SLOT]) != row[Ring.FOUND]:
        verdict.violations.append(row)
        return
    del half.reported[row[Ring.SLOT]]
    verdict.adopted_slots += 1
    verdict.adopted_fingerprints += 1


class _Group:
    """The rows of one step and one slot space, and what its halves held around the change.

    Attributes:
        step: the call in which they changed.
        by_slot: the rows of each slot that changed.
        reported: ids of the halves that changed somewhere.
        beside: of a half that no guarded graph writes, the slots to which the graph writes the other half of the layer.
    """

    def __init__(self, rows: Sequence[Row], lead: PoolHalf, registry: PoolRegistry, stamps: torch.Tensor):
        self._lead, self._stamps, self.step = lead, stamps, rows[0][Ring.STEP]
        self._by_id = {h: half for h in lead.peers if (half := registry.by_id(h)) is not None}
        self._halves = list(self._by_id.values())
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.by_slot: dict[int, list[Row]] = defaultdict(list)
        self._by_half: dict[int, list[Row]] = defaultdict(list)
        for row in rows:
            self.by_slot[row[Ring.SLOT]].append(row)
            self._by_half[row[Ring.HALF]].append(row)
        self.reported = set(self._by_half)
        layout = lead.place.layout
        #: slots of one sequence
        self._length = layout.positions if layout.has_rows else 1 if lead.kind == "state" else layout.slots
        self._others = [half for number in lead.beside if (half := registry.by_id(number)) is not None]
        self.beside = self._written_beside() if lead.kind == "read" else set()

    def shown_beside(self) -> set[int]:
        """The slots to which the graph writes the other half; and what a crop has cleared behind them."""
        legal = self.beside & self.by_slot.keys()
        if not self._lead.place.layout.has_rows:
            return legal | self._cleared_beside()
        for row in {slot // self._length for slot in self.beside}:
            first, end = min(s for s in self.beside if s // self._length == row), (row + 1) * self._length
            behind = {slot for slot in self.by_slot if first <= slot < end} - self.beside
            filled = {row * self._length + int(p) for half in self._halves for p in self._now(half, row).nonzero()}
            legal |= behind if max(filled - self.beside, default=-1) < first else set()
        return legal

    def _cleared_beside(self) -> set[int]:
        """The slots of a pool that are empty, and of which the other half is, too."""
        empty = self.empty()
        for half in self._others:
            digests = half.buffers.digest[0].to(torch.int64).cpu() & MASK32
            mark = empty_digest(half.seeds)[0] & MASK32
            empty = {slot for slot in empty if int(digests[slot]) in (0, mark)}
        return empty if self._others else set()

    def _written_beside(self) -> set[int]:
        written: set[int] = set()
        for half in self._others:
            if half.buffers.baseline is not None:
                written |= set((half.buffers.baseline != half.buffers.digest[0]).nonzero().squeeze(1).tolist())
            else:
                stamped = self._stamps[0, : half.place.layout.slots] >> 16 >= self.step
                written |= set(stamped.nonzero().squeeze(1).tolist())
        return written

    # ---- what is asked

    def required(self) -> set[int]:
        """The halves that a legal rewrite of a slot changes."""
        above = self._above()
        return set(self._lead.peers) if len(above) < 2 else above  # one half says nothing alone

    def _above(self) -> set[int]:
        """The halves above the group's first layer."""
        peers, lowest = self._lead.peers, min(self._lead.peers.values())
        return {h for h, layer in peers.items() if layer > lowest}

    def rewritten(self, required: Iterable[int], among: Iterable[int]) -> set[int]:
        """The slots that changed in all required halves, of those in ``among``."""
        asked = set(required) & set(among)
        return {slot for slot, hits in self.by_slot.items() if asked <= {row[Ring.HALF] for row in hits}}

    def legal(self) -> set[int]:
        """The slots whose change is legal."""
        changed: dict[int, set[int]] = defaultdict(set)
        for slot in self.by_slot.keys() - self.beside:
            changed[slot // self._length].add(slot)
        required, above = self.required(), self._above()
        latents = self._lead.kind == "kv" and len(above) == 1 and len(required) == 2
        rewritten = self.rewritten(required, required)
        if len(required) < 2 and self._lead.kind == "state":
            rewritten = set()  # one alone says nothing
        legal: set[int] = set()
        for row, slots in changed.items():
            done = self._emptied(row, slots) or self._begun_elsewhere(row)
            new = slots if done else self._new_tokens(row, slots & rewritten, required)
            if not done and latents and slots & rewritten:
                # where the old prompt had the same token, the first layer holds the same; the second does not
                new |= self._new_tokens(row, slots & self.rewritten(above, above), above)
            new |= self._cleared(row, slots)
            legal |= slots if new != slots and self._moved(row, slots) else new
        return legal

    def is_unwritten(self) -> bool:
        """Whether no half has been written since the check, though each write of its graph may reach any slot.

        Seen where one tensor holds all layers, each a graph: the first one's finds what a crop has cleared in all of
        them, and the later ones' own writes, which show where the sequences end, come behind it.
        """
        return all(
            half.buffers.baseline is not None and torch.equal(half.buffers.baseline, half.buffers.digest[0])
            for half in self._halves
        )

    def empty(self) -> set[int]:
        """The slots that are empty now in each half that has changed there."""
        return {slot for slot, hits in self.by_slot.items() if all(self._is_empty(row) for row in hits)}

    def asks_other_layers(self) -> bool:
        """Whether the group is one half alone, or one above a first layer, and other graphs of the forward have the
        others: as behind a break between K and V.  Of one layer with rows a slot says too little.
        """
        peers, forward = self._lead.peers, self._lead.forward
        alone = len(peers) == 1 or len(self._above()) == 1
        if not alone or self._lead.kind != "kv" or forward is None:
            return False
        if self._lead.place.layout.has_rows and not forward.several_layers():
            return False
        return not peers.keys() >= set(forward.above_first())  # no other half to compare with

    def shown(self) -> set[int]:
        """The slots that changed in those of the group's halves that are above the first layer of the forward."""
        forward = self._lead.forward
        return self.rewritten([] if forward is None else forward.above_first(), self._lead.peers)

    def without_gaps(self, shown: set[int]) -> set[int]:
        """Those of the slots that are new tokens: with rows, every later slot that was not empty must be one, too."""
        if not self._lead.place.layout.has_rows:
            return shown
        new: set[int] = set()
        for row in {slot // self._length for slot in shown}:
            written = self._written(row)
            mine = {slot for slot in shown if slot // self._length == row}
            end = self._end(self._lead, row, mine) if written is None else written
            last = max((slot for slot in self._held(self._lead, row) if slot < end and slot not in shown), default=-1)
            mine -= self._given_up(row, mine, self._lead, written)
            new |= {slot for slot in mine if slot > last}
        return new

    def settle(self, slot: int) -> None:
        """A slot's change is legal: what was reported of it is of the past."""
        for half in self._halves:
            half.reported.pop(slot, None)

    def held(self) -> set[int]:
        """The slots that were not empty before the change."""
        return {slot for slot, hits in self.by_slot.items() if not all(self._was_empty(row) for row in hits)}

    # ---- the table's lines

    def _emptied(self, row: int, slots: set[int]) -> bool:
        """Whether a row is empty."""
        if not all(self._is_empty(r) for slot in slots for r in self.by_slot[slot]):
            return False
        return not any(bool(self._now(half, row).any()) for half in self._halves)

    def _begun_elsewhere(self, row: int) -> bool:
        """Whether the forward continues a row at another place than where its last write to this half ended.

        A graph that checks the half without writing it does not know; other halves of the row show it.
        """
        if not self._lead.place.layout.has_rows or self._lead.buffers.baseline is not None or self._lead.kind != "kv":
            return False
        part = slice(row * self._length, (row + 1) * self._length)
        written = (self._stamps[0, part] >> 16 >= self.step).nonzero().squeeze(1).tolist()
        ended = int(self._lead.buffers.rows[row, RowState.NEXT])  # in this step, if it was written by now
        return bool(written) and ended not in (written[0], written[-1] + 1)

    def _cleared(self, row: int, slots: set[int]) -> set[int]:
        """Those of the slots that are empty and hold no sequence's tokens any more.

        With rows, those from the step's write on, if all of the row is empty there: a crop clears what it cut off.  In
        a pool with K and V in one half each: both are empty.
        """
        lead, empty = self._lead, {s for s in slots if all(self._is_empty(r) for r in self.by_slot[s])}
        if lead.kind != "kv" or not empty:
            return set()
        if not lead.place.layout.has_rows:
            return empty if len(lead.peers) == 1 and lead.info.half == "KV" else set()
        if lead.buffers.baseline is not None:
            return set()
        filled = torch.stack([self._now(half, row) for half in self._halves]).any(0).nonzero().squeeze(1).tolist()
        written = (self._stamps[0, row * self._length : (row + 1) * self._length] >> 16 >= self.step).nonzero()
        begun = int(written[0]) if len(written) else int(lead.buffers.rows[row, RowState.NEXT])
        if max(filled, default=-1) >= begun:
            return set()
        return {slot for slot in empty if slot >= row * self._length + begun}

    def _moved(self, row: int, slots: set[int]) -> bool:
        """Whether a row holds in every half what one other row held."""
        count = self._lead.place.layout.slots // self._length
        if count == 1:
            return False
        first = self.by_slot[min(slots)][0]
        half, place = self._by_id[first[Ring.HALF]], first[Ring.SLOT] % self._length
        column = self._view(half)[0].view(count, self._length)[:, place]
        sources = (column == self._now(half, row)[place]).nonzero().squeeze(1).tolist()
        return any(source != row and self._same(row, source) for source in sources)

    def exchanged(self) -> set[tuple[int, int]]:
        """Halves and slots of a row that hold what another row did before: the one that is most like it.

        Seen: by the other rules, a bit that was flipped in a beam that had just got another one's cache was taken for a
        token of a new prompt, since the beam's newest tokens had changed in all halves.
        """
        count, came = self._lead.place.layout.slots // self._length, set()
        shape = (len(self._halves), count, self._length)
        before, now = (torch.stack(views).view(shape) for views in zip(*map(self._view, self._halves), strict=True))
        settled = torch.stack([self._settled(half, row) for half in self._halves for row in range(count)]).view(shape)
        for row in {slot // self._length for slot in self.by_slot}:
            differs = (now[:, row, None] != before) & settled[:, row, None] & settled
            source = int(differs.sum((0, 2)).argmin())
            for number, half in enumerate(self._halves):
                slots = (~differs[number, source]).nonzero().squeeze(1) + row * self._length
                came |= {(half.id, slot) for slot in slots.tolist()}
        return came

    def _same(self, row: int, source: int) -> bool:
        for half in self._halves:
            now, before = self._now(half, row), self._before(half, source)
            if bool(((now != before) & self._settled(half, row) & self._settled(half, source)).any()):
                return False
        return True

    def _new_tokens(self, row: int, slots: set[int], required: set[int]) -> set[int]:
        """Those of the slots that changed in all required halves that are new tokens of their row.

        A slot that was empty is one as it is.  Those that had tokens are, if they are enough for a new prompt.
        """
        alone = len(required) < 2
        if not slots or (not alone and self._lead.kind == "read"):
            return slots
        if not alone and not self._lead.place.layout.has_rows:
            return slots | self._rounded(slots)
        half = self._by_id[min(required)]
        written, held = self._written(row), set(self._held(half, row)) - self.beside
        given_up = self._given_up(row, slots, half, written)
        held |= {slot for slot in slots if any(slot in self._by_id[h].reported for h in required)}  # emptied by a fault
        slots, held = slots - given_up, held - given_up
        if written is not None:  # later slots belong to another sequence: as if they had been empty
            held = {slot for slot in held if slot < written}
        fresh, old = slots - held, slots & held
        if not old:
            return fresh
        held = {slot for slot in held if slot < self._end(half, row, old)}
        later = {slot for slot in held if slot >= min(old)}
        if required == set(self._lead.peers):  # one layer: equal tokens at a place have equal K and V
            several = len(old) >= 2 and 2 * len(old) >= len(later)
            prompt = several or (held <= old and not alone)
        elif half.buffers.baseline is not None:  # any slot may be written: what follows says nothing
            prompt = True
        else:
            prompt = later <= old
            if not alone:
                fresh |= self._computed_again(row, held, old)
        return fresh | old if prompt else fresh

    def _computed_again(self, row: int, held: set[int], old: set[int]) -> set[int]:
        """The slots of a row that were computed anew with a new prompt, which begins as the last one did.

        Products of another size may round otherwise.  Then a token's K and V differ from some layer on, or in one half
        of the last layer, where nothing else follows from them.  That other tokens are new shows by the newest ones.

        Args:
            held: the slots that were not empty before.
            old: those of them that changed in all required halves.
        """
        new, rounded, layers = old - self.empty(), set[int](), self._lead.peers
        newest = list(itertools.takewhile(new.__contains__, sorted(held, reverse=True)))
        for slot in self.by_slot.keys() - self.empty() if newest else ():
            changed = {hit[Ring.HALF] for hit in self.by_slot[slot]}
            lowest = min(layers[half] for half in changed)
            behind = {half for half, layer in layers.items() if layer >= lowest}
            if slot // self._length == row and (behind <= changed or len(newest) > 1):
                rounded.add(slot)
        return set(newest) | rounded

    def _rounded(self, new: set[int]) -> set[int]:
        """The slots of a pool that were computed anew beside new tokens: other in K and V from some layer on.

        As in :meth:`_computed_again`, but nothing tells which of a pool's slots are of one sequence, so a half by
        itself is a violation.  Seen: two prompts at once where they had come one by one, of which one was the old one.

        Args:
            new: the slots that changed in all required halves.
        """
        empty, layers = self.empty(), self._lead.peers
        rounded = set[int]()
        for slot in self.by_slot.keys() - empty if new - empty else ():
            changed = {hit[Ring.HALF] for hit in self.by_slot[slot]}
            lowest = min(layers[half] for half in changed)
            if len(changed) > 1 and {half for half, layer in layers.items() if layer >= lowest} <= changed:
                rounded.add(slot)
        return rounded

    def _held(self, half: PoolHalf, row: int) -> list[int]:
        """The slots of a row that were not empty before the change."""
        slots: list[int] = (self._before(half, row).nonzero().squeeze(1) + row * self._length).tolist()
        return slots

    def _given_up(self, row: int, slots: set[int], half: PoolHalf, written: int | None) -> set[int]:
        """The newest slots of a row, if they are empty now and the step's write went on behind them."""
        held, now = self._held(half, row), (self._now(half, row).nonzero() + row * self._length).squeeze(1).tolist()
        if half.kind == "read":
            return set()
        if half.buffers.baseline is not None:
            after = -1 if written is None else written + 1
        else:
            after = row * self._length + int(half.buffers.rows[row, RowState.NEXT])
            held, now = [slot for slot in held if slot < after], [slot for slot in now if slot < after]
        if not held or after <= held[-1] + 1:
            return set()  # unknown where the write continued, or it did not continue there
        newest = now[-1] if now else row * self._length - 1
        return {slot for slot in slots if newest < slot < after}

    def _end(self, half: PoolHalf, row: int, changed: set[int]) -> int:
        """The slot up to which a row's slots are asked: behind its sequence, a crop has left what it cut off.

        All are asked if one there has changed: a ring's older tokens are behind the next write.
        """
        end, last = row * self._length + int(half.buffers.rows[row, RowState.NEXT]), (row + 1) * self._length
        shown = half.buffers.baseline is None and half.place.layout.has_rows and half.kind != "read"
        return end if shown and max(changed) < end else last

    def _written(self, row: int) -> int | None:
        """The first slot of a row that a write which may reach any slot has changed; None where nothing shows it.

        A rolling window changes all of them, and shows nothing.
        """
        changed, held = torch.zeros(2, self._length, dtype=torch.bool, device="cpu")
        for half in self._halves:
            if half.buffers.baseline is not None:
                now, after = self._now(half, row), half.buffers.digest[0].to(torch.int64).cpu() & MASK32
                after = after[row * self._length : (row + 1) * self._length]
                changed |= torch.where(after == empty_digest(half.seeds)[0] & MASK32, 0, after) != now
                held |= now != 0
        first = int(changed.to(torch.int8).argmax())
        return row * self._length + first if bool(changed.any()) and bool(held[:first].any()) else None

    # ---- what is known

    def _is_empty(self, row: Row) -> bool:
        return row[Ring.FOUND] & MASK32 == self._empty(row)

    def _was_empty(self, row: Row) -> bool:
        return row[Ring.STORED] & MASK32 == self._empty(row)

    def _empty(self, row: Row) -> int:
        return empty_digest(self._by_id[row[Ring.HALF]].seeds)[0] & MASK32

    def _before(self, half: PoolHalf, row: int) -> torch.Tensor:
        """int64 ``[slots of a row]``: digests before the change, 0 where a slot was empty."""
        return self._view(half)[0][row * self._length : (row + 1) * self._length]

    def _now(self, half: PoolHalf, row: int) -> torch.Tensor:
        """The same, after the change and before the step's own write."""
        return self._view(half)[1][row * self._length : (row + 1) * self._length]

    def _settled(self, half: PoolHalf, row: int) -> torch.Tensor:
        """bool ``[slots of a row]``: what the slots held before the step's own write is known."""
        if half.buffers.baseline is not None:
            return torch.ones(self._length, dtype=torch.bool, device="cpu")
        part = slice(row * self._length, (row + 1) * self._length)
        return (self._stamps[0, part] >> 16 < self.step).cpu()

    def _view(self, half: PoolHalf) -> tuple[torch.Tensor, torch.Tensor]:
        """Digests of all slots (plane 0) before and after the change; slots written since count as empty."""
        if half.id not in self._views:
            buffers, count = half.buffers, half.place.layout.slots
            known = buffers.digest[0] if buffers.baseline is None else buffers.baseline
            known = known.to(torch.int64).cpu() & MASK32
            if buffers.baseline is None:
                known[(self._stamps[0, :count] >> 16 >= self.step).cpu()] = 0
            before, now = known, known.clone()
            changed = self._by_half.get(half.id, [])
            slots = [row[Ring.SLOT] for row in changed]
            for view, column in ((before, Ring.STORED), (now, Ring.FOUND)):
                view[slots] = torch.tensor([row[column] & MASK32 for row in changed], dtype=torch.int64, device="cpu")
            empty = empty_digest(half.seeds)[0] & MASK32
            for view in (before, now):
                view[view == empty] = 0
            self._views[half.id] = before, now
        return self._views[half.id]
