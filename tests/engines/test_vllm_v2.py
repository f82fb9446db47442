"""The guard of Model Runner V2, with a runner that has its fields and no GPU: what it gives the session, and when.

With vLLM itself: ``vllm_v2_run.py``.
"""

from __future__ import annotations

import contextlib
import importlib
import operator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from v2_runner import DIM, HEADS, PAGE, Runner, Sizes, execute


@pytest.fixture
def runner():
    return Runner()


def run(runner):
    """Two requests: a prompt each, decode, one more page, another request after the first has ended."""
    runner.step({"x": 3, "y": 5}, new={"x": [1], "y": [2, 3]})
    runner.step({"y": 1, "x": 1})  # the order of a batch changes
    runner.step({"x": 1, "y": 1}, more={"x": [4]})
    runner.step({"y": 1}, finished=["x"])
    runner.step({"z": 2, "y": 1}, new={"z": [1]}, more={"y": [5]})
    return runner.step({"z": 1, "y": 1})


def test_steps_of_a_runner_that_reorders_its_batch_are_silent(runner):
    run(runner)
    assert runner.guard.read() is None
    stats = runner.guard.session.stats()
    assert (stats.violations, stats.engine_steps, runner.guard.session.uncovered) == (0, 6, [])
    assert stats.recorded == 4 * (8 + 2 + 2 + 1 + 3 + 2)
    assert runner.connector.calls == ["pre_forward", "finish_forward"] * 6


@pytest.mark.parametrize("most", [0, 2])
def test_more_new_pages_than_a_launch_takes_in_are_sent_before_it(runner, monkeypatch, most):
    """As those of many prompts: here of one."""
    from kvcanary_fx.adapters.vllm.v2 import kept
    from kvcanary_fx.adapters.vllm.v2.rows import Rows

    sent, write = [], Rows.write
    monkeypatch.setattr(kept, "most_pages", lambda tokens: most)
    monkeypatch.setattr(Rows, "write", lambda self, pages: sent.append(len(pages) // 3) or write(self, pages))
    run(runner)
    assert runner.guard.read() is None
    assert sent == ([3, 1, 2] if most == 0 else [3])


@pytest.mark.parametrize("frees", ["the next step's tokens", "sleep"])
def test_k_and_v_of_a_prompt_are_freed_where_the_device_has_the_next_step(runner, frees):
    """And before the engine sleeps, whose memory is another's then."""

    def kept():
        return sum(len(written) for _, written in runner.guard._layers.held._kept)

    runner.step({"x": 3}, new={"x": [1]})
    assert kept() == len(runner.layers)
    runner.read()  # the tokens of the step before it, while the device waits for the host
    assert kept() == len(runner.layers)
    if frees == "sleep":
        runner.guard.forget_stored()
    else:
        runner.read()
    assert kept() == 0
    runner.step({"x": 1})
    runner.guard._news.patience = -1  # another rank's are read, and nobody would free them here
    runner.step({"x": 1}, more={"x": [2]})
    assert kept() == 0


@pytest.mark.parametrize("damaged", [False, True])
def test_a_request_whose_input_comes_in_pieces_begins_again_with_its_pages(damaged):
    """vLLM's streaming input: it is new in the step of each piece, and has dropped the tokens behind its last one."""
    runner = Runner(KVCANARY_BUDGET="none")
    runner.step({"x": 3}, new={"x": [1]})
    for number in range(3):  # the last one had begun when the piece before it ended
        runner.step({"x": 1}, more={} if number else {"x": [2]})
    runner.layers["b"][0][1, 1] += damaged
    runner.step({"x": 4}, new={"x": [1, 2, 3]}, found={"x": 5}, events=[("taken", [3], ["x"], [1], 0)])
    runner.read(runner.step({"x": 1}))
    told = {(v.check, v.layer, v.slot, v.position) for v in runner.guard.session.violations()}
    assert told == ({("content", "b", PAGE + 1, 1)} if damaged else set())


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_a_rank_finds_whose_outputs_are_dropped_says_how_many_tokens_had_been_sent(monkeypatch, elsewhere):
    """Seen over two H200: one token that was computed from the damage had left."""
    told = []
    ranks = SimpleNamespace(reads=False, tell=told.append) if elsewhere else None
    monkeypatch.setattr("kvcanary_fx.adapters.vllm.reactions.join", lambda parallel: ranks)
    runner = Runner(KVCANARY_BUDGET="none", KVCANARY_VLLM_ON_VIOLATION="recompute")
    runner.step({"x": 3}, new={"x": [1]})
    runner.layers["b"][0][1, 1] += 1
    runner.step({"x": 1})
    runner.guard.session.drain()
    assert (told[0] if elsewhere else runner.guard.reactions.verdict).late == elsewhere


def image(name, offset=1, length=2):
    return SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=length))


