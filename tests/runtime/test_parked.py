"""Pages that leave the pool and come back: what is known of them waits elsewhere, and is laid over what arrives."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import random_plans
import torch
from gpu_on_cpu import use_gpu_kernels
from toy import Toy

from kvcanary_fx.engine import parked
from kvcanary_fx.engine.parked import ParkedShadows
from kvcanary_fx.engine.slot_events import slots_in

TOKENS = [5, 6, 7, 8, 9, 10]


@pytest.fixture(params=["plain code", "a GPU's kernels"])
def kernels(request, monkeypatch):
    """Both ways that slots are told of."""
    if request.param != "plain code":
        if torch.cuda.is_available():
            pytest.skip("the interpreter stands in for a missing GPU")
        use_gpu_kernels(monkeypatch.setattr)


def off_loaded(**settings) -> tuple[Toy, ParkedShadows, list[list[torch.Tensor]]]:
    """A toy whose request A had four tokens in slots 4 to 7, pages 2 and 3; they are in the host's memory now."""
    toy = Toy(**settings)
    toy.add("A", TOKENS)
    toy.run({"A": [4, 5, 6, 7]})
    store = ParkedShadows(toy.pool, 2)
    store.put(["first", "second"], [2, 3])
    bytes_of = [[half[4:8].clone() for half in layer] for layer in toy.kv]
    toy.done("A")
    toy.add("C", [50, 51, 52, 53])
    toy.run({"C": [4, 5, 6, 7]})  # which writes over them
    return toy, store, bytes_of


def load(toy: Toy, bytes_of: list[list[torch.Tensor]], slots: list[int]) -> None:
    for layer, stored in zip(toy.kv, bytes_of, strict=True):
        for half, rows in zip(layer, stored, strict=True):
            half[slots] = rows


def begin(toy: Toy, store: ParkedShadows, tokens: list[int], keys=("first", "second")):
    """Request B, whose first four tokens are to be loaded into slots 12 to 15."""
    toy.add("B", tokens)
    toy.take("B", [12, 13, 14, 15])
    toy.requests["B"].stored = 4
    return toy.pool.expect([12, 13, 14, 15], store.get(keys), tokens, [0, 1, 2, 3], owner="B")


@pytest.mark.parametrize("every", ["1", "1/512"])
def test_what_comes_back_as_it_was_is_silent_and_guarded_from_there_on(kernels, every):
    toy, store, bytes_of = off_loaded(verify_fraction=every)
    accept = begin(toy, store, TOKENS)
    load(toy, bytes_of, [12, 13, 14, 15])
    toy.run({"B": [16]})
    accept()
    assert toy.found() == []
    assert toy.pool.adopted == 0
    toy.run({"B": [17]})
    assert toy.found() == []


@pytest.mark.parametrize("every", ["1", "1/512"])
@pytest.mark.parametrize("half", [0, 1])
def test_a_bit_that_changed_meanwhile_is_told_by_the_first_that_reads_it_whatever_the_share(kernels, half, every):
    toy, store, bytes_of = off_loaded(verify_fraction=every)
    bytes_of[1][half].view(torch.int32)[2, 0, 1] ^= 1 << 7
    accept = begin(toy, store, TOKENS)
    load(toy, bytes_of, [12, 13, 14, 15])
    toy.run({"B": [16]})
    accept()
    (v,) = toy.found()
    assert (v.check, v.layer, v.half, v.slot, v.position, v.token) == ("content", "layers.1", "KV"[half], 14, 2, 7)
    assert (v.request, v.text) == ("B", "transfer")
    assert " why=transfer " in v.line()
    toy.run({"B": [17]})
    assert len(toy.found()) == 1  # once


def test_what_no_forward_has_read_yet_is_not_taken_as_it_is(kernels):
    """As where a window leaves out slots that were loaded, until another request takes up the page."""
    toy, store, bytes_of = off_loaded()
    bytes_of[1][0].view(torch.int32)[2, 0, 1] ^= 1 << 7
    accept = begin(toy, store, TOKENS)
    load(toy, bytes_of, [12, 13, 14, 15])
    accept()
    toy.run({"B": [16]})
    assert [(v.check, v.slot) for v in toy.found()] == [("content", 14)]


