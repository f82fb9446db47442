"""The observers of one session; they see its batches, forwards and steps."""

from __future__ import annotations

from collections.abc import Mapping

from ...kernels.slots.space import RequestPlan
from ...runtime.session import Stats
from .given import GivenInputs, in_part, without_inputs
from .health import Health
from .observed import Observed
from .stats import EngineStats, engine_stats
from .sweep import Sweep
from .windows import Windows


class Observers:
    """What looks at a session's pools between its steps.

    Attributes:
        given: the inputs of checks that the engine gave so far.
        sweep: checks of idle slots.
        health: proof that the writes of every layer are recorded.
        windows: what pools with a window held.
    """

    def __init__(self, session: Observed):
        self._session = session
        self.given = GivenInputs()
        self.sweep = Sweep(session, session.schedule.sweep)
        self.health, self.windows = Health(session), Windows(session)

    def reset(self) -> None:
        """The warm-up ended: count from here on."""
        self.windows.reset()
        self.given.reset()

    def after_forward(self, plans: Mapping[int, RequestPlan]) -> None:
        """A forward ended; ``plans`` says what it read and wrote, by the number of the slot space."""
        self.health.last_plans = self.windows.last_plans = plans

    @property
    def idle(self) -> bool:
        """Whether nothing is to be done after any step."""
        schedule = self._session.schedule
        return not (self.sweep.every or schedule.health or schedule.stats or schedule.windows)

    def after_step(self) -> None:
        """A step ended: run what the schedule says.

        Raises:
            UnrecordedLayersError: mode ``raise``, and a layer's writes are not recorded.
        """
        if self.sweep.every:
            self.sweep.after_step()
        schedule = self._session.schedule
        if schedule.health or schedule.stats:
            self.health.after_step()
        if schedule.windows:
            self.windows.after_step()

    def stats(self, base: Stats, slots: bool) -> EngineStats:
        """The counts of the session, out of those that every session has; ``slots`` as of :func:`engine_stats`."""
        session = self._session
        return engine_stats(base, session.pools, session.steps, self.sweep, session.found.by_check, slots)

    def checks_without_inputs(self) -> dict[str, str]:
        """The checks that cannot run in the session, each with what they lack."""
        plans = self._session.plans
        compare = any(plan.attention or any(site.has_operand for site in plan.sites) for plan in plans)
        swept = bool(self.sweep.every or self.sweep.runs)
        return without_inputs(self.given, self._session.pools, swept, compare)

    def checks_in_part(self) -> dict[str, str]:
        """The checks that run without some of their inputs, each with what is lost."""
        return in_part(self.given, self.checks_without_inputs())
