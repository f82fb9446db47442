"""Random load on engines of random features, each guarded and not: no violation, the same tokens.

    python tests/engines/vllm_random_load.py --seconds 3600 --seed 1 [--requests 60] [--models llama window chunks ...]
    python tests/engines/vllm_random_load.py --seconds 240 --seed 1 --jobs 6 --tokens-may-differ  # one GPU

Each seed draws a model, features of the engine (prefix caching, size of prompts' chunks, number of blocks, scheduling,
drafts by prompt lookup, whether blocks are off-loaded to the host's memory, on a CPU whether it is compiled in pieces
and whether another KV connector loads blocks, some of which cannot be loaded), and requests: stems that they share,
turns of a conversation, salts, priorities, ``n`` above one, sampled or greedy, log probabilities of the prompt, aborts,
resets of the prefix cache.  A line for each engine,
and a summary; the exit status is 1 if a seed failed, or none could be judged.  A seed whose unguarded engine does not
run, or gives no token (drafts may take a small batch until all requests are aborted), is listed as ``unable``.
``--once SEED`` is that engine in this process, ``--jobs N`` runs N seeds at once.

The settings of the guard are the environment's (``KVCANARY_BUDGET=none`` compares everything).  On a GPU the tokens
depend on what else is in a batch, and a batch of asynchronous scheduling on time: ``--tokens-may-differ``.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from typing import Any

import forced_compile
import tiny_configs
import tiny_vllm
from vllm_runs import MARK

#: As on a GPU by default: compiled in pieces, between which attention runs from Python.
COMPILED: dict[str, Any] = {"enforce_eager": False, "compilation_config": {"mode": 3}}

MODELS = {
    "llama": "llama",
    "moe": "mixtral",
    "window": "gemma3",
    "mla": "deepseek_v3",
    "chunks": "llama4",
    "conv": "hybrid",
    "ssm": "granite",
}


def features(rng: random.Random, models: list[str], on_gpu: bool) -> tuple[str, dict[str, Any]]:
    """A model, and arguments of its engine."""
    block = 16 if on_gpu else 32
    most, model = rng.choice([2, 4, 8, 16]), rng.choice(models)
    chosen: dict[str, Any] = dict(
        enable_prefix_caching=rng.random() < 0.8,
        max_num_seqs=most,
        max_num_batched_tokens=rng.choice([32, 64, 128, 512]),
        block_size=block,
        # 256 / block for the longest request, twice that with two groups or if vLLM halves the block; 1 is nobody's
        num_gpu_blocks_override=256 // block * rng.choice([1, 2, 3, 6]) * (1 if model in ("llama", "moe") else 2) + 2,
        scheduling_policy=rng.choice(["fcfs", "priority"]),
    )
    if rng.random() < 0.2:
        chosen["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1
        }  # fmt: skip
    if on_gpu:
        sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= 4 * most]
        chosen |= dict(dtype="bfloat16", enforce_eager=rng.random() < 0.2, kv_cache_memory_bytes=1 << 30)
        chosen["compilation_config"] = {"cudagraph_capture_sizes": sizes}
        chosen["gpu_memory_utilization"] = 0.05  # what must be free at the start, with others on the GPU
    elif rng.random() < 0.3 and model != "mla":  # two unguarded runs of it differ when it is compiled (vLLM 0.32.0)
        chosen |= COMPILED
    if model in ("conv", "ssm"):  # blocks of 128 tokens; a request has one more for its states, of "ssm" two
        few = {"enable_prefix_caching": False, "block_size": None}
        few["num_gpu_blocks_override"] = (chosen["num_gpu_blocks_override"] - 2) * block // 128 + 2
        chosen = {name: value for name, value in (chosen | few).items() if name != "speculative_config"}
    if model in ("window", "chunks") and rng.random() < 0.3:
        chosen["disable_hybrid_kv_cache_manager"] = True  # one group, whose blocks are all kept
    return model, chosen


def connector(seed: int, model: str, chosen: dict[str, Any]) -> dict[str, Any]:
    """A KV connector, in two of five engines that can have one: what it is told of :class:`.MemoryConnector`.

    A generator of its own, so that the other features of a seed stay as they were.
    """
    rng = random.Random(f"connector {seed}")
    one_group = model in ("llama", "moe", "mla")
    if (
        rng.random() > 0.4
        or not one_group
        or not chosen.get("enable_prefix_caching")
        or chosen.get("speculative_config")
    ):
        return {}
    return dict(steps=rng.choice([0, 0, 1, 3]), fails_each=rng.choice([0, 0, 3]), sends=rng.choice([0, 0, 2, 5]))


def off_load(seed: int, model: str, chosen: dict[str, Any], always: bool) -> dict[str, Any]:
    """An OffloadingConnector, in four of ten engines that have no other, or in all that can have one: ``steps`` of
    :class:`.CopyingWorker`, and what it is configured with."""
    rng = random.Random(f"off-load {seed}")
    if (rng.random() > 0.4 and not always) or model in ("conv", "ssm") or not chosen.get("enable_prefix_caching"):
        return {}
    extra = dict(blocks_per_chunk=rng.choice([1, 1, 2, 3]), cpu_bytes_to_use=rng.choice([1 << 19, 1 << 22, 1 << 26]))
    return dict(steps=rng.choice([0, 1, 3]), extra=extra | dict(offload_prompt_only=rng.random() < 0.5))


def connect(given: dict[str, Any], on_gpu: bool) -> dict[str, Any]:
    """The engine's argument for one of both; this process has one engine."""
    if "extra" in given:
        import vllm_cpu_store

        vllm_cpu_store.CopyingWorker.steps = given["steps"]
        config = vllm_cpu_store.config(**given["extra"])
        if on_gpu:  # where vLLM has copies of its own
            config["kv_connector_extra_config"] = given["extra"]
        return dict(kv_transfer_config=config)
    from vllm_memory_connector import MemoryConnector

    for name, value in given.items():
        setattr(MemoryConnector, name, value)
    named = dict(kv_connector=MemoryConnector.__name__, kv_connector_module_path=MemoryConnector.__module__)
    return dict(kv_transfer_config=dict(named, kv_role="kv_both", kv_load_failure_policy="recompute"))


