"""What a session says: log lines, the order of violations, the summary."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..config import ZERO_CONFIG_CHECKS, CanaryConfig
from ..kernels.checks import CHECKS
from .violation import Violation

if TYPE_CHECKING:
    from ..passes.graph_plan import GraphPlan
    from ..runtime.session import CanarySession

#: The logger of violations and of lost coverage, ``kvcanary``.
log = logging.getLogger("kvcanary")

#: Violations logged one by one; the rest of a burst is counted in one line.
LINES_PER_DRAIN = 100

_OTHER_CUT = (
    "two graphs divide its bytes into different slots, in a way that cannot be translated: what one of them has "
    "written is not checked when the other one reads it"
)


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Keep the logger quiet: these violations are planted."""

    def drop(record: logging.LogRecord) -> bool:
        return False

    log.addFilter(drop)
    try:
        yield
    finally:
        log.removeFilter(drop)


def by_importance(violations: Sequence[Violation]) -> list[Violation]:
    """The causes before the consequences: a write out of bounds explains the content it destroyed."""
    return sorted(violations, key=lambda v: (v.step, CHECKS[v.check].place))


def emit(violations: Sequence[Violation], lines: Sequence[str], config: CanaryConfig) -> None:
    """Log what there is to say about violations, and hand each of them to the user's callback."""
    for line in lines[:LINES_PER_DRAIN]:
        log.warning("%s", line)
    if len(lines) > LINES_PER_DRAIN:
        log.warning("kvcanary.violations and %d more in this drain", len(lines) - LINES_PER_DRAIN)
    if config.on_violation is not None:
        for violation in violations:
            config.on_violation(violation)


def summarise(session: CanarySession) -> str:
    """The text of :meth:`CanarySession.summary`."""
    stats, plans = session.stats(), session.plans
    on = [c for c in session.config.checks if c not in session.checks_without_inputs()]
    lines = [
        f"kvcanary: mode {session.config.mode}, checks {', '.join(on) or 'none'}, "
        f"bytes of 1/{session.config.verify_every} of the slots checked each step",
        f"  steps {stats.steps}, fingerprints checked {stats.checked}, recorded {stats.recorded}, "
        f"adopted {stats.adopted}, violations {stats.violations}",
    ]
    for why, checks in _by_reason(session).items():
        lines.append(f"  off {', '.join(checks)}: {why}")
    lines += [f"  in part {c}: {why}" for c, why in session.checks_in_part().items() if c in session.config.checks]
    lines += [line for plan in plans for line in describe_plan(plan, session.config)]
    if session.eager_layers:
        lines.append(f"  guarded around each call of their own: {', '.join(session.eager_layers)}")
    elif not any(plan.guarded for plan in plans):
        lines.append("  nothing is guarded: no compiled graph writes a KV cache in place")
    lines += [f"    not      {pool}: {_OTHER_CUT}" for pool in dict.fromkeys(session.registry.lost)]
    lines += [f"  coverage lost: {why}" for why in session.uncovered]
    return "\n".join(lines)


def _by_reason(session: CanarySession) -> dict[str, list[str]]:
    """The configured checks of a session that lack what they need, by what that is."""
    reasons: dict[str, list[str]] = {}
    for check, why in session.checks_without_inputs().items():
        if check in session.config.checks:
            reasons.setdefault(why, []).append(check)
    return reasons


def describe_plan(plan: GraphPlan, config: CanaryConfig) -> list[str]:
    """What one graph guards, what it does not, and which checks are off, with reasons."""
    if not plan.guarded and not plan.unguarded and not plan.functional:
        return [f"  {plan.name}: writes no input"]
    lines = [f"  {plan.name}: {len(plan.sites)} halves guarded"]
    for op in plan.attention:
        lines.append(f"    guarded  {op.op} of layer {op.layer or '(an input of the graph)'}")
    for site in plan.sites:
        how = ", ".join(site.writes) or "only read here"
        how = f"a state for each sequence, {how}" if site.kind == "state" else how
        how += ", returned for the next call" if site.output is not None else ""
        axes = f"slots on axes {list(site.slot_axes)}" if site.slot_axes else "slots as in the graphs that write it"
        lines.append(f"    guarded  {site.name:40s} {site.pool}, {axes}, {how}")
    lines += [f"    not      {name}: {why}" for name, why in plan.unguarded]
    lines += [f"    cannot   {name}: rebuilt by cat each step" for name in plan.functional]
    lines += [f"    off      {check}: {why}" for check, why in checks_off(plan, config)]
    return lines


def checks_off(plan: GraphPlan, config: CanaryConfig) -> list[tuple[str, str]]:
    """The checks that do not run on a graph, each with its reason."""
    if not plan.guarded:
        return []
    off = [(c, "switched off by the setting 'checks'") for c in ZERO_CONFIG_CHECKS if c not in config.checks]
    if plan.sites and "chain" in config.checks and plan.chain_off is not None:
        off.append(("chain", plan.chain_off))
    for site in plan.sites:
        if site.opaque is not None:
            off.append(("operand, bounds", f"{site.name}: {site.opaque}"))
        elif site.kind == "read":
            off.append(("operand, bounds, poison", f"{site.name}: this graph only reads it"))
        elif not site.has_operand:
            off.append(("operand", f"{site.name}: its writes show no operand in the cache's dtype"))
        if not site.verified:
            off.append(("content", f"{site.name}: this graph overwrites all of it before it reads any"))
    return off
