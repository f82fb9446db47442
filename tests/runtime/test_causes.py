"""The likeliest cause of an incident: every reason has one, and what is known of the slots decides between several."""

from __future__ import annotations

import pytest
import torch

from kvcanary_fx import Violation
from kvcanary_fx.kernels.checks import CHECKS, Why
from kvcanary_fx.reports.incidents.causes import CAUSES, likely
from kvcanary_fx.reports.incidents.incident import (
    Evidence,
    HalfScene,
    Incident,
    PoolScene,
    Record,
    RequestScene,
    SlotScene,
)


def record(check, why=None, half=None, slot=5, stored=0, found=0, seen=None, text=None):
    told = Violation(check, "pre", 3, "*", "*", "kv", None, slot, slot, 2, stored, found, 0, "a", None, why, text=text)
    return Record(told, 0, half, slot, seen)


def incident(*records, imported=False, extend=1, states=(0, 0, 0, 0, 0, 1, 2)):
    """A pool of two tensors; request ``a`` writes slot 6."""
    halves = tuple(HalfScene(i, "layers.0", half, "kv", 1, "float32", (4,), (1, 2)) for i, half in enumerate("KV"))
    near = (SlotScene(5, "written", 1, "a", 9, 2, imported=imported), SlotScene(6, "empty", 1, "a"))
    batch = (RequestScene("a", 1, 3, extend, (9,), (6,), (3,), (4, 3, 5, 6)),)
    pool = PoolScene("kv", len(states), 0, halves, near, torch.tensor(states, dtype=torch.uint8), batch=batch)
    return Incident("2026-01-01T00:00:00", "violation", records, len(records), (pool,), {}, {})


@pytest.mark.parametrize("why", [why.name for why in Why if why is not Why.NONE])
def test_every_reason_has_a_cause(why):
    names = likely(incident(record("owner", why)))
    assert set(names) <= CAUSES.keys() - {"unknown"}
    assert len(set(names)) == len(names) >= 1


@pytest.mark.parametrize("check", sorted(CHECKS.keys() - {"sweep", "owner", "namespace", "token", "digest"}))
def test_every_check_without_a_reason_has_a_cause(check):
    assert likely(incident(record(check))) != ["unknown"]


FLIP, CHANGED, ZERO = Evidence(True, 7, 16, 0), Evidence(True, None, 16, 0), Evidence(True, None, 0, 0)


@pytest.mark.parametrize(
    ("told", "cause"),
    [
        (incident(record("content", half=0, seen=FLIP)), "bit flip"),
        (incident(record("content", half=0, seen=CHANGED)), "wrong slot"),
        (incident(record("content", half=0, seen=CHANGED), record("content", half=1, seen=CHANGED)), "torn transfer"),
        (incident(record("content", half=0, seen=CHANGED), imported=True), "torn transfer"),
        (incident(record("content", half=0, seen=CHANGED, text="transfer")), "torn transfer"),
        (incident(*(record("content", half=h, seen=ZERO, text="transfer") for h in (0, 1))), "wrong rank"),
        (incident(record("index", "READ_DIFFERS", found=5)), "stale table"),
        (incident(record("index", "READ_DIFFERS", found=6)), "wrong slot"),
        (incident(record("owner", "FOREIGN_READ")), "early free"),
        (incident(record("owner", "FOREIGN_READ"), extend=4), "wrong prefix"),
        (incident(record("chain", "WRONG_POSITION", slot=6, stored=3, found=0)), "wrong position"),
        (incident(record("chain", "WRONG_POSITION", stored=2, found=9)), "torn transfer"),
        (incident(record("chain", "WRONG_PREDECESSOR")), "wrong prefix"),
        (incident(record("chain", "WRONG_PREDECESSOR"), imported=True), "torn transfer"),
        (incident(record("bounds", "OUT_OF_RANGE", stored=-1)), "padding"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_known_of_the_slots_decides(told, cause):
    assert likely(told)[0] == cause


def test_without_violations_there_is_no_cause_and_without_a_rule_it_is_unknown():
    assert likely(incident()) == []
    assert likely(incident(record("novel"))) == ["unknown"]
