"""What each step of vLLM's engine takes, guarded and not: on the host by part, and from one step's tokens to the next.

    python tests/benchmarks/vllm_steps.py --shape 8b --requests 16 64 --rounds 6 [--kv-gib 8] [--logs DIRECTORY]

Both engines run as :mod:`vllm_engine` starts them, in processes of their own, and take turns on one GPU.  A clock is
read where the engine's loop calls the scheduler, the model runner and the sampler, and where a step's tokens are there.
A decode step that waits for the GPU takes what it takes on the device.  ``decode_quick`` is the tenth that is fastest:
a step that waits for the host takes longer whenever something else on the machine does.

With ``--parts`` there are clocks around parts of vLLM's runner and the canary's own, too (1 to 2 us each), nested
ones among them: what they take of a decode step, of one in which requests get new pages, and of one with prompts.
Prompts of more tokens than vLLM's largest graph has (``--requests 1 --input 600``) run layer by layer from Python.

With ``--rate 12`` so many requests come each second, as a server's do, ``--requests`` of them a run, and the lines say
what a step takes by its kind: with a prompt in it, the one behind, where requests get new pages, where one has come or
gone, and any other one.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import cores
import report
import vllm_engine

#: Parts of a step, in the order of the engine's loop.
PARTS = ("schedule", "execute", "sample", "wait", "update")


#: Parts of the canary, as ``module:owner.method``, behind ``kvcanary_fx.``
OURS = (
    "adapters.vllm.v2.guard:GuardV2.begin_step",
    "adapters.vllm.books:Books.apply",
    "adapters.vllm.v2.rows:Rows.take",
    "adapters.vllm.v2.guard:GuardV2.before_model",
    "adapters.vllm.v2.kept:KeptSteps.step",
    "adapters.vllm.v2.rows:Rows.new_pages",
    "runtime.pace:Pace.begin",
    "engine.steps:Steps.begin_kept",
    "engine.steps:Steps.flush",
    "adapters.vllm.v2.take_in:Landing.send",
    "engine.kept_forward:_Captured.__call__",
    "adapters.vllm.ops:verify",
    "adapters.vllm.ops:record",
    "adapters.vllm.ops:record_in",
    "adapters.vllm.v2.guard:GuardV2.after_model",
    "kernels.held:Held.flush",
    "adapters.vllm.v2.guard:GuardV2.sampled",
    "adapters.vllm.v2.guard:GuardV2.read",
)

#: Parts of vLLM that have clocks beside those.
THEIRS = (
    "v1.worker.gpu.model_runner:GPUModelRunner.prepare_inputs",
    "v1.worker.gpu.model_runner:GPUModelRunner.prepare_attn",
    "v1.worker.gpu.model_runner:GPUModelRunner.sample",
    "v1.worker.gpu.async_utils:AsyncOutput.__init__",
    "v1.worker.gpu.model_runner:GPUModelRunner.postprocess_sampled",
    "v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager.run_fullgraph",
    "compilation.piecewise_backend:PiecewiseBackend.__call__",
    "v1.attention.backends.flash_attn:FlashAttentionImpl.forward",
    "v1.attention.backends.flash_attn:FlashAttentionImpl.do_kv_cache_update",
)

#: In the environment of engines that have clocks around them.
WITH_PARTS = "VLLM_STEPS_PARTS"  # the canary refuses names of its own that it does not know


def trace(path: str) -> None:
    """From now on, also in processes that are forked, write a line for each step of an engine's loop to ``path``."""
    from vllm.plugins import load_general_plugins
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.executor.uniproc_executor import AsyncOutputFuture, UniProcExecutor

    load_general_plugins()  # the clocks are around the canary's hooks
    spans: list[tuple[str, float, float, Any]] = []

    def clocked(owner: Any, method: str, part: str, about: Callable[[Any, Any], Any] = lambda args, made: None) -> None:
        original = getattr(owner, method)

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            made = original(*args, **kwargs)
            spans.append((part, began, time.perf_counter(), about(args, made)))
            if part == "update" and not args[0].has_unfinished_requests():
                write(path, spans)
            return made

        setattr(owner, method, run)

    def batch(args: Any, made: Any) -> Any:
        pages = any(made.scheduled_cached_reqs.new_block_ids)
        return made.total_num_scheduled_tokens, len(made.num_scheduled_tokens), len(made.scheduled_new_reqs), pages

    parts = [f"kvcanary_fx.{part}" for part in OURS] + [f"vllm.{part}" for part in THEIRS]
    for part in parts if os.environ.get(WITH_PARTS) else ():
        module, _, name = part.partition(":")
        owner: Any = importlib.import_module(module)
        *of, method = name.split(".")
        for each in of:
            owner = getattr(owner, each)
        clocked(owner, method, name)

    clocked(Scheduler, "schedule", "schedule", batch)
    clocked(UniProcExecutor, "execute_model", "execute")
    clocked(UniProcExecutor, "sample_tokens", "sample")
    clocked(AsyncOutputFuture, "result", "wait")
    clocked(Scheduler, "update_from_output", "update")


