"""The small serving engine: right by its oracle, silent under the canary, and loud when a fault is planted."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples" / "paged_engine"
sys.path.append(str(FOLDER))

import main as paged_main  # noqa: E402
from batching import Plan  # noqa: E402
from config import EngineConfig  # noqa: E402
from engine import Engine  # noqa: E402
from faults import Faults  # noqa: E402
from memory import Memory  # noqa: E402
from models import expected_tokens  # noqa: E402
from prefix_cache import PrefixCache  # noqa: E402
from serving import Served, serve  # noqa: E402
from workload import BOS, Request, workload  # noqa: E402

PLAIN = EngineConfig(pages=32)
EVERYTHING = EngineConfig(pages=40, offload=True, window=12, window_pages=36, draft=2, fp8=True)


def served(config: EngineConfig, count: int = 12, seed: int = 0, **settings) -> Served:
    return serve(workload(count, seed, namespaces=3, abort_share=0.2), config, **{"mode": "raise", **settings})


def require_no_leak(run: Served) -> None:
    """Every page is free again, and the canary agrees."""
    for engine in run.engines:
        memory, config = engine.memory, engine.config
        assert len(memory.full.free) == config.pages - 1
        assert not config.window or len(memory.window.free) == config.window_pages - 1
    assert {p.live_slots for s in run.sessions for p in s.pools.values()} <= {0}


# ---- the engine is right, and the canary has nothing to say


@pytest.mark.parametrize("seed", range(3))
def test_with_everything_on_the_outputs_are_the_oracles(seed):
    run = served(EVERYTHING, count=8, seed=seed, transfer=True, sweep_every=5)
    assert run.wrong() == []
    assert run.violations() == []
    require_no_leak(run)
    assert run.transfers > 0


FEATURES = [{}, {"prefix_cache": False}, {"offload": True}, {"window": 12}, {"draft": 3}, {"fp8": True}]


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: "_".join(f) or "plain")
def test_each_feature_alone(feature):
    run = served(dataclasses.replace(PLAIN, **feature), count=8)
    assert run.wrong() == []
    assert run.violations() == []
    require_no_leak(run)
    if "draft" in feature:
        assert 0.3 * run.engines[0].draft.proposed < run.engines[0].accepted < run.engines[0].draft.proposed


def test_a_small_pool_retracts_evicts_and_comes_back():
    run = served(dataclasses.replace(PLAIN, pages=26, offload=True), count=14)
    engine = run.engines[0]
    assert run.wrong() == []
    assert engine.scheduler.retracts > 5
    assert engine.host.saves == engine.host.loads > 0
    assert engine.scheduler.aborts > 0
    assert engine.scheduler.hits > 0


SLOW = [pytest.param(inner, marks=pytest.mark.slow) for inner in ("aot_eager", "inductor")]


@pytest.mark.parametrize("inner", ["eager", *SLOW])
def test_llama_guarded_gives_the_tokens_of_the_unguarded_run(inner):
    config = dataclasses.replace(EVERYTHING, model="llama", fp8=inner == "eager", inner=inner)
    plain, guarded = (served(config, count=4, mode=mode) for mode in ("off", "raise"))
    assert [r.output for r in plain.requests] == [r.output for r in guarded.requests]
    assert guarded.violations() == []
    halves = sum(len(plan.sites) for plan in guarded.engines[0].session.plans[:1])
    assert halves == (config.layers + config.window_layers) * (4 if config.fp8 else 2)


def test_runs_are_deterministic():
    first, second = (served(EVERYTHING, count=8, mode="off") for _ in range(2))
    assert [r.output for r in first.requests] == [r.output for r in second.requests]
    assert [e.steps for e in first.engines] == [e.steps for e in second.engines]


def test_expected_tokens_depend_on_every_token_and_the_namespace():
    prompt = [BOS, *range(10, 30)]
    base = expected_tokens(prompt, 4, 0, PLAIN)
    assert base == expected_tokens(prompt, 4, 0, PLAIN)
    assert base[:3] == expected_tokens(prompt, 3, 0, PLAIN)
    for at in range(len(prompt)):
        assert base != expected_tokens([t + (i == at) for i, t in enumerate(prompt)], 4, 0, PLAIN)
    assert base != expected_tokens(prompt, 4, 1, PLAIN)


# ---- the prefix cache by itself


def test_radix_tree_splits_and_evicts_the_oldest_leaf():
    memory = Memory(PLAIN)
    cache = PrefixCache(memory)
    pages = memory.full.take(5, "a")
    cache.insert(0, list(range(12)), pages[:3])
    cache.insert(0, [0, 1, 2, 3, 9, 9, 9, 9], [pages[0], pages[3]])
    assert cache.match(0, list(range(14))) == pages[:3]
    assert cache.match(0, [0, 1, 2, 3, 9, 9, 9, 9]) == [pages[0], pages[3]]
    assert cache.match(0, [0, 1, 2]) == cache.match(1, list(range(12))) == []
    assert cache.evict() == []  # the request still has them
    memory.drop(pages, "a")
    assert [cache.evict() for _ in range(4)] == [pages[1:3], [pages[3]], [pages[0]], []]


# ---- off costs nothing


def test_with_the_canary_off_nothing_of_it_is_touched(monkeypatch):
    def never(*args):
        raise AssertionError("only the canary needs this")

    monkeypatch.setattr(Plan, "history", property(never))
    monkeypatch.setattr(Plan, "lengths", property(never))
    run = served(EVERYTHING, mode="off", transfer=True)
    assert run.wrong() == []
    assert run.sessions == []
    for engine in run.engines:
        assert engine.memory.full.watchers == engine.memory.window.watchers == []
        assert all(store.pool is None for store in engine.host.stores)


# ---- planted faults


class Once(Faults):
    """Strikes once, in the first batch that has a request with ``length`` stored positions in decode."""

    def __init__(self, length: int = 9):
        self.length, self.victim = length, None

    def before_forward(self, engine: Engine, plan: Plan) -> None:
        ready = [w for w in plan.work if w.start >= self.length and w.request.output]
        if self.victim is None and ready:
            self.victim = ready[0].request
            self.strike(engine, self.victim)

    def strike(self, engine: Engine, request: Request) -> None:
        raise NotImplementedError


class FlipByte(Once):
    def strike(self, engine, request):
        slot = engine.memory.slots(request, 5, 6)[0]
        engine.groups[0].layers[1][1].view(torch.uint8)[slot, 0, 3] ^= 0x10


class SwapEntries(Once):
    def strike(self, engine, request):
        row = engine.memory.table[request.row]
        row[:2] = row[:2].flip(0)


class EarlyFree(Once):
    def strike(self, engine, request):
        engine.memory.full.drop(request.pages[1:2], request.id)


class LostLoad(Faults):
    victim = None

    def on_load(self, engine, request, saved):
        self.victim = self.victim or request
        return self.victim is not request


class BadWire(Faults):
    def on_transfer(self, raw):
        raw[len(raw) // 3] ^= 4
        return raw


class WrongBlockTable(Faults):
    def on_reads(self, engine, plan):
        plan.reads[0][0, 0] += 1


class OtherNamespace(Faults):
    """A prefix cache that forgets that namespaces matter."""

    def on_match(self, engine, request, pages):
        return pages or engine.memory.usable(engine.cache.match(1 - request.namespace, request.tokens[:-1]))


def planted(faults: Faults, config: EngineConfig = PLAIN, **settings) -> Served:
    """Without the prefix cache, so that a request's slots are its own."""
    config = dataclasses.replace(config, prefix_cache=False)
    return served(config, settings.pop("count", 6), faults=faults, mode="log", **settings)


