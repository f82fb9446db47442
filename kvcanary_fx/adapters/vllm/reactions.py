"""What a violation in a model runner does at once, and what it leaves for the scheduler."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from .counts import ENGINE, note_ended
from .settings import VllmSettings
from .verdict import Verdict, new_id

if TYPE_CHECKING:
    from ...reports.violation import Violation

log = logging.getLogger("kvcanary")

#: Lines about the violations that an exception reports; the exception has them all.
LINES = 10


class Reactions:
    """Of one model runner.

    Args:
        page_sizes: slots of a block of each KV cache group.

    Attributes:
        settings: of the runner's guard.
        news: violations that are not in the counts yet.
        late: not all bytes are compared in each step.
        logged: the session logs each violation by itself, also where the engine ends.
        page_sizes: slots of a block of each KV cache group, one of the pools' each.
        verdict: what violations mean for requests and blocks, not yet sent to a scheduler.
    """

    def __init__(self, settings: VllmSettings, page_sizes: list[int]):
        self.settings = settings
        self.news = 0
        self.late = self.logged = False
        self.verdict: Verdict | None = None
        self.page_sizes = page_sizes

    def flag(self, violation: Violation) -> None:
        """Called with each violation."""
        self.news += 1
        if self.settings.on_violation == "raise":
            if self.news <= LINES and not self.logged:  # otherwise the session logs it
                log.warning("%s", violation.line())
        else:
            if self.verdict is None:
                self.verdict = Verdict(outcome=self.settings.on_violation, late=self.late)
            self.verdict.add(violation, self.page_sizes)
        given = self.settings.config.on_violation
        if given is not None:
            given(violation)

    def take_verdict(self) -> Verdict | None:
        """What the violations since the last call mean for requests and blocks, if there were any."""
        taken, self.verdict = self.verdict, None
        return taken

    def told(self) -> None:
        """The violations are in the counts: if the engine is to end, say by which incident."""
        found, self.news = self.news, 0
        if self.settings.on_violation == "raise":
            incident = new_id()
            log.error("kvcanary.vllm kv_cache_corruption %s: %d violations end the engine", incident, found)
            note_ended({ENGINE: incident})
