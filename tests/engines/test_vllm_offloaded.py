"""What an OffloadingConnector has stored is compared when it comes back: :mod:`kvcanary_fx.adapters.vllm.offloaded`."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import vllm_runs
from v2_runner import PAGE, Runner

from kvcanary_fx.adapters.vllm import offloaded
from kvcanary_fx.adapters.vllm.offloaded import pairs
from kvcanary_fx.engine.parked import ParkedShadows


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "gemma3"])
@pytest.mark.parametrize("scene", ["off-loaded", "off-loaded in chunks"])
def test_a_bit_that_changed_in_the_hosts_memory_is_told_when_it_comes_back(models, scene, model):
    """vLLM's scheduler and worker of the connector; CUDA's copies are made by torch.  ``gemma3`` has windows."""
    (found,) = vllm_runs.results(models, [{"model": model, "scene": scene}], "log")
    assert found["loaded"] >= 4
    assert all(found["alike"].values())
    assert found["violations"] == found["uncovered"] == []
    assert found["adopted"] == 0
    ((check, phase, layer, half, position, _),) = found["told"]
    assert (check, phase, half) == ("content", "pre", "K")
    assert layer.startswith("model.layers.0.") or model == "gemma3"  # the first tensor of the connector's
    assert position == (63 if scene.endswith("chunks") else 95)
    assert "text='transfer'" in found["said"][0]


@pytest.mark.slow
def test_chunks_that_are_mixed_up_are_told(models):
    (found,) = vllm_runs.results(models, [{"model": "llama", "scene": "off-loaded, mixed up"}], "log")
    assert found["violations"] == []
    halves = {(layer, half) for _, _, layer, half, _, _ in found["told"]}
    assert len(halves) == 4  # both of both layers
    assert {check for check, *_ in found["told"]} == {"content"}


@pytest.mark.slow
def test_each_rank_compares_what_it_has_stored(models):
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # workers are sent functions
    runs = [{"model": "llama", "scene": "off-loaded on two ranks"}]
    (found,) = vllm_runs.results(models, runs, "log", **environment)
    first, again, _ = found["tokens"]
    assert first == again
    assert found["loads"] == [[0, 0], [3, 3], [6, 6]]
    assert found["before"] == []
    assert len(found["after"]) == 3  # a bit in each block
    for line in found["after"]:
        assert " check=content " in line
        assert " why=transfer " in line
        assert "layer=model.layers.0." in line
        assert "TP1" in line  # the second rank's process


@pytest.mark.slow
def test_a_store_that_the_canary_does_not_know_is_taken_as_it_is(models):
    (found,) = vllm_runs.results(models, [{"model": "llama", "scene": "off-loaded elsewhere"}], "log")
    assert found["violations"] == found["uncovered"] == found["told"] == []
    assert found["adopted"] > 0


@pytest.mark.parametrize("seed", range(30))
def test_blocks_have_the_chunks_that_vllm_copies_them_to(seed):
    """As its ``compute_sub_block_ptrs`` does, by addresses."""
    from vllm.v1.kv_offload.base import GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.gpu_worker import compute_sub_block_ptrs

    draw = random.Random(seed)
    per_chunk = draw.randint(1, 4)
    sizes = [draw.randint(0, 6) for _ in range(draw.randint(1, 3))]
    firsts = [draw.randint(0, 9) for _ in sizes]
    used = [-(-(n + first % per_chunk) // per_chunk) if n else 0 for n, first in zip(sizes, firsts, strict=True)]
    blocks, chunks = draw.sample(range(1, 99), sum(sizes)), draw.sample(range(99), sum(used))
    host = torch.zeros(100, per_chunk * 8, dtype=torch.int8)
    expected, begin = [], 0
    for n, first, of_chunks in zip(sizes, firsts, used, strict=True):
        where = np.zeros(n, dtype=np.uint64)
        if n:
            given_chunks = np.array(chunks[begin : begin + of_chunks])
            compute_sub_block_ptrs(given_chunks, per_chunk, where, host, skip_count=first % per_chunk)
            expected += [divmod((int(address) - host.data_ptr()) // 8, per_chunk) for address in where]
        begin += of_chunks
    found = list(pairs(GPULoadStoreSpec(blocks, sizes, firsts), CPULoadStoreSpec(chunks), per_chunk))
    assert found == list(zip(blocks, expected, strict=True))


def job(request, source, target):
    """One block of a request and its chunk, in the order of the transfer."""
    return SimpleNamespace(req_id=request, src_spec=source, dst_spec=target)


def block(number):
    return SimpleNamespace(block_ids=np.array([number]), group_sizes=[1], block_indices=[0])


def chunk(number):
    return SimpleNamespace(block_ids=np.array([number]))


def message(store=(), load=(), flush=()):
    """To the worker of a connector."""
    return SimpleNamespace(store_jobs=dict(store), load_jobs=dict(load), jobs_to_flush=set(flush) or None)


STORE = {0: job("x", block(1), chunk(7))}
LOAD = {9: job("z", chunk(7), block(2))}
LOADED = [("taken", [2, 5], ["z"], [2], 0), ("filled_elsewhere", [2], "z", [0], PAGE)]


def runner_that_off_loads(**settings):
    """Model Runner V2, made up, with a connector whose loads are compared."""
    runner = Runner(off_loads=True, **settings)
    runner.guard.books.offloaded._blocks_per_chunk = [1]
    return runner


def copy(runner, source, target):
    for half in (half for halves in runner.layers.values() for half in halves):
        half[target] = half[source]


@pytest.mark.parametrize("claimed", ["plain code", "a GPU's kernels"])
@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("when", ["in the next step", "at once", "as its request has ended"])
def test_model_runner_v2_compares_what_a_connector_loads_before_the_first_forward_reads_it(
    damaged, when, claimed, as_on_a_gpu
):
    if claimed != "plain code":
        as_on_a_gpu()
    runner = runner_that_off_loads(KVCANARY_VERIFY_AFTER="0", KVCANARY_VERIFY_FRACTION="1/512")
    stored_later = when == "in the next step"
    runner.step({"x": PAGE}, new={"x": [1]}, transfers=message(STORE) if stored_later else message())
    finished = when == "as its request has ended"
    if finished:
        runner.step({"y": 1}, new={"y": [3]}, finished=["x"], transfers=message(STORE))
    else:
        runner.step({"x": 1}, more={"x": [4]}, transfers=message() if stored_later else message(STORE, flush=[0]))
    copy(runner, 1, 2)
    runner.layers["b"][0][2, 1] += damaged
    others = {"y": 1} if finished else {"x": 1}
    given = dict(new={"z": [2, 5]}, found={"z": PAGE}, events=LOADED, transfers=message(load=LOAD))
    runner.read(runner.step({**others, "z": 2}, **given))
    told = [(v.check, v.layer, v.slot, v.position, v.request, v.text) for v in runner.guard.session.violations()]
    assert told == [("content", "b", 2 * PAGE + 1, 1, "z", "transfer")] * damaged
    assert runner.guard.session.pools["group0"].adopted == 0
    runner.read(runner.step({**others, "z": 1}, transfers=message()))
    assert len(runner.guard.session.violations()) == damaged


def test_a_block_that_is_stored_in_a_step_of_which_nothing_else_is_said_is_known_when_it_is_loaded():
    """The scheduler says that nothing happened to blocks, and the connector's message has a block to store.  Seen on an
    H200: such steps were not looked at, and what an earlier request had stored was told of the next one's loads."""
    runner = runner_that_off_loads(KVCANARY_VERIFY_AFTER="0")
    runner.step({"x": PAGE}, new={"x": [1, 4]}, transfers=message())
    for _ in range(3):
        runner.step({"x": 1}, wrong=1, transfers=message())
    runner.step({"x": 1}, wrong=1, transfers=message(STORE))
    runner.step({"x": 1}, more={"x": [3]}, wrong=1, transfers=message())
    copy(runner, 1, 2)
    runner.layers["b"][0][2, 1] += 1
    runner.read(
        runner.step({"x": 1, "z": 2}, new={"z": [2, 5]}, found={"z": PAGE}, events=LOADED, transfers=message(load=LOAD))
    )
    told = [(v.check, v.layer, v.slot, v.position, v.text) for v in runner.guard.session.violations()]
    assert told == [("content", "b", 2 * PAGE + 1, 1, "transfer")]