def takes_up(runner, of):
    """A request with an image takes up the first page of one with the image of a cat; what is told of it."""
    runner.step({"x": 5}, new={"x": [1, 2]}, images={"x": [image("cat")]})
    runner.step({"x": 1})
    events = [("touched", [1], "y"), ("taken", [3], ["y"], [1], 0)]
    runner.step({"y": 2}, new={"y": [1, 3]}, found={"y": 4}, images={"y": of}, events=events)
    runner.step({"y": 1, "x": 1})
    return {(v.check, v.position, v.request) for v in runner.guard.session.violations()}


def test_a_prefix_with_the_same_image_is_silent(runner):
    assert takes_up(runner, [image("cat")]) == set()
    stored = runner.guard.session.pool.space.tokens[[4, 5, 6, 7]].tolist()
    assert (stored[0], stored[3]) == (3, 6)
    assert stored[2] == stored[1] + 1 > 1 << 30


@pytest.mark.parametrize("of", [[], [image("dog")], [image("cat", offset=2)]], ids=["none", "another", "elsewhere"])
def test_a_prefix_with_another_image_is_told_where_it_is(runner, of):
    told = takes_up(runner, of)
    assert told
    assert {(check, request) for check, _, request in told} == {("token", "y")}
    assert {position for _, position, _ in told} <= {1, 2, 3}


def test_a_prompt_cut_within_its_image_goes_on_in_it(runner):
    runner.step({"x": 2}, new={"x": [1]}, images={"x": [image("cat")]})
    runner.step({"x": 2})
    stored = runner.guard.session.pool.space.tokens[[4, 5, 6, 7]].tolist()
    assert stored[2] == stored[1] + 1 > 1 << 30
    assert stored[3] == 6
    runner.step({"y": 1}, new={"y": [2]}, finished=["x"])
    assert not runner.guard._forwards.images._of
    assert runner.guard.session.violations() == []


def test_what_was_released_is_compared_before_the_runner_clears_it(runner, monkeypatch):
    """Of a hybrid, the runner clears the blocks that were just handed out, on the GPU before our step begins there."""
    runner.step({"x": 3, "y": 5}, new={"x": [1], "y": [2, 3]})
    session, seen = runner.guard.session, []
    flush = session.flush
    monkeypatch.setattr(session, "flush", lambda: (seen.append(bool(runner.layers["a"][0][1].any())), flush()))
    runner.step({"y": 1}, finished=["x"])
    assert seen == []  # nothing is sent early where nothing is cleared
    runner.step({"z": 2, "y": 1}, new={"z": [1]}, zeroed=[1])
    assert seen == [True]
    assert runner.read(runner.step({"z": 1, "y": 1})) is None


def test_a_flip_is_reported_when_its_steps_tokens_are_read(runner):
    run(runner)
    runner.layers["b"][1][2, 1, 0, 3] += 1  # position 1 of y
    runner.read(runner.step({"y": 1}))
    (found,) = runner.guard.session.known_violations()
    assert (found.check, found.layer, found.half, found.request, found.position) == ("content", "b", "V", "y", 1)


class FromPython(Runner):
    """Its layers run from Python, with the checks in the op of each: ours in the place of vLLM's, where a graph is
    split, or vLLM's own, of a model that is not compiled."""

    def __init__(self, in_graph, **sizes):
        self._in_graph = in_graph
        super().__init__(sizes=Sizes(**sizes))

    def _model(self, slots, layers=None):
        from kvcanary_fx.adapters.vllm import ops

        for layer, halves in self.layers.items():
            written = [torch.randn(len(slots), HEADS, DIM) for _ in halves]

            def attention(query, key, value, output, layer_name, halves=halves, written=written):
                for half, rows in zip(halves, written, strict=True):
                    half.view(-1, HEADS, DIM)[slots] = rows

            ops._guarded(attention, self._in_graph)(None, *written, torch.zeros(1), layer)


