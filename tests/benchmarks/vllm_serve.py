"""vLLM's server under a constant load, guarded and not: time to the first token, and for each other one.

    python tests/benchmarks/vllm_serve.py --shape 1b --gpus 0 1 --rounds 5 --requests 400 --rate 25 [--json FILE]

Both servers are alive at once, with as many blocks, with ``--share`` of a GPU's memory each, and take turns in each
round, with the same prompts.  With ``--gpus 0 1`` there are both on each of the two, and the rounds take turns on them;
with ``--at-once`` a round loads the plain server of one and the guarded one of the other at the same time, each by a
client in a process of its own.  (Of two H200 of one host, one took 1.6 % longer for the same step.)  Nothing else is
set: the runner, CUDA graphs and scheduling are vLLM's choice, and the logs must agree about them.  ``dummy`` weights,
no tokenizer, prompts of random token ids; each request gets all the tokens it asks for.

On a CPU: ``--shape tiny --rate 2 --blocks 128 -- --kv-cache-memory-bytes 268435456 --block-size 32``.

The servers of one GPU run on the same hardware threads once they have started (:mod:`cores`).  Percentiles are over the
requests of all rounds; beside them is the median of the rounds' own ratios, guarded to plain, with the interval that it
is in with 95 % certainty.  The slowest hundredth of all requests is that of the few seconds in which the host was
slowest, whichever server had its turn: of three runs on H200s, of 2,250 to 2,550 requests to each, it was 125, 76 and
116 % of the plain server's, and the median of 51 rounds of 50 requests was 102 % (95 %: 100 to 105).  So many short
rounds say more than a few long ones: ``--requests 50 --rounds 60``.

Two processes of the same server differ: on an H200 a step with a prompt took one of them 21.0 ms of its host, another
one 22.1.  With ``--starts 2`` all are started again after half of the rounds, with warm caches, in the other order.

``--parts`` also says what the parts of a step took of each engine's main thread (``step_parts``), on a GPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cores
import report
import serve_load
import step_parts
from serve_load import Load, Sample
from vllm_shapes import SHAPES, vocabulary, write_config


class Server:
    """One server in processes of its own.

    Attributes:
        name: ``plain`` or ``guarded``.
        start: seconds until ``/health`` said 200.
        parts: the file of what the parts of its steps took.
    """

    def __init__(self, args: argparse.Namespace, mode: str | None, gpu: str | None):
        self.name = "plain" if mode is None else "guarded"
        environment = {k: v for k, v in os.environ.items() if mode is not None or not k.startswith("KVCANARY_")}
        if mode is not None:
            environment["KVCANARY_MODE"] = mode
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.parts = Path(args.logs) / f"parts-{self.name}{gpu or ''}-{port}.jsonl"
        if args.parts:
            environment = step_parts.environment(Path(args.logs) / "step_parts", self.parts, environment)
        self._log = Path(args.logs) / f"serve-{args.shape}-{self.name}{gpu or ''}.log"
        # what `vllm serve` runs
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", write_config(args.shape)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", args.shape]
        command += ["--load-format", "dummy", "--skip-tokenizer-init", "--disable-uvicorn-access-log"]
        command += ["--max-model-len", str(min(8192, max(1024, args.input + args.output)))]
        command += ["--num-gpu-blocks-override", str(args.blocks)]
        if not any(argument.startswith("--gpu-memory-utilization") for argument in args.arguments):
            command += ["--gpu-memory-utilization", str(args.share)]  # so much must be free, whatever the cache takes
        self._began = time.monotonic()
        with self._log.open("w") as out:
            self._process = subprocess.Popen([*command, *args.arguments], stdout=out, stderr=out, env=environment)

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self._process.pid

    def up(self) -> bool:
        """Whether it answers."""
        if self._process.poll() is not None:
            sys.exit(f"the {self.name} server ended with {self._process.returncode}, {self._log}:\n{self.tail()}")
        try:
            self.get("/health")
        except OSError:
            return False
        self.start = time.monotonic() - self._began
        return True

    def get(self, path: str) -> str:
        """The answer to a GET."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as answer:
            text: str = answer.read().decode()
        return text

    def tail(self) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-4000:]

    def facts(self) -> dict[str, Any]:
        """What vLLM chose, from the log."""
        log = self._log.read_text(errors="replace")
        graphs = re.search(r"'cudagraph_mode': <CUDAGraphMode\.(\w+)", log)
        return dict(
            graphs=graphs and graphs[1],
            v2="Using V2 Model Runner" in log,
            # it is said where it is off
            asynchronous=not re.search(r"sync(hronous)? scheduling (is |will be )?(disabled|not)", log),
        )

    def canary(self) -> dict[str, float]:
        """The canary's metrics."""
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith("kvcanary_")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


