"""SGLang with the plugin, on the CPU: same tokens, no violation; flips in both layers; bugs of the allocator.

Each run starts SGLang as a user does, in processes of its own.  Skipped where sglang is not installed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import pytest

HERE = Path(__file__).parent

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed", allow_module_level=True)
if not any(e.name == "kvcanary" for e in importlib.metadata.entry_points(group="sglang.srt.plugins")):
    pytest.skip("the package is not installed, so its entry point does not exist", allow_module_level=True)


class Run(NamedTuple):
    """What a run of SGLang printed.

    Attributes:
        tokens: of each prompt of each round, None if it did not come to that.
        planted: of each fault its kind, where it struck, the slot and the request.
        violations: the fields of each violation's line.
        stats: the last counts of the guarded runner, empty without one.
    """

    tokens: list[list[list[int]]] | None
    planted: list[list[Any]]
    violations: list[dict[str, str]]
    stats: dict[str, int]
    text: str


def run(
    folder: Path, faults: dict[str, Any] | None = None, settings: dict[str, Any] | None = None, **variables: str
) -> Run:
    """Run SGLang with settings of its Engine, faults to plant, and environment variables."""
    entry = folder / "sglang_faults-0.dist-info"
    entry.mkdir(exist_ok=True)
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-faults\nVersion: 0\n")
    (entry / "entry_points.txt").write_text("[sglang.srt.plugins]\nfaults = sglang_faults:register\n")
    path = os.pathsep.join(map(str, (HERE / "sglang_stubs", HERE, folder)))
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KVCANARY_")}
    environment = clean | variables | {"PYTHONPATH": path, "SGLANG_FAULTS": json.dumps(faults or {})}
    done = subprocess.run(
        [sys.executable, str(HERE / "sglang_run.py"), json.dumps(settings or {})],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    text = done.stdout + done.stderr
    tokens = re.findall(r"^TOKENS (.*)$", text, re.MULTILINE)
    stats = re.findall(r"^STATS (.*)$", text, re.MULTILINE)
    return Run(
        json.loads(tokens[0]) if tokens else None,
        [json.loads(line) for line in re.findall(r"^PLANTED (.*)$", text, re.MULTILINE)],
        [_fields(line) for line in re.findall(r"kvcanary\.violation (check=.*)$", text, re.MULTILINE)],
        {k: int(v) for k, v in _fields(stats[-1]).items() if v.isdigit()} if stats else {},
        text,
    )


def _fields(line: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in line.split() if "=" in pair)


@functools.cache
def plain(folder: Path) -> list[list[list[int]]] | None:
    return run(folder).tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sglang")


def test_without_the_variable_nothing_is_hooked(folder):
    off = run(folder)
    assert off.tokens is not None
    assert off.stats == {}
    assert "hook(s) to sglang.srt.layers.radix_attention" not in off.text


def test_chunked_prefill_and_a_second_round_from_the_prefix_cache_are_silent(folder):
    guarded = run(folder, KVCANARY_MODE="raise")
    assert guarded.tokens == plain(folder)
    assert guarded.tokens is not None
    assert guarded.stats["violations"] == 0
    assert guarded.stats["checked"] > guarded.stats["recorded"] > 0
    assert "kvcanary.sglang guards pool kv: 257 slots, 2 layers" in guarded.text
    assert "kvcanary.coverage" not in guarded.text
    # K and V of two layers, for each token that is computed; the second round has its prompts in the cache
    new = 5 * 11
    prompts = 4 * 23 + 40
    assert 4 * (prompts + new) // 2 < guarded.stats["recorded"] < 4 * 2 * (prompts + new)


def test_a_pool_so_small_that_the_prefix_cache_is_evicted_is_silent(folder):
    small = {"max_total_tokens": 100}
    guarded = run(folder, settings=small, KVCANARY_MODE="raise")
    assert guarded.tokens is not None
    assert guarded.tokens == run(folder, settings=small).tokens
    assert guarded.stats["violations"] == 0


def test_a_flipped_bit_is_found_in_either_layer(folder):
    faults = {"4": ["flip", 0, "K"], "6": ["flip", 1, "K"], "8": ["flip", 1, "V"]}
    found = run(folder, faults, KVCANARY_MODE="log")
    assert found.tokens is not None
    told = [(v["check"], v["layer"], v["half"], v["slot"], v["position"]) for v in found.violations]
    assert len(found.planted) == 3
    assert told == [
        ("content", f"model.layers.{layer}.self_attn", half, str(slot), "3")
        for _, layer, half, slot, _ in found.planted
    ]


@pytest.mark.parametrize(
    ("fault", "check", "why"), [("free", "owner", "read_after_free"), ("table", "token", "wrong_token")]
)
def test_bugs_of_the_allocator_and_the_request_table(fault, check, why, folder):
    found = run(folder, {"5": [fault]}, KVCANARY_MODE="log")
    (planted,) = found.planted
    first = found.violations[0]
    assert (first["check"], first["why"]) == (check, why)
    assert first["request"] == planted[-1]
    assert first["position"] == "3"


def test_request_that_gets_the_padding_row_is_named(folder):
    found = run(folder, {"5": ["padding"]}, KVCANARY_MODE="log")
    first = found.violations[0]
    assert (first["check"], first["why"], first["request"]) == ("bounds", "padding_writes", found.planted[0][-1])


def test_raise_mode_ends_the_engine(folder):
    found = run(folder, {"5": ["flip", 1, "V"]}, KVCANARY_MODE="raise")
    assert found.tokens is None
    assert "KV cache violation" in found.text
    assert "layer model.layers.1.self_attn, half V" in found.text


@pytest.fixture
def runner():
    """As much of a model runner as is asked before it is guarded, in a mode that can be."""

    class MHATokenToKVPool:
        kv_cache_layout = "nhd"

    settings = dict(disable_cuda_graph=True, enable_torch_compile=False, disable_overlap_schedule=True)
    settings |= dict(enable_hierarchical_cache=False, disaggregation_mode="null", speculative_algorithm=None)
    return types.SimpleNamespace(
        canary_manager=None,
        is_draft_worker=False,
        token_to_kv_pool=MHATokenToKVPool(),
        server_args=types.SimpleNamespace(**settings),
    )


def test_steps_aside_for_sglangs_own_canary(runner):
    """Asked without a run: the own canary of SGLang 0.5.23 needs torch 2.14 on a CPU."""
    from kvcanary_fx.adapters.sglang.runner import why_not

    assert why_not(runner) is None
    runner.canary_manager = object()
    assert "SGLANG_KVCANARY_OWN=replace" in why_not(runner)


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("enable_torch_compile", True, "--enable-torch-compile"),
        ("disable_cuda_graph", False, "--disable-cuda-graph"),
        ("disable_overlap_schedule", False, "--disable-overlap-schedule"),
        ("enable_hierarchical_cache", True, "--enable-hierarchical-cache"),
        ("disaggregation_mode", "decode", "another instance"),
        ("speculative_algorithm", "EAGLE", "speculative decoding"),
    ],
)
def test_mode_that_is_not_guarded_says_so(runner, caplog, setting, value, said):
    """Asked without a run: none of these modes runs on a CPU with what can be installed there."""
    from kvcanary_fx import CanaryConfig
    from kvcanary_fx.adapters.sglang import hooks

    setattr(runner.server_args, setting, value)
    hooks.attach(runner, CanaryConfig(mode="log"))
    assert not hasattr(runner, "kvcanary")
    (record,) = caplog.records
    assert record.message.startswith("kvcanary.unguarded model of SGLang: ")
    assert said in record.message


def test_pool_that_is_not_connected_is_named(runner):
    from kvcanary_fx.adapters.sglang.runner import why_not

    class MLATokenToKVPool:
        pass

    runner.token_to_kv_pool = MLATokenToKVPool()
    assert "MLATokenToKVPool" in why_not(runner)


def test_replaces_sglangs_own_canary(folder):
    replaced = run(folder, settings={"kv_canary": "log"}, KVCANARY_MODE="log", SGLANG_KVCANARY_OWN="replace")
    assert "own kv-canary is replaced" in replaced.text
    assert replaced.tokens == plain(folder)
    assert replaced.stats["violations"] == 0
    assert replaced.stats["checked"] > 0


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"disable_overlap_schedule": False}, "--disable-overlap-schedule"),
        ({"enable_torch_compile": True}, "--enable-torch-compile"),
    ],
)
def test_what_cannot_be_guarded_is_named(settings, reason, folder):
    run_ = run(folder, settings=settings, KVCANARY_MODE="log")
    assert run_.stats == {}
    assert "kvcanary.unguarded" in run_.text
    assert reason in run_.text