@pytest.mark.parametrize("in_graph", [True, False], ids=["split", "not compiled"])
@pytest.mark.parametrize("layer", ["a", "b", "c"])
def test_each_layer_that_runs_from_python_is_recorded(in_graph, layer):
    """Seen: of a model that is not compiled only the last one was."""
    runner = FromPython(in_graph, layers=("a", "b", "c"))
    run(runner)
    assert runner.guard.session.uncovered == []
    runner.layers[layer][1][2, 1, 0, 3] += 1  # position 1 of y
    runner.read(runner.step({"y": 1}))
    assert [(v.check, v.layer, v.half) for v in runner.guard.session.known_violations()] == [("content", layer, "V")]


def test_layers_that_wrote_and_are_not_recorded_are_told(monkeypatch):
    """Seen: what they had noted was lost, and they were counted among the guarded ones."""
    from kvcanary_fx.kernels.deferred import Deferred

    monkeypatch.setattr(Deferred, "take_in", lambda noted: noted.written.clear())
    runner = FromPython(True, layers=("a", "b", "c"))
    runner.step({"x": 3}, new={"x": [1]})
    assert any("only 0 of 3 layers" in why for why in runner.guard.session.uncovered)


def test_the_host_hears_of_violations_and_copies_nothing():
    """A GPU's kernels write to the host's memory when they find one; here that stands for it."""
    from kvcanary_fx.adapters.vllm.v2.outputs import UNREAD, News
    from kvcanary_fx.kernels.ring import Control, append
    from kvcanary_fx.runtime.rows import take_rows

    control = Control.allocate(4, torch.device("cpu"))
    control.bell = torch.zeros(2, dtype=torch.int64)
    news = News(SimpleNamespace(controls=SimpleNamespace(by_device={"cpu": control})))
    assert not news.news()
    append(control, True, half=0, check=1, phase=0, slot=3, stored=1, found=2)
    assert news.unread(early=True)
    assert not news.unread(early=False), "its tokens may be read yet"
    assert news.news()
    assert len(take_rows(control)[0]) == 1
    assert not news.news()
    append(control, True, half=0, check=1, phase=0, slot=3, stored=1, found=2)
    news.dropped = UNREAD
    assert not news.unread(early=False)
    news.dropped += 1
    assert news.unread(early=False), "nobody reads the tokens of this rank"


def test_in_mode_raise_the_tokens_of_the_step_do_not_arrive():
    from kvcanary_fx import KVCacheViolation

    runner = Runner("raise")
    runner.read(run(runner))
    runner.layers["a"][0][2, 0, 0, 0] += 1
    runner.step({"y": 1})
    with pytest.raises(KVCacheViolation, match="request y, position 0"):
        runner.guard.read()


def test_in_mode_raise_a_rank_whose_outputs_nobody_reads_ends_at_its_next_step():
    from kvcanary_fx import KVCacheViolation

    runner = Runner("raise")
    runner.read(run(runner))
    runner.layers["a"][0][2, 0, 0, 0] += 1
    runner.step({"y": 1})
    with pytest.raises(KVCacheViolation, match="request y, position 0"):
        runner.step({"y": 1})


def test_requests_that_read_damage_are_named_to_the_scheduler():
    runner = Runner(KVCANARY_VLLM_ON_VIOLATION="abort")
    runner.read(run(runner))
    runner.layers["a"][0][2, 0, 0, 0] += 1
    verdict = runner.read(runner.step({"y": 1}))
    assert (verdict.outcome, verdict.blocks()) == ("abort", {2})
    assert runner.read(runner.step({"y": 1})) is None


def test_the_table_that_attention_gets_is_compared_with_the_schedulers(runner):
    run(runner)
    runner.read(runner.step({"y": 1}, wrong=2))
    assert runner.guard.session.known_violations() == []
    runner.read(runner.step({"y": 1}, wrong=6))
    found = runner.guard.session.known_violations()
    assert [(v.check, v.request, v.position) for v in found] == [("index", "y", place) for place in range(PAGE)]
    assert runner.guard.session.uncovered == []


