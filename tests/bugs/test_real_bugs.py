"""Documented KV-cache bugs of engines and libraries: the faulty one is reported, its repaired twin is silent.

On a GPU, the plays' tensors and those that the canary makes go where ``torch.device`` says: some engines run like that.
"""

from __future__ import annotations

import cache_layouts  # noqa: F401
import index_spaces  # noqa: F401
import lifetimes  # noqa: F401
import padding  # noqa: F401
import positions  # noqa: F401
import prefixes  # noqa: F401
import pytest
import transfers  # noqa: F401
from cases import BUGS, Bug

from kvcanary_fx import Violation
from kvcanary_fx.reports.summary import by_importance

EVERY = pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.number)


def reported(bug: Bug, faulty: bool) -> tuple[list[Violation], tuple[int | None, str | None]]:
    """The violations of a play, the most telling first, and where they should be."""
    outcome = bug.play(faulty)
    found = [v for session in outcome.sessions for v in session.violations()]
    return by_importance(found), (outcome.slot, outcome.request)


@EVERY
def test_bug_is_reported_at_its_slot_and_request(bug, device, on_device, record_property):
    found, (slot, request) = reported(bug, True)
    if device == "cpu":
        record_property("bug", (bug.number, bug.source, bug.check or "-", found[0].check if found else "-"))
    if bug.check is None:
        assert not found, f"documented as out of reach, but reported: {found[0].explain()}"
        return
    assert found, "nothing was reported"
    allowed = (bug.check, *bug.also)
    here = [v for v in found if slot in (None, v.slot) and request in (None, v.request)]
    assert here, f"reported elsewhere: {[v.line() for v in found]}"
    assert here[0].check in allowed, here[0].explain()
    assert found[0].check in allowed, found[0].explain()


@EVERY
def test_repaired_twin_is_silent(bug, on_device):
    found, _ = reported(bug, False)
    assert not found, [v.line() for v in found]


def test_every_entry_of_the_collection_is_played():
    assert len({b.number for b in BUGS}) == len(BUGS) == 64
