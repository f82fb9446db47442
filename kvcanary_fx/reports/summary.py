"""A session's output: log lines, the order of violations, the summary."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..config import ZERO_CONFIG_CHECKS, CanaryConfig
from ..kernels.checks import CHECKS
from .violation import Violation

if TYPE_CHECKING:
    from ..passes.graph_plan import GraphPlan

#: The logger of violations and of lost coverage, ``kvcanary``.
log = logging.getLogger("kvcanary")

#: Violations logged one by one; the rest of a burst is counted in one line.
LINES_PER_DRAIN = 100

_NO_GRAPH = (
    "no graph was compiled for this session. The model was not called yet; or a function that was compiled with "
    "another backend calls it, whose graph then has all of it: compile that function with the canary; or nothing of it "
    "can be compiled (a generator, torch.compiler.disable, TORCHDYNAMO_DISABLE=1): TORCH_LOGS=graph_breaks shows why"
)
_OTHER_CUT = (
    "two graphs divide its bytes into different slots, in a way that cannot be translated: what one of them has "
    "written is not checked when the other one reads it"
)


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Keep the logger quiet: these violations are planted."""

    def drop(record: logging.LogRecord) -> bool:
        return False

    log.filters.insert(0, drop)  # before what keeps lines for an incident
    try:
        yield
    finally:
        log.removeFilter(drop)


def by_importance(violations: Sequence[Violation]) -> list[Violation]:
    """Sort causes before consequences: a write out of bounds explains the content it destroyed."""
    return sorted(violations, key=lambda v: (v.step, CHECKS[v.check].place))


def emit(violations: Sequence[Violation], lines: Sequence[str], config: CanaryConfig) -> None:
    """Log violations, and pass each of them to the user's callback."""
    for line in lines[:LINES_PER_DRAIN]:
        log.warning("%s", line)
    if len(lines) > LINES_PER_DRAIN:
        log.warning("kvcanary.violations and %d more in this drain", len(lines) - LINES_PER_DRAIN)
    if config.on_violation is not None:
        for violation in violations:
            config.on_violation(violation)


def summarise(
    config: CanaryConfig,
    every: int,
    counts: str,
    plans: Sequence[GraphPlan],
    *,
    off: Mapping[str, str],
    in_part: Mapping[str, str],
    eager_layers: Sequence[str],
    lost: Sequence[str],
    uncovered: Sequence[str],
    budget: Sequence[str] = (),
) -> str:
    """The text of :meth:`CanarySession.summary`.

    Args:
        every: N of the share 1/N of the slots whose bytes are checked each step.
        counts: what was done so far, as text.
        off, in_part: why checks do not run, or only in part, by check; also for checks that were not enabled.
        eager_layers: layers whose calls are guarded one by one.
        lost: pools on which two graphs disagree.
        uncovered: why coverage was lost.
        budget: what a budget buys, if there is one.
    """
    on = [c for c in config.checks if c not in off]
    lines = [
        f"kvcanary: mode {config.mode}, checks {', '.join(on) or 'none'}, "
        f"bytes of 1/{every} of the slots checked each step",
        *(f"  {line}" for line in budget),
        f"  {counts}",
    ]
    by_reason: dict[str, list[str]] = {}
    for check, why in off.items():
        if check in config.checks:
            by_reason.setdefault(why, []).append(check)
    lines += [f"  off {', '.join(checks)}: {why}" for why, checks in by_reason.items()]
    lines += [f"  in part {check}: {why}" for check, why in in_part.items() if check in config.checks]
    lines += [line for plan in plans for line in describe_plan(plan, config)]
    if eager_layers:
        lines.append(f"  guarded around each call of their own: {', '.join(eager_layers)}")
    elif not plans:
        lines.append(f"  nothing is guarded: {_NO_GRAPH}")
    elif not any(plan.guarded for plan in plans):
        lines.append("  nothing is guarded: no compiled graph writes a KV cache in place")
    lines += [f"    not      {pool}: {_OTHER_CUT}" for pool in dict.fromkeys(lost)]
    lines += [f"  coverage lost: {why}" for why in uncovered]
    return "\n".join(lines)


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
