"""Parts of the small serving engine by themselves: the oracle's answers, and what goes to the device and back."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "examples" / "paged_engine"))

import oracle
from batching import Work
from config import EngineConfig
from copies import make_copier
from history import History
from memory import Memory
from models import expected, windows
from workload import BOS, Request

PLAIN = EngineConfig(pages=32)


@pytest.mark.parametrize("fp8", [False, True])
def test_expected_tokens_are_those_of_the_plain_definition(fp8):
    config = dataclasses.replace(PLAIN, window=12, fp8=fp8)
    asked = [Request("a", [BOS, *range(40, 70)], 5, namespace=1), Request("b", [BOS, 3, 4], 3)]

    def plain(request: Request) -> list[int]:
        tokens = list(request.prompt)
        while len(tokens) < len(request.prompt) + request.new_tokens:
            ids, state = torch.tensor(tokens), 0
            places, spaces = torch.arange(len(tokens)), torch.full_like(ids, request.namespace)
            for number, window in enumerate(w for group in windows(config) for w in group):
                found = oracle.weight(oracle.written(ids, places, spaces, number, fp8), number)
                state = state + (found * oracle.powers(len(tokens)))[-(window or 0) :].sum()
            tokens.append(int(oracle.next_token(state)))
        return tokens[len(request.prompt) :]

    assert expected(asked, config) == [plain(r) for r in asked]


def test_history_of_a_row_is_that_of_the_request_in_it():
    history = History(PLAIN)
    first, second = Request("a", [BOS, 5, 6, 7], 4, row=2), Request("b", [BOS, 8], 4, row=2)
    assert history.of([Work(first, 0, [])]).tolist() == [[BOS, 5, 6, 7]]
    first.stored, first.output = 4, [9]
    assert history.of([Work(first, 4, [9])]).tolist() == [[BOS, 5, 6, 7, 9]]
    first.output = [10]  # not stored yet, so it may change
    assert history.of([Work(first, 4, [10])]).tolist() == [[BOS, 5, 6, 7, 10]]
    assert history.of([Work(second, 2, [])]).tolist() == [[BOS, 8]]


def test_slots_of_a_part_of_a_request():
    memory, request = Memory(PLAIN), Request("a", [BOS], 1)
    memory.grow(request, 14)
    for start, stop in [(0, 14), (3, 9), (4, 8), (13, 14), (6, 6)]:
        assert memory.slot_tensor(request, start, stop).tolist() == memory.slots(request, start, stop)


@pytest.mark.gpu
def test_a_copy_on_the_second_stream_waits_for_what_was_queued_before():
    copier, pool = make_copier("cuda"), torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    host = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    torch.cuda._sleep(200_000_000)
    pool.fill_(7)
    ticket = copier.start(lambda: host.copy_(pool, non_blocking=True))
    ticket.wait()
    assert int(host.min()) == 7