@pytest.mark.parametrize("why", ["it was stored unseen", "its request ended", "another request has the block"])
def test_what_nothing_is_known_of_is_taken_as_it_is(why):
    runner = runner_that_off_loads(KVCANARY_VERIFY_AFTER="0")
    runner.step({"x": PAGE}, new={"x": [1]}, transfers=message(STORE))
    runner.step({"x": 1}, more={"x": [4]}, transfers=message())
    copy(runner, 1, 2)
    runner.layers["b"][0][2, 1] += 1
    given = dict(new={"z": [2, 5]}, found={"z": PAGE}, events=LOADED)
    if why == "it was stored unseen":
        runner.step({"x": 1, "z": 2}, **given, transfers=message(load={9: job("z", chunk(8), block(2))}))
    elif why == "its request ended":
        runner.step({"x": 1}, transfers=message(load=LOAD))
        runner.step({"x": 1}, lost={"ended": ["z"]}, transfers=message())
        runner.step({"x": 1, "z": 2}, **given, transfers=message())
    else:
        runner.step({"x": 1, "z": 2}, **given, transfers=message(load={9: job("w", chunk(7), block(2))}))
    assert runner.guard.session.violations() == []
    assert runner.guard.session.pools["group0"].adopted == PAGE


@pytest.mark.parametrize("damaged", [False, True])
def test_all_that_a_step_stores_is_kept_by_one_launch(damaged, as_on_a_gpu, monkeypatch):
    as_on_a_gpu()
    runner = runner_that_off_loads(KVCANARY_VERIFY_AFTER="0", KVCANARY_VERIFY_FRACTION="1/512")
    launches, put = [], ParkedShadows.put  # from here on: one was launched to compile it
    monkeypatch.setattr(ParkedShadows, "put", lambda *given: launches.append(given[1:]) or put(*given))
    both = {0: job("x", block(1), chunk(7)), 1: job("y", block(3), chunk(8))}
    prompts = {"y": [90 + i for i in range(PAGE)]}
    new = {"x": [1], "y": [3]}
    runner.step({"x": PAGE, "y": PAGE}, new=new, prompts=prompts, transfers=message(both))
    runner.step({"x": 1}, more={"x": [4]}, transfers=message())
    assert launches == [([(0, 7, 0), (0, 8, 0)], [1, 3])]
    copy(runner, 1, 2)
    runner.layers["a"][1][2, 0] += damaged
    given = dict(new={"z": [2, 5]}, found={"z": PAGE}, events=LOADED, transfers=message(load=LOAD))
    runner.read(runner.step({"x": 1, "z": 2}, **given))
    told = [(v.check, v.layer, v.half, v.slot) for v in runner.guard.session.violations()]
    assert told == [("content", "a", "V", 2 * PAGE)] * damaged


