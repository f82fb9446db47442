"""What an observer sees of an engine's session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ...errors import CanaryError
from ...reports.log import ViolationLog
from ...runtime.session import Stats
from ..forward import Schedule
from ..guarded_pool import Pools
from ..request_ids import RequestIds

if TYPE_CHECKING:
    from ...passes.graph_plan import GraphPlan
    from ...runtime.binding import GraphBinding


class Observed(Protocol):
    """The part of :class:`~.engine.session.EngineSession` that observers use; they are the session's, not the other way
    round.

    Attributes:
        pools: by name.
        ids: numbers of request ids.
        schedule: which observer runs how often.
        found: the violations so far.
        plans: of the compiled graphs.
        bindings: the same at run time.
    """

    pools: Pools
    ids: RequestIds
    schedule: Schedule
    found: ViolationLog
    plans: list[GraphPlan]
    bindings: list[GraphBinding]

    @property
    def steps(self) -> int:
        """Steps of the engine so far."""

    def stats(self) -> Stats:
        """The counts so far; waits for the devices."""

    def report_lost(self, error: CanaryError, cause: BaseException | None = None) -> None:
        """Checks did not run: raise or log, as the mode says."""
