"""Questions of a session that its graphs do not answer: pools, steps and requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..config import ENGINE_CHECKS
from ..kernels.context import ForwardContext
from ..reports.violation import Violation
from .bound_call import BoundCall
from .groups import Group, groups_of
from .registry import PoolRegistry


class Hooks:
    """The answers of a session that knows only its graphs.  An engine's: :mod:`kvcanary_fx.engine.hooks`.

    Attributes:
        pools_in: how many pools are in an input of a graph; None if no pools are declared.
        measures_calls: a budget is kept by timing calls; False if steps are timed.
    """

    pools_in: Callable[[Any], int] | None = None
    measures_calls = True

    def context_of(self, call: BoundCall) -> ForwardContext:
        """The context in which the ops of a call look things up."""
        return call.context

    def before_drain(self) -> bool:
        """The rings are about to be read.  Whether their rows count; else they are dropped."""
        return True

    def decode(self, row: Sequence[int]) -> Violation | None:
        """The record of a ring row; None if nothing is known beyond the graph's shadow."""
        return None

    def history(self, row: Sequence[int]) -> str | None:
        """What the slot of a ring row went through, in words; None if that is not kept."""
        return None

    def groups(self, registry: PoolRegistry) -> list[Group]:
        """The caches that are guarded, for the file of an incident."""
        return groups_of(registry)

    def checks_without_inputs(self) -> dict[str, str]:
        """The checks that cannot run, each with what it lacks."""
        return dict.fromkeys(ENGINE_CHECKS, "only an engine knows what they need (kvcanary_fx.install_canary)")

    def checks_in_part(self) -> dict[str, str]:
        """The checks that run without some of what they need, each with what is lost."""
        return {}