class Load:
    """Requests of a seed, added and ended between an engine's steps.

    Attributes:
        tokens: what each sequence that ran to its end got, by request and number.
        answered: the requests that got a token, also if they were aborted later.
        ended: how often each kind of thing happened.
    """

    def __init__(self, rig: Any, rng: random.Random, requests: int, drafts: bool):
        self._rig, self._rng, self._left, self._drafts = rig, rng, requests, drafts
        self._on_gpu = rig.runner.device.type == "cuda"
        self._stems = [self._words(rng.randint(10, 150)) for _ in range(4)]
        self._running: set[str] = set()
        self._number = 0
        self.tokens: dict[str, list[int]] = {}
        self.answered: set[str] = set()
        self.ended = dict(requests=requests, steps=0, sequences=0, aborted=0, resets=0)

    def run(self) -> None:
        """Until all have ended."""
        while self._left or self._running:
            while self._left and len(self._running) < 24 and self._rng.random() < 0.3:
                for _ in range(self._rng.choice([1, 1, 2, 6])):
                    self._add()
            if self._running and self._rng.random() < 0.02:
                self._abort()
            if self._rng.random() < 0.01:
                self.ended["resets"] += 1
                running = self._rng.random() < 0.5 and self._rig.scheduler.connector is None  # some may wait for loads
                self._rig.engine.reset_prefix_cache(reset_running_requests=running)
            self._step()
        for _ in range(3):
            self._rig.engine.step()  # the workers hear of what ended

    def _step(self) -> None:
        self.ended["steps"] += 1
        if self.ended["steps"] > 50_000:
            raise AssertionError(f"requests are left: {sorted(self._running)}")
        for output in self._rig.engine.step():
            for sequence in output.outputs:
                self.tokens[f"{output.request_id}.{sequence.index}"] = list(sequence.token_ids)
                if sequence.token_ids:
                    self.answered.add(output.request_id)
            if output.finished:
                self._running.discard(output.request_id)
                self._continue(output.outputs[0].token_ids)

    def _continue(self, tokens: Any) -> None:
        """The next turn of a conversation begins with this answer, some times."""
        if self._rng.random() < 0.3:
            turn = self._rng.randrange(len(self._stems))
            self._stems[turn] = (self._stems[turn] + list(tokens))[-170:]

    def _add(self) -> None:
        from vllm import SamplingParams

        if not self._left:
            return
        rng, name = self._rng, f"r{self._number}"
        self._left -= 1
        self._number += 1
        stem = rng.choice(self._stems)
        prompt = stem[: rng.choice([len(stem), rng.randint(0, len(stem))])] + self._words(rng.randint(1, 40))
        greedy = self._drafts or rng.random() < 0.6
        several = 1 if greedy else rng.choice([1, 1, 2, 3])
        given = SamplingParams(
            temperature=0 if greedy else rng.choice([0.5, 1.0, 2.0]),
            n=several,
            # on a CPU vLLM fails with a seed where a prompt is in chunks ("CPU Generator does not use offset")
            seed=None if greedy or not self._on_gpu else rng.randrange(2**31),
            top_k=0 if greedy else rng.choice([0, 5]),
            max_tokens=rng.randint(1, 30),
            ignore_eos=rng.random() < 0.8,
            prompt_logprobs=1 if not self._drafts and rng.random() < 0.05 else None,
            detokenize=False,
        )
        salted = {"cache_salt": rng.choice("ab")} if rng.random() < 0.2 else {}
        self._rig.engine.add_request(name, {"prompt_token_ids": prompt, **salted}, given, priority=self._priority(rng))
        self._running.add(name)
        self.ended["sequences"] += several

    def _priority(self, rng: random.Random) -> int:
        drawn = rng.randint(0, 3)
        return drawn if self._rig.engine.vllm_config.scheduler_config.policy == "priority" else 0

    def _abort(self) -> None:
        name = self._rng.choice(sorted(self._running, key=lambda known: int(known[1:])))
        self._rig.engine.abort_request([name])
        self._running.discard(name)
        self.ended["aborted"] += 1
        for sequence in [known for known in self.tokens if known.partition(".")[0] == name]:
            del self.tokens[sequence]

    def _words(self, length: int) -> list[int]:
        return [self._rng.randrange(3, tiny_configs.VOCABULARY) for _ in range(length)]