def test_a_chunk_that_is_stored_anew_has_what_was_stored_last():
    runner = runner_that_off_loads(KVCANARY_VERIFY_AFTER="0")
    again = {1: job("y", block(3), chunk(7))}
    runner.step({"x": PAGE}, new={"x": [1]}, transfers=message(STORE))
    prompts = {"y": [90 + i for i in range(PAGE)]}
    runner.step({"x": 1, "y": PAGE}, new={"y": [3]}, more={"x": [4]}, prompts=prompts, transfers=message(again))
    copy(runner, 3, 2)
    given = dict(new={"z": [2, 5]}, found={"z": PAGE}, events=LOADED, transfers=message(load=LOAD))
    runner.step({"x": 1, "z": 2}, **given)
    told = {(v.check, v.request) for v in runner.guard.session.violations()}
    assert told <= {("token", "z")}  # y's tokens are others, and its bytes are there


def test_a_part_of_a_chunk_that_is_not_stored_anew_is_not_what_was_there_before():
    runner = runner_that_off_loads(KVCANARY_VERIFY_AFTER="0")
    runner.guard.books.offloaded._blocks_per_chunk = [2]
    both = {0: job("x", SimpleNamespace(block_ids=np.array([1, 3]), group_sizes=[2], block_indices=[0]), chunk(7))}
    first = {1: job("x", block(4), chunk(7))}
    runner.step({"x": 2 * PAGE}, new={"x": [1, 3]}, transfers=message(both))
    runner.step({"x": PAGE}, more={"x": [4]}, transfers=message(first))
    runner.step({"x": 1}, more={"x": [6]}, transfers=message())
    assert [*runner.guard.books.offloaded._pool_at] == [(0, 7, 0)]


def connector(spec_name="CPUOffloadingSpec", replicated=False, canonical=False, per_chunk=2):
    spec = type(spec_name, (), {})()
    spec.config, spec.replicated_layout = SimpleNamespace(canonical_layout=canonical), replicated
    spec.blocks_per_chunk = per_chunk
    return SimpleNamespace(connector_worker=SimpleNamespace(spec=spec))


@pytest.mark.parametrize(
    ("given", "compared"),
    [
        (connector(), True),
        (connector("TieringOffloadingSpec"), False),  # whose chunks are also filled from other tiers
        (connector(replicated=True), False),  # one rank stores for all
        (connector(canonical=True), False),
        (connector(per_chunk=None), False),  # of another vLLM
        (SimpleNamespace(), False),
    ],
)
def test_only_memory_that_this_worker_alone_writes_is_compared(given, compared):
    assert (offloaded.chunk_of(given) is not None) == compared


@pytest.mark.slow
def test_no_token_is_computed_from_a_block_that_was_damaged_in_the_hosts_memory(models):
    """The request begins again.  The store is dropped, and a later one loads what this one has computed."""
    runs = [{"model": "llama", "scene": "ruined store"}]
    (plain,) = vllm_runs.results(models, runs, None)
    (found,) = vllm_runs.results(models, runs, "log", KVCANARY_VLLM_ON_VIOLATION="recompute")
    right = plain["tokens"]["clean"]
    assert plain["tokens"]["damaged"] != right
    assert found["tokens"] == {"clean": right, "damaged": right, "later": right}
    assert found["preempted"] == 1
    assert found["loaded_later"] == 3
