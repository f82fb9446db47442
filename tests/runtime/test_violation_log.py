"""What a long run says: each fault once, repetitions as a count, in memory that does not grow."""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import re
import tracemalloc

import pytest
import torch
from long_log import LongRun
from test_engine_session import prefilled
from torch import nn
from toy import Toy
from toys import Rig

from kvcanary_fx import CanaryBackend, CanaryConfig, KVCacheViolation
from kvcanary_fx.reports import log as violation_log
from kvcanary_fx.reports.log import KEPT, LINES, UNTOLD, ViolationLog
from kvcanary_fx.reports.violation import Violation

WRONG = Violation(
    check="owner", phase="pre", step=1, layer="*", half="*", pool="kv", row=None, index=4, slot=4, position=3,
    stored=1, found=2, request="a", why="READ_AFTER_FREE",
)  # fmt: skip


def at(slot: int, step: int = 1) -> Violation:
    return dataclasses.replace(WRONG, slot=slot, step=step)


def said(log: ViolationLog, violations: list[Violation]) -> list[str]:
    log.add(violations, len(violations))
    return list(log.lines(violations))


# ---- lines


def test_a_slot_that_stays_wrong_is_one_line_and_then_a_count():
    log = ViolationLog()
    lines = [line for step in range(1, 1001) for line in said(log, [at(4, step)])]
    assert lines[0] == at(4).line()
    assert [line.rpartition(" ")[2] for line in lines[1:]] == ["times=10", "times=100", "times=1000"]
    assert log.total == 1000


def test_new_places_of_one_kind_are_lines_up_to_a_number_and_then_a_count():
    log = ViolationLog()
    lines = said(log, [at(slot) for slot in range(5000)])
    assert lines[:LINES] == [at(slot).line() for slot in range(LINES)]
    assert [line.rpartition(" ")[2] for line in lines[LINES:]] == ["places=1000"]


def test_another_request_another_layer_another_reason_are_news():
    log = ViolationLog()
    others = [dict(request="b"), dict(layer="layers.1", half="K"), dict(why="FOREIGN_READ"), dict(slot=5)]
    news = [WRONG, *[dataclasses.replace(WRONG, **other) for other in others]]
    assert said(log, news) == [v.line() for v in news]
    assert said(log, news) == []


def test_an_engine_with_a_freed_slot_in_a_row_says_so_once(caplog):
    toy = prefilled()
    toy.pool.release([4], owner="A")
    with caplog.at_level(logging.WARNING, "kvcanary"):
        for slot in range(6, 10):
            toy.run({"A": [slot]})
            toy.session.drain()
    lines = [r.getMessage() for r in caplog.records if "kvcanary.violation" in r.getMessage()]
    assert len(lines) == 1
    assert "why=read_after_free" in lines[0]
    assert toy.session.stats().violations == 4
    assert toy.session.stats().by_check == {"owner": 4}


# ---- memory


def test_records_are_the_first_ones_and_the_newest():
    log = ViolationLog()
    log.add([at(slot) for slot in range(3 * KEPT)], 3 * KEPT)
    slots = [v.slot for v in log.records()]
    assert slots == [*range(KEPT), *range(2 * KEPT, 3 * KEPT)]
    assert log.total == log.by_check["owner"] == 3 * KEPT


def test_memory_is_flat_once_it_is_full(monkeypatch):
    for name, few in (("KEPT", 100), ("UNTOLD", 100), ("PLACES", 400)):
        monkeypatch.setattr(violation_log, name, few)
    log = ViolationLog()

    def run(steps: range) -> int:
        for step in steps:
            list(log.lines([at(slot=step)]))
            log.add([at(slot=step, step=step)], 1)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        full = run(range(1000))
        assert run(range(1000, 6000)) < 1.05 * full
    finally:
        tracemalloc.stop()


def test_a_long_run_with_faults_in_each_step_stays_small_and_quiet():
    run = LongRun()
    try:
        run.steps(30)
        assert run.toy.session.stats().violations >= 60
        first = run.lines
        run.steps(60)
        assert run.lines <= first + 3 * 3  # the counts at 10 and at 100
    finally:
        run.close()


def test_an_exception_tells_what_no_other_did_and_counts_what_it_cannot_hold():
    log = ViolationLog()
    log.add([at(slot) for slot in range(UNTOLD + 5)], UNTOLD + 7)
    fresh, total = log.take_untold()
    assert (len(fresh), total) == (UNTOLD, UNTOLD + 7)
    assert log.take_untold() == ([], 0)
    log.add([at(1)], 1)
    assert log.take_untold() == ([at(1)], 1)


def test_in_raise_mode_each_step_that_reads_a_wrong_slot_raises():
    toy = prefilled()
    toy.session.config = dataclasses.replace(toy.session.config, mode="raise")
    toy.pool.release([4], owner="A")
    for slot in (6, 7, 8):
        toy.take("A", [slot])
        with pytest.raises(KVCacheViolation) as caught:
            toy.forward(toy.plan({"A": [slot]}))
        assert [v.why for v in caught.value.violations] == ["READ_AFTER_FREE"]


# ---- what a line may hold