def write(path: str, spans: list[tuple[str, float, float, Any]]) -> None:
    """Write the steps of a run that is over, and forget them."""
    steps: list[dict[str, Any]] = []
    told = dict.fromkeys(PARTS, 0)
    for part, began, ended, about in spans:
        if part == "schedule":
            tokens, requests, new, pages = about
            steps.append(dict(tokens=tokens, requests=requests, new=new, pages=pages, parts={}))
        if part not in told:
            if steps:
                taken = steps[-1]["parts"]
                taken[part] = taken.get(part, 0.0) + ended - began
        elif told[part] < len(steps):
            steps[told[part]][part] = [began, ended]
            told[part] += 1
    spans.clear()
    if any(step["tokens"] and "update" in step for step in steps):  # else: what tells the workers who ended
        with open(path, "a") as out:
            out.write(json.dumps(steps) + "\n")


def summary(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of a run, by part."""
    steps = [step for step in steps if step["tokens"] and "update" in step]
    prompts = [step for step in steps if step["tokens"] > step["requests"]]
    most = max(step["requests"] for step in steps)
    decodes = [step for step in steps if step["tokens"] == step["requests"] == most]
    first, last = steps[0], steps[-1]
    between = sorted(b - a for a, b in itertools.pairwise(step["update"][0] for step in decodes))
    found = dict(
        run=last["update"][1] - first["schedule"][0],
        prompts=prompts[-1]["update"][0] - first["schedule"][0],
        prompt_steps=len(prompts),
        prompt_host=sum(step["execute"][1] - step["execute"][0] for step in prompts),
        first_host=first["execute"][1] - first["execute"][0],
        decode=statistics.median(between),
        decode_quick=between[len(between) // 10],
    )
    for part in PARTS:
        seconds = [step[part][1] - step[part][0] for step in decodes if part in step]
        found[f"decode_{part}"] = statistics.median(seconds) if seconds else 0.0  # nothing waits without asynchrony
    return found


def parts_of(runs: list[list[dict[str, Any]]]) -> list[str]:
    """Lines: what the parts took of steps of three kinds, in microseconds: the median, and the quickest tenth."""
    steps = [step for run in runs for step in run if step["tokens"] and "update" in step]
    most = max(step["requests"] for step in steps)
    decodes = [step for step in steps if step["tokens"] == step["requests"] == most]
    kinds = {
        "decode": [step for step in decodes if not step["pages"]],
        "new pages": [step for step in decodes if step["pages"]],
        "prompts": [step for step in steps if step["tokens"] > step["requests"]],
    }
    lines = []
    for part in dict.fromkeys(part for step in steps for part in step["parts"]):
        taken = {kind: [1e6 * step["parts"].get(part, 0.0) for step in of] for kind, of in kinds.items() if of}
        lines.append(
            f"  {part}: "
            + ", ".join(
                f"{kind} {statistics.median(us):.1f} ({sorted(us)[len(us) // 10]:.1f}) us" for kind, us in taken.items()
            )
        )
    return lines


#: Seconds after which the engine had nothing to do between two steps.
IDLE = 2e-3

#: Kinds of steps under a load, in the order in which they are asked for.
KINDS = ("prompt", "behind a prompt", "new pages", "other requests", "decode")


def kind_of(before: dict[str, Any], step: dict[str, Any]) -> str:
    """One of :data:`KINDS`."""
    if step["tokens"] > step["requests"]:
        return KINDS[0]
    if before["tokens"] > before["requests"]:
        return KINDS[1]
    if step["pages"]:
        return KINDS[2]
    return KINDS[3] if step["requests"] != before["requests"] else KINDS[4]


def by_kind(steps: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Seconds from the tokens of the step before to those of each step, and of it the host's, by the step's kind."""
    steps = [step for step in steps if step["tokens"] and "update" in step]
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for before, step in itertools.pairwise(steps):
        if step["schedule"][0] < before["update"][1] + IDLE:
            took = step["update"][0] - before["update"][0], step["execute"][1] - step["execute"][0]
            found[kind_of(before, step)].append(took)
    return found


def under_load(name: str, runs: list[list[dict[str, Any]]]) -> list[str]:
    """Lines: the steps of each kind, medians and 99th percentiles."""
    lines = []
    found = [by_kind(steps) for steps in runs]
    for kind in KINDS:
        took, host = ([pair[i] for kinds in found for pair in kinds[kind]] for i in (0, 1))
        if took:
            mean, most = statistics.mean(took), sorted(took)[len(took) * 99 // 100]
            shown = [1000 * each for each in (statistics.median(took), mean, most, statistics.median(host))]
            lines.append(
                f"{name}, {kind}: {len(took)} steps, median {shown[0]:.3f} ms, mean {shown[1]:.3f}, "
                f"99 % {shown[2]:.3f}, of it in execute_model {shown[3]:.3f}"
            )
    return lines


def table(requests: int, name: str, runs: list[dict[str, Any]]) -> str:
    """A line: medians of the runs, in milliseconds but for counts."""
    cells = []
    for key in runs[0]:
        value = statistics.median(run[key] for run in runs)
        cells.append(f"{key} {value:.0f}" if key == "prompt_steps" else f"{key} {1000 * value:.3f}")
    return f"{requests} requests, {name}: " + ", ".join(cells)


def ratios(requests: int, plain: list[dict[str, Any]], guarded: list[dict[str, Any]]) -> str:
    """A line: what was measured guarded, of what was in the same round unguarded, medians and the spread."""
    cells = []
    for key in ("run", "prompts", "decode", "decode_quick"):
        cells.append(f"{key} {report.paired([g[key] / p[key] for p, g in zip(plain, guarded, strict=True)])}")
    return f"{requests} requests, guarded of plain: " + ", ".join(cells)


def measure(args: argparse.Namespace, engines: dict[str, vllm_engine.Engine], requests: int) -> list[str]:
    """Let the engines take turns; the lines about them."""
    runs: dict[str, list[list[dict[str, Any]]]] = {}
    for number in range(args.rounds + 1):
        for name, engine in list(engines.items())[:: -1 if number % 2 else 1]:
            written = engine.steps.read_text().count("\n") if engine.steps.exists() else 0
            engine.ask(*(("load", requests, number, args.rate) if args.rate else ("run", requests, number)))
            if number:  # the first one warms up
                lines = engine.steps.read_text().splitlines()[written:]
                runs.setdefault(name, []).append([step for line in lines for step in json.loads(line)])
    lines = []
    if args.rate:
        for name in engines:
            lines += [*under_load(name, runs[name]), *(parts_of(runs[name]) if args.parts else ())]
        return lines
    found = {name: [summary(run) for run in runs[name]] for name in engines}
    for name in engines:
        lines += [table(requests, name, found[name]), *parts_of(runs[name])]
    return [*lines, ratios(requests, **found)]


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", choices=list(vllm_engine.SHAPES))
    parser.add_argument("--requests", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--rate", type=float, default=0, help="requests a second; 0: all of a run at once")
    parser.add_argument("--input", type=int, default=512)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4000)
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--kv-gib", type=float, default=8, help="memory of each KV cache; nothing is profiled")
    parser.add_argument("--logs", default=tempfile.gettempdir())
    parser.add_argument("--guarded-first", action="store_true", help="start the guarded engine before the other one")
    parser.add_argument("--parts", action="store_true", help="also what parts of the runner and the canary take")
    args = parser.parse_args()
    args.profile, args.mixed, args.steps, args.ranks = False, False, True, 1
    print(cores.use_one_thread_of_each(), flush=True)
    if args.parts:
        os.environ[WITH_PARTS] = "1"
    kinds = [("plain", None), ("guarded", "log")]
    order = kinds[::-1] if args.guarded_first else kinds
    engines = {name: vllm_engine.Engine(args, args.shape, mode) for name, mode in order}
    for engine in engines.values():
        engine.wait()
    cores.put_alike([engine.pid for engine in engines.values()])
    for requests in args.requests:
        print("\n".join(measure(args, engines, requests)), flush=True)
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