def test_a_page_that_is_given_away_too_early_is_reported(runner):
    runner.step({"x": 3}, new={"x": [1]})
    freed = [("freed", [], [1], "x"), ("taken", [1], ["y"], [1], 0)]
    runner.step({"x": 1, "y": 2}, new={"y": [1]}, events=freed)
    runner.guard.read()
    found = runner.guard.session.known_violations()
    assert "owner" in {v.check for v in found}
    told = "written in step 1 by request x, released in step 1 by request x, allocated in step 1 to request y"
    assert any(told in v.history for v in found if v.history)


@pytest.mark.parametrize("chunk", [2 * PAGE, None])
def test_pages_of_an_earlier_chunk_are_given_to_others(chunk):
    """And attention gets other tables than the runner's, one for each chunk."""
    runner = Runner(chunk=chunk)
    runner.step({"x": 7}, new={"x": [1, 2]})
    runner.step({"x": 1})
    events = [("freed", [], [1, 2], "x"), ("taken", [3], ["x"], [1], 0), ("taken", [1], ["y"], [1], 0)]
    runner.step({"x": 2, "y": 3}, more={"x": [3]}, new={"y": [1]}, events=events)
    runner.read(runner.step({"x": 1, "y": 1}, wrong=9))
    found = {(v.check, v.request) for v in runner.guard.session.known_violations()}
    assert (found == set()) == (chunk is not None)
    assert chunk is not None or {("owner", "x"), ("index", "x")} <= found
    before = len(runner.guard.session.known_violations())
    runner.layers["b"][1][3, 1, 0, 3] += 1  # position 9 of x
    runner.read(runner.step({"x": 1}))
    told = runner.guard.session.known_violations()[before:]
    assert ("content", "b", "V", "x", 9) in {(v.check, v.layer, v.half, v.request, v.position) for v in told}
    assert len(told) == 1 or chunk is None


def test_a_report_names_the_line_of_the_scheduler_that_freed_a_page():
    runner = Runner(KVCANARY_STACKS="10")
    runner.step({"x": 3}, new={"x": [1]})
    freed = [("freed", [], [1], "x"), ("taken", [1], ["y"], [1], 0)]
    stacks = [(f"vllm/v1/core/sched/scheduler.py:{line} in schedule", "core.py:5 in step") for line in (7, 9)]
    runner.read(runner.step({"x": 1, "y": 2}, new={"y": [1]}, events=freed, stacks=stacks))
    told = "released in step 1 by request x at vllm/v1/core/sched/scheduler.py:7 in schedule, allocated in step 1 to "
    found = runner.guard.session.known_violations()
    assert any(f"{told}request y at vllm/v1/core/sched/scheduler.py:9" in v.history for v in found if v.history)


def test_what_the_scheduler_reports_is_queued_while_no_other_thread_reads_violations(runner, monkeypatch):
    """The thread that reads a step's tokens sends the queue before it reads what failed."""
    seen = []
    for name in ("apply", "settle", "after_forward"):
        method = getattr(runner.guard.books, name)

        def noted(*args, name=name, method=method):
            seen.append((name, runner.guard._counts._lock.locked()))
            return method(*args)

        monkeypatch.setattr(runner.guard.books, name, noted)
    runner.step({"x": 3}, new={"x": [1]})
    assert seen == [("apply", True), ("after_forward", True)]
    seen.clear()
    runner.step({"x": 1}, events=[("touched", [1], "y")])  # a page that is taken up
    assert seen == [("apply", True), ("settle", True), ("after_forward", True)]


def test_a_request_may_take_up_a_page_that_the_same_forward_writes(runner):
    events = [("taken", [1, 2], ["x"], [2], 0), ("touched", [1], "y"), ("taken", [3], ["y"], [1], 0)]
    runner.read(runner.step({"x": 6, "y": 2}, new={"x": [1, 2], "y": [1, 3]}, found={"y": 4}, events=events))
    runner.read(runner.step({"x": 1, "y": 1}))
    assert runner.guard.session.violations() == []


def test_a_connector_that_does_nothing_is_not_called(runner, monkeypatch):
    from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR, KVConnector

    from kvcanary_fx.adapters.vllm.v2.connector import Bracket

    bracket = runner.kv_connector = Bracket(NO_OP_KV_CONNECTOR, runner.guard)
    for name in ("pre_forward", "finish_forward"):
        monkeypatch.setattr(KVConnector, name, lambda *_: pytest.fail("called"))
    run(runner)
    assert runner.guard.read() is None
    assert runner.guard.session.stats().engine_steps == 6
    assert bracket.post_forward(set()) is None
    assert bracket.no_forward(None) is NO_OP_KV_CONNECTOR.no_forward(None)


