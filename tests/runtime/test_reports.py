"""Every way to fail can be told: it belongs to a check, has a text, and a place among the others."""

from __future__ import annotations

import pytest

from kvcanary_fx.config import CHECKS
from kvcanary_fx.kernels.checks import CHECKS as TABLE
from kvcanary_fx.kernels.checks import REASONS, TEXTS, Check, Why
from kvcanary_fx.kernels.ring import UNKNOWN, Ring
from kvcanary_fx.proof import doctor
from kvcanary_fx.reports.summary import by_importance
from kvcanary_fx.reports.violation import ALL_LAYERS, HalfInfo, decode

POOL = HalfInfo(7, ALL_LAYERS, "*", "kv", None, 8)


def row(why: Why, checks: Check) -> list[int]:
    """A violation of a slot, as a kernel leaves it in the ring."""
    words = [0] * len(Ring)
    words[Ring.WHY], words[Ring.CHECK], words[Ring.SLOT] = why, checks, 3
    words[Ring.ORIGIN] = words[Ring.POSITION] = UNKNOWN
    return words


@pytest.mark.parametrize("why", [why for why in Why if why is not Why.NONE], ids=lambda why: why.name)
def test_every_reason_has_a_check_a_text_and_an_importance_whatever_else_failed(why):
    every = Check(sum(Check))
    violation = decode(row(why, every), POOL)
    assert violation.check in CHECKS
    assert set(violation.also) == {c.name.lower() for c in Check} - {violation.check}
    assert by_importance([violation]) == [violation]
    text = violation.explain()
    assert text.startswith(f"[{violation.check}]")
    assert TEXTS[why.name].remedy in text


def test_every_check_has_a_bit_a_place_a_text_and_a_fault_of_the_doctors():
    assert {row.reports for row in TABLE.values()} == set(Check)
    bits = {name: row for name, row in TABLE.items() if name != "sweep"}  # which finds what the others find
    assert [name.upper() for name in bits] == [row.reports.name for row in bits.values()]
    assert len({row.place for row in bits.values()}) == len(bits)
    assert set(bits) - set(TEXTS) == {"bounds"} | {r.check.name.lower() for r in REASONS.values()} - set(TEXTS)
    assert set(doctor.FAULTS) == set(TABLE)


@pytest.mark.parametrize("check", ["content", "operand", "bounds", "poison", "chain"])
def test_a_check_of_bytes_needs_no_reason(check):
    violation = decode(row(Why.NONE, Check[check.upper()]), POOL)
    assert violation.check == check
    assert by_importance([violation]) == [violation]
    assert violation.explain().startswith(f"[{check}]")
