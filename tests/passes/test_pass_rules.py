"""Rules of the passes: run twice inserts nothing, the input graph stays, broken graphs are told."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from idioms import IDIOMS, B, D, H, S, T
from render import render

import kvcanary_fx
from kvcanary_fx.passes.functional_cache import find_functional_caches
from kvcanary_fx.passes.graph_lint import BrokenGraphError, check_canary_rules
from kvcanary_fx.passes.graph_plan import GraphPlan
from kvcanary_fx.passes.insert_canaries import insert_canaries
from kvcanary_fx.passes.pipeline import passes, run_passes
from kvcanary_fx.passes.state_inputs import is_canary

INDEX_COPY = next(i for i in IDIOMS if i.name == "index_copy")


def dynamo_graph(run, *args, **options) -> tuple[torch.fx.GraphModule, list[Any]]:
    """The graph that Dynamo hands to a backend, with the inputs it hands along."""
    graphs = []

    def backend(gm, example_inputs):
        graphs.append((gm, list(example_inputs)))
        return gm.forward

    with torch.no_grad():
        torch.compile(run, backend=backend, **options)(*args)
    return graphs[0]


def graph_of(run, *args, **options) -> tuple[torch.fx.GraphModule, GraphPlan]:
    gm, inputs = dynamo_graph(run, *args, **options)
    return run_passes(gm, inputs, passes())


@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda i: i.name)
def test_run_twice_inserts_nothing_new(idiom):
    gm, inputs = dynamo_graph(idiom.run, *idiom.make())
    once, plan = run_passes(gm, inputs, passes())
    states = [torch.zeros(1, dtype=torch.int32) for _ in plan.devices]
    twice, second = run_passes(once, [*inputs, *states], passes())
    assert render(twice) == render(once)
    assert second.sites == []


def test_the_graph_given_stays_as_it_is():
    gm, inputs = dynamo_graph(INDEX_COPY.run, *INDEX_COPY.make())
    before, metas = render(gm), [dict(n.meta) for n in gm.graph.nodes]
    run_passes(gm, inputs, passes())
    assert render(gm) == before
    assert [dict(n.meta) for n in gm.graph.nodes] == metas


def test_analysis_never_touches_the_real_tensors():
    args = INDEX_COPY.make()
    gm, inputs = dynamo_graph(INDEX_COPY.run, *copy.deepcopy(args))
    before = [t.clone() for t in inputs]
    run_passes(gm, inputs, passes())
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))


def test_meta_of_dynamo_is_carried_over():
    gm, inputs = dynamo_graph(INDEX_COPY.run, *INDEX_COPY.make())
    rewritten, _ = run_passes(gm, inputs, passes())
    assert rewritten.meta["dynamo_compile_id"] == gm.meta["dynamo_compile_id"]
    assert rewritten._param_name_to_source == gm._param_name_to_source
    old = [n._dynamo_source for n in gm.graph.find_nodes(op="placeholder")]
    new = [n._dynamo_source for n in rewritten.graph.find_nodes(op="placeholder")]
    assert new == [*old, None]


def test_dynamic_start_of_a_slice_becomes_an_argument():
    def run(kc, k, start):
        kc[:, :, start : start + k.shape[2]] = k
        return kc.sum()

    args = (torch.zeros(B, H, S, D), torch.randn(B, H, T, D), 3)
    rewritten, plan = graph_of(run, *args, dynamic=True)
    verify = next(n for n in rewritten.graph.nodes if is_canary(n) and "verify" in n.name)
    assert [type(e).__name__ for e in verify.args[3]] == ["Node", "Node"]
    assert plan.sites[0].slot_axes == (0, 2)


def test_cast_of_the_operand_is_a_node_that_write_and_record_share():
    def write(cache, k, pos):
        cache[:, :, 2:4] = k
        return cache.sum()

    gm, inputs = dynamo_graph(write, torch.zeros(2, 2, 8, 4, dtype=torch.bfloat16), torch.ones(2, 2, 2, 4), None)
    rewritten, _ = run_passes(gm, inputs, passes())
    nodes = {n.name: n for n in rewritten.graph.nodes}
    cast = nodes["to"]
    assert cast.args[1] is torch.bfloat16
    assert nodes["setitem"].args[2] is cast
    assert cast in [n.args[1] for n in rewritten.graph.nodes if is_canary(n) and "record" in n.name]


def test_dynamic_sizes_of_the_cache_are_guarded():
    backend = kvcanary_fx.CanaryBackend(kvcanary_fx.CanaryConfig(inner="eager"))
    run = torch.compile(INDEX_COPY.run, backend=backend, dynamic=True)
    with torch.no_grad():
        for batch, length in ((5, 20), (7, 24)):
            q, k, v = (torch.randn(batch, H, T, D) for _ in range(3))
            kc, vc = torch.zeros(batch, H, length, D), torch.zeros(batch, H, length, D)
            for step in range(3):
                run(q, k, v, kc, vc, torch.arange(T * step, T * step + T))
            kc.data[1, 0, 2, 0] += 1
            with pytest.raises(kvcanary_fx.KVCacheViolation) as caught:
                run(q, k, v, kc, vc, torch.arange(6, 6 + T))
            assert [(v.row, v.index) for v in caught.value.violations] == [(1, 2)]
    assert len(backend.session.plans) == 1


def test_complex_rotary_embeddings_are_analysed():
    """As Llama's: a complex view of what a linear layer made, times a part of a table, of a size that is a symbol."""
    project = torch.nn.Linear(H * D, H * D, bias=False)
    table = torch.polar(torch.ones(S, D // 2), torch.rand(S, D // 2))

    def run(x, start, kc):
        k = torch.view_as_complex(project(x).view(1, x.shape[1], H, D // 2, 2))
        k = k * table[start : start + x.shape[1]].view(1, x.shape[1], 1, D // 2)
        kc[:, start : start + x.shape[1]] = torch.view_as_real(k).flatten(3)
        return kc.sum()

    backend = kvcanary_fx.CanaryBackend(kvcanary_fx.CanaryConfig(inner="eager"))
    compiled, cache = torch.compile(run, backend=backend, dynamic=True), torch.zeros(1, S, H, D)
    with torch.no_grad():
        for start, tokens in ((0, 4), (4, 2)):
            compiled(torch.randn(1, tokens, H * D), start, cache)
        cache.data[0, 3, 0, 0] += 1
        with pytest.raises(kvcanary_fx.KVCacheViolation) as caught:
            compiled(torch.randn(1, 2, H * D), 6, cache)
    assert [(v.check, v.row, v.index) for v in caught.value.violations] == [("content", 0, 3)]


def test_a_rewritten_write_takes_the_count_of_tokens_as_its_extent():
    def run(input_ids, k, kc):
        kc.copy_(torch.cat((kc[:, :, k.shape[2] :], k), dim=2))
        return F.embedding(input_ids, torch.ones(20, D)).sum() + kc.sum()

    settings = kvcanary_fx.CanaryConfig(inner="eager", rewrite_writes=True)
    backend = kvcanary_fx.CanaryBackend(settings)
    compiled, cache, plain = torch.compile(run, backend=backend, dynamic=True), *torch.zeros(2, B, H, S, D)
    with torch.no_grad():
        for tokens in (4, 3):
            ids, k = torch.zeros(B, tokens, dtype=torch.int64), torch.randn(B, H, tokens, D)
            assert torch.equal(compiled(ids, k, cache), run(ids, k, plain))
    assert torch.equal(cache, plain)
    assert [plan.rewritten for plan in backend.session.plans] == [1]


def test_one_graph_with_caches_of_two_shapes_has_a_site_each():
    def run(kc, lc, k, low, pos):
        kc.index_copy_(2, pos, k)
        lc.index_copy_(1, pos, low)
        return kc.sum() + lc.sum()

    args = (
        torch.zeros(B, H, S, D),
        torch.zeros(B, S, 5),
        torch.randn(B, H, T, D),
        torch.randn(B, T, 5),
        torch.arange(T),
    )
    _, plan = graph_of(run, *args)
    assert [(s.pool, s.slot_axes) for s in plan.sites] == [("kc", (0, 2)), ("lc", (0, 1))]


def test_two_inputs_that_share_a_storage_are_told_apart():
    def run(kc, vc, k, pos):
        kc.index_copy_(0, pos, k)
        vc.index_copy_(0, pos, k)
        return kc.sum() + vc.sum()

    both = torch.zeros(2, S, H, D)
    _, plan = graph_of(run, both[0], both[1], torch.randn(T, H, D), torch.arange(T))
    assert [s.pool for s in plan.sites] == ["kc", "vc"]
    backend = kvcanary_fx.CanaryBackend(kvcanary_fx.CanaryConfig(inner="eager"))
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(run, backend=backend)
        compiled(both[0], both[1], torch.randn(T, H, D), torch.arange(T))
        both.data[1, 1, 0, 0] += 1
        with pytest.raises(kvcanary_fx.KVCacheViolation) as caught:
            compiled(both[0], both[1], torch.randn(T, H, D), torch.arange(T, 2 * T))
    assert [(v.pool, v.slot) for v in caught.value.violations] == [("vc", 1)]


def test_grown_by_cat_is_told_by_name(caplog):
    def run(keys, k):
        keys = torch.cat([keys, k], dim=2)
        return keys.sum(), keys

    gm, inputs = dynamo_graph(run, torch.zeros(B, H, S, D), torch.randn(B, H, T, D))
    plan = GraphPlan("graph")
    find_functional_caches(gm, inputs, plan)
    assert plan.functional == ["keys"]
    with caplog.at_level(logging.WARNING, "kvcanary"), torch.no_grad():
        backend = kvcanary_fx.CanaryBackend(kvcanary_fx.CanaryConfig(inner="eager"))
        torch.compile(run, backend=backend)(torch.zeros(B, H, S, D), torch.randn(B, H, T, D))
    assert "rebuilt by cat each step (keys)" in caplog.text
    assert "StaticCache" in caplog.text


@pytest.mark.parametrize("name", ["linear_cache", "ssm_states"])
def test_replaced_by_a_new_tensor_is_told_by_name(name):
    """As MiniMax's linear state; what is no cache, is written in place, or has another shape is not named."""

    class Layer(torch.nn.Module):
        def forward(self, hidden_states, kv_cache, pos, **states):
            kv_cache.index_copy_(0, pos, hidden_states)
            state = states[name] * 0.9 + hidden_states.sum(0)
            return hidden_states * 2, kv_cache, state, states[name].sum(-1)

    def run(**more):
        return torch.compile(Layer(), backend=backend)(
            torch.randn(T, H, D), torch.zeros(S, H, D), torch.arange(T), **more
        )

    torch._dynamo.reset()
    backend = kvcanary_fx.CanaryBackend(kvcanary_fx.CanaryConfig(inner="eager"))
    with torch.no_grad():
        run(**{name: torch.zeros(1, H, D)})
    (plan,) = backend.session.plans
    assert plan.unguarded == [(f"states.{name}", "replaced by a new tensor each step")]
    assert [s.pool for s in plan.sites] == ["kv_cache"]
    assert f"not      states.{name}: replaced by a new tensor each step" in backend.session.summary()


class _Memory(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.memory = torch.zeros(B, D)

    def forward(self, k, kc, pos):
        kc.index_copy_(2, pos, k)
        self.memory = self.memory * 0.9 + k.sum((1, 2))
        return kc.sum() + self.memory.sum()


def _past_in_a_tuple(k, kc, pos, past):
    kc.index_copy_(2, pos, k)
    return kc.sum(), (past[0] * 0.9 + k.sum(), past[1])


def _grown_and_detached(k, kc, pos, keys):
    kc.index_copy_(2, pos, k)
    return kc.sum(), torch.cat([keys, k], dim=2).detach()


def _behind_the_result(k, kc, pos, s):
    kc.index_copy_(2, pos, k)
    return kc.sum(), s * 0.9 + k.sum()


def _through_views(k, kc, pos, pool):
    kc.index_copy_(2, pos, k)
    return kc.sum(), pool.transpose(1, 2).index_copy(1, pos, k.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize(
    ("run", "more", "named"),
    [
        (_Memory(), (), "memory"),
        (_past_in_a_tuple, ((torch.zeros(B, D, D), torch.zeros(B, D, D)),), "past[0]"),
        (_grown_and_detached, (torch.zeros(B, H, T, D),), "keys"),
        (_behind_the_result, (torch.zeros(B, D, D),), "s"),
        (_through_views, (torch.zeros(B, H, S, D),), "pool"),
    ],
    ids=["attribute", "tuple", "cat and detach", "argument", "update through views"],
)
def test_a_second_cache_that_is_made_anew_is_told_by_name(run, more, named, caplog):
    """Beside a cache that is guarded, so that the graph is not one without any."""
    backend = kvcanary_fx.CanaryBackend(kvcanary_fx.CanaryConfig(inner="eager"))
    with caplog.at_level(logging.WARNING, "kvcanary"), torch.no_grad():
        torch.compile(run, backend=backend)(torch.randn(B, H, T, D), torch.zeros(B, H, S, D), torch.arange(T), *more)
    (plan,) = backend.session.plans
    assert [s.pool for s in plan.sites] == ["kc"]
    (told,) = [r.getMessage() for r in caplog.records if "kvcanary.unguarded" in r.getMessage()]
    assert [*plan.functional, *(name for name, _ in plan.unguarded)] == [named]
    assert named in told
    assert named in backend.session.summary()


def test_born_in_the_graph_is_told(caplog):
    def run(k, pos):
        kc = torch.zeros(B, H, S, D)
        kc.index_copy_(2, pos, k)
        return kc.sum(), kc

    with caplog.at_level(logging.WARNING, "kvcanary"), torch.no_grad():
        backend = kvcanary_fx.CanaryBackend(kvcanary_fx.CanaryConfig(inner="eager"))
        torch.compile(run, backend=backend)(torch.randn(B, H, T, D), torch.arange(T))
    assert "created inside this graph" in caplog.text
    assert "early_initialization" in caplog.text


def test_lint_finds_a_verify_after_its_record():
    gm, inputs = dynamo_graph(INDEX_COPY.run, *INDEX_COPY.make())
    rewritten, plan = run_passes(gm, inputs, passes())
    nodes = {n.name: n for n in rewritten.graph.nodes}
    nodes["record_halves_default"].append(nodes["verify_halves_default"])
    with pytest.raises(BrokenGraphError, match="verify_halves_default checks a half after it was recorded"):
        check_canary_rules(rewritten, plan, "a pass")


def test_lint_finds_an_op_without_its_state():
    gm, inputs = dynamo_graph(INDEX_COPY.run, *INDEX_COPY.make())
    rewritten, plan = run_passes(gm, inputs, passes())
    node = next(n for n in rewritten.graph.nodes if n.name == "verify_halves_default")
    node.update_arg(4, node.args[0])
    with pytest.raises(BrokenGraphError, match="does not thread a state input"):
        check_canary_rules(rewritten, plan, "a pass")


@pytest.mark.parametrize("moved", ["begin_default", "verify_halves_default"])
def test_lint_finds_a_begin_that_is_not_first_or_not_alone(moved):
    gm, inputs = dynamo_graph(INDEX_COPY.run, *INDEX_COPY.make())
    rewritten, plan = run_passes(gm, inputs, passes())
    nodes = {n.name: n for n in rewritten.graph.nodes}
    if moved == "begin_default":
        nodes["record_halves_default"].append(nodes["begin_default"])
    else:
        with rewritten.graph.inserting_after(nodes["verify_halves_default"]):
            rewritten.graph.node_copy(nodes["begin_default"])
    with pytest.raises(BrokenGraphError, match="is out of order with its graph's begin"):
        check_canary_rules(rewritten, plan, "a pass")


def test_dump_writes_each_stage(tmp_path):
    gm, inputs = dynamo_graph(INDEX_COPY.run, *INDEX_COPY.make())
    run_passes(gm, inputs, passes(rewrite=True), dump=str(tmp_path))
    names = sorted(p.name.partition(".")[2] for p in tmp_path.iterdir())
    done = ["unsqueeze_scalar_indices", "find_functional_caches", "insert_canaries", "rewrite_writes"]
    assert names == ["0_before.txt", *(f"{number}_{name}.txt" for number, name in enumerate(done, start=1))]
    assert "kvcanary.verify" in next(tmp_path.glob("*3_insert*")).read_text()


@pytest.mark.parametrize("mode", ["raise", "log"])
def test_directory_that_takes_no_dump_any_more_leaves_the_graph_guarded(tmp_path, mode, caplog):
    backend = kvcanary_fx.CanaryBackend(kvcanary_fx.CanaryConfig(mode=mode, inner="eager", dump=tmp_path / "graphs"))
    (tmp_path / "graphs").write_text("a file has taken the name since")
    compiled = torch.compile(INDEX_COPY.run, backend=backend)
    with torch.no_grad():
        compiled(*INDEX_COPY.make())
    assert backend.session.stats().recorded > 0
    assert "kvcanary.dump" in caplog.text
    assert "give the setting dump another directory" in caplog.text


def test_debug_log_counts_ops_and_time(caplog):
    gm, inputs = dynamo_graph(INDEX_COPY.run, *INDEX_COPY.make())
    with caplog.at_level(logging.DEBUG, "kvcanary.passes"):
        _, plan = run_passes(gm, inputs, passes())
    assert "insert_canaries in" in caplog.text
    assert "+1 begin, +1 record_halves, +1 verify_halves" in caplog.text
    assert set(plan.seconds) == {"unsqueeze_scalar_indices", "find_functional_caches", "insert_canaries"}


def test_insertion_reports_where_the_graph_comes_from():
    _, plan = graph_of(INDEX_COPY.run, *INDEX_COPY.make())
    assert plan.name.startswith("graph 0/0 (index_copy, idioms.py:")


def test_chain_is_on_only_where_tokens_are_shown():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(10, H * D)
            self.register_buffer("k_cache", torch.zeros(B, H, S, D))

        def forward(self, input_ids, position_ids):
            k = self.embed(input_ids).view(B, -1, H, D).transpose(1, 2)
            self.k_cache.index_copy_(2, position_ids[0], k)
            return self.k_cache.sum()

    gm, inputs = dynamo_graph(Model(), torch.zeros(B, T, dtype=torch.int64), torch.arange(T).expand(B, T))
    with_chain, plan = run_passes(gm, inputs, passes(chain=True))
    without, off = run_passes(gm, inputs, passes(chain=False))
    assert plan.chain_off is None
    assert "canary.identify(input_ids, position_ids" in render(with_chain)
    assert off.chain_off == "it is switched off"
    assert "identify" not in render(without)
    _, none = graph_of(INDEX_COPY.run, *INDEX_COPY.make())
    assert none.chain_off == "the graph has no input with token ids"


def test_insert_canaries_alone_keeps_the_signature_of_a_pass():
    gm, inputs = dynamo_graph(INDEX_COPY.run, *INDEX_COPY.make())
    plan = GraphPlan("graph")
    assert insert_canaries(gm, inputs, plan, chain=False) is gm
    assert plan.ops == 3