def test_hooks_begin_a_step_end_it_and_give_its_output_what_was_found(runner, monkeypatch):
    from kvcanary_fx.adapters.vllm import registry
    from kvcanary_fx.adapters.vllm.journal import ATTRIBUTE, Message
    from kvcanary_fx.adapters.vllm.v2 import hooks

    class Output:
        def get_output(self):
            return SimpleNamespace()

    def raises(*_):
        seen.append(runner.guard.scheduled)
        raise ValueError("out of memory")

    monkeypatch.setattr(hooks, "AsyncOutput", Output)
    seen = []
    execute = hooks._execute_model(lambda runner, scheduled, *_, **__: seen.append(runner.guard.scheduled))
    sample, read = hooks._sample_tokens(lambda runner: Output()), hooks._get_output(Output.get_output)
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set(), num_computed_tokens=[])
    scheduled = SimpleNamespace(
        finished_req_ids=set(), preempted_req_ids=None, scheduled_new_reqs=[], scheduled_cached_reqs=cached,
        kv_cache_block_copies=None, num_scheduled_tokens={},
    )  # fmt: skip
    setattr(scheduled, ATTRIBUTE, Message())
    execute(runner, scheduled)
    assert seen.pop() is None, "nobody guards this runner yet"
    registry.add(runner, runner.guard)
    execute(runner, scheduled, None, True)
    assert seen.pop() is None, "a dummy run is no step"
    for run in (execute, hooks._execute_model(raises)):
        with contextlib.suppress(ValueError):
            run(runner, scheduled)
        assert seen.pop() is scheduled
        assert runner.guard.scheduled is None
    output = sample(runner)
    assert not hasattr(read(output), ATTRIBUTE)
    runner.guard.reactions.verdict = "damaged"
    assert getattr(read(output), ATTRIBUTE) == "damaged"


def test_dummy_forwards_look_at_nothing(runner):
    run(runner)
    runner.kv_connector.set_disabled(True)
    scheduled = SimpleNamespace(num_scheduled_tokens={}, finished_req_ids=set())
    execute(runner, scheduled, lambda: runner._model(torch.tensor([9])))
    runner.kv_connector.set_disabled(False)
    assert runner.guard.session.violations() == []
    assert runner.connector.calls[-2:] == ["set_disabled"] * 2


def test_a_layer_that_no_check_saw_is_told(runner):
    del runner.layers["b"]
    runner.step({"x": 3}, new={"x": [1]})
    assert any("only 1 of 2 layers" in why for why in runner.guard.session.uncovered)


def test_the_parts_that_the_steps_benchmark_times_are_there(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import vllm_steps

    for part in vllm_steps.OURS:
        module, _, name = part.partition(":")
        assert callable(operator.attrgetter(name)(importlib.import_module(f"kvcanary_fx.{module}"))), part


def test_our_ops_split_the_graph_wherever_it_comes_from(monkeypatch):
    """A graph from vLLM's cache is split by the configuration, and is not handed to us."""
    from vllm.config import CompilationConfig, VllmConfig
    from vllm.platforms.cpu import CpuPlatform

    from kvcanary_fx.adapters.vllm import ops, plugin

    plugin.register()
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(lambda cls, config: None))
    config = VllmConfig(compilation_config=CompilationConfig(mode=3)).compilation_config
    assert [op for op in ops.OPS if op not in config.splitting_ops] == []


def test_a_model_that_raises_leaves_a_session_that_goes_on(runner, monkeypatch):
    runner.step({"x": 3}, new={"x": [1]})
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_model", lambda *_: (_ for _ in ()).throw(ValueError("out of memory")))
        with pytest.raises(ValueError, match="out of memory"):
            runner.step({"x": 1})
    runner.step({"y": 3}, new={"y": [2]})
    assert runner.guard.session._stepping.running is None


