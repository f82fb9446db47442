"""What becomes of a violation: requests that are aborted, engines that end, counts that reach the metrics endpoint."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys

import pytest
import tiny_vllm
import torch
import vllm_runs
from vllm_rig import Rig, prompt

LAYER = "model.layers.1.self_attn.attn"


def test_only_the_named_request_is_aborted(models):
    plain = Rig("llama", models)
    plain.add("B", prompt(51, 60), length=10)
    plain.run()
    plain.close()
    (found,) = vllm_runs.results(
        models, [{"model": "llama", "scene": "abort"}], "raise", KVCANARY_VLLM_ON_VIOLATION="abort"
    )
    assert found["finished"] == {"A": "error", "B": "length"}
    assert found["tokens"]["B"] == plain.tokens["B"]
    assert len(found["tokens"]["A"]) == found["tokens_before"] < 10
    assert found["violations"] == [["content", LAYER, "K", 10]]
    assert found["pages_left"] == 0


def test_engine_in_a_process_of_its_own_is_guarded_and_counts_arrive(models):
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    plain, guarded = (
        vllm_runs.results(models, [{"model": "llama", "scene": "spawned"}], mode, **environment)[0]
        for mode in (None, "raise")
    )
    assert guarded["tokens"] == plain["tokens"]
    assert guarded["counts"]["fingerprints_recorded"] > 4 * 100
    assert guarded["counts"]["fingerprints_checked"] > 4 * 100
    assert guarded["violations"] == {}


def test_violation_in_a_spawned_engine_ends_it_with_the_report(models):
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    (found,) = vllm_runs.results(models, [{"model": "llama", "scene": "spawned flip"}], "raise", **environment)
    assert found["error"] == "EngineDeadError"
    assert found["violations"] == {"content": found["violations"]["content"]}
    assert "[content] the bytes of a slot changed" in found["stderr"]
    assert f"layer {LAYER}, half V" in found["stderr"]


def test_an_engine_in_the_first_process_says_in_vllms_log_that_it_is_guarded(models):
    """Seen: with VLLM_ENABLE_V1_MULTIPROCESSING=0 no line of the canary came."""
    code = "import pathlib, sys, tiny_vllm, vllm\n"
    code += "vllm.LLM(**tiny_vllm.engine_arguments('llama', pathlib.Path(sys.argv[1])))"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVCANARY_")}
    environment.update(tiny_vllm.ENVIRONMENT, KVCANARY_MODE="log", VLLM_LOGGING_LEVEL="INFO")
    environment["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    command = [sys.executable, "-c", code, os.fspath(models)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert (done.stdout + done.stderr).count("kvcanary.vllm guarded: 1 group") == 1


@pytest.mark.slow
def test_both_ranks_of_an_engine_are_guarded(models):
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    plain, guarded = (
        vllm_runs.results(models, [{"model": "llama", "scene": "spawned on two ranks"}], mode, **environment)[0]
        for mode in (None, "raise")
    )
    assert guarded["tokens"] == plain["tokens"]
    assert guarded["counts"]["fingerprints_recorded"] > 2 * 4 * 100
    assert guarded["violations"] == {}


@pytest.mark.slow
@pytest.mark.skipif(0 < torch.cuda.device_count() < 2, reason="needs two GPUs, or none")
@pytest.mark.parametrize("outcome", ["recompute", "raise"])
def test_damage_on_another_rank_than_the_first_is_contained(models, outcome):
    """Seen: it was logged there, and the request went on with it; with ``raise`` the ranks waited for each other."""
    runs = [{"model": "llama", "scene": "ruined on another rank"}]
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # workers are sent functions
    environment["KVCANARY_BUDGET"] = "none"
    (found,) = vllm_runs.results(models, runs, "log", KVCANARY_VLLM_ON_VIOLATION=outcome, **environment)
    if outcome == "raise":
        assert found["error"] == "EngineDeadError"
        assert "violations end the engine" in found["stderr"]
        return
    (ruined,) = vllm_runs.results(models, runs, "log", KVCANARY_VLLM_ON_VIOLATION="log", **environment)
    assert found["planted"] == ruined["planted"] == [False, True]
    v2 = torch.cuda.is_available()
    # bfloat16: a prompt's tokens depend on what else is in a batch, so the model is asked whether it would choose them
    near = 0.3 if v2 else 1e-3
    running, *clean = ([token > near for token in below] for below in found["below"])
    assert sum(running) <= 2 * v2, "what another rank finds is known a step or two later with Model Runner V2"
    assert not any([*running[8:], *itertools.chain(*clean)])
    assert any(token > near for token in ruined["below"][0][8:]), "damage is seen where nothing keeps it from tokens"
    if not v2:
        running, _, again = found["tokens"]
        assert running == again, "a clean run's, since the block has left the prefix cache"
    assert "recomputed: 0-" in found["stderr"]
    assert ("; tokens sent before: 0-" in found["stderr"]) == v2


def test_metrics_of_a_server_name_a_group_that_is_not_guarded_and_why(models, tmp_path):
    found, _ = serve(models, tmp_path, "2", "3", "--enforce-eager", KVCANARY_MODE="log", TINY_MODEL="hybrid")
    assert found["failed"] == 0
    of_groups = {name: n for name, n in found["at_health"].items() if name.startswith("kvcanary_guarded{")}
    assert sorted(of_groups.values()) == [0, 1]
    (named,) = [name for name, n in of_groups.items() if not n]
    assert "MambaSpec with mamba_cache_mode=align" in named
    assert sum(v for name, v in found["metrics"].items() if name.startswith("kvcanary_violations")) == 0


@pytest.mark.slow
def test_each_engine_of_a_data_parallel_server_is_guarded(models, tmp_path):
    found, written = serve(
        models, tmp_path, "4", "6", "--data-parallel-size", "2", "--enforce-eager",
        KVCANARY_MODE="log", VLLM_LOGGING_LEVEL="INFO", VLLM_CPU_OMP_THREADS_BIND="nobind",
    )  # fmt: skip
    assert found["requests"] > 4
    assert found["failed"] == 0
    assert written.count("kvcanary.vllm guarded: 1 group, 4 halves, checks content ") == 2
    assert found["metrics"]["kvcanary_fingerprints_recorded_total"] > 100
    assert sum(v for name, v in found["metrics"].items() if name.startswith("kvcanary_violations")) == 0


def serve(models, tmp_path, *arguments, **variables):
    """What vllm_serve.py found, and what the server wrote to standard error."""
    command = [sys.executable, os.path.join(os.path.dirname(__file__), "vllm_serve.py"), os.fspath(models), *arguments]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVCANARY_")}
    environment.update(tiny_vllm.ENVIRONMENT, VLLM_CACHE_ROOT=os.fspath(tmp_path), **variables)
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(vllm_runs.MARK)]
    assert lines, f"rc {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return json.loads(lines[-1].removeprefix(vllm_runs.MARK)), done.stderr


def test_metrics_of_the_server_have_the_counts(models, tmp_path):
    """vLLM's server in processes of its own, two clients, and the metrics endpoint."""
    found, written = serve(models, tmp_path, "2", "4", KVCANARY_MODE="log", VLLM_LOGGING_LEVEL="INFO")
    assert found["requests"] > 4
    assert found["failed"] == 0
    assert found["at_health"]['kvcanary_guarded{group="group0",reason=""}'] == 1
    assert "kvcanary.vllm guarded: 1 group, 4 halves, checks content " in written
    assert found["metrics"]["kvcanary_forwards_total"] > 10
    assert found["metrics"]["kvcanary_fingerprints_recorded_total"] > 100
    assert found["metrics"]['kvcanary_violations_total{check="content"}'] == 0
    assert sum(v for name, v in found["metrics"].items() if name.startswith("kvcanary_violations")) == 0


