"""The benchmarks of whole forwards, as a user runs them, but tiny and on a CPU: they measure what they say."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from threading import get_ident

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import budget
import compile_time
import cores
import decode_models
import forward
import forward_scene
import goals
import layers
import plain_cache
import step_parts
import svg_plot
import vllm_stacks
from serve_load import Sample

# tests/engines has a module of this name, too
_SPEC = importlib.util.spec_from_file_location("benchmark_of_a_server", Path(sys.path[-1]) / "vllm_serve.py")
served = sys.modules[_SPEC.name] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(served)

# not for the other tests: transformers would take benchmarks/kernels.py for the package of that name
BENCHMARKS = Path(sys.path.pop())


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def table(out: str) -> list[list[str]]:
    """The cells of the rows of the table, without its header."""
    lines = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines[2:]]


def with_goals(read, printed: str) -> dict[str, str]:
    """What `goals.py` reads in it, with the goal of each."""
    found = list(read(printed))
    assert all(figure.measured for figure in found)
    return {figure.what: figure.goal for figure in found}


def name_cores(root, siblings):
    """Say which hardware threads share a core; None: nothing is said."""
    for cpu, listed in enumerate(siblings or ()):
        topology = root / f"cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(listed + "\n")


@pytest.mark.parametrize(
    ("siblings", "chosen"),
    [(["0,2", "1,3", "0,2", "1,3"], {0, 1}), (["0-1", "0-1", "2-3", "2-3"], {0, 2}), (None, {0, 1, 2, 3})],
    ids=["halves", "neighbours", "unknown"],
)
def test_engines_that_are_compared_get_one_hardware_thread_of_each_core(tmp_path, siblings, chosen):
    name_cores(tmp_path, siblings)
    assert cores.first_threads({0, 1, 2, 3}, tmp_path) == chosen


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="Linux")
def test_engines_that_take_turns_run_on_the_same_hardware_threads():
    child = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    started = [subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    sleeping = [int(process.stdout.readline()) for process in started]
    try:
        first, second = cores.put_alike([process.pid for process in started], each=1)
        assert first == second
        assert len(first) == 2
        for process, asleep in zip(started, sleeping, strict=True):
            assert [os.sched_getaffinity(process.pid), os.sched_getaffinity(asleep)] == first
    finally:
        for number in sleeping:
            os.kill(number, signal.SIGKILL)
        for process in started:
            process.wait()


@pytest.mark.parametrize(("threads", "parts"), [(16, 1), (16, 2), (24, 2)])
def test_whoever_loads_engines_is_on_no_core_of_theirs(monkeypatch, threads, parts):
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda process: set(range(threads)), raising=False)
    engines = [group for part in range(parts) for group in cores._groups(2, part, parts)[0]]
    assert len(engines) == len(set().union(*engines)) / 2  # no two processes share a thread
    cores_of = lambda those: {thread // 2 for thread in those}  # noqa: E731
    shared = cores_of(cores.spare(parts=parts)) & cores_of(set().union(*engines))
    assert bool(shared) == (threads // 4 // parts < 3)  # too few for a group of its own


def called_from(filename: str, name: str):
    """A function of a file that calls what it is given."""
    made: dict = {}
    exec(compile(f"def {name}(call):\n    return call()", filename, "exec"), made)
    return made[name]


def test_a_look_at_a_stack_is_the_canarys_where_the_innermost_function_of_both_is():
    step = called_from("/site/vllm/v1/core.py", "step")
    hook = called_from("/here/kvcanary_fx/adapters/vllm/hooks.py", "hook")
    check = called_from("/here/kvcanary_fx/kernels/checks.py", "check")
    stacks = vllm_stacks.Stacks()

    def look():
        stacks.look(sys._getframe())

    step(lambda: hook(lambda: step(look)))  # what the canary wraps is vLLM's
    step(lambda: hook(lambda: check(look)))
    step(lambda: hook(lambda: check(look)))
    look()
    assert stacks.looks == {"vllm": 1, "canary": 2, "others": 1}
    assert [stacks.within[f] for f in ("v1/core.py:step", "vllm/hooks.py:hook", "kernels/checks.py:check")] == [3, 2, 2]
    found = {}
    for collected in (0.25, 0.25):
        vllm_stacks.add(found, dict(looks={}, within={}, at={}, collected=collected, collections=[1, 0, 0]))
    seen = dict(looks=stacks.looks, within=stacks.within, at=stacks.at)
    vllm_stacks.add(found, dict(**seen, collected=0.0, collections=[0, 1, 0]))
    assert found["collections"] == [2, 1, 0]
    plain = {**found, "looks": {}, "within": {}, "at": {}}
    rows = table(vllm_stacks.table({"plain": plain, "guarded": found}, 2, 500))
    assert ["**in the canary**", "0.0", "1.0"] in rows
    assert ["garbage collector", "250.0", "250.0"] in rows
    assert ["v1/core.py:step", "0.0", "1.5"] in rows
    assert [name.partition(", line ")[0] for name in stacks.at] == ["kernels/checks.py:check"]
    assert rows[-1] == [*stacks.at, "0.0", "1.0"]


def test_tiny_forwards_have_all_configurations_and_no_violations(tmp_path):
    results = tmp_path / "rows.json"
    done = run("forward.py", "--tiny", "--device", "cpu", "--rounds", "1", "--json", str(results))
    assert done.returncode == 0, done.stderr
    rows = json.loads(results.read_text())["rows"]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    assert cases == ["tiny gqa decode 2 x 192", "tiny gqa prefill 32 tokens", "tiny mla decode 2 x 192"]
    assert [row["configuration"] for row in rows] == len(cases) * list(forward_scene.CONFIGURATIONS)
    assert [row["problems"] for row in rows] == [[]] * len(rows)
    counts = {(row["case"], row["configuration"]): row["counts"] for row in rows}
    assert counts[cases[0], "content"] == {
        "identities": 2 * 191, "digests": 2 * 191 * 4, "recorded": 2 * 4, "violations": 0,
    }  # fmt: skip
    assert 2 * 4 * 2 <= counts[cases[0], "content 1/64"]["digests"] <= 2 * 4 * 3
    assert counts[cases[1], "identity"]["recorded"] == 32 * 4
    assert counts[cases[0], "off"] is None
    assert [line[1] for line in table(done.stdout)] == [row["configuration"] for row in rows]


def test_changed_bytes_of_a_prefix_and_a_forward_without_one_are_problems():
    case = forward_scene.Case(decode_models.TINY_MLA, 2, 128, 1)
    scene = forward_scene.Scene(case, torch.device("cpu"))
    settings = forward_scene.CONFIGURATIONS["content"]
    runner = forward_scene.Runner(scene, decode_models.Model(case.shape, "cpu"), settings, "eager")
    runner.runs[0]()
    assert runner.counts().problems(case, settings) == []
    scene.pools[1][0].view(torch.int16)[forward_scene.FIRST + 5, 0, 3] ^= 1
    scene.batch.prefix_lens[1] = 0
    runner.runs[0]()
    problems = runner.counts().problems(case, settings)
    assert [p.split()[1] for p in problems] == ["violations", "identities", "digests"]
    assert {v.check for v in runner.session.violations()} >= {"content"}


def test_layers_whose_checks_the_engine_calls_are_checked_in_each_forward(capsys):
    arguments = ["--tiny", "--device", "cpu", "--inner", "eager", "--rounds", "1", "--configs", "off", "side"]
    assert layers.main(arguments) == 0  # the counts are what the batch makes them
    rows = table(capsys.readouterr().out)
    assert [row[1:3] for row in rows] == [["called", "off"], ["called", "side"]]
    assert rows[1][8] == "0"
    assert all(float(cell.split()[0]) > 0 for cell in rows[1][6:8])


def test_flips_are_found_within_the_steps_that_a_budget_promises(capsys):
    arguments = ["--tiny", "--device", "cpu", "--budget", "0.5", "--rounds", "2", "--flips", "1", "--seconds", "0.5"]
    budget.main(arguments)
    printed = capsys.readouterr().out
    (row,) = table(printed)
    assert with_goals(goals.of_budget, printed) == {"budget 50 %, tiny gqa decode 2 x 192, called": "at most +62.5 %"}
    assert row[8] == "1 of 1"
    assert "too late" not in row[10]


def test_a_cache_with_nothing_set_up_is_checked_in_each_forward():
    done = run("forward.py", "--tiny", "--device", "cpu", "--rounds", "1", "--modes", "zero-configuration")
    assert done.returncode == 0, done.stderr
    rows = table(done.stdout)
    assert [row[1] for row in rows] == list(plain_cache.CONFIGURATIONS)
    of_log = with_goals(goals.of_forward("log, default", 2), done.stdout)
    assert of_log == {"forward tiny gqa decode 2 x 64, log, default": "at most +2 %"}
    assert [row[6:] for row in rows[2:]] == [["512", "8", "0"]] * 3 + [["16", "8", "0"]]


@pytest.mark.parametrize("device", ["cpu", "none"])
def test_batches_of_hugging_face_take_turns_and_have_parts(device):
    pytest.importorskip("transformers", minversion="5.17")
    small = ["--requests", "2", "--context", "24", "--new-tokens", "16", "--page", "8", "--batch-tokens", "64"]
    done = run("generate_batch.py", "--shape", "tiny", "--device", device, *small, "--rounds", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = table(done.stdout)
    if device == "cpu":
        assert [row[1] for row in rows] == ["off", "log"]
        assert all(float(row[6].removesuffix(" ms")) > 0 for row in rows)
        assert rows[1][7:] == ["100 %", "0"]
        assert "graphs off, async off" in done.stdout
        tokens = {"generate_batch tiny 2 x 24, log, tokens/s": "at least -3 %"}
        assert with_goals(goals.of_batches, done.stdout) == tokens
        return
    assert [row[0] for row in rows] == ["tiny 2 x 24", "tiny 2 x 24, 10th percentile"]
    assert all(float(cell) > 0 for row in rows for cell in row[1:])


def test_changed_bytes_of_a_plain_cache_are_a_problem():
    case = forward_scene.Case(decode_models.TINY_GQA, 2, 64, 1)
    model = decode_models.Model(case.shape, "cpu")
    runner = plain_cache.PlainRunner(case, model, {"mode": "log"}, torch.device("cpu"))
    runner.runs[0]()
    assert runner.counts().problems(case, runner.settings) == []
    runner._model.layers[1].values.data[1, 0, 5, 3] += 1
    runner.runs[0]()
    assert runner.counts().problems(case, runner.settings) == ["1 violations"]


def test_shadow_of_small_pools_is_what_the_formula_says():
    done = run("shadow_memory.py", "--device", "cpu", "--slots", "256")  # where nothing else comes and goes
    assert done.returncode == 0, done.stderr
    rows = table(done.stdout)
    assert [row[1] for row in rows] == ["32", "64", "32", "64"]
    for row in rows:
        measured, expected = (float(cell.split()[0]) for cell in row[3:5])
        assert measured == pytest.approx(expected, rel=0.01)


def test_decode_steps_of_two_checkouts_take_turns_on_a_cpu():
    small = ["--layers", "1", "2", "--context", "16", "--rounds", "2", "--steps", "3", "--inner", "eager"]
    done = run("cpu_decode.py", *small, "--before", str(BENCHMARKS.parents[1]), "--repeats", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = table(done.stdout)
    assert [row[0] for row in rows] == ["1", "1", "2", "2"]
    assert all(float(cell.removesuffix(" us").replace(",", "")) > 0 for row in rows for cell in (row[2], row[3]))


def test_a_decode_step_that_compares_less_than_is_stored_is_a_problem(monkeypatch):
    monkeypatch.setenv("KVCANARY_VERIFY_FRACTION", "1/4")
    done = run("cpu_decode.py", "--layers", "1", "--context", "16", "--rounds", "1", "--steps", "4", "--inner", "eager")
    assert done.returncode == 1
    assert f"fingerprints were checked, not {2 * (26 + 27 + 28 + 29)}" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--help"], "usage:"),
        (["--tiny", "--write"], "--tiny is no measurement"),
        (["--only", "gqa decode 7"], "--only leaves none of: gqa decode 1, gqa decode 64"),
        (["--device", "cpu", "--modes", "manual"], "CUDA graphs need a GPU"),
        (["--device", "cpu", "--only", "gqa reduce-overhead"], "CUDA graphs need a GPU"),
    ],
)
def test_arguments_of_forward(arguments, told, capsys):
    with pytest.raises(SystemExit):
        forward.parse(arguments)
    assert told in "".join(capsys.readouterr())


def test_only_picks_forwards_by_words():
    args = forward.parse(["--only", "mla 64", "prefill"])
    assert [case.name for case in args.cases] == [
        "gqa prefill 2048 tokens", "gqa prefill 8192 tokens", "mla decode 64 x 4096",
    ]  # fmt: skip


def test_usual_forwards_of_a_gpu_and_what_only_adds():
    def names(*only: str) -> list[tuple[str, str, int]]:
        args = forward.parse(["--device", "cuda", *only])
        return [(turn.case.name, turn.mode, len(turn.configurations)) for turn in args.turns]

    few = [("gqa decode 1 x 4096", "reduce-overhead", 2), ("gqa decode 64 x 4096", "reduce-overhead", 2)]
    plain = [("gqa decode 16 x 4096", "zero-configuration", 6)]
    usual = names()
    assert [name for name, mode, _ in usual if mode == "manual"] == [
        "gqa decode 1 x 4096", "gqa decode 64 x 4096", "gqa decode 128 x 4096", "gqa prefill 2048 tokens",
        "mla decode 64 x 4096",
    ]  # fmt: skip
    assert [row for row in usual if row[1] != "manual"] == few + plain
    assert names("--only", "zero-configuration") == plain
    assert ("gqa prefill 8192 tokens", "manual", 5) in names("--only", "8192")
    assert ("gqa decode 64 x 4096", "reduce-overhead", 1) in names("--configs", "off")


def test_what_our_kernels_take_of_a_first_call_is_said_by_thread(monkeypatch):
    import triton.compiler
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    from kvcanary_fx.kernels.compile_ahead import InBackground

    def kernel(module: str) -> types.SimpleNamespace:
        function = types.SimpleNamespace(__module__=module, __name__=f"kernel of {module}")
        return types.SimpleNamespace(fn=function, device_caches={0: ({},)})

    def launch(kernel: types.SimpleNamespace, signature: str) -> str:
        if signature not in kernel.device_caches[0][0]:
            kernel.device_caches[0][0][signature] = triton.compiler.compile(types.SimpleNamespace(fn=kernel))
        return "launched"

    monkeypatch.setattr(JITFunction, "run", launch)
    monkeypatch.setattr(triton.compiler, "compile", lambda source: types.SimpleNamespace(src=source, module=None))
    monkeypatch.setattr(CompiledKernel, "_init_handles", lambda loaded: vars(loaded).update(module=1))
    monkeypatch.setattr(InBackground, "wait", lambda self: None)
    times = compile_time.KernelTimes()
    ours, other = kernel("kvcanary_fx.kernels.content.triton_layer"), kernel("inductor")

    def ahead():
        JITFunction.run(ours, "a")
        for _ in range(2):
            CompiledKernel._init_handles(ours.device_caches[0][0]["a"])

    thread = threading.Thread(target=ahead, name="ahead")
    thread.start()
    thread.join()
    InBackground.wait(None)
    made = [JITFunction.run(*what) for what in ((ours, "a"), (ours, "a"), (other, "a"), (ours, "b"))]
    assert made == ["launched"] * 4
    assert [(what, thread) for _, what, thread, _, _ in times.parts] == [
        ("compile", "ahead"),
        ("first launch", "ahead"),
        ("load", "ahead"),
        ("wait", "MainThread"),
        ("first launch", "MainThread"),
        ("compile", "MainThread"),
        ("first launch", "MainThread"),
    ]
    found = {"kernels": times.parts}
    assert compile_time.variants(found) == 2
    assert compile_time.in_first_call(found) == sum(times.parts[i][4] for i in (3, 4, 6))
    assert compile_time.beside_it(found) == sum(times.parts[i][4] for i in (0, 2))


def test_compile_times_are_of_pairs_that_take_turns(monkeypatch, capsys):
    ran, seconds = [], iter([10.0, 11.0, 4.2, 4.0, 3.0, 3.3, 9.9, 9.0, 2.0, 2.4, 4.4, 4.0])

    def run(variant, device, cache):
        ran.append((variant, cache))
        return {
            "seconds": next(seconds),
            "importing": 0.7,
            "passes": 0.05,
            "hits": {"fx": (1, 0), "aot": (1, 0)},
            "kernels": [],
        }

    monkeypatch.setattr(compile_time, "in_new_process", run)
    args = types.SimpleNamespace(device="cpu", repeats=2, warm=2, parts=False, at_once=False)
    found = compile_time.text(compile_time.take_turns(args), args)
    first, pairs = [variant for variant, _ in ran[::2]], zip(ran[::2], ran[1::2], strict=True)
    assert first == ["plain", "guarded", "plain", "guarded", "plain", "guarded"], "each first in every second pair"
    assert all(a[0] != b[0] for a, b in pairs)
    assert len({cache for _, cache in ran}) == 4, "the caches of one kind, cold and then warm"
    assert "| cold | 9.50 s | 10.45 s (9.90 to 11.00) | +10.0 % | 110.0 % (rounds 110.0 to 110.0) |" in found
    assert "| warm | 3.50 s | 3.75 s (2.40 to 4.40) | +7.1 % | 110.0 % (rounds 105.0 to 120.0) |" in found


def test_compile_times_of_a_pair_at_once_are_on_halves_of_the_cores_that_change(monkeypatch, capsys):
    ran = []

    def run(variant, device, cache):
        ran.append((variant, os.sched_getaffinity(0)))
        return {"seconds": 1.0, "importing": 0.7, "passes": 0.05, "hits": {}, "kernels": []}

    monkeypatch.setattr(compile_time, "in_new_process", run)
    monkeypatch.setattr(compile_time.os, "sched_setaffinity", lambda thread, cpus: here.update({get_ident(): cpus}))
    monkeypatch.setattr(compile_time.os, "sched_getaffinity", lambda thread: here.get(get_ident(), {0, 1, 2, 3}))
    here: dict[int, set[int]] = {}
    compile_time.take_turns(types.SimpleNamespace(device="cpu", repeats=1, warm=1, parts=False, at_once=True))
    low, high = {0, 1}, {2, 3}
    assert sorted(ran[:2]) == [("guarded", high), ("plain", low)]
    assert sorted(ran[2:]) == [("guarded", low), ("plain", high)]


def test_a_clock_that_falls_is_no_growth_of_a_step():
    """As that of a GPU that grows warm: each step takes longer than the one before, first much, then less."""
    times = [8.0 + 0.2 * (1 - 0.8**number) for number in range(12)]
    plain, guarded = [], []
    for number in range(6):
        for taken, factor in [(plain, 1), (guarded, 1.004)][:: 1 if number % 2 == 0 else -1]:
            taken.append(factor * times.pop(0))
    row = budget.Row(None, "captured", 0.005, plain, guarded, 512, 4.0)
    assert row.growth == pytest.approx(0.004, abs=4e-4)
    with pytest.raises(SystemExit):
        budget.parse(["--tiny", "--device", "cpu", "--rounds", "5"])  # one is in one order only


@pytest.mark.parametrize(
    ("siblings", "lower"),
    [(["0,2", "1,3", "0,2", "1,3"], {0, 2}), (["0-1", "0-1", "2-3", "2-3"], {0, 1}), (None, {0, 1})],
    ids=["halves", "neighbours", "unknown"],
)
def test_halves_of_the_hardware_threads_share_no_core(tmp_path, siblings, lower):
    name_cores(tmp_path, siblings)
    assert cores.parts({0, 1, 2, 3}, 2, tmp_path) == [lower, {0, 1, 2, 3} - lower]


def test_plot_has_every_line_and_mark():
    drawn = svg_plot.plot("t", "x", "y", {"a": [(1, 1), (10, 100)], "b": [(1, 2), (10, 3)]})
    assert drawn.count("<circle") == 4
    assert ">a</text>" in drawn
    assert ">100</text>" in drawn


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["manual", "reduce-overhead", "eager", "zero-configuration"])
def test_tiny_forwards_on_a_gpu(mode):
    done = run("forward.py", "--tiny", "--device", "cuda", "--rounds", "2", "--modes", mode)
    assert done.returncode == 0, done.stdout + done.stderr


def test_parts_of_steps_are_those_of_their_kind_and_come_back_from_the_file(tmp_path):
    class Scheduler:
        def schedule(self, tokens):
            return types.SimpleNamespace(num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values()))

    parts, file = step_parts.Parts(), tmp_path / "parts.jsonl"
    parts.clock(Scheduler, "schedule", "schedule")
    scheduler, asleep = Scheduler(), 0.02
    for tokens in ({"a": 7}, {"a": 1, "b": 5}, {"a": 1, "b": 1}, {}, {"b": 1}):
        assert parts.step(lambda tokens=tokens: parts.scheduled(scheduler.schedule(tokens)) or "made") == "made"
        with file.open("a") as to:
            parts.write(to)
    with pytest.raises(ValueError, match="of vLLM's"):
        parts.step(lambda: parts.scheduled(scheduler.schedule({"b": 1})) or _raise(ValueError("of vLLM's"), asleep))
    with file.open("a") as to:
        parts.write(to)
    found, nothing = step_parts.read(file), step_parts.read(tmp_path / "none")
    assert found.steps == {"decode": 3, "prompt": 2}
    assert [sorted(sums) for sums in found.sums.values()] == [["a step", step_parts.PROCESSOR, "schedule"]] * 2
    assert all(sums["schedule"] <= sums["a step"] for sums in found.sums.values())
    decode = found.sums["decode"]
    assert decode["a step"] - decode[step_parts.PROCESSOR] > asleep / 2  # what it waits is not the processor's
    rows = step_parts.table(nothing, found)
    assert [row[:3] for row in rows] == [
        [f"{kind} (0 and {n} steps)", part, "-"]
        for kind, n in (("decode", 3), ("prompt", 2))
        for part in ("a step", step_parts.PROCESSOR, "schedule")
    ]


def test_the_parts_of_a_step_say_what_its_graph_takes_the_device():
    class Event:
        """Of a device that takes 5 ms for each replay, and is one behind."""

        made, arrived = [], 0

        def record(self):
            self.place = len(Event.made)
            Event.made.append(self)

        def query(self):
            return self.place < Event.arrived

        def elapsed_time(self, end):
            assert end.place == self.place + 1
            return 5.0

    class Graph:
        replays = 0

        def replay(self):
            Graph.replays += 1

    parts, graph = step_parts.Parts(), Graph()
    collect = parts.clock_graphs(Graph, Event)
    for number, tokens in enumerate((3, 1, 1, 1)):  # the first step has a prompt
        scheduled = types.SimpleNamespace(num_scheduled_tokens={"a": tokens}, total_num_scheduled_tokens=tokens)
        parts.step(lambda scheduled=scheduled: (parts.scheduled(scheduled), graph.replay()))
        Event.arrived = 2 * (number - 1)
        collect()
    assert Graph.replays == 4
    assert parts.sums["decode"][step_parts.GRAPH] == pytest.approx(0.010), "of two, the third is under way"
    assert step_parts.GRAPH not in parts.sums["prompt"]
    assert parts.steps == {"decode": 3, "prompt": 1}


def test_a_server_finds_the_plugin_that_clocks_its_steps(tmp_path):
    given = step_parts.environment(tmp_path / "plugins", tmp_path / "file", {"PYTHONPATH": "of others", "A": "b"})
    assert given["A"] == "b"
    assert given["PYTHONPATH"].split(os.pathsep) == [str(tmp_path / "plugins"), "of others"]
    code = "import importlib.metadata as m; print(m.entry_points(group='vllm.general_plugins')['step_parts'].load())"
    found = subprocess.run([sys.executable, "-S", "-c", code], env=given, capture_output=True, text=True)
    assert "function install" in found.stdout, found.stderr


def _raise(error, asleep=0.0):
    time.sleep(asleep)
    raise error


def test_a_servers_slowest_seconds_are_told_apart_from_what_its_rounds_have_in_common():
    """Of ten rounds one was slow: it is all of the 99th percentile, and nothing of the median of the rounds."""

    def load(each):
        return [Sample(0.1, each * (1 + number / 100), end=10.0, longest=0.2) for number in range(50)]

    plain = [load(0.010)] * 10
    guarded = [load(0.0101)] * 9 + [load(0.03)]
    rows = {name: cells for name, *cells in served.compare(plain, guarded, output=128)}
    assert rows["tokens/s"][:3] == ["640.00", "640.00", "100.0 %"]
    *_, pooled, median = rows["time per token p99, ms"]
    assert pooled == "289.9 %"
    assert median == "101.0 % (95 %: 101.0 to 101.0; rounds 101.0 to 300.0)"
    assert rows["TTFT p50, ms"][2] == "100.0 %"


@pytest.mark.skipif(importlib.util.find_spec("aiohttp") is not None, reason="without it")
def test_the_server_benchmark_says_what_it_needs_and_helps_without_it():
    assert "--requests" in run("vllm_serve.py", "--help").stdout
    refused = run("vllm_serve.py")
    assert refused.returncode == 1
    assert "make .venv-vllm/installed" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="without it")
def test_the_lab_of_vllms_host_says_what_it_needs_and_refuses_what_it_cannot_run():
    needs, odd = run("vllm_host.py"), run("vllm_host.py", "--layers", "0")
    assert (needs.returncode, odd.returncode) == (1, 2)
    assert "make .venv-vllm/installed" in needs.stderr
    assert "--layers 0: at least 1" in odd.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_kernels_are_not_timed_without_a_gpu():
    done = run("kernels.py")
    assert done.returncode == 2
    assert "no GPU is visible: kernels are timed on one" in done.stderr