def test_layers_of_a_group_that_is_not_guarded_raise_nothing_and_stand_for_no_others(runner):
    runner.layers["elsewhere"] = tuple(torch.zeros_like(half) for half in runner.layers["a"])
    runner.step({"x": 3}, new={"x": [1]})
    assert runner.guard.session.uncovered == []
    runner.layers.pop("b")
    runner.step({"x": 1})
    assert "only 1 of 2 layers were checked" in runner.guard.session.uncovered[0]


def test_a_guard_is_made_once_every_half_of_the_cache_has_proved_to_be_compared(runner, monkeypatch):
    from kvcanary_fx import SelfTestError
    from kvcanary_fx.adapters.vllm import proof
    from kvcanary_fx.adapters.vllm.v2 import hooks

    runner.dcp_size, runner.pcp_manager, runner.ubatch_runner = 1, None, None
    monkeypatch.setattr(hooks, "groups_with_drafts", lambda runner, *_: [runner.group])
    assert hooks._guard(runner, runner.settings, False, {}).groups == [runner.group]
    assert not any(half.any() for halves in runner.layers.values() for half in halves)  # nothing is left of it
    monkeypatch.setattr(proof, "record_layer", lambda *_: None)
    with pytest.raises(SelfTestError, match="a changed byte in half K of a"):
        hooks._guard(runner, runner.settings, False, {})


def test_layers_of_a_draft_are_named_with_the_reason_and_are_not_the_targets(caplog):
    from kvcanary_fx.adapters.vllm import pools
    from kvcanary_fx.adapters.vllm.v2 import drafts

    speculator = SimpleNamespace(method="dflash", draft_attn_layer_names={"draft.0"})
    runner, unguarded = SimpleNamespace(speculator=speculator), {}
    runner.compilation_config = SimpleNamespace(static_forward_context={"draft.0": None})
    runner.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["draft.0"])])
    assert pools.draft_layers(runner) == {"draft.0"}
    assert pools.groups_with_drafts(runner, drafts.why_unguarded(speculator), unguarded) == []
    assert unguarded == {"draft": "drafts of dflash are not supported by this adapter"}
    assert "kvcanary.unguarded draft layers (draft.0, ...): drafts of dflash" in caplog.text


@pytest.fixture
def drafting():
    return Runner(drafts=2)


def run_drafting(runner):
    """A prompt that is checked launch by launch, and steps with drafts, of which none, some and all are rejected."""
    runner.step({"x": 14}, new={"x": [1, 2, 3, 4, 5]}, rejected={})
    runner.step({"x": 3, "y": 10}, new={"y": [6, 7, 8, 9, 10]}, rejected={"x": 2})  # launch by launch, too
    runner.step({"y": 3, "x": 1}, rejected={"y": 1})
    runner.step({"x": 3, "y": 3}, rejected={"x": 1, "y": 2})
    return runner.step({"y": 3}, rejected={"y": 0}, finished=["x"])  # x leaves guesses in its pages


def test_rejected_drafts_are_silent_in_the_target_and_in_the_draft(drafting):
    assert drafting.read(run_drafting(drafting)) is None
    stats = drafting.guard.session.stats()
    assert (stats.violations, drafting.guard.session.uncovered) == (0, [])
    assert stats.recorded == 6 * (14 + 13 + 4 + 6 + 3)


@pytest.mark.parametrize("beside", [{}, {"z": 10}], ids=["kept", "launch by launch"])
def test_rejected_draft_that_the_runner_counts_is_reported(drafting, beside):
    drafting.read(run_drafting(drafting))
    drafting.step({"y": 3, **beside}, new={"z": [11, 12, 13]} if beside else (), rejected={"y": 2})
    stored = drafting._stored("y")
    drafting.req_states.num_computed_tokens.gpu[drafting.row["y"]] += 1
    drafting.read(drafting.step({"y": 1}))
    found = drafting.guard.session.known_violations()
    told = {(v.check, v.why, v.request, v.position) for v in found}
    assert told == {("token", "REJECTED_TOKEN", "y", stored), ("poison", "NEVER_WRITTEN", "y", stored)}
    assert {v.layer for v in found if v.check == "poison"} == {"draft"}  # a guess is there


def test_flip_in_a_layer_of_a_draft_is_reported_before_the_next_proposal(drafting):
    drafting.read(run_drafting(drafting))
    drafting.draft["draft"][0][6, 1, 0, 3] += 1  # position 1 of y
    drafting.read(drafting.step({"y": 1}))
    (found,) = drafting.guard.session.known_violations()
    assert (found.check, found.layer, found.half, found.request, found.position) == ("content", "draft", "K", "y", 1)