#: An unguarded server and a guarded one that are loaded in one round.
Pair = tuple[Server, Server]


@contextlib.contextmanager
def servers(args: argparse.Namespace, guarded_first: bool = False) -> Iterator[list[Pair]]:
    """The pairs that the rounds take turns on, ready.

    On two GPUs servers of both start at once, one on each; on one GPU one after the other, since vLLM looks at the free
    memory while it starts.  All start at once if the arguments say how much each takes.
    """
    first, second = args.gpus or (None, None)
    sized = any(argument.startswith("--kv-cache-memory") for argument in args.arguments)
    with contextlib.ExitStack() as closing:

        def started(*places: tuple[str | None, str | None]) -> list[Server]:
            found = []
            for mode, gpu in places[:: -1 if guarded_first else 1]:
                found.append(Server(args, mode, gpu))
                closing.callback(found[-1].close)
                if not args.gpus and not sized:
                    _wait(found, args.patience)
            if not sized:
                _wait(found, args.patience)
            return found[:: -1 if guarded_first else 1]

        plain, guarded = all_servers = started((None, first), (args.mode, second))
        if not args.gpus:
            _wait(all_servers, args.patience)
            cores.put_alike([plain.pid, guarded.pid])
            yield [(plain, guarded)]
            return
        other_plain, other_guarded = others = started((None, second), (args.mode, first))
        _wait([*all_servers, *others], args.patience)
        for part, one_gpu in enumerate(((plain, other_guarded), (other_plain, guarded))):
            cores.put_alike([server.pid for server in one_gpu], part=part, parts=2)
        across = (plain, guarded), (other_plain, other_guarded)
        yield list(across if args.at_once else ((plain, other_guarded), (other_plain, guarded)))


def _wait(started: Sequence[Server], patience: float) -> None:
    began = told = time.monotonic()
    missing = [server for server in started if not hasattr(server, "start")]
    while missing:
        time.sleep(0.25)
        missing = [server for server in missing if not server.up()]
        now = time.monotonic()
        if missing and now - began > patience:
            sys.exit(f"the {missing[0].name} server is not up after {patience:.0f} s:\n{missing[0].tail()}")
        if now - told > 8:
            told = now
            print(f"  starting for {now - began:.0f} s: {', '.join(s.name for s in missing)}", flush=True)


Rounds = list[list[Sample]]

#: When the program began.
_BEGAN = time.monotonic()


