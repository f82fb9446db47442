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
from kvcanary_fx.reports.past import PastEvent, SlotHistory


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


def past(text, read_before=None, earlier=0, step=3):
    """A history from words such as ``allocate a 1, write a 2``: kind, request and step."""
    events = [
        PastEvent(kind, int(step), None if who == "-" else who) for kind, who, step in map(str.split, text.split(","))
    ]
    written = next((e for e in reversed(events) if e.kind == "write"), None)
    return SlotHistory(tuple(events), earlier, written, 1, read_before, step, read_before)


def told_of(history, *records, extend=1, state="written", fits=None, **known):
    """The first cause where the slot went through that."""
    slot = SlotScene(records[0].slot, state, 1, "b", 9, 2, fits=fits, past=history)
    return likely(incident(*records, slots=[slot], extend=extend, **known))[0]


HAD = "allocate a 1, write a 1, release a 1, allocate b 1, write b 2"
NEVER_HAD = "allocate b 1, write b 2"


@pytest.mark.parametrize(
    ("why", "history", "extend", "cause"),
    [
        ("FOREIGN_READ", HAD, 1, "early free"),
        ("FOREIGN_READ", HAD, 4, "early free"),  # a prompt in pieces
        ("FOREIGN_READ", NEVER_HAD, 1, "stale table"),
        ("FOREIGN_READ", NEVER_HAD, 4, "wrong prefix"),
        ("OVERWRITE", HAD, 1, "early free"),
        ("OVERWRITE", "allocate a 1, write a 1, allocate b 1", 1, "double free"),
        ("OVERWRITE", NEVER_HAD, 1, "stale table"),
        ("OVERWRITE", NEVER_HAD, 4, "wrong slot"),  # one token of several
        ("WRITE_AFTER_FREE", "allocate a 1, write a 1, release a 2", 1, "early free"),
        ("WRITE_AFTER_FREE", "allocate b 1, write b 1, release b 2", 1, "stale table"),
        ("READ_AFTER_FREE", HAD + ", release b 2", 1, "early free"),
        ("READ_AFTER_FREE", NEVER_HAD + ", release b 2", 1, "stale table"),
        ("SHARE_AFTER_FREE", "allocate b 1, write b 1, release b 1, share n 1", 1, "double free"),
        (
            "SHARE_AFTER_FREE",
            "allocate b 1, write b 1, share - 1, release b 1, release - 1, share n 1",
            1,
            "wrong prefix",
        ),
        ("SHARE_AFTER_FREE", "allocate b 1, write b 1, release - 1, share n 1", 1, "wrong prefix"),
        ("OVERWRITE", NEVER_HAD + ", write a 3", 1, "stale table"),  # what is reported, and what came after it
        ("FOREIGN_READ", NEVER_HAD + ", release b 3, allocate a 3, write a 4", 1, "stale table"),
    ],
)
def test_who_had_the_slot_decides(why, history, extend, cause):
    told = record("owner", why, phase="life" if why.startswith("SHARE") else "pre")
    assert told_of(past(history), told, extend=extend) == cause


def test_a_history_that_begins_too_late_or_has_lost_names_does_not_say_that_a_request_never_had_the_slot():
    assert told_of(past(NEVER_HAD, earlier=3), record("owner", "FOREIGN_READ")) == "early free"
    assert told_of(past("allocate - 1, write b 2"), record("owner", "FOREIGN_READ")) == "early free"


@pytest.mark.parametrize(
    ("history", "read_before", "cause"),
    [
        ("allocate a 1, release a 1, allocate b 1, write b 2", None, "early free"),
        ("allocate a 1, release a 1, allocate b 1, write b 2", 3, "early free"),
        ("allocate a 1, release a 1, allocate b 1, write b 2", 9, "wrong slot"),  # nobody's late write
        ("allocate b 1, write b 2", None, "wrong slot"),  # nobody had it before
    ],
)
def test_bytes_that_changed_when_nobody_who_had_the_slot_was_left_were_written_astray(history, read_before, cause):
    changed = record("content", half=0, seen=CHANGED)
    step = changed.violation.step
    assert told_of(past(history, read_before, step=step), changed) == cause


@pytest.mark.parametrize(
    ("history", "positions", "cause"),
    [
        ("allocate b 1, write b 1, release b 1, allocate a 1", [0], "uncleared"),
        ("allocate a 1", [1, 0], "torn transfer"),
        ("allocate a 1", [1], "wrong position"),
    ],
)
def test_nobody_has_left_anything_where_nobody_was(history, positions, cause):
    records = [record("poison", "NEVER_WRITTEN", slot=4, position=position) for position in positions]
    assert told_of(past(history), *records) == cause


def test_without_violations_there_is_no_cause_and_without_a_rule_it_is_unknown():
    assert likely(incident()) == []
    assert likely(incident(record("novel"))) == ["unknown"]
