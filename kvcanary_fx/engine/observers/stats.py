"""Counts of an engine's session."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ...kernels.buffers import Count
from ...kernels.slots.space import REFERENCE, Flag, SpaceCount
from ...runtime.session import Stats
from ..guarded_pool import EnginePool
from .sweep import Sweep


@dataclasses.dataclass(frozen=True)
class EngineStats(Stats):
    """Counts of an engine's session since it was ready, over all pools.

    Attributes:
        engine_steps: steps that ended well.
        forwards: forwards of all pools.
        slots: slots that hold a token now; None if they were not counted, see :meth:`.EngineSession.stats`.
        slots_checked: slots whose identity was compared.
        sweeps: sweeps so far; ``swept`` the fingerprints they compared.
        compared_every: N of the share 1/N of the slots whose bytes are compared in a step.
        compared_within: seconds in which each slot's are, under a budget; 0 if unknown.
        by_check: violations by the name of the check.
    """

    engine_steps: int = 0
    forwards: int = 0
    slots: int | None = 0
    slots_checked: int = 0
    sweeps: int = 0
    swept: int = 0
    compared_every: int = 1
    compared_within: float = 0.0
    by_check: dict[str, int] = dataclasses.field(default_factory=dict)

    def flat(self) -> dict[str, float]:
        counts = {k: n for k, n in super().flat().items() if k != "by_check" and n is not None}
        return counts | {f"violations_{check}": n for check, n in sorted(self.by_check.items())}


def engine_stats(
    base: Stats, pools: Mapping[str, EnginePool], steps: int, sweep: Sweep, by_check: Mapping[str, int], slots: bool
) -> EngineStats:
    """The counts of a session; waits for the devices.

    Args:
        base: what graphs and the ring counted.
        steps: of the engine.
        by_check: violations, by check.
        slots: also count those that hold a token, which takes kernels.  All else is copied to the host: kernels beside
            those of a model make it slower (:mod:`.runtime.beside`).
    """
    counts: list[list[int]] = []
    opaque: list[list[int]] = []
    held = 0
    for pool in pools.values():
        # a thread that counts must not send allocator calls: they would run in its stream, beside those of the engine
        space, content = pool.on_device
        counts.append(space.counters.tolist())
        opaque += content.counts.tolist()
        if slots:
            flags = space.flags[:-1]
            held += int((((flags & int(Flag.WRITTEN)) != 0) & (flags >= REFERENCE)).sum())
    base = dataclasses.replace(
        base,
        checked=base.checked + sum(c[Count.CHECKED] for c in opaque),
        recorded=base.recorded + sum(c[Count.RECORDED] for c in opaque),
        adopted=base.adopted + sum(pool.adopted for pool in pools.values()),
    )
    return EngineStats(
        **dataclasses.asdict(base),
        engine_steps=steps,
        forwards=sum(c[SpaceCount.FORWARDS] for c in counts),
        slots=held if slots else None,
        slots_checked=sum(c[SpaceCount.CHECKED] for c in counts),
        sweeps=sweep.runs,
        swept=sweep.checked,
        by_check=dict(by_check),
    )