def measure(
    args: argparse.Namespace, pairs: Sequence[Pair], numbers: Sequence[int], samples: tuple[Rounds, Rounds]
) -> None:
    """Add the samples of each round, of unguarded and guarded servers.

    Args:
        numbers: of the rounds.
    """
    took = 0.0  # the last round
    before = range(numbers[0] - len(pairs), numbers[0])
    apart = cores.spare(parts=2 if args.gpus else 1)
    with concurrent.futures.ProcessPoolExecutor(2, initializer=os.sched_setaffinity, initargs=(0, apart)) as clients:
        for number in (*before, *numbers):
            if samples[0] and time.monotonic() + took > _BEGAN + args.seconds:
                print(f"  no time for more than {len(samples[0])} rounds", flush=True)
                break
            began = time.monotonic()
            plain, guarded = pair = pairs[number % len(pairs)]
            order = pair[:: -1 if number // len(pairs) % 2 else 1]
            # before: what is made at first use
            requests = min(args.requests, 100) if number in before else args.requests
            what = "before the rounds" if number in before else f"round {number} of {args.rounds}"
            loads = {server: _load(args, server, number, requests, what) for server in order}
            try:
                if args.at_once:
                    running = {server: clients.submit(serve_load.run, load) for server, load in loads.items()}
                    found = {server: future.result() for server, future in running.items()}
                else:
                    found = {server: clients.submit(serve_load.run, load).result() for server, load in loads.items()}
            except serve_load.FailedRequest as e:
                tails = (f"{server.name}:\n{server.tail()}" for server in (plain, guarded))
                sys.exit("\n".join((str(e), *tails)))
            took = time.monotonic() - began
            if number not in before:
                samples[0].append(found[plain])
                samples[1].append(found[guarded])
                rows = compare([found[plain]], [found[guarded]], args.output)
                print(f"  round {number}: {'; '.join(', '.join(row[:4]) for row in rows)}", flush=True)


def _load(args: argparse.Namespace, server: Server, number: int, requests: int, what: str) -> Load:
    return Load(
        url=server.url,
        model=args.shape,
        requests=requests,
        rate=args.rate,
        input=args.input,
        output=args.output,
        vocabulary=vocabulary(args.shape),
        seed=number,
        name=f"{what}, {server.name}",
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that ``share`` of all do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def quantities(samples: Sequence[Sample], output: int) -> dict[str, float]:
    """What is compared, of some requests that were sent in one round."""
    firsts, each, longest = [s.first for s in samples], [s.each for s in samples], [s.longest for s in samples]
    return {
        "tokens/s": len(samples) * output / max(s.end for s in samples),
        "TTFT p50, ms": 1e3 * percentile(firsts, 0.5),
        "TTFT p99, ms": 1e3 * percentile(firsts, 0.99),
        "time per token p50, ms": 1e3 * percentile(each, 0.5),
        "time per token p99, ms": 1e3 * percentile(each, 0.99),
        "longest wait of a request p50, ms": 1e3 * percentile(longest, 0.5),
        "longest wait of a request p99, ms": 1e3 * percentile(longest, 0.99),
    }


HEADER = ["", "plain", "guarded", "guarded of plain", "median of the rounds"]


def compare(plain: Rounds, guarded: Rounds, output: int) -> list[list[str]]:
    """The rows of the table."""
    rounds = [[quantities(samples, output) for samples in side] for side in (plain, guarded)]
    whole = [quantities([s for samples in side for s in samples], output) for side in (plain, guarded)]
    rows = []
    for name in rounds[0][0]:
        ratios = [g[name] / p[name] for p, g in zip(*rounds, strict=True)]
        if name == "tokens/s":  # the rounds begin anew
            values = [statistics.median(found[name] for found in side) for side in rounds]
        else:
            values = [found[name] for found in whole]
        shown = [f"{value:,.0f}" if value >= 1000 else f"{value:.2f}" for value in values]
        rows.append([name, *shown, f"{100 * values[1] / values[0]:.1f} %", report.paired(ratios)])
    return rows


def unlike(pairs: Sequence[Pair], canaries: Sequence[dict[str, float]]) -> list[str]:
    """Why the comparison is not one of equals, or a guard found something."""
    facts = {str(server.facts()) for pair in pairs for server in pair}
    wrong = [] if len(facts) == 1 else [f"not all alike: {facts}"]
    for canary in canaries:
        of_groups = {name: value for name, value in canary.items() if name.startswith("kvcanary_guarded{")}
        if not of_groups or 0 in of_groups.values():
            wrong.append(f"not all is guarded: {of_groups}")
        found = {name: n for name, n in canary.items() if name.startswith("kvcanary_violations_total") and n}
        wrong += [f"violations: {found}"] if found else []
    return wrong


def main() -> None:
    """Start both, load them, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1b", choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--starts", type=int, default=1, help="of each server; the rounds are shared among them")
    parser.add_argument("--requests", type=int, default=400, help="of a round, for each server")
    parser.add_argument("--rate", type=float, default=25, help="requests a second; inf: all at once")
    parser.add_argument("--input", type=int, default=512)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=12000, help="KV cache blocks of each server")
    parser.add_argument("--share", type=float, default=0.45, help="of the GPU's memory, for each server")
    parser.add_argument("--gpus", nargs=2, help="two GPUs, each with both servers; default: one")
    parser.add_argument("--at-once", action="store_true", help="load both at the same time; wants --gpus")
    parser.add_argument("--mode", default="log", choices=["log", "raise"])
    parser.add_argument("--parts", action="store_true", help="also: what the parts of a step take of the engines")
    parser.add_argument("--logs", default=tempfile.gettempdir(), help="directory of the servers' logs")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no round that would end later")
    parser.add_argument("--patience", type=float, default=240, help="seconds that a start may take")
    parser.add_argument("--json", type=Path, help="write facts, table and samples to this file")
    parser.add_argument("arguments", nargs="*", help="of vLLM, after --")
    args = parser.parse_args()
    if importlib.util.find_spec("aiohttp") is None:
        sys.exit("aiohttp is missing: it is in an environment of vLLM's, such as `make .venv-vllm/installed` for a CPU")
    if args.at_once and not args.gpus:
        parser.error("--at-once wants --gpus: on one GPU each server would be measured with the other's load")
    if not 1 <= args.starts <= args.rounds:
        parser.error(f"--starts {args.starts}: from 1 to --rounds {args.rounds}, since each start gets a round")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # or the servers would go on
    print(cores.use_one_thread_of_each(), flush=True)
    samples: tuple[Rounds, Rounds] = ([], [])
    facts: list[dict[str, Any]] = []
    canaries: list[dict[str, float]] = []
    wrong: list[str] = []
    for start in range(args.starts):
        if time.monotonic() > _BEGAN + args.seconds and start:
            print(f"  no time for more than {start} starts", flush=True)
            break
        numbers = range(start * args.rounds // args.starts + 1, (start + 1) * args.rounds // args.starts + 1)
        with servers(args, guarded_first=start % 2 == 1) as pairs:
            for pair in pairs:
                facts += (chosen := [dict(s.facts(), name=s.name, start=s.start) for s in pair])
                print(f"start {pair[0].start:.1f} s, guarded {pair[1].start:.1f} s; {chosen[0]}", flush=True)
            measure(args, pairs, numbers, samples)
            time.sleep(2.5)  # metrics are at most two seconds old
            canaries += (found := [guarded.canary() for _, guarded in pairs])
            if args.parts:
                for pair in pairs:
                    rows = step_parts.table(*(step_parts.read(server.parts) for server in pair))
                    few = f"no parts: no engine had {step_parts.EVERY} steps"
                    print(report.table(step_parts.HEADER, rows) if rows else few, flush=True)
            wrong += unlike(pairs, found)
    rows = compare(*samples, args.output)
    rounds = f"{len(samples[0])} rounds of {args.requests} requests"
    print(f"{args.shape}, {rounds}, {args.rate:g} a second, {args.input} tokens")
    print(report.table(HEADER, rows))
    for canary in canaries:
        print({name: canary[f"kvcanary_{name}"] for name in ("forwards_total", "compared_within_seconds")})
    if args.json:
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        told = [[[dataclasses.astuple(s) for s in samples_] for samples_ in side] for side in samples]
        args.json.write_text(json.dumps(dict(settings=settings, facts=facts, canary=canaries, rows=rows, samples=told)))
    if wrong:
        sys.exit("; ".join(wrong))


if __name__ == "__main__":
    main()
