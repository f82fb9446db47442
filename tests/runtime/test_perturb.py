"""The perturbations: when they strike, what they change, and that the canary reports each of them."""

from __future__ import annotations

import logging
import random
import sys
from pathlib import Path

import pytest
import torch

import kvcanary_fx
from kvcanary_fx import EngineError, KVPool
from kvcanary_fx.proof import perturb
from kvcanary_fx.proof.perturb import Spot, Target
from kvcanary_fx.proof.perturbation import flip_bit, row_of
from kvcanary_fx.reports.summary import muted

sys.path.append(str(Path(__file__).parents[2] / "examples" / "paged_engine"))

SPOTS = [Spot(s, f"r{s % 2}", s) for s in range(1, 9)]


def pool(dtype: torch.dtype = torch.float32, paged: bool = False) -> kvcanary_fx.EnginePool:
    shape = (4, 4, 2, 4) if paged else (16, 2, 4)
    layers = [[torch.zeros(shape, dtype=dtype) for _ in range(2)] + [torch.zeros(*shape[:-2], 1)] for _ in range(2)]
    declared = KVPool(
        layers, torch.arange(12, dtype=torch.int32).view(3, 4), paged=paged, half_names=("K", "V", "K scale")
    )
    return kvcanary_fx.install_canary(declared, mode="log").pool


# ---- when


def test_probability_warm_up_and_limit_decide_when():
    given = pool()
    always = perturb.UsedBytes(warm_up=3, limit=2)
    struck = [always.strike(given, SPOTS, step) is not None for step in range(8)]
    assert struck == [False] * 3 + [True] * 2 + [False] * 3
    assert always.opportunities == 8
    assert [s.step for s in always.strikes] == [3, 4]
    never, some = perturb.UsedBytes(probability=0), perturb.UsedBytes(probability=0.3)
    for _ in range(300):
        never.strike(given, SPOTS)
        some.strike(given, SPOTS)
    assert never.strikes == []
    assert 60 < len(some.strikes) < 120


def test_a_seed_gives_the_same_strikes_again():
    runs = []
    for seed in (1, 1, 2):
        fault, given = perturb.UsedBytes(probability=0.5, seed=seed), pool()
        for step in range(20):
            fault.strike(given, SPOTS, step)
        runs.append(fault.strikes)
    assert runs[0] == runs[1] != runs[2]


def test_nothing_to_strike_is_no_opportunity():
    fault = perturb.UsedBytes()
    assert fault.strike(pool(), []) is None
    assert fault.opportunities == 0


@pytest.mark.parametrize(
    ("target", "where"),
    [
        (Target(layer="layers.1"), {"layer": "layers.1"}),
        (Target(half="V"), {"half": "V"}),
        (Target(request="r1"), {"request": "r1"}),
        (Target("kv", "layers.0", "K", "r0"), {"pool": "kv", "layer": "layers.0", "half": "K", "request": "r0"}),
    ],
)
def test_a_target_narrows_what_is_struck(target, where):
    fault, given = perturb.UsedBytes(target=target), pool()
    for _ in range(20):
        assert fault.strike(given, SPOTS) is not None
    assert all(getattr(s, name) == value for s in fault.strikes for name, value in where.items())


def test_another_pool_or_request_is_left_alone():
    for target in (Target(pool="other"), Target(request="nobody")):
        assert perturb.UsedBytes(target=target).strike(pool(), SPOTS) is None
        assert perturb.TableEntry(target=target).strike(pool(), 1, {0: SPOTS[0]}, range(4)) is None


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"probability": 1.5}, r"UsedBytes\(probability=1.5\): give the share of opportunities, from 0 to 1"),
        ({"probability": -0.1}, "from 0 to 1"),
        ({"probability": float("nan")}, "from 0 to 1"),
        ({"warm_up": -1}, "0 for none"),
        ({"limit": 0}, "or None for no end"),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_the_remedy(settings, remedy):
    with pytest.raises(EngineError, match=remedy):
        perturb.UsedBytes(**settings)


def test_a_strike_is_one_line_in_the_log(caplog):
    with caplog.at_level(logging.INFO, logger="kvcanary"):
        strike = perturb.UsedBytes().strike(pool(), [Spot(5, "r1", 4)], step=3)
    (line,) = [r.getMessage() for r in caplog.records if "kvcanary.perturb" in r.getMessage()]
    assert line == strike.line()
    assert line.startswith("kvcanary.perturb class=used_bytes slot=5 request=r1 position=4 pool=kv layer=layers.")


# ---- what


