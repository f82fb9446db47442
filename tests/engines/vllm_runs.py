"""Runs engines in a process of its own: ``python vllm_runs.py DIRECTORY RUNS``, the results as one line of JSON.

RUNS is a JSON list of ``{"model": name, "arguments": {...}, "forced": bool, "load": name}``, the load a function of
``vllm_rig``, or ``{"model": name, "scene": name}``; ``KVCANARY_MODE`` decides whether they are guarded.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import forced_compile
import tiny_vllm
import vllm_rig

MARK = "RESULTS "


def results(directory: pathlib.Path, runs: list[dict[str, Any]], mode: str | None, **env: str) -> list[dict[str, Any]]:
    """Run in a new process with ``KVCANARY_MODE=mode`` (None: not set); what each run gave."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVCANARY_")}
    environment.update(tiny_vllm.ENVIRONMENT, **env)
    if mode is not None:
        environment["KVCANARY_MODE"] = mode
    command = [sys.executable, os.path.abspath(__file__), os.fspath(directory), json.dumps(runs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert lines, f"rc {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    found: list[dict[str, Any]] = json.loads(lines[-1].removeprefix(MARK))
    return found


def _run(directory: pathlib.Path, run: dict[str, Any]) -> dict[str, Any]:
    if "scene" in run:
        from vllm_scenes import SCENES

        return SCENES[run["scene"]](directory, run["model"])
    from vllm.compilation.counter import compilation_counter

    compiled, loaded = compilation_counter.num_aot_compiles, compilation_counter.num_aot_artifacts_loaded
    rig = vllm_rig.Rig(run["model"], directory, **run.get("arguments", {}))
    getattr(vllm_rig, run.get("load", "mixed_load"))(rig)
    config = rig.engine.vllm_config.compilation_config
    found: dict[str, Any] = {
        "tokens": rig.tokens,
        "logprobs": rig.logprobs,
        "preempted": rig.preempted,
        "mode": str(config.mode),
        "pieces": compilation_counter.num_piecewise_graphs_seen,
        "compiled": compilation_counter.num_backend_compilations,
        "aot_compiled": compilation_counter.num_aot_compiles - compiled,
        "aot_loaded": compilation_counter.num_aot_artifacts_loaded - loaded,
        "modules": sorted(m for m in sys.modules if m.startswith("kvcanary_fx")),
    }
    if os.environ.get("KVCANARY_MODE", "off") != "off":
        rig.session.health.check()
        found["violations"] = [v.line() for v in rig.session.violations()]
        found["uncovered"] = rig.session.uncovered
        stats = rig.session.stats()
        found["stats"] = {"checked": stats.checked, "recorded": stats.recorded, "slots_checked": stats.slots_checked}
        found["in_graph"] = rig.guard.calls_in_graph
        found["outside"] = rig.guard.calls_outside
        if hasattr(rig.guard, "states"):
            guarded = rig.guard.states
            found["violations"] += [v.line() for v in guarded.session.violations()]
            found["uncovered"] = found["uncovered"] + guarded.session.uncovered
            found["states"] = {
                "recorded": guarded.session.stats().recorded,
                "in_ops": guarded.recorded_in_ops,
                "steps": rig.session.stats().engine_steps,
            }
    rig.close()
    return found


def main() -> None:
    directory, runs = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
    if any(run.get("forced") for run in runs):
        forced_compile.allow_vllm_compile()
    print(MARK + json.dumps([_run(directory, run) for run in runs]), flush=True)


if __name__ == "__main__":
    main()