def test_guess_that_overwrites_a_token_is_reported(drafting):
    drafting.read(run_drafting(drafting))
    drafting.read(drafting.step({"y": 3}, rejected={}, stray=6 * PAGE + 2))
    assert drafting.guard.session.known_violations() == []
    drafting.read(drafting.step({"y": 1}))
    found = {(v.check, v.layer, v.request, v.position) for v in drafting.guard.session.known_violations()}
    assert found == {("content", "draft", "y", 2)}


def test_layer_of_a_draft_that_no_check_saw_is_told(drafting, monkeypatch):
    monkeypatch.setattr(drafting, "_model", lambda slots, layers=None: Runner._model(drafting, slots, layers and {}))
    drafting.step({"x": 3}, new={"x": [1]})
    assert drafting.guard.session.uncovered == ["only 0 of 1 layers of a draft were checked"]


def test_tokens_of_the_target_in_the_batch_of_a_draft_model():
    from kvcanary_fx.adapters.vllm.v2.drafts import rows_of_the_target

    batch = SimpleNamespace(num_tokens=6, num_reqs=3, query_start_loc=torch.tensor([0, 2, 3, 6, 6], dtype=torch.int32))
    assert rows_of_the_target(batch).tolist() == [0, 1, 3, 5, 6, 7]


def test_outputs_say_whose_they_are_where_a_process_has_had_several_runners():
    """Else its guard reads all of them, and nothing of ours is called where tokens are sampled."""
    from kvcanary_fx.adapters.vllm.v2.outputs import Readers

    class Of:
        def __init__(self, follows_samples=False):
            self.follows_samples = follows_samples

    readers, runner, guard = Readers(), Of(), Of()
    assert not readers.add(runner, guard)
    assert readers.only() is guard
    again = Of()
    assert not readers.add(runner, again), "its memory was made anew"
    assert readers.only() is again
    del again
    assert readers.only() is None, "it ended with its engine"
    del runner
    other, its = Of(), Of()
    assert not readers.add(other, its)
    second = Of()
    assert readers.add(second, None), "an unguarded one, whose outputs are not the first one's"
    assert readers.only is None
    del second
    assert readers.add(other, its), "some may still be on their way"
    drafting = Of(follows_samples=True)
    assert Readers().add(Of(), drafting)
    assert not Readers().add(Of(), None)


@pytest.mark.parametrize(
    ("said", "plain"),
    [
        ({}, True),
        (dict(finished_req_ids={"y"}), False),
        (dict(preempted_req_ids={"y"}), False),
        (dict(kv_cache_block_copies=[SimpleNamespace()]), False),
        (dict(scheduled_new_reqs=[SimpleNamespace(req_id="y")]), False),
        (dict(more=([5],)), False),
        (dict(resumed={"y"}), False),
        (dict(events=[("freed", [], [3], "y")]), False),
    ],
)
def test_a_message_is_plain_where_nothing_happened_and_nothing_is_new(said, plain):
    from kvcanary_fx.adapters.vllm.blocks import JOURNAL
    from kvcanary_fx.adapters.vllm.journal import ATTRIBUTE, Journal
    from kvcanary_fx.adapters.vllm.outcomes import _schedule

    journal, more, resumed, events = (
        Journal(),
        said.pop("more", None),
        said.pop("resumed", set()),
        said.pop("events", []),
    )
    pool = SimpleNamespace(**{JOURNAL: journal})
    scheduler = SimpleNamespace(
        kv_cache_manager=SimpleNamespace(block_pool=pool),
        requests={"y": SimpleNamespace(lora_request=None, cache_salt=None)},
    )
    cached = SimpleNamespace(req_ids=["x"], new_block_ids=[more], resumed_req_ids=resumed)
    nothing = dict(finished_req_ids=set(), preempted_req_ids=None, scheduled_new_reqs=[], kv_cache_block_copies=None)
    for event in events:
        journal.note(*event)
    output = _schedule(lambda _: SimpleNamespace(scheduled_cached_reqs=cached, **{**nothing, **said}))(scheduler)
    message = getattr(output, ATTRIBUTE)
    assert message.plain == plain
    assert message.events == events
