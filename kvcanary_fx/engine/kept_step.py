"""The step of an engine around a forward whose checks were kept.  See :mod:`.kept_forward`."""

from __future__ import annotations

from collections.abc import Callable

from ..kernels.context import publish, withdraw
from ..runtime.pace import Sample
from .kept_forward import KeptForward
from .steps import Steps


class KeptStep:
    """A step with one forward, whose checks were kept: around the model.

    No generator and nothing nested: it is entered in each decode step, which is often waiting for the host.
    """

    def __init__(
        self,
        steps: Steps,
        kept: KeptForward,
        send: Callable[[int], None],
        size: tuple[int, int],
        measure: Callable[[], Sample | None],
    ):
        """
        Args:
            send: copies to the device what ``take_in`` needs, given the number of the step.
            size: requests and tokens of the batch.
            measure: begins a measurement, if one is due.
        """
        self._steps, self._kept, self._send, self._size = steps, kept, send, size
        self._measure = measure

    def __enter__(self) -> None:
        self._sample = self._measure()
        try:
            self._steps.begin_kept(self._kept, self._send, *self._size)
        except BaseException:
            self._steps.leave_kept()
            raise
        self._published = publish(self._kept.context(self._size[1]))
        if self._sample is not None:
            self._sample.model_runs()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        withdraw(self._published)
        try:
            if kind is None:
                if self._sample is not None:
                    self._sample.model_ran()
                self._steps.end_kept(self._kept)
                if self._sample is not None:
                    self._sample.end()
        finally:
            self._steps.leave_kept()
