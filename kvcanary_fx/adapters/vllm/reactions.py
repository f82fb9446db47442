"""What a violation in a model runner does at once, and what it leaves for the scheduler."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from .counts import ENGINE, note_ended
from .ranks import RankVerdicts, join
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
        ranks: the other ranks of the engine; None if there are none.
        elsewhere: the outputs of this rank are dropped, and another's are read.
    """

    @classmethod
    def of(cls, settings: VllmSettings, page_sizes: list[int], parallel: Any) -> Reactions:
        """Of a rank.

        Args:
            parallel: vLLM's ``ParallelConfig``.
        """
        return cls(settings, page_sizes, join(parallel))

    def __init__(self, settings: VllmSettings, page_sizes: list[int], ranks: RankVerdicts | None = None):
        self.settings, self.ranks = settings, ranks
        self.elsewhere = ranks is not None and not ranks.reads
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
        """What the violations since the last call mean for requests and blocks, if there were any, on any rank."""
        taken, self.verdict = self.verdict, None
        told = self.ranks.read() if self.heard() and self.ranks is not None else None
        return told if taken is None else taken if told is None else taken.joined(told)

    def heard(self) -> bool:
        """Whether another rank has found something, and this is the one whose outputs are read."""
        return self.ranks is not None and self.ranks.reads and self.ranks.news()

    def told(self) -> None:
        """The violations are in the counts: tell the rank whose outputs are read, or say by which incident the engine
        ends.

        vLLM hears of an exception from the former only.  Another rank ends its process, which the engine's first one
        notices: the ranks would wait for it in the next layer.
        """
        found, self.news = self.news, 0
        ranks = self.ranks if self.elsewhere else None
        if ranks is not None and self.verdict is not None:
            ranks.tell(self.verdict)
            self.verdict = None
        if self.settings.on_violation == "raise":
            incident = new_id()
            log.error("kvcanary.vllm kv_cache_corruption %s: %d violations end the engine", incident, found)
            note_ended({ENGINE: incident})
            if ranks is not None:
                _end_process(ranks)


def _end_process(ranks: RankVerdicts) -> None:
    """End this process with status 1, whatever it is in the middle of."""
    error = sys.exc_info()[1]
    if error is not None:
        log.error("kvcanary.vllm this rank ends: %s", error)
    ranks.remove()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
