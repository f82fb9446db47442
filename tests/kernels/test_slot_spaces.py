"""The checks of an engine's pools equal their plain reference, on random lives of a slot space."""

from __future__ import annotations

import copy
import dataclasses
import os
from types import ModuleType

import pytest
import torch
from random_events import run_events
from random_plans import ALL, IMPLEMENTATIONS, USUAL, main, run_plans, use_sizes

from kvcanary_fx.kernels.checks import Check
from kvcanary_fx.kernels.ring import Control, Ring, Word
from kvcanary_fx.kernels.slots import checks as request_checks
from kvcanary_fx.kernels.slots import gpu as gpu_requests
from kvcanary_fx.kernels.slots.past import read_back
from kvcanary_fx.kernels.slots.space import RequestPlan, SlotSpace, SpaceCount

SEEDS = int(os.environ.get("CANARY_TEST_SEEDS", "150"))
BLOCKS = 5


def _seeds(block: int) -> range:
    return range(block * SEEDS // BLOCKS, (block + 1) * SEEDS // BLOCKS)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_vectorised_checks_equal_the_reference(block):
    assert sum(run_plans(seed, plans=5) for seed in _seeds(block)) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands in for a missing GPU")
@pytest.mark.parametrize("block", range(BLOCKS))
def test_interpreted_triton_checks_equal_the_reference(block):
    assert sum(run_plans(seed, plans=5, kernels="triton") for seed in _seeds(block)[::10]) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("block", range(BLOCKS))
def test_checks_on_the_gpu_equal_the_reference(block, kernels):
    settings = dict(device="cuda", kernels=kernels, group=20)  # of seeds, for which Triton compiles once
    assert sum(run_plans(seed, plans=5, **settings) for seed in _seeds(block)) > 0


def test_plans_that_differ_end_with_a_command_that_shows_it_again(monkeypatch, capsys):
    with monkeypatch.context() as broken:
        broken.setattr(IMPLEMENTATIONS["torch"], "store", lambda space, plan: None)
        assert main(["--plans", "30", "--seed", "20", "--group", "20"]) == 1
        command = capsys.readouterr().out.splitlines()[-1].split("random_plans.py ")[1].split()
        assert main(command) == 1
        assert capsys.readouterr().out.splitlines()[-1].endswith(" ".join(command))
    assert main(command) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands in for a missing GPU")
@pytest.mark.parametrize("block", range(2))
def test_many_calls_of_an_allocator_in_one_launch_equal_the_reference(block):
    assert sum(run_events(seed, rounds=2) for seed in range(block * 4, block * 4 + 4)) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("block", range(BLOCKS))
def test_many_calls_of_an_allocator_on_the_gpu_equal_the_reference(block):
    assert sum(run_events(seed, "cuda") for seed in _seeds(block)) > 0


@pytest.mark.parametrize("tokens", [1, 64, 65, 1000, pytest.param(262_144, marks=pytest.mark.gpu)])
def test_chain_of_a_long_prefill_is_the_sum_over_all_blocks(device, tokens):
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter stands in for a missing GPU")
    lens = [tokens // 3, 0, tokens - tokens // 3]
    expected, got = (prefilled(tokens, lens, device, kernels) for kernels in (request_checks, gpu_requests))
    for name in ("tokens", "positions", "chain", "flags"):
        assert torch.equal(getattr(expected, name)[:-1], getattr(got, name)[:-1])
    assert expected.counters.tolist() == got.counters.tolist() == [2, tokens, tokens]
    assert int(got.control.words[Word.HEAD]) == 0


@pytest.mark.parametrize("at", [1, 63, 64, 65, 128, 129])
def test_chain_of_a_prompt_that_breaks_is_reported_where_it_does(device, at):
    """Also at the first position of a block, where all that follows agrees with each other."""
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter stands in for a missing GPU")
    told = []
    for kernels in (request_checks, gpu_requests):
        control = prefilled(130, [130, 0, 0], device, kernels, at).control
        ring = control.ring[: int(control.words[Word.HEAD])].tolist()
        told.append([(row[Ring.CHECK], row[Ring.POSITION]) for row in ring])
    assert told == [[(Check.CHAIN, at)]] * 2


@pytest.mark.parametrize("compared", [True, False])
@pytest.mark.parametrize("kernels", [request_checks, gpu_requests], ids=["torch", "triton"])
def test_slots_are_listed_and_noted_as_compared_only_if_their_bytes_are(device, kernels, compared):
    if torch.cuda.is_available() and (kernels is request_checks or device == "cpu"):
        pytest.skip("the interpreter stands in for a missing GPU, where the kernels list")
    space = prefilled(9, [4, 3, 2], device, kernels, checks=ALL if compared else ALL & ~Check.CONTENT)
    assert int(space.listed_count) == (9 if compared else 0)
    noted = [past.reads for past in read_back(space.past[1:10].tolist())]
    assert noted == [int(compared)] * 9
    assert int(space.counters[SpaceCount.CHECKED]) == 9


def prefilled(
    tokens: int,
    lens: list[int],
    device: str,
    kernels: ModuleType,
    breaks_at: int | None = None,
    checks: Check = ALL,
) -> SlotSpace:
    """A space after a forward that wrote whole prompts, scattered, and one that read them.

    Args:
        breaks_at: from this token on, the chains are those of another prompt.
    """
    use_sizes(USUAL)
    made = torch.Generator().manual_seed(tokens)
    slots = torch.randperm(tokens, generator=made).to(device) + 1
    ids = torch.randint(50_000, (tokens,), generator=made).to(device)
    control = Control.allocate(64, torch.device(device))
    space = SlotSpace.allocate(tokens + 1, torch.device(device), control, 7, checks, owner_known=False, history=2)
    table = torch.nn.utils.rnn.pad_sequence(list(slots.split(lens)), batch_first=True)

    def plan(prefix: list[int], extend: list[int], n: int) -> RequestPlan:
        here = dict(device=device)
        return RequestPlan(
            counts=torch.tensor([3, n, 0], **here),
            rows=torch.arange(3, **here),
            prefix_lens=torch.tensor(prefix, **here),
            extend_lens=torch.tensor(extend, **here),
            tokens=ids[:n],
            slots=slots[:n],
            positions=None,
            owners=torch.tensor([5, 6, 7], **here),
            namespaces=torch.tensor([0, 1, 2], **here),
            table=table,
            columns=table.shape[1],
        )

    for forward in (plan([0, 0, 0], lens, tokens), plan(lens, [0, 0, 0], 0)):
        kernels.walk(space, forward)
        kernels.check_writes(space, forward)
        kernels.store(space, forward)
        if breaks_at is not None:
            space.chain[slots[breaks_at:]] += 1
    return space


def test_buffers_of_a_space_are_columns_of_its_block_wherever_it_goes():
    space = SlotSpace.allocate(4, torch.device("cpu"), Control.allocate(4, torch.device("cpu")), 7, ALL)
    for value, each in enumerate((space, copy.deepcopy(space), space.to("cpu"), dataclasses.replace(space)), 5):
        before = each.block.clone()
        for name in ("tokens", "positions", "chain", "owners", "flags", "reads"):
            getattr(each, name)[2] = value
        assert (each.block != before).sum(1).tolist() == [0, 0, 6, 0, 0], value


def test_a_write_that_received_a_slot_for_each_token_of_the_batch_received_those_of_the_plan():
    one = torch.zeros(1, dtype=torch.int64)
    plan = RequestPlan(one, one, one, one, one, one, None, one, None, one.view(1, 1), 1)
    received = torch.tensor([40, 41, 42, 43])
    assert request_checks.taken_of(plan, received).tolist() == [40, 41, 42, 43]
    fewer = dataclasses.replace(plan, taken=torch.tensor([1, 3, 0, 0]))  # of four tokens the second and the fourth
    assert request_checks.taken_of(fewer, received).tolist() == [41, 43, 40, 40]
    assert request_checks.taken_of(fewer, received[:2]).tolist() == [40, 41]  # the engine left the others out