def once(directory: pathlib.Path, seed: int, models: list[str], requests: int, off_loads: bool) -> dict[str, Any]:
    """The engine of a seed, in this process."""
    import torch
    import vllm_filled  # noqa: F401  whose load format the engine is asked for
    from vllm_rig import Rig

    rng = random.Random(seed)
    model, chosen = features(rng, models, torch.cuda.is_available())
    if COMPILED.items() <= chosen.items():
        forced_compile.allow_vllm_compile()
    on_gpu = torch.cuda.is_available()
    # on a GPU vLLM fails behind one that fails
    loads = {} if on_gpu or off_loads else connector(seed, model, chosen)
    loads = loads or off_load(seed, model, chosen, off_loads)
    rig = Rig(MODELS[model], directory, load_format="filled", **chosen, **(connect(loads, on_gpu) if loads else {}))
    load = Load(rig, rng, requests, "speculative_config" in chosen)
    load.run()
    found: dict[str, Any] = dict(
        model=model, chosen=chosen, preempted=rig.preempted, runner=type(rig.runner).__module__, **load.ended,
        answered=len(load.answered), connector=loads,
    )  # fmt: skip
    found["tokens"] = {name: zlib.crc32(str(tokens).encode()) for name, tokens in load.tokens.items()}
    if rig.guard is not None:
        sessions = rig.guard.sessions
        for session in sessions:
            session.health.check()
        told = [str(v.line()) for session in sessions for v in session.violations()]
        counts = [session.stats() for session in sessions]
        found |= dict(violations=told[:5], count=len(told), uncovered=[u for s in sessions for u in s.uncovered][:3])
        if loads:
            pools = [pool for session in sessions for pool in session.pools.values()]
            found |= dict(adopted=sum(pool.adopted for pool in pools), compared=sum(pool.expected for pool in pools))
        if "extra" in loads and not on_gpu:
            from vllm_cpu_store import CopyingWorker

            found |= dict(blocks_stored=CopyingWorker.stores, blocks_loaded=CopyingWorker.loads)
        found |= dict(checked=sum(each.checked for each in counts), recorded=sum(each.recorded for each in counts))
        if len(sessions) > 1:
            found["of the last session"] = counts[-1].recorded
    return found


