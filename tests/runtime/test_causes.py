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


def record(
    check, why=None, half=None, slot=5, stored=0, found=0, seen=None, text=None, phase="pre", request="a", position=2
):
    told = Violation(
        check, phase, 3, "*", "*", "kv", None, slot, slot, position, stored, found, 0, request, None, why, text=text
    )
    return Record(told, 0, half, slot, seen)


def incident(*records, imported=False, extend=1, states=(0, 0, 0, 1, 1, 1, 2), owned=(3, 4, 5), slots=()):
    """A pool of two tensors; request ``a`` reads slots 4, 3 and 5, and writes slot 6.

    Args:
        owned: the slots that the request has allocated.
        slots: what is known of slots, in place of what it is by default.
    """
    halves = tuple(HalfScene(i, "layers.0", half, "kv", 1, "float32", (4,), (1, 2)) for i, half in enumerate("KV"))
    known = {
        s.slot: s for s in (SlotScene(5, "written", 1, "a", 9, 2, imported), SlotScene(6, "empty", 1, "a"), *slots)
    }
    batch = (RequestScene("a", 1, 3, extend, (9,), (6,), (3,), (4, 3, 5, 6)),)
    owners = torch.tensor([0 if slot in owned else -1 for slot in range(len(states))], dtype=torch.int32)
    pool = PoolScene(
        "kv",
        len(states),
        0,
        halves,
        tuple(known.values()),
        torch.tensor(states, dtype=torch.uint8),
        owners,
        ("a",),
        batch,
    )
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
MOVED, ONE_NAN, ALL_NAN = Evidence(True, None, 16, 0, (), (1,)), Evidence(True, None, 16, 1), Evidence(True, None, 8, 4)


@pytest.mark.parametrize(
    ("told", "cause"),
    [
        (incident(record("content", half=0, seen=FLIP)), "bit flip"),
        (incident(record("content", half=0, seen=CHANGED)), "early free"),
        (incident(record("content", half=0, seen=CHANGED, phase="post")), "wrong slot"),
        (incident(*(record("content", half=0, slot=s, seen=CHANGED) for s in (3, 5))), "wrong slot"),
        (incident(record("content", half=0, seen=CHANGED), record("content", half=1, seen=CHANGED)), "torn transfer"),
        (incident(record("content", half=0, seen=CHANGED), imported=True), "torn transfer"),
        (incident(record("content", half=0, seen=CHANGED, text="transfer")), "torn transfer"),
        (incident(*(record("content", half=h, seen=ZERO, text="transfer") for h in (0, 1))), "wrong rank"),
        (
            incident(
                *(record("content", half=h, seen=ZERO, text="transfer") for h in (0, 1)),
                imported=True,
                slots=[SlotScene(4, "written", 1, "a", 7, 0, imported=True)],
            ),
            "torn transfer",
        ),
        (incident(record("operand", half=0, slot=6, seen=MOVED)), "wrong slot"),
        (incident(record("operand", half=0, slot=6, seen=ZERO)), "lost write"),
        (incident(record("operand", half=0, slot=6, seen=CHANGED)), "wrong slot"),
        (incident(record("operand", half=0, slot=6, seen=CHANGED), extend=2), "lost write"),
        (incident(record("poison", half=0, slot=6, seen=ONE_NAN)), "bad value"),
        (incident(record("poison", half=0, slot=6, seen=ALL_NAN)), "padding"),
        (incident(record("poison", half=0, slot=0, seen=ONE_NAN), slots=[SlotScene(0, "reserved")]), "padding"),
        (incident(record("index", "READ_DIFFERS", found=5)), "stale table"),
        (incident(record("index", "READ_DIFFERS", found=6)), "wrong slot"),
        (incident(record("index", "NOT_THE_PLANNED_SLOT", slot=6, found=5, position=3)), "stale table"),
        (incident(record("index", "NOT_THE_PLANNED_SLOT", slot=6, found=3, position=3)), "too narrow"),
        (incident(record("index", "NOT_THE_PLANNED_SLOT", slot=6, found=1, position=3)), "wrong slot"),
        (incident(record("index", "NOT_THE_PLANNED_SLOT", slot=6, found=5, position=3), extend=2), "wrong slot"),
        (incident(record("owner", "READ_AFTER_FREE"), slots=[SlotScene(5, "free", 0, fits=True)]), "early free"),
        (incident(record("owner", "READ_AFTER_FREE"), slots=[SlotScene(5, "free", 0, fits=False)]), "stale table"),
        (incident(record("owner", "READ_AFTER_FREE", slot=2)), "stale table"),
        (incident(record("owner", "READ_AFTER_FREE", phase="sweep", request=None)), "double free"),
        (incident(record("owner", "FOREIGN_READ")), "early free"),
        (incident(record("owner", "FOREIGN_READ"), states=(0, 1, 0, 1, 1, 1, 2), owned=(1, 3, 4)), "stale table"),
        (incident(record("poison", "NEVER_WRITTEN")), "wrong position"),
        (incident(record("poison", "NEVER_WRITTEN", slot=4, position=0)), "uncleared"),
        (incident(record("poison", "NEVER_WRITTEN"), imported=True), "torn transfer"),
        (incident(record("bounds", "RESERVED_SLOT")), "stale table"),
        (incident(record("bounds", "RESERVED_SLOT", slot=6)), "padding"),
        (incident(record("token", "WRONG_TOKEN", slot=6)), "wrong token"),
        (
            incident(record("token", "WRONG_TOKEN", slot=6), slots=[SlotScene(6, "written", 1, "a", 8, 3)]),
            "wrong position",
        ),
        (incident(record("token", "WRONG_TOKEN"), slots=[SlotScene(5, "shared", 2, None, 8, 2)]), "wrong prefix"),
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