@pytest.mark.parametrize("name", ["a\nkvcanary.violation check=owner", "\x1b[2J", "two words", 'x"y', "a=b", ""])
def test_names_from_outside_neither_forge_a_line_nor_reach_the_terminal(name):
    told = dataclasses.replace(WRONG, request=name, pool=name, owners=(name, None))
    line, text = told.line(), told.explain()
    assert line.isprintable()
    assert "\x1b" not in text
    assert len(text.splitlines()) == 4
    fields = re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)', line)
    assert [key for key, _ in fields] == [key for key, _ in re.findall(r"(\w+)=(\S+)", WRONG.line())]
    assert json.loads(dict(fields)["request"]) == json.loads(dict(fields)["stored"]) == name


def test_plain_names_stand_as_they_are():
    assert " request=a " in WRONG.line()
    assert WRONG.line().endswith(" pool=kv")


def test_the_other_owner_is_named():
    toy = prefilled()
    toy.pool.release([4], owner="A")
    toy.pool.allocate([4], owner="req-B")
    toy.run({"A": [6]})
    (v,) = [v for v in toy.found() if v.why == "FOREIGN_READ"]
    assert v.owners == ("A", "req-B")
    assert " stored=A found=req-B " in v.line()
    assert "belongs to another request (req-B)" in v.explain()


def test_why_is_none_where_the_check_says_it():
    rig = Rig.build(mode="log")
    rig.step(4)
    rig.step()
    rig.flip(1, 1, row=0, position=2)
    rig.step()
    (v,) = rig.session.violations()
    assert v.why is None


# ---- what an engine is told to do


def test_damage_of_a_transfer_is_explained_as_one():
    here, there = prefilled(), Toy()
    there.add("B", here.requests["A"].tokens, prefix=[9, 10, 11])
    there.pool.allocate([9, 10, 11], owner="B")
    there.pool.import_(here.pool.export([3, 4, 5]), [9, 10, 11])
    for mine, theirs in zip(here.kv, there.kv, strict=True):
        for source, target in zip(mine, theirs, strict=True):
            target[[9, 10]] = source[[3, 4]]  # and the third one was lost
    there.run({"B": [12]})
    texts = {v.explain() for v in there.found()}
    assert texts
    assert all("transferred slot" in text and "session.forget" not in text for text in texts)
    there.pool.release([9, 10, 11], owner="B")
    there.pool.allocate([9, 10, 11], owner="C")
    assert not bool(there.pool.content.imported[[9, 10, 11]].any())


def test_changed_bytes_of_an_engines_pool_are_not_explained_with_calls_of_other_sessions():
    toy = prefilled()
    toy.kv[0][0].view(torch.int32)[4, 0, 2] ^= 1 << 7
    toy.run({"A": [6]})
    (v,) = toy.found()
    assert "pool.import_ or pool.adopt" in v.explain()
    assert "session.forget" not in v.explain()


# ---- places


class Ring(nn.Module):
    """One layer over a cache of six slots that are used again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project = nn.Embedding(50, 8), nn.Linear(8, 16)

    def forward(self, input_ids, position_ids, k_cache, v_cache):
        key, value = self.project(self.embed(input_ids)).chunk(2, -1)
        index = position_ids[0] % k_cache.shape[1]
        k_cache[:, index], v_cache[:, index] = key, value
        return (k_cache + v_cache).sum()


def test_positions_of_a_ring_that_has_wrapped_are_those_of_its_tokens():
    backend = CanaryBackend(CanaryConfig(inner="eager", mode="log"))
    ring = torch.compile(Ring(), backend=backend)
    k, v = torch.zeros(2, 6, 8), torch.zeros(2, 6, 8)

    def run(first: int, tokens: int) -> None:
        positions = torch.arange(first, first + tokens).expand(2, tokens)
        with torch.no_grad():
            ring(torch.randint(50, (2, tokens)), positions, k, v)

    run(0, 4)
    for position in range(4, 9):
        run(position, 1)
    k.data[0, 4, 0] += 1  # position 4
    k.data[1, 1, 0] += 1  # position 7; the newest, 8, is in slot 2
    run(9, 1)
    assert [(v.index, v.position) for v in backend.session.violations()] == [(4, 4), (1, 7)]


class Attention(nn.Module):
    def forward(self, x, k, v, index):
        k[:, index], v[:, index] = x, 2 * x
        torch._dynamo.graph_break()
        return x + k.sum(1, keepdim=True) + v.sum(1, keepdim=True)


def test_layers_whose_code_calls_their_caches_alike_are_numbered():
    backend = CanaryBackend(CanaryConfig(inner="eager", mode="log"))
    layers = nn.ModuleList([Attention() for _ in range(3)])
    caches = [(torch.zeros(2, 6, 8), torch.zeros(2, 6, 8)) for _ in layers]

    @torch.compile(backend=backend)
    def model(x, index):
        for layer, (k, v) in zip(layers, caches, strict=True):
            x = layer(x, k, v, index)
        return x

    with torch.no_grad():
        for position in range(4):
            if position == 3:
                caches[2][0].data[1, 1, 0] += 1
            model(torch.randn(2, 1, 8), torch.tensor([position]))
    (v,) = backend.session.violations()
    assert (v.layer, v.pool, v.half, v.index) == ("k/v #3", "k #3", "K", 1)