@pytest.mark.parametrize("paged", [False, True], ids=["flat", "paged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_one_bit_of_one_row_changes(dtype, paged):
    given = pool(dtype, paged)
    flip_bit(row_of(given, 4, 6), random.Random(1))
    raw = [view.reshape(16, -1).view(torch.uint8) for view in given.views]
    assert [int((r != 0).sum()) for r in raw] == [0, 0, 0, 0, 1, 0]
    (value,) = raw[4][6][raw[4][6] != 0].tolist()
    assert value.bit_count() == 1


def test_a_row_without_contiguous_memory_changes_too():
    row = torch.zeros(4, 8)[:, ::2].t()
    flip_bit(row, random.Random(0))
    assert int((row.contiguous().view(torch.int32) != 0).sum()) == 1


def test_scale_strikes_only_scales():
    fault, given = perturb.Scale(), pool()
    for _ in range(10):
        assert fault.strike(given, SPOTS).half == "K scale"
    assert perturb.Scale(target=Target(half="V")).strike(given, SPOTS) is None


def test_late_write_brings_back_what_was_there():
    fault, given = perturb.LateWrite(target=Target(half="K", layer="layers.0")), pool()
    given.views[0][3] = 7.0
    fault.remember(given, [3, 4])
    assert fault.strike(given, SPOTS) is None  # the same bytes still
    given.views[0][3] = 1.0
    assert fault.strike(given, SPOTS).slot == 3
    assert bool((given.views[0][3] == 7.0).all())


def test_plans_and_tables():
    given = pool()
    strike = perturb.TableEntry().strike(given, 1, {2: Spot(6, "a", 2)}, range(16))
    assert given.declared.request_table[1, 2] == strike.partner.slot != 6
    slots = torch.tensor([4, 5, 6])
    strike = perturb.SlotIndex().strike(slots, {1: Spot(5, "a", 0)}, range(16))
    assert slots.tolist() == [4, strike.partner.slot, 6]
    lengths = [3, 4]
    perturb.StaleLength().strike(lengths, {0: Spot(1, "a", 3)})
    assert lengths in ([2, 4], [4, 4])
    tokens, spots = [7, 7, 9], {i: Spot(i, f"r{i}") for i in range(3)}
    strike = perturb.SwappedTokens().strike(tokens, spots)
    assert tokens in ([9, 7, 7], [7, 9, 7])
    assert 2 in (strike.slot, strike.partner.slot)
    assert perturb.SwappedTokens().strike([7, 7], {0: SPOTS[0], 1: SPOTS[1]}) is None
    perturb.RankSkew().strike(lengths, {1: Spot(-1, "a")}, 100)
    assert lengths[1] != 4


def test_pages_and_transfers():
    freed = []
    perturb.EarlyFree().strike({3: Spot(12, "a", 0)}, freed.extend)
    assert freed == [3]
    assert perturb.DoubleFree().strike({3: Spot(12), 4: Spot(16)}) in ([3, 4, 3], [3, 4, 4])
    raw = bytearray(range(1, 200))
    perturb.LostTransfer().strike(raw, "a")
    assert 0 < raw.count(0) <= 64
    assert len(raw) == 199
    assert perturb.LostTransfer().strike(bytearray(8), "a") is None


# ---- in an engine, under the canary


def test_each_class_strikes_and_is_reported():
    from trials import PLANTS, Lab

    assert set(PLANTS) == set(perturb.CLASSES)
    lab, told = Lab(), {}
    with muted():
        for name in PLANTS:
            trials = [lab.trial(name, seed) for seed in range(3)]
            struck = [t for t in trials if t.strike is not None]
            told[name] = {
                "struck": len(struck) >= 2,
                "missed": sum((t.visible or t.mattered) and not t.reports for t in struck),
                "unexplained": sum(not explained for t in trials for _, _, explained in t.reports),
            }
    lab.close()
    assert told == {name: {"struck": True, "missed": 0, "unexplained": 0} for name in PLANTS}


def test_without_its_check_a_fault_goes_unreported_and_the_lab_says_that_it_mattered():
    from trials import Lab

    lab = Lab(checks=("owner", "chain"))
    with muted():
        struck = [t for t in (lab.trial("used_bytes", seed) for seed in range(4)) if t.strike is not None]
    lab.close()
    assert struck
    assert all(t.mattered and t.visible and not t.reports for t in struck)


def test_a_run_is_repeated_by_its_seed():
    from trials import Lab

    lab = Lab()
    with muted():
        first, other, again = (lab.trial("late_bytes", seed) for seed in (3, 4, 3))
        clean = lab.trial("late_bytes", 3, armed=False)
    lab.close()
    assert first.strike == again.strike != other.strike
    assert [s for s, _, _ in first.reports] == [s for s, _, _ in again.reports]
    assert (clean.strike, clean.mattered, clean.reports) == (None, False, [])
