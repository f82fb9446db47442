"""Every shape of pool, by every check: a fault is planted and must be reported; runs without one are silent."""

from __future__ import annotations

import pytest
from groups import Cross, Group
from pool_faults import FAULTS, Told, fits
from rig import Rig
from shapes import SHAPES, groups_of

from kvcanary_fx.kernels.writes.layout import FLOAT_DTYPES

EVERY = pytest.mark.parametrize("shape", SHAPES)
#: Faults whose report says more than one thing: a wrong table is wrong for every pool that uses it.
ALONE = ("content", "sweep", "operand", "owner", "reuse")


def applies(check: str, group: Group) -> bool:
    """All but this: integers have no NaN."""
    return check != "poison" or any(half.dtype in FLOAT_DTYPES for half in group.bytes_of[0])


def play(rig: Rig, group: Group, check: str) -> str | None:
    """Plant a check's fault; what is wrong with the report, or None."""
    rig.reset()
    wanted: list[Told] = FAULTS[check](rig, group)
    found = rig.found()
    missed = [told for told in wanted if not any(fits(told, v, group.name) for v in found)]
    if missed:
        return f"{group.name}, {check}: {missed} missed among {[v.line() for v in found]}"
    names = {told.check for told in wanted}
    beside = [v for v in found if v.pool != group.name or not names & {v.check, *v.also}]
    if check in ALONE and check != "operand" and beside:
        return f"{group.name}, {check}: besides, {[v.line() for v in beside]}"
    return None


@EVERY
def test_faults_are_reported_by_their_checks(shape, device, record_property):
    """A flipped bit, a misdirected write, a slot that is used again, and so on, in each group of the shape."""
    wrong = []
    rigs = {kernel: Rig(groups_of(shape, device), kernel=kernel) for kernel in (False, True)}
    for number, group in enumerate(rigs[False].groups):
        cells = {}
        for check in FAULTS:
            if applies(check, group):
                rig = rigs[check == "operand"]
                problem = play(rig, rig.groups[number], check)
                cells[check] = "guarded" if problem is None else "MISSED"
                wrong += [problem] if problem else []
        several = len(rigs[False].groups) > 1
        name = f"{shape}: {group.name}" if several else shape
        record_property("shape", (name if device == "cpu" else f"{name}, {device}", cells))
    assert not wrong, "\n".join(wrong)


@EVERY
@pytest.mark.parametrize("kernel", [False, True], ids=["indexing", "store kernel"])
def test_clean_run_is_silent(shape, kernel, device):
    """Long prefills, decoding past every window, and slots that the next request gets at once."""
    rig = Rig(groups_of(shape, device), kernel=kernel, health_every=1, sweep_every=1)
    for request in "ABA":
        rig.run(request, 9)
        for _ in range(9):
            rig.run(request)
        if request != "B":
            rig.finish(request)
    assert rig.found() == []
    assert rig.session.uncovered == []
    for group in rig.groups:
        space = rig.session.pools[group.name].space
        forwards, verified, recorded = space.counters.tolist()
        assert forwards == 30
        # the first three read nothing
        assert verified >= (27 if group.slot_per_token else 1), group.name
        assert recorded > 0
        if not isinstance(group, Cross):
            assert rig.session.stats().checked >= verified * len(group.bytes_of[0])


def test_states_are_compared_in_each_step_when_a_fraction_is_checked(device):
    rig = Rig(groups_of("recurrent and conv state", device), verify_fraction="1/8")
    state = rig.groups[1]
    rig.run("A", 3)
    for step in range(8):
        rig.flip(state, 0, step % 2, rig.live(state))
        rig.run("A")
        assert len(rig.found()) == step + 1
