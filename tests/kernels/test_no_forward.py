"""Checks in a model's graph, in a replay that is no forward: they leave all as it is."""

from __future__ import annotations

import dataclasses
import random

import pytest
import random_plans
import torch
from random_plans import IMPLEMENTATIONS, Form, Snapshot, moved, random_pages, random_plan, random_space

from kvcanary_fx.kernels.buffers import Gate
from kvcanary_fx.kernels.content import cpu, gpu, naive
from kvcanary_fx.kernels.ring import Control, Word
from kvcanary_fx.kernels.slots import naive as space_reference

CUDA = torch.cuda.is_available()


def spaces():
    """Each implementation, and the device that it runs on here."""
    yield pytest.param(space_reference, "cpu", id="reference")
    yield pytest.param(IMPLEMENTATIONS["torch"], "cpu", id="torch")
    yield pytest.param(IMPLEMENTATIONS["triton"], "cuda" if CUDA else "cpu", id="triton")


def everything(space, plan):
    snapshot = Snapshot(space, plan)
    random_plans.fetch(snapshot)
    values = {name: value.tolist() for name, value in snapshot.values().items() if name not in ("listed", "count")}
    return values | {name: getattr(plan, name).tolist() for name in ("ends", "real_slots", "counts")}


@pytest.mark.parametrize(("checks", "device"), spaces())
@pytest.mark.parametrize("seed", range(6 if CUDA else 25))
def test_a_plan_of_no_forward_changes_nothing(checks, device, seed):
    """What a forward before it left is still there: its ends and real slots too, for its layers."""
    rng = random.Random(seed)
    form = Form.draw(rng)
    space = random_space(rng, form)
    plan = random_plan(rng, space, unique=True, form=form)
    random_plans.make_it_true(rng, space, plan)
    pages, lengths, size = (t.to(device) if isinstance(t, torch.Tensor) else t for t in random_pages(rng, plan))
    control = Control(*[getattr(space.control, name).to(device) for name in ("words", "ring", "stamps")])
    space, plan = dataclasses.replace(space.to(device), control=control), moved(plan, device)
    own = {n: torch.full((count,), -5, dtype=torch.int64, device=device) for n, count in (
        ("ends", plan.rows.shape[0]), ("real_slots", plan.slots.shape[0]))}  # fmt: skip
    plan = dataclasses.replace(plan, **own)
    checks.walk(space, plan)
    checks.check_writes(space, plan)
    before = everything(space, plan)
    counts = torch.tensor([-1, 0, rng.randrange(9)], device=device)
    nothing = dataclasses.replace(plan, counts=counts)
    checks.walk(space, nothing)
    checks.check_writes(space, nothing)
    if not nothing.ring:
        checks.check_reads(space, nothing, pages, lengths, size)
    checks.store(space, nothing)
    assert everything(space, plan) == before
    if checks is not space_reference:
        assert space.listed_count.tolist() == [0], "the layers compare nothing"


@pytest.mark.parametrize(("kernels", "device"), [(naive, "cpu"), (cpu, "cpu"), (gpu, "cuda" if CUDA else "cpu")])
def test_a_forward_begins_unless_there_is_none(kernels, device):
    words, gate = (torch.arange(1, 1 + len(kind), device=device) for kind in (Word, Gate))
    told = words.clone(), gate.clone()
    kernels.begin(words, gate, torch.tensor([-1, 0, 4], device=device))
    assert torch.equal(words, told[0])
    assert torch.equal(gate, told[1])
    kernels.begin(words, gate, torch.tensor([0, 0, 4], device=device))
    assert words[Word.STEP] == told[0][Word.STEP] + 1
    assert gate[Gate.STEP] == told[1][Gate.STEP] + 1
