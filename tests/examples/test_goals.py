"""Goals of benchmarks: they are read from what these print, and run side by side."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import compile_time
import goals

# not for the other tests: transformers would take benchmarks/kernels.py for the package of that name
BENCHMARKS = Path(sys.path.pop())

SMALL = "--shape tiny --device cpu --requests 2 --context 24 --rounds 1"


@pytest.mark.parametrize(
    ("command", "read", "expected"),
    [
        (
            f"generate.py {SMALL} --new-tokens 4 --mode log raise",
            goals.of_generate,
            {
                "generate tiny 2 x 24, log, tokens/s": "at least -2 %",
                "generate tiny 2 x 24, raise, tokens/s": "at least -3 %",
            },
        ),
        (
            "engine_step.py --device cpu --source pages --steps 2",
            goals.of_steps,
            {"engine's session, eager, pages": "at most 150 us at fast times"},
        ),
    ],
    ids=["generate", "engine_step"],
)
def test_figures_are_read_from_what_a_benchmark_prints(command, read, expected):
    """Those of others are where these run, in test_benchmarks.py."""
    done = subprocess.run([sys.executable, *goals.words(f"{BENCHMARKS}/{command}")], capture_output=True, text=True)
    found = list(read(done.stdout))
    assert {figure.what: figure.goal for figure in found} == expected, done.stderr
    assert all(figure.measured for figure in found)


def test_first_compiles_are_pairs_medians():
    runs = {}
    for kind, seconds in {"cold": [(10.0, 11.1), (10.0, 11.3)], "warm": [(4.0, 4.1), (4.0, 4.2), (2.0, 3.0)]}.items():
        for plain, guarded in seconds:
            for variant, taken in (("plain", plain), ("guarded", guarded)):
                found = {"seconds": taken, "importing": 0.7, "passes": 0.05, "kernels": []}
                runs.setdefault((variant, kind), []).append({**found, "hits": {"fx": (1, 0), "aot": (1, 0)}})
    text = compile_time.text(runs, types.SimpleNamespace(device="cpu", repeats=2, warm=1, at_once=False))
    cold, warm = goals.of_compilation(text)
    assert (cold.what, cold.goal, cold.reached) == ("first compile, cold", "at most +10 %", False)
    assert cold.measured.startswith("+12.0 %")
    assert (warm.what, warm.goal, warm.reached) == ("first compile, warm", "at most +5 %", True)


def test_goals_of_kernels_are_those_of_their_sizes():
    printed = """64 x 4096 + 1  133.5 us (+-0.6), 4.02 TB/s, 95 % of a copy  5.6 us  3.6 us (+-0.4)  3.7 us  3.8 us  0
64 x 0 + 4096  0.1 us, nothing stored  5.6 us  150.4 us (+-0.4)  277.7 us (+-0.4)  548.8 us (+-0.1)  0
64 x 4096 + 1  10.8 us (+-0.1)  15.4 us (+-0.1)  4.4 us (+-0.0)  0
64 x 0 + 4096  15.2 us (+-0.0)  35.4 us (+-0.2)  28.9 us (+-0.1)  0
"""
    record, identity = goals.of_kernels(printed)
    assert (record.measured, record.reached) == ("150.4 us (+-0.4)", False)
    assert (identity.measured, identity.reached) == ("10.8 us (+-0.1)", True)


@pytest.mark.parametrize(
    ("line", "reached"),
    [
        ("1b 8 x 512  log  2,540 (2,391 to 2,603)  -2.0 %  2,968 us (2,900 to 3,000)  -1.8 %  100 %  0", True),
        ("1b 8 x 512  log  2,540 (2,391 to 2,603)  -2.1 %  2,968 us (2,900 to 3,000)  -1.8 %  100 %  0", False),
        ("1b 8 x 512  raise  2,540 (2,391 to 2,603)  -2.9 %  2,968 us (2,900 to 3,000)  -1.8 %  100 %  0", True),
        ("1b 8 x 512  log  2,540 (2,391 to 2,603)  +1.0 %  2,968 us (2,900 to 3,000)  -1.8 %  100 %  1", False),
    ],
    ids=["as many", "too few", "raise", "a report"],
)
def test_a_goal_is_reached_without_reports(line, reached):
    (figure,) = goals.of_generate(line)
    assert figure.reached == reached


def test_a_miss_says_where_the_host_was_never_as_fast_as_elsewhere():
    printed = """['eager', '155', '151 (78 %)', '158', '54', '76', '16', '3', '5', '44 (43)']
['captured', '214', '214 (100 %)', '214', '80', '111', '13', '0', '8', '68 (67)']
['at once', '181', '115 (15 %)', '181', '50', '94', '23', '4', '8', '76 (41)']
"""
    figures = list(goals.of_steps(printed))
    assert [figure.host for figure in figures] == [43, 67, 41]
    assert [figure.cells(41.0)[-1] for figure in figures] == ["**no**", "**no**, slow host", "yes"]
    assert figures[1].cells(67.0)[-1] == "**no**"  # alone, nobody knows


def test_benchmarks_have_a_gpu_and_threads_each_and_what_is_printed_until_the_time_is_up_counts(tmp_path, monkeypatch):
    (tmp_path / "step.py").write_text(
        "import os, sys, time\n"
        "print(['of ' + sys.argv[1], '12', '9', os.environ['CUDA_VISIBLE_DEVICES'], str(os.sched_getaffinity(0))])\n"
        "sys.stdout.flush()\n"
        "time.sleep(60 if sys.argv[1] == 'long' else 0)\n"
    )
    monkeypatch.setattr(goals, "HERE", tmp_path)
    own = set(os.sched_getaffinity(0))
    made = [
        goals.Benchmark(name, f"step.py {name}", 1 + (name == "long"), goals.of_steps) for name in ("short", "long")
    ]
    goals.run_all(made, 2, tmp_path, 3)
    assert [b.status for b in made] == [0, None]
    assert [[f.what for f in b.figures] for b in made] == [
        ["engine's session, of short"],
        ["engine's session, of long"],
    ]
    given = [(tmp_path / f"{name}.log").read_text().split("', '")[3:5] for name in ("long", "short")]
    assert [gpu for gpu, _ in given] == ["0", "1"]
    if len(own) > 1:
        assert given[0][1] != given[1][1]
    assert os.sched_getaffinity(0) == own


def test_another_text_than_those_of_benchmarks_is_told_what_there_is(capsys):
    with pytest.raises(SystemExit):
        goals.parse(["--only", "nothing of these"])
    assert "generate 1b 1 x 512" in capsys.readouterr().err
    assert [b.name for b in goals.parse(["--only", "kernels", "engine_step at-once 1"]).chosen] == [
        "engine_step at-once 1", "kernels",
    ]  # fmt: skip


def test_each_goal_names_a_script_that_takes_its_arguments():
    for benchmark in goals.benchmarks():
        script, *arguments = goals.words(benchmark.command)
        source = (BENCHMARKS / script).read_text()
        assert all(f'"{a}"' in source for a in arguments if a.startswith("--")), benchmark.command