def test_pages_of_another_request_are_told_with_both_tokens():
    """As where a connector's table gives the wrong chunk: the bytes are as they were stored."""
    toy, store, bytes_of = off_loaded()
    begin(toy, store, [5, 6, 40, 41, 9])
    load(toy, bytes_of, [12, 13, 14, 15])
    toy.run({"B": [16]})
    assert {(v.check, v.slot, v.request) for v in toy.found()} == {("token", 14, "B"), ("token", 15, "B")}


def test_a_slot_of_which_nothing_is_known_is_taken_as_it_is(kernels):
    """It held a drafted token that was not accepted, or its page was given up before it was stored."""
    toy = Toy()
    toy.add("A", TOKENS)
    toy.run({"A": [4, 5]})
    toy.pool.reject([5])
    store = ParkedShadows(toy.pool, 2)
    store.put(["first", "second"], [2, 10])
    bytes_of = [[torch.cat([half[4:5], torch.ones(3, *half.shape[1:])]) for half in layer] for layer in toy.kv]
    accept = begin(toy, store, TOKENS)
    load(toy, bytes_of, [12, 13, 14, 15])
    toy.run({"B": [16]})
    accept()
    assert toy.found() == []
    for slot in (12, 13, 15):
        toy.kv[0][0].view(torch.int32)[slot, 0, 1] ^= 1 << 7
    toy.run({"B": [17]})
    assert {(v.slot, v.position, v.text) for v in toy.found()} == {
        (12, 0, "transfer"),
        (13, 1, "engine content"),
        (15, 3, "engine content"),
    }


@pytest.mark.parametrize("bits", [32, 64])
def test_what_is_parked_is_read_back_in_any_order_from_any_piece_of_memory(kernels, monkeypatch, bits):
    monkeypatch.setattr(parked, "ROOM", 2)
    toy = Toy(digest_bits=bits)
    toy.add("A", list(range(30)))
    toy.run({"A": [4, 5, 6, 7, 8, 9, 10, 11, 12, 13]})
    made = []

    def memory(rows, columns):
        made.append(torch.full((rows, columns), -1, dtype=torch.int32))
        return made[-1]

    store = ParkedShadows(toy.pool, 2, memory)
    store.put([2, 3, 4], [2, 3, 4])
    store.put([5, 6, 5, 4], [2, 6, 5, 6])  # what was under 4 is overwritten, and under 5 is the last one
    assert len(made) == 3
    order = [4, 2, 6, 3, 5]
    found, pages = store.get(order), [6, 2, 6, 3, 5]
    expected = toy.pool.export([slot for page in pages for slot in (2 * page, 2 * page + 1)])
    for name in ("tokens", "positions", "chain", "marks", "digests"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert found.parts == expected.parts
    with pytest.raises(KeyError):
        store.get([2, 9])


@pytest.mark.parametrize("seed", range(25))
def test_one_launch_leaves_what_the_plain_code_leaves(monkeypatch, seed):
    if torch.cuda.is_available():
        pytest.skip("the interpreter stands in for a missing GPU")
    rng = random.Random(seed)
    monkeypatch.setattr(parked, "ROOM", rng.choice([1, 3, 256]))
    size, number, device = rng.choice([1, 2, 3, 16, 80]), rng.randint(1, 5), torch.device("cpu")
    space = random_plans.random_space(rng)
    if space.slots < size * number:
        space = random_plans.SlotSpace.allocate(
            size * number + rng.randint(0, 2), device, space.control, 7, space.checks
        )
    space.block.random_(-(2**31), 2**31 - 1)
    digests = torch.randint(-(2**31), 2**31 - 1, (rng.choice([1, 2, 17, 40]), rng.choice([1, 2]), space.slots))
    pool = SimpleNamespace(
        space=space,
        digests=digests.to(torch.int32),
        declared=SimpleNamespace(device=device),
        content=SimpleNamespace(parts=()),
    )
    pool.slot_tensor = lambda slots, page=1: slots_in(torch.tensor(slots, dtype=torch.int64), page)
    rounds = [rng.sample(range(number), rng.randint(0, number)) for _ in range(3)]
    left = []
    for way in range(2):
        made: list[torch.Tensor] = []

        def memory(rows, columns, made=made):
            made.append(torch.full((rows, columns), -7, dtype=torch.int32))
            return made[-1]

        if way:
            use_gpu_kernels(monkeypatch.setattr)
        store = ParkedShadows(pool, size, memory)
        for pages in rounds:
            store.put([f"{page % 4}" for page in pages], pages)
        left.append(made)
    assert len(left[0]) == len(left[1])
    assert all(map(torch.equal, *left))
