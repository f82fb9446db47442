"""Which of the inputs that checks need an engine has given so far, and what is lost without the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from ...kernels.checks import CHECKS, Need
from ...reports import summary
from ..batch_fields import fields_of
from ..operands import Operands

if TYPE_CHECKING:
    from ..guarded_pool import EnginePool


#: The inputs of each check; docs/checks.md has them in a table.
NEEDS = tuple((check, need) for check, row in CHECKS.items() for need in row.needs)

_FIELDS = tuple(name for _, need in NEEDS for name in need.given if "." not in name)


class GivenInputs:
    """Counts the batches that had each input, and the calls that bring the others.

    Attributes:
        operands: K and V of layers whose checks the engine calls.
    """

    def __init__(self) -> None:
        self.operands = Operands()
        self.reset()

    def reset(self) -> None:
        """Count from here on."""
        self._batches, self._called = 0, Counter[str]()
        self._alike: dict[tuple[str, ...], int] = {}  # batches, by the fields that they had
        self._half_a_history = False
        self.operands.reset()

    def note(self, batch: Any) -> None:
        """A batch was given; an empty one needs nothing."""
        get = fields_of(batch)
        had = tuple([name for name in _FIELDS if get(name, None) is not None])
        if not _size(get("request_rows", None)):
            return
        self._batches += 1
        before = self._alike.get(had, 0)
        self._alike[had] = before + 1
        if before:
            return
        if ("history" in had) != ("history_lens" in had) and not self._half_a_history:
            self._half_a_history = True
            missing = "history_lens" if "history" in had else "history"
            summary.log.warning(
                "kvcanary.unguarded the token check is off: the batch has no %s. It needs history, the requests' own "
                "token ids [bs, length], and history_lens, how many of them are valid [bs]",
                missing,
            )

    def called(self, what: str) -> None:
        """A call gave an input that no batch has."""
        self._called[f"session.{what}"] += 1

    @property
    def _had(self) -> Counter[str]:
        """How often each input was given."""
        had = Counter(self._called)
        for names, batches in self._alike.items():
            had.update(dict.fromkeys(names, batches))
        return had

    def missing(self, need: Need) -> str | None:
        """Which inputs of a check were not given so far, in words; None if all were, each time."""
        calls, had = [name for name in need.given if "." in name], self._had
        if calls:
            return None if had[calls[0]] else f"{calls[0]} was not called"
        if not self._batches:
            return f"no batch with {' and '.join(need.given)} so far"
        never = [name for name in need.given if not had[name]]
        if never:
            return f"no batch had {' or '.join(never)}, of {self._batches}"
        least = min(need.given, key=lambda name: had[name])
        without = self._batches - had[least]
        return f"{without} of {self._batches} batches had no {least}" if without else None

    def off(self, need: Need) -> bool:
        """Whether a check has never run for want of inputs."""
        had = self._had
        return need.whole and any(not had[name] for name in need.given)


#: What the operand check does not find without K and V.
_NO_OPERAND = "what a write stored is not compared with what it was given"


def without_inputs(
    given: GivenInputs, pools: Mapping[str, EnginePool], swept: bool, graphs_compare: bool
) -> dict[str, str]:
    """The checks that cannot run in a session, each with what they lack.

    Args:
        swept: sweeps have a schedule, or the engine ran one itself.
        graphs_compare: the operand check runs in compiled graphs.
    """
    lacking = {}
    if not any(p.declared.allocations for p in pools.values()):
        lacking["owner"] = "no pool reports allocate and release (KVPool(allocations=False))"
    if not swept:
        lacking["sweep"] = "no schedule (install_canary(sweep_every=N)); session.sweep.run() runs one"
    for check, need in NEEDS:
        if given.off(need):
            lacking[check] = f"{given.missing(need)}: {need.lost}"
    if given.operands.none_compared and not graphs_compare:
        lacking["operand"] = f"{given.operands.told()}: {_NO_OPERAND}"
    return lacking


def in_part(given: GivenInputs, off: Collection[str]) -> dict[str, str]:
    """The checks of a session that run without some of their inputs, each with what is lost; without those ``off``."""
    missing = [(check, need, given.missing(need)) for check, need in NEEDS if check not in off]
    found = {check: f"{why}: {need.lost}" for check, need, why in missing if why is not None}
    operands = given.operands.told()
    if operands is not None and "operand" not in off:
        found["operand"] = f"{operands}: {_NO_OPERAND}"
    return found


def _size(given: Any) -> int:
    return len(given) if hasattr(given, "__len__") else 1
