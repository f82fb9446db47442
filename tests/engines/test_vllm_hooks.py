"""The table of what is hooked into, and the vLLM that is installed."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
import types

import pytest

from kvcanary_fx import EngineError
from kvcanary_fx.adapters.vllm import plugin
from kvcanary_fx.adapters.vllm.hook_points import HOOK_POINTS, SERVER, differences, overrides, resolve
from kvcanary_fx.adapters.vllm.patching import _MARK


def test_vllm_has_what_the_table_says():
    importlib.import_module(SERVER)  # so that its rows are compared, too
    assert differences(HOOK_POINTS, on_cpu=True) == []


def test_all_that_is_wrapped_is_in_the_table():
    plugin.register()
    assert differences(HOOK_POINTS, on_cpu=True) == []  # also of what is hooked already
    known = set()
    for point in HOOK_POINTS:
        owner, name = resolve(point.where)
        known.add(id(getattr(vars(owner)[name], "fget", vars(owner)[name])))
        if isinstance(owner, type):
            known.update(id(vars(cls)[name]) for cls in overrides(owner, name))
    wrapped = [f for f in gc.get_objects() if isinstance(f, types.FunctionType) and _MARK in vars(f)]
    ours = [f for f in wrapped if f.__module__.split(".")[0] == "vllm"]
    assert [f"{f.__module__}.{f.__qualname__}" for f in ours if id(f) not in known] == []
    assert len(ours) > 20


def test_a_process_that_only_looks_at_a_models_class_is_left_alone(monkeypatch):
    """vLLM starts one before its first start with a model."""
    from vllm.model_executor.models.registry import _run_in_subprocess

    def seen():
        import sys

        return [f"kvcanary_fx.adapters.vllm.{name}" in sys.modules for name in ("plugin", "connect")]

    monkeypatch.setenv("KVCANARY_MODE", "log")
    assert _run_in_subprocess(seen) == [True, False]


def _free_blocks_into(self, ordered_blocks, tier):
    """As a later version might have it."""


@pytest.mark.parametrize("mode", ["raise", "log"])
def test_vllm_with_another_signature_is_not_guarded_by_guess(mode, monkeypatch, caplog):
    import vllm
    from vllm.v1.core.block_pool import BlockPool

    monkeypatch.setattr(BlockPool, "free_blocks", _free_blocks_into)
    monkeypatch.delattr("vllm.v1.core.sched.scheduler.Scheduler.schedule")
    monkeypatch.setenv("KVCANARY_MODE", mode)
    said = (
        r"is not one that kvcanary_fx knows: vllm\.v1\.core\.block_pool\.BlockPool\.free_blocks takes "
        r"\(self, ordered_blocks, tier\), known is \(self, ordered_blocks\); "
        r"vllm\.v1\.core\.sched\.scheduler\.Scheduler\.schedule is missing\. "
        r"Install vllm==0\.32\.0, or set KVCANARY_MODE=off"
    )
    if mode == "raise":
        with pytest.raises(EngineError, match=said):
            plugin.register()
    else:
        plugin.register()
        (message,) = [r.message for r in caplog.records]
        assert message.startswith(f"kvcanary.unguarded nothing is guarded: this vLLM ({vllm.__version__})")
    assert BlockPool.free_blocks is _free_blocks_into


@pytest.mark.parametrize("mode", ["raise", "log"])
def test_the_first_runner_is_checked_and_hooked_when_vllm_imports_it(mode):
    """An engine with the second runner never imports it, nor what it imports: no more does ours."""
    code = """
import logging, sys
from vllm import LLM
from kvcanary_fx.adapters.vllm import plugin
from kvcanary_fx.adapters.vllm.hook_points import HOOK_POINTS
from kvcanary_fx.adapters.vllm.patching import _MARK
late = {p.where.split(":")[0] for p in HOOK_POINTS if p.late}
plugin.register()
assert not late & sys.modules.keys(), late & sys.modules.keys()
if sys.argv[1:]:  # another version's
    from kvcanary_fx.adapters.vllm import late_imports
    (name, hook), = late_imports._WAITING.items()
    def changed():
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner
        del GPUModelRunner.sample_tokens
        hook()
    late_imports._WAITING[name] = changed
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
print("hooked", hasattr(GPUModelRunner.execute_model, _MARK), hasattr(SpecDecodeBaseProposer.propose, _MARK))
"""
    environment = dict(os.environ, KVCANARY_MODE=mode)

    def run(*arguments):
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    known = run()
    assert known.stdout.splitlines()[-1] == "hooked True True", known.stderr[-2000:]
    other = run("changed")
    missing = "vllm.v1.worker.gpu_model_runner.GPUModelRunner.sample_tokens is missing"
    assert missing in other.stdout + other.stderr
    if mode == "raise":
        assert other.returncode
        assert "EngineError: this vLLM" in other.stderr
    else:
        assert other.stdout.splitlines()[-1] == "hooked False False", other.stderr[-2000:]


def test_vllm_copies_our_settings_to_what_ray_starts(monkeypatch):
    from vllm.ray.ray_env import get_env_vars_to_copy

    monkeypatch.setenv("KVCANARY_BUDGET", "2%")
    monkeypatch.setenv(plugin._CARRIED_BY_RAY, "")
    assert "KVCANARY_BUDGET" not in get_env_vars_to_copy()
    plugin.register()
    assert {"KVCANARY_BUDGET", "KVCANARY_MODE"} <= get_env_vars_to_copy()