def _child(args: argparse.Namespace, seed: int, guarded: bool, cache: str | None) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if guarded or not k.startswith("KVCANARY_")}
    for name, value in tiny_vllm.ENVIRONMENT.items():
        environment.setdefault(name, value)
    if guarded:
        environment.setdefault("KVCANARY_MODE", "log")
    if cache is not None:
        environment["VLLM_CACHE_ROOT"] = cache
    command = [sys.executable, os.path.abspath(__file__), "--once", str(seed), "--requests", str(args.requests)]
    command += ["--models", *args.models] + ["--off-load"] * args.off_load
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=args.limit, check=False)
    except subprocess.TimeoutExpired as error:
        return dict(failed=f"not ready after {error.timeout} s")
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        return dict(failed=f"status {done.returncode}: {done.stderr[-1500:]}", why=_reason(done.stderr))
    found: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
    return found


def _reason(log: str) -> str:
    """The last error that a process told of, which need not be its last line: ranks warn when they end."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "nothing was said")[
        -300:
    ]


def _judge(args: argparse.Namespace, seed: int, cache: str | None = None) -> dict[str, Any]:
    """Both engines of a seed, and what is wrong with them.

    Args:
        cache: the folder for what vLLM compiles; None: its own.
    """
    plain = _child(args, seed, False, cache)
    if "failed" in plain:
        return dict(seed=seed, ok=None, unable=plain.get("why", plain["failed"]))
    guarded = _child(args, seed, True, cache)
    wrong = [f"guarded: {guarded['failed']}"] if "failed" in guarded else []
    if not wrong:
        wrong += guarded["violations"] + guarded["uncovered"]
        if not (wrong or plain["answered"] or guarded["answered"]):
            return dict(seed=seed, ok=None, unable="no request got a token, unguarded either", model=plain["model"])
        wrong += ["nothing checked"] * (not guarded["checked"])
        other = [name for name, tokens in plain["tokens"].items() if guarded["tokens"].get(name) != tokens]
        if (other or len(plain["tokens"]) != len(guarded["tokens"])) and not args.tokens_may_differ:
            wrong.append(f"other tokens than unguarded: {other[:5]}")
    shown = {k: v for k, v in guarded.items() if k not in ("tokens", "violations", "uncovered", "failed")}
    return dict(seed=seed, ok=not wrong, wrong=wrong, **shown)


def _seeds(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of each seed, ``args.jobs`` at once, until the time is over; each is printed when it is known."""
    began, seeds, lock, rows = time.monotonic(), itertools.count(args.seed), threading.Lock(), []

    def work(folder: str | None) -> None:
        while time.monotonic() < began + args.seconds:
            with lock:
                seed = next(seeds)
            row = _judge(args, seed, folder)
            with lock:
                rows.append(row)
                print(json.dumps(dict(at=round(time.monotonic() - began), **row)), flush=True)

    with tempfile.TemporaryDirectory() as caches, concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        # engines that compile at once do it apart from each other
        folders = [None] if args.jobs == 1 else [os.path.join(caches, str(job)) for job in range(args.jobs)]
        list(pool.map(work, folders))
    return sorted(rows, key=lambda row: row["seed"])


def main() -> None:
    """Seed after seed, or one engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="begin no engine after these")
    parser.add_argument("--seed", type=int, default=1, help="the first")
    parser.add_argument("--requests", type=int, default=60, help="of each engine")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument(
        "--off-load", action="store_true", help="in each engine that can have it, and no other connector"
    )
    parser.add_argument("--limit", type=float, default=600, help="seconds for an engine")
    parser.add_argument("--jobs", type=int, default=1, help="seeds at once")
    parser.add_argument("--tokens-may-differ", action="store_true", help="where vLLM is not deterministic")
    parser.add_argument("--once", type=int, help="one engine, in this process")
    args = parser.parse_args()
    if args.once is not None:
        with tempfile.TemporaryDirectory() as directory:
            found = once(pathlib.Path(directory), args.once, args.models, args.requests, args.off_load)
        print(MARK + json.dumps(found), flush=True)
        return
    rows = _seeds(args)
    failed = [row["seed"] for row in rows if row["ok"] is False]
    unable = [row["seed"] for row in rows if row["ok"] is None]
    total = {k: sum(row.get(k, 0) for row in rows) for k in ("requests", "sequences", "steps", "aborted", "preempted")}
    seeds = f"{args.seed} to {args.seed + len(rows) - 1}"
    print(json.dumps(dict(engines=len(rows), seeds=seeds, failed=failed, unable=unable, **total)), flush=True)
    sys.exit(1 if failed or len(unable) == len(rows) else 0)


if __name__ == "__main__":
    main()
