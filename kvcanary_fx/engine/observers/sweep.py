"""The sweep: idle slots are checked on a schedule, all of them or a slice at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ...kernels.checks import Check, Phase, Why
from ...kernels.content.cpu import poisoned_words, rows_as_words
from ...kernels.findings import Findings
from ...kernels.slots.prefixes import check_listed
from ...kernels.slots.space import REFERENCE, Flag
from ...kernels.writes.layout import FLOAT_DTYPES
from ..arguments import require_whole
from ..guarded_pool import EnginePool
from ..kv_pool import Slots
from ..prefixes import Prefix, listed_slots
from .observed import Observed


class Sweep:
    """Checks of idle slots.

    Attributes:
        every: steps between two sweeps, 0 for none.
        budget: slots looked at in one sweep; the next one goes on from there.  None for all.
        runs, checked: sweeps so far, and fingerprints they compared.
    """

    def __init__(self, session: Observed, every: int, budget: int | None = None):
        self._session, self.every, self.budget = session, every, budget
        self.runs = self.checked = 0
        self._next: dict[str, int] = {}
        self._watched: dict[str, Callable[[], Iterable[Prefix]]] = {}

    def after_step(self) -> None:
        """Run if the schedule says so."""
        if not self.every or self._session.steps % self.every:
            return
        self.run()
        for name, prefixes in self._watched.items():
            pool = self._session.pools[name]
            check_listed(pool.space, listed_slots(prefixes(), pool, self._session.ids))

    def run(self, slots: Slots | None = None, pool: str | None = None, prefixes: Iterable[Prefix] | None = None) -> int:
        """Check the bytes of slots in every layer, that they are not free, and of prefixes who is in them.

        Args:
            slots: integer ``[n]``, in any order; None: the written ones, within the budget.
            pool: name of the pool; None for all.
            prefixes: what a prefix cache lists, with the order of the slots: positions, what each token follows,
                namespaces, owners and tokens are compared as in a forward that took the prefix.  Without ``slots``,
                exactly these slots are checked, whatever the budget.

        Returns:
            How many fingerprints were compared.
        """
        self.runs += 1
        checked, given = 0, None if prefixes is None else list(prefixes)
        for engine_pool in self._session.pools.values() if pool is None else [self._session.pools[pool]]:
            checked += self._run(engine_pool, slots, given)
        self.checked += checked
        return checked

    def watch(self, prefixes: Callable[[], Iterable[Prefix]] | None, pool: str | None = None) -> None:
        """What scheduled sweeps take for the prefixes of a pool, besides the written slots.

        Args:
            prefixes: called at each scheduled sweep; None for none.
            pool: name of the pool; None for all.

        Raises:
            EngineError: no such pool.
        """
        for name in list(self._session.pools) if pool is None else [self._session.pools[pool].name]:
            self._watched.pop(name, None)
            if prefixes is not None:
                self._watched[name] = prefixes

    def _run(self, pool: EnginePool, slots: Slots | None, prefixes: list[Prefix] | None) -> int:
        chosen = pool.slot_tensor(slots) if slots is not None else None
        if prefixes is not None:
            listed = listed_slots(prefixes, pool, self._session.ids)
            check_listed(pool.space, listed)
            if chosen is None:
                self._check_reserved(pool)
                return self._check_bytes(pool, listed.slots.unique())
        chosen = self._due(pool) if chosen is None else chosen
        self._check_place(pool, chosen)
        self._check_reserved(pool)
        return self._check_bytes(pool, chosen)

    def _due(self, pool: EnginePool) -> torch.Tensor:
        """The next slice of the written slots."""
        flags = pool.space.flags[:-1]
        written = (((flags & int(Flag.WRITTEN)) != 0) & (flags >= REFERENCE)).nonzero().squeeze(1)
        if self.budget is None or written.numel() <= self.budget:
            return written
        start = self._next.get(pool.name, 0)
        ahead = torch.cat((written[written >= start], written[written < start]))[: self.budget]
        self._next[pool.name] = int(ahead[-1]) + 1
        return ahead

    def _check_place(self, pool: EnginePool, slots: torch.Tensor) -> None:
        """A slot that a prefix cache lists must exist and not be free."""
        space = pool.space
        outside = (slots < 0) | (slots >= space.slots)
        at = torch.where(outside, space.nowhere, slots)
        findings = Findings(torch.ones_like(outside), space.checks)
        findings.add(Why.OUT_OF_RANGE, outside, slots, -1)
        findings.stop(outside)
        if space.owner_known:
            findings.add(Why.READ_AFTER_FREE, space.flags[at] < REFERENCE, 0, 0)
        needed = int(Flag.WRITTEN | Flag.RESERVED)
        findings.add(Why.NEVER_WRITTEN, (space.flags[at] & needed) == 0, 0, 0)
        findings.report(
            space.control, space.space_id, Phase.SWEEP, slots, space.positions[at], space.owners[at], space.tokens[at]
        )

    def _check_bytes(self, pool: EnginePool, slots: torch.Tensor) -> int:
        """Compare the bytes of slots with their digests; a mismatch is reported once."""
        if not pool.space.checks & Check.CONTENT:
            return 0
        slots = slots[(slots >= 0) & (slots < pool.space.slots)]
        recorded = int((pool.digests[:, 0, slots] != 0).sum())
        pool.content.verify(slots, None, None, Phase.SWEEP)
        return recorded

    def _check_reserved(self, pool: EnginePool) -> None:
        """A reserved slot takes padding, and is read by masked tiles: a NaN there poisons them, as 0 * NaN is NaN."""
        declared = pool.declared
        slots = pool.slot_tensor([slot for slot in declared.reserved if slot not in declared.never_read])
        for half, view in zip(pool.halves, pool.views, strict=True):
            layout = half.place.layout
            if not slots.numel() or layout.dtype not in FLOAT_DTYPES:
                continue
            words = rows_as_words(layout.gather(view, slots), layout)
            bad = poisoned_words(words, layout)
            at = bad.to(torch.int8).argmax(1)
            found = words.gather(1, at.unsqueeze(1)).squeeze(1).to(torch.int64) & 0xFFFFFFFF
            findings = Findings(torch.ones_like(slots, dtype=torch.bool), pool.space.checks)
            findings.add(Check.POISON, bad.any(1), 0, found)
            findings.report(pool.space.control, half.id, Phase.SWEEP, slots, detail=at)

    def report_digest(self, pool: EnginePool, mine: int, theirs: int, request: int) -> None:
        """Report two digests that differ.

        Raises:
            EngineError: they are no digests.
        """
        for digest in (mine, theirs):
            require_whole("a digest", digest, -(1 << 63), "64 bits, as session.digest() returns")
        space = pool.space
        differs = torch.tensor([mine != theirs], device=space.flags.device)
        findings = Findings(torch.ones_like(differs), space.checks)
        findings.add(Why.DIGEST_DIFFERS, differs, mine, theirs)
        findings.report(space.control, space.space_id, Phase.LIFE, -1, request=request, detail=-1)
