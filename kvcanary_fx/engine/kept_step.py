"""The step of an engine around a forward whose checks were kept.  See :mod:`.kept_forward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..kernels.context import publish, withdraw
from ..kernels.held import Held
from ..runtime.pace import Passing, Sample
from .kept_forward import KeptForward
from .steps import Steps


class GoingOn(NamedTuple):
    """What an engine begins a step with that goes on as the last one did, see :meth:`.LayerChecks.going_on`.

    Attributes:
        steps: it adds 1 to those that have begun, and to those that are done.
        passing: which of them may pass without a look; None without a budget.
        look: called in one that may not, with about how many tokens are stored: it returns what measures the step, if
            it is to be measured.
    """

    steps: Steps
    passing: Passing | None
    look: Callable[[float], Sample | None]


class KeptStep:
    """A step with one forward, whose checks were kept: around the model.

    No generator and nothing nested: it is entered in each decode step, which is often waiting for the host.  It may be
    entered again, for a step of as many requests and tokens.

    Attributes:
        in_graph: a graph of the model launches all checks.
        stored: about how many tokens the next step's batch has stored before; 0 if nobody knows.
    """

    def __init__(
        self,
        steps: Steps,
        kept: KeptForward,
        send: Callable[[int], None],
        size: tuple[int, int],
        measure: Callable[[float], Sample | None],
        held: Held | None = None,
        in_graph: bool = False,
        stored: float = 0,
    ):
        """
        Args:
            send: gives the device what ``take_in`` needs, given the number of the step.
            size: requests and tokens of the batch.
            measure: begins a measurement, if one is due for so many stored tokens.
            held: takes what the layers wrote until the model has run.
            in_graph, stored: as of :meth:`.LayerChecks.kept`.
        """
        self._steps, self._kept, self._send, self._size = steps, kept, send, size
        self._measure, self._held = measure, held
        self.in_graph, self.stored = in_graph, stored
        self._context = kept.context(size[1], held)

    def __enter__(self) -> None:
        sample = self._sample = self._measure(self.stored)
        try:
            self._steps.begin_kept(self._kept, self._send, *self._size)
            if not self.in_graph:
                self._kept.before()
        except BaseException:
            self._steps.leave_kept()
            raise
        self._published = publish(self._context)
        if sample is not None:
            sample.model_runs()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        withdraw(self._published)
        try:
            if kind is None:
                if self._sample is not None:
                    self._sample.model_ran()
                if self._held is not None:
                    self._held.flush()
                if not self.in_graph and self._kept.after is not None:
                    self._kept.after()
                self._steps.end_kept(self._kept)
                if self._sample is not None:
                    self._sample.end()
            elif self._held is not None:
                self._held.drop()
        finally:
            self._steps.leave_kept()