@pytest.mark.parametrize(
    ("fault", "check", "why"),
    [
        (FlipByte, "content", None),
        (SwapEntries, "token", "WRONG_TOKEN"),
        (EarlyFree, "owner", "READ_AFTER_FREE"),
    ],
)
def test_a_fault_is_reported_at_its_request(fault, check, why):
    faults = fault()
    found = planted(faults).violations()
    assert (found[0].request, found[0].check, found[0].why) == (faults.victim.id, check, why)
    if fault is not EarlyFree:  # whose page goes to another request later on
        assert {v.request for v in found} == {faults.victim.id}
    if fault is FlipByte:
        assert (found[0].layer, found[0].half, found[0].position) == ("layers.1", "V", 5)


@pytest.mark.gpu
def test_everything_on_a_gpu():
    on = dataclasses.replace(EVERYTHING, device="cuda")
    run = served(on, count=8, transfer=True, sweep_every=5)
    assert run.wrong() == []
    assert run.violations() == []
    require_no_leak(run)
    assert run.counts()["off-loads"] > 0
    faults = FlipByte()
    run = planted(faults, dataclasses.replace(on, fp8=False))
    found = run.violations()[0]
    assert (found.check, found.layer, found.half, found.position) == ("content", "layers.1", "V", 5)
    assert found.request == faults.victim.id
    assert run.wrong() == [faults.victim.id]


def test_a_flipped_byte_changes_the_output_of_its_request_only():
    faults = FlipByte()
    assert planted(faults).wrong() == [faults.victim.id]


def test_a_lost_load_back_is_reported_at_its_request():
    faults = LostLoad()
    run = planted(faults, dataclasses.replace(PLAIN, pages=26, offload=True), count=14)
    assert {v.request for v in run.violations() if v.check == "content"} == {faults.victim.id}


def test_a_bad_wire_is_reported_by_the_decode_instance():
    run = planted(BadWire(), transfer=True)
    prefill, decode = (e.session for e in run.engines)
    assert prefill.violations() == []
    assert {v.check for v in decode.violations()} == {"content"}
    assert set(run.wrong()) <= {v.request for v in decode.violations()}


def test_a_wrong_block_table_is_reported_though_the_request_table_is_right():
    found = planted(WrongBlockTable(), count=2).violations()
    assert {v.why for v in found} == {"READ_DIFFERS"}


def test_a_prefix_of_another_namespace_is_reported():
    prompt = [BOS, *range(50, 62)]
    requests = [Request("a", prompt, 3, namespace=0), Request("b", prompt, 3, namespace=1, arrival=6)]
    run = serve(requests, PLAIN, faults=OtherNamespace(), mode="log")
    assert run.wrong() == ["b"]
    assert {(v.check, v.request) for v in run.violations()} == {("namespace", "b")}


# ---- the command line


def test_main_prints_a_table(capsys):
    assert paged_main.main(["--requests", "6", "--no-transfer", "--seed", "3"]) == 0
    out = capsys.readouterr().out
    assert "outputs equal the oracle's True" in out
    assert "violations                 0" in out