@pytest.mark.parametrize("outcome", ["abort", "raise"])
def test_client_of_a_damaged_server_is_told_an_id_that_is_in_the_log(models, tmp_path, outcome, monkeypatch):
    from kvcanary_fx.adapters.vllm import counts, settings

    kept = {settings.COUNTS_VARIABLE: os.fspath(tmp_path / "counts")}
    (tmp_path / "counts").mkdir()
    found, written = serve(
        models, tmp_path, "violation", KVCANARY_MODE="log", KVCANARY_VLLM_ON_VIOLATION=outcome, **kept
    )
    told = re.search(
        r"kv_cache_corruption: .* see (kvc-[0-9a-f]{8}) in the server's log", found["told"]["error"]["message"]
    )
    assert told, found["told"]
    assert ("of this request" in told[0], "the engine ended" in told[0]) == (outcome == "abort", outcome == "raise")
    assert f"kv_cache_corruption {told[1]}: " in written
    assert "kvcanary.violation check=content " in written
    if outcome == "abort":  # and goes on
        assert found["same"]
        assert found["metrics"]['kvcanary_violations_total{check="content"}'] > 0
    else:
        assert found["status"] == 1
        monkeypatch.setenv(*next(iter(kept.items())))
        assert counts.read_all()[1]["content"] > 0  # written before the engine ended


@pytest.mark.parametrize(
    "setting", [{"KVCANARY_MODE": "rise"}, {"KVCANARY_VLLM_ON_VIOLATION": "all"}, {"KVCANARY_CHEKS": "x"}]
)
def test_wrong_setting_is_refused_by_name(models, setting):
    code = "from kvcanary_fx.adapters.vllm.plugin import register; register()"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVCANARY_")}
    environment.update({"KVCANARY_MODE": "log", **setting})
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert next(iter(setting)) in done.stderr.splitlines()[-1]
