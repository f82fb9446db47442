"""What a session asks whoever knows more than its graphs show: pools, steps and requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..config import ENGINE_CHECKS
from ..kernels.context import ForwardContext
from ..reports.violation import Violation
from .bound_call import BoundCall


class Hooks:
    """The answers of a session that knows its graphs alone.  An engine's: :mod:`kvcanary_fx.engine.hooks`.

    Attributes:
        pools_in: how many pools are in an input of a graph; None where no pools are known beforehand.
        measures_calls: a budget is kept by the time of calls; False where steps are measured.
    """

    pools_in: Callable[[Any], int] | None = None
    measures_calls = True

    def context_of(self, call: BoundCall) -> ForwardContext:
        """What the ops of a call look things up in."""
        return call.context

    def before_drain(self) -> bool:
        """The rings are about to be read.  Whether their rows count; else they are dropped."""
        return True

    def decode(self, row: Sequence[int]) -> Violation | None:
        """The record of a ring row; None if there is no more to say about it than the graph's shadow has."""
        return None

    def checks_without_inputs(self) -> dict[str, str]:
        """The checks that cannot run, each with what they lack."""
        return dict.fromkeys(ENGINE_CHECKS, "only an engine knows what they need (kvcanary_fx.install_canary)")

    def checks_in_part(self) -> dict[str, str]:
        """The checks that run without some of what they need, each with what is lost."""
        return {}
