"""What the history of a slot says of a violation, in plain words."""

from __future__ import annotations

import pytest
from test_causes import HAD, NEVER_HAD, past, record

from kvcanary_fx.reports.incidents.plain_words import plain_words

LOST = (
    "Request a had it until it was released in step 1 by request a. Request b got it in step 1, and wrote it in step 2."
)


@pytest.mark.parametrize(
    ("why", "history", "told"),
    [
        ("FOREIGN_READ", HAD, f"{LOST} So request a reads what is request b's."),
        ("OVERWRITE", HAD + ", write a 3", f"{LOST} So request a writes over what is request b's."),
        ("FOREIGN_READ", NEVER_HAD, "Request a never had this slot."),
        ("FOREIGN_READ", "allocate - 1, write b 2", ""),
        (
            "READ_AFTER_FREE",
            "allocate a 0, write a 1, share - 1, release a 1, release - 2",
            "Request a had it until it was released in step 2.",
        ),
        (
            "OVERWRITE",
            "allocate a 0, release a 1, allocate b 1, fill - 1",
            "Request a had it until it was released in step 1 by request a. Request b got it in step 1, and had it "
            "filled in step 1. So request a writes over what is request b's.",
        ),
        (
            "NEVER_WRITTEN",
            "allocate b 0, write b 1, release b 1, allocate a 2",
            "Request b had the slot before, until it was released in step 1.",
        ),
        ("NEVER_WRITTEN", "allocate a 2", ""),
        ("OUT_OF_RANGE", HAD, ""),
    ],
)
def test_a_reader_and_a_writer_are_told_of_who_had_the_slot(why, history, told):
    assert plain_words(past(history), record("owner", why).violation) == told


@pytest.mark.parametrize(
    ("why", "history", "told"),
    [
        ("DOUBLE_FREE", "allocate a 0, release a 1, release b 2", "It had been released in step 1 by request a; "),
        (
            "DOUBLE_ALLOCATE",
            "allocate a 0, allocate b 2",
            "Request a had got it before step 1, and nobody has released",
        ),
        ("DOUBLE_FREE", "allocate a 0, write a 1", ""),
    ],
)
def test_a_call_of_the_allocator_is_told_with_the_one_before(why, history, told):
    said = plain_words(past(history), record("owner", why, phase="life").violation)
    assert said.startswith(told)
    assert bool(said) == bool(told)


def test_what_an_engine_calls_itself_is_no_request():
    cached = past("allocate a 0, write a 1, release a 1, allocate b 1")
    events = (*cached.events[:-1], cached.events[-1].__class__("allocate", 1, "the prefix cache of vLLM"))
    told = plain_words(cached.__class__(events), record("owner", "FOREIGN_READ").violation)
    assert "The prefix cache of vLLM got it in step 1." in told
    assert "request the" not in cached.__class__(events).told()
