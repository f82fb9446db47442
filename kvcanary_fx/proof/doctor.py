"""Self-proof: plant one fault per check on a scratch pool of the user's own layout; each must be reported.

A broken sanitizer looks exactly like a program without bugs.  The doctor distinguishes the two, on the user's device,
dtype and layout, through the same graph rewrite and the same kernels that guard the real pools.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from ..config import CanaryConfig
from ..engine.kv_pool import KVPool
from ..errors import SelfTestError
from ..kernels.checks import CHECKS
from ..kernels.writes.layout import FLOAT_DTYPES
from ..reports.summary import by_importance, muted
from .scratch import Scratch

#: Steps without a fault: a scratch ring is full after four slots, and wraps around.
_STEPS = 6


@dataclasses.dataclass(frozen=True)
class Finding:
    """The doctor's result for one check.

    Attributes:
        check: its name; ``silence`` for the run without a fault.
        fault: what was planted.
        ok: the check reported, and only where it should.
        told: the names of the checks that reported.
    """

    check: str
    fault: str
    ok: bool
    told: tuple[str, ...]


def _silence(scratch: Scratch) -> None:
    for _ in range(_STEPS):
        scratch.append()


def _misread(scratch: Scratch) -> None:
    scratch.misread()
    scratch.append()


def _free_early(scratch: Scratch) -> None:
    scratch.session.pool.release(scratch.slots_at([scratch.live]), owner="patient")
    scratch.append()


def _flip_and_read(scratch: Scratch) -> None:
    scratch.flip()
    scratch.append()


def _flip_and_sweep(scratch: Scratch) -> None:
    scratch.flip()
    scratch.session.sweep.run()


def _compare_ranks_that_differ(scratch: Scratch) -> None:
    scratch.session.compare_digests(1, 2)


#: The fault planted for each check, and how.
FAULTS: dict[str, tuple[str, Callable[[Scratch], None]]] = {
    "content": ("a flipped bit in a stored slot", _flip_and_read),
    "operand": ("a write that lands one slot further", lambda s: s.append(shift=1)),
    "bounds": ("a table entry beyond the pool", _misread),
    "poison": ("a NaN in what is written", lambda s: s.append(nan=True)),
    "chain": ("a position that is off by one", lambda s: s.append(positions=s.positions_off_by_one())),
    "index": ("a write that receives another slot", lambda s: s.append(astray=1)),
    "owner": ("a slot released while its request reads it", _free_early),
    "namespace": ("a prefix of another namespace", lambda s: s.append(namespaces=[7])),
    "token": ("a history that is not what is stored", lambda s: s.append(history=s.another_history())),
    "digest": ("two digests that differ", _compare_ranks_that_differ),
    "sweep": ("a flipped bit in an idle slot", _flip_and_sweep),
}


def examine(pool: KVPool, config: CanaryConfig) -> Iterator[Finding]:
    """Plant one fault per enabled check on a scratch copy of a pool's layout, after one run without any."""
    with muted():
        yield from _examine_all(pool, config)


def _examine_all(pool: KVPool, config: CanaryConfig) -> Iterator[Finding]:
    scratch = Scratch(pool, config)
    yield _examine(scratch, "silence", "nothing", _silence, None)
    floats = all(t.dtype in FLOAT_DTYPES for layer in pool.tensors for t in layer)
    for check, row in CHECKS.items():
        (fault, plant), told = FAULTS[check], (row.reports.name or "?").lower()
        if check in config.checks and told in config.checks and (check != "poison" or floats):
            yield _examine(scratch, check, fault, plant, told)


def _examine(scratch: Scratch, check: str, fault: str, plant: Callable[[Scratch], None], told: str | None) -> Finding:
    scratch.reset()
    before = scratch.session.violations()
    plant(scratch)
    found = by_importance(scratch.session.violations())
    names = tuple(dict.fromkeys(v.check for v in found))
    ok = not before and (names[:1] == (told,) if told is not None else not names)
    return Finding(check, fault, ok, names)


def require_health(pools: Sequence[KVPool], config: CanaryConfig) -> None:
    """Refuse to start if a check does not report its fault, or reports without one.

    Raises:
        SelfTestError: naming the checks.
    """
    failed = [f for pool in pools for f in examine(pool, config) if not f.ok]
    if failed:
        raise SelfTestError([(f.check, f.fault, f.told) for f in failed])
