"""vLLM at its own defaults on a GPU, guarded and not: both engines alive at once, taking turns.

    python tests/benchmarks/vllm_engine.py --shape 1b 8b --requests 1 16 64 256 --rounds 5 [--mode log] [--write]
    python tests/benchmarks/vllm_engine.py --shape 1b --requests 64 --profile   # launches and host time of a step

With ``--gpus 0 1`` there are both engines on each of the two, and the rounds take turns on them: of two H200 of one
host, one took 1.6 % longer for the same step.  With ``--ranks 2`` each engine is spread over two GPUs (tensor
parallel).  With ``--alone 2`` each engine has the GPU for itself, as a user's has:
they are started one after the other, twice in all, and the rounds of one start are compared with those of the other
engine's.  Each kernel takes longer once those of its process have run in many streams (``streams.py``); what one takes
is printed.

Two engines of one kind need not be as fast as each other: of two unguarded ones on the same hardware threads one took
3 to 9 % longer for each part of a step.  With ``--each 3`` there are three of each kind, in each round an unguarded one
and a guarded one, and in turn all pairs of them; what each of them does is printed.

Offline throughput: prompts of ``--input`` random token ids, ``--output`` tokens each, random weights (``dummy``), as
many blocks in both engines.  With ``--mixed`` prompts have half as many tokens at least: the requests of a batch then
fill their pages in different steps, as those of users do, and not all of them in one step of 16.

Each engine is in processes of its own, as ``LLM(...)`` starts it; nothing is set but sizes, and both run on the same
hardware threads (:mod:`cores`) once they have started.  The settings of the guard are
the environment's (``KVCANARY_BUDGET``, ...), ``KVCANARY_MODE`` is ``--mode``.

Where steps wait for a host that is uneven, many rounds tell more than long ones: ``--seconds 60`` makes as many
as fit, and the median's 95 % interval says what they are worth.  Other work on the host makes rounds slower and never
quicker, so the quickest tenths are compared, too: what the guard takes of a host that has nothing else to do.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cores
import report
from vllm_shapes import SHAPES, vocabulary, write_config


class Engine:
    """One engine in a process of its own; :meth:`wait` for it first.

    Attributes:
        facts: what vLLM chose.
        start: seconds until it was ready.
        steps: the file of :mod:`vllm_steps`, if it was asked for.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        shape: str,
        mode: str | None,
        gpu: str | None = None,
        name: str | None = None,
        **variables: str,
    ):
        """
        Args:
            name: of its log; without one, what it is.
            variables: of its environment.
        """
        environment = {k: v for k, v in os.environ.items() if mode is not None or not k.startswith("KVCANARY_")}
        if mode is not None:
            environment["KVCANARY_MODE"] = mode
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        environment |= variables
        answers, answer = os.pipe()
        command = [sys.executable, __file__, "--worker", str(answer), "--shape", shape]
        command += ["--input", str(args.input), "--output", str(args.output), "--blocks", str(args.blocks)]
        command += ["--share", str(args.share)] + ["--profile"] * args.profile + ["--mixed"] * args.mixed
        command += ["--kv-gib", str(args.kv_gib)] * bool(args.kv_gib)
        command += ["--ranks", str(args.ranks)]
        Path(args.logs).mkdir(parents=True, exist_ok=True)
        log = Path(args.logs) / f"{shape}-{name or mode or 'plain'}{gpu or ''}.log"
        if args.steps:
            self.steps = log.with_suffix(".steps")
            self.steps.unlink(missing_ok=True)
            command += ["--steps", str(self.steps)]
        self.facts: dict[str, Any] = {}
        self._began = time.time()
        with log.open("w") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=out, env=environment, pass_fds=[answer], text=True
            )
        os.close(answer)
        self._answers = os.fdopen(answers)
        self._log = log

    def wait(self) -> None:
        """Until it is ready."""
        if not self.facts:
            self.facts, at = self._read(self._log)
            self.start = at - self._began

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self._process.pid

    def ask(self, *words: object) -> Any:
        """Let it run something, and wait."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        return self._read(self._log)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _read(self, log: Path) -> Any:
        line = self._answers.readline()
        if not line:
            sys.exit(f"an engine ended:\n{log.read_text()[-3000:]}")
        return json.loads(line)


#: An unguarded engine and a guarded one.
Pair = tuple[Engine, Engine]


def start(args: argparse.Namespace, shape: str) -> list[Pair]:
    """The engines, begun: on one GPU one after the other, since vLLM looks at the free memory, unless it is told how
    much to take; on two GPUs a pair on each."""
    if args.each > 1:
        kinds = [None, args.mode]
        made = [
            [begin(args, shape, mode, f"{mode or 'plain'}-{number}") for mode in kinds[:: -1 if number % 2 else 1]]
            for number in range(args.each)
        ]
        return [(first, second) if number % 2 == 0 else (second, first) for number, (first, second) in enumerate(made)]
    gpus = args.gpus or [None]
    first = [(None, gpu) for gpu in gpus]
    second = [(args.mode, gpu) for gpu in reversed(gpus)]
    found = []
    for places in zip(first, second, strict=True):
        engines = []
        for at in places:
            engines.append(Engine(args, shape, *at))
            if not args.gpus and not args.kv_gib:
                engines[-1].wait()
        for engine in engines if args.gpus and not args.kv_gib else ():
            engine.wait()
        found.append(engines)
    if not args.gpus:
        return [(found[0][0], found[0][1])]
    (plain0, guarded1), (plain1, guarded0) = found
    return [(plain0, guarded0), (plain1, guarded1)]


def begin(args: argparse.Namespace, shape: str, mode: str | None, name: str) -> Engine:
    """Begin one of several engines on a GPU; wait for it where it looks at the free memory."""
    engine = Engine(args, shape, mode, name=name)
    if not args.kv_gib:
        engine.wait()
    return engine


def turns(pairs: list[Pair], each: int) -> list[list[Engine]]:
    """The engines of each round, in their order; behind the last one comes the first again.

    Args:
        each: engines of a kind on one GPU: any of them is compared with any of the other kind.
    """
    mixed = [(pairs[i][0], pairs[(i + k) % each][1]) for k in range(each) for i in range(each)] if each > 1 else pairs
    return [[*pair[::way]] for way in (1, -1) for pair in mixed]


def measure(args: argparse.Namespace, shape: str, pairs: list[Pair], rounds: int) -> list[list[str]]:
    """The rows of a shape."""
    for plain, guarded in pairs:
        for engine in (plain, guarded):
            engine.wait()
        cores.put_alike([plain.pid, guarded.pid])
        starts = f"start {plain.start:.1f} s, guarded {guarded.start:.1f} s"
        print(f"{shape}: {starts}; {plain.facts} {guarded.facts}", flush=True)
    rows = []
    for requests in args.requests:
        for engine in (engine for pair in pairs for engine in pair):
            engine.ask("run", requests, 0)
        taken: dict[Engine, list[float]] = {engine: [] for pair in pairs for engine in pair}
        seconds: tuple[list[float], list[float]] = ([], [])
        ends = time.monotonic() + args.seconds
        for number, engines in enumerate(itertools.cycle(turns(pairs, args.each)), 1):
            if number > rounds and time.monotonic() > ends:
                break
            for engine in engines:
                taken[engine].append(engine.ask("run", requests, number))
                seconds[any(engine is pair[1] for pair in pairs)].append(taken[engine][-1])
        rows.append(row(shape, requests, args.output, *seconds))
        print(" | ".join(rows[-1]), flush=True)
        if args.each > 1:
            print("  " + of_each(pairs, taken, requests * args.output), flush=True)
    for _, guarded in pairs:
        print("guarded:", guarded.ask("stats"), flush=True)
    for engine in (engine for pair in pairs for engine in pair):
        engine.close()
    return rows


def measure_alone(args: argparse.Namespace, shape: str, rounds: int) -> list[list[str]]:
    """The same of engines that are started one after the other."""
    taken: dict[int, tuple[list[float], list[float]]] = {requests: ([], []) for requests in args.requests}
    for number in range(args.alone):
        for mode in (None, args.mode)[:: -1 if number % 2 else 1]:
            engine = Engine(args, shape, mode)
            engine.wait()
            cores.put_alike([engine.pid])
            name = "plain" if mode is None else "guarded"
            print(f"{shape}, {name}: start {engine.start:.1f} s; {engine.facts}", flush=True)
            for requests in args.requests:
                engine.ask("run", requests, 0)
                turns = range(number * rounds + 1, (number + 1) * rounds + 1)
                taken[requests][mode is not None].extend(engine.ask("run", requests, turn) for turn in turns)
            print(f"  a kernel takes {engine.ask('kernel'):,.0f} ns there", flush=True)
            if mode is not None:
                print("guarded:", engine.ask("stats"), flush=True)
            engine.close()
    return [row(shape, requests, args.output, *taken[requests]) for requests in args.requests]


def of_each(pairs: list[Pair], taken: Mapping[Engine, list[float]], tokens: int) -> str:
    """What each engine makes a second, and the quickest tenth of its rounds."""
    kinds = []
    for name, engines in zip(("plain", "guarded"), zip(*pairs, strict=True), strict=True):
        rates = []
        for seconds in (sorted(taken[engine]) for engine in engines if taken[engine]):
            rates.append(f"{tokens / statistics.median(seconds):,.0f} ({tokens / seconds[len(seconds) // 10]:,.0f})")
        kinds.append(f"{name} {' '.join(rates)}")
    return ", ".join(kinds) + " tokens/s"


def row(shape: str, requests: int, output: int, plain: list[float], guarded: list[float]) -> list[str]:
    """Throughput of both, and the ratio in each round."""
    ratios = [p / g for p, g in zip(plain, guarded, strict=True)]
    rate = [requests * output / statistics.median(times) for times in (plain, guarded)]
    told = [f"{rate[0]:,.0f}", f"{rate[1]:,.0f}", report.paired(ratios), quickest(plain, guarded)]
    return [shape, str(requests), *told, str(len(ratios))]


def quickest(plain: list[float], guarded: list[float]) -> str:
    """The ratio of what nine rounds in ten are slower than; of fewer than 20 rounds nothing."""
    if len(plain) < 20:
        return ""
    return f"{100 * sorted(plain)[len(plain) // 10] / sorted(guarded)[len(guarded) // 10]:.1f} %"


HEADER = ["shape", "requests", "tokens/s", "guarded", "guarded of plain (median)", "of the quickest tenth", "rounds"]


def worker(args: argparse.Namespace) -> None:
    """An engine that runs what its input says."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    if args.profile:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    if args.steps:
        import vllm_steps

        vllm_steps.trace(args.steps)
    answers = os.fdopen(args.worker, "w")

    def answer(what: Any) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    (shape,) = args.shape
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # of a function, for "kernel"
    llm = LLM(
        model=write_config(shape),
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=max(8192, args.input + args.output),
        gpu_memory_utilization=args.share,
        num_gpu_blocks_override=args.blocks,
        tensor_parallel_size=args.ranks,
        **(dict(kv_cache_memory_bytes=int(args.kv_gib * 2**30)) if args.kv_gib else {}),
    )
    config = llm.llm_engine.vllm_config
    graphs = config.compilation_config.cudagraph_mode.name
    chose = dict(graphs=graphs, asynchronous=config.scheduler_config.async_scheduling, v2=config.use_v2_model_runner)
    chose |= dict(prefixes=config.cache_config.enable_prefix_caching, states=config.cache_config.mamba_cache_mode)
    answer((chose, time.time()))
    sampling = SamplingParams(temperature=0, max_tokens=args.output, ignore_eos=True, detokenize=False)
    runs = Runs(args, llm, sampling, vocabulary(shape))
    for line in sys.stdin:
        what, *words = line.split()
        if what == "run":
            answer(runs.run(int(words[0]), int(words[1])))
        elif what == "load":
            answer(runs.load(int(words[0]), int(words[1]), float(words[2])))
        elif what == "profile":
            answer(profiled(functools.partial(runs.run, int(words[0]))))
        elif what == "stats":
            answer(stats())
        elif what == "kernel":
            answer(max(llm.collective_rpc(kernel_nanoseconds)))
        elif what == "stacks":
            import vllm_stacks

            answer(llm.collective_rpc(vllm_stacks.start_in if words == ["start"] else vllm_stacks.stop_in)[0])


class Runs:
    """What an engine is given to do."""

    def __init__(self, args: argparse.Namespace, llm: Any, sampling: Any, most: int):
        """
        Args:
            most: token ids are smaller.
        """
        self._args, self._llm, self._sampling, self._most = args, llm, sampling, most

    def _prompts(self, requests: int, seed: int) -> list[Any]:
        numbers = random.Random(f"{requests} requests, {seed}")  # of their own: or the prefix cache would have them
        return [
            {"prompt_token_ids": [numbers.randrange(3, self._most) for _ in range(length)]}
            for length in lengths(self._args.input, requests, numbers if self._args.mixed else None)
        ]

    def run(self, requests: int, seed: int) -> float:
        """All at once; the seconds they take."""
        prompts = self._prompts(requests, seed)
        began = time.perf_counter()
        self._llm.generate(prompts, self._sampling, use_tqdm=False)
        return time.perf_counter() - began

    def load(self, requests: int, seed: int, rate: float) -> float:
        """So many a second, as a server's clients send them; the seconds until the last one has ended."""
        engine, prompts = self._llm.llm_engine, self._prompts(requests, seed)
        began, sent = time.perf_counter(), 0
        while sent < requests or engine.has_unfinished_requests():
            while sent < requests and time.perf_counter() >= began + sent / rate:
                engine.add_request(f"{seed}-{sent}", prompts[sent], self._sampling)
                sent += 1
            if engine.has_unfinished_requests():
                engine.step()
            else:
                time.sleep(max(0.0, began + sent / rate - time.perf_counter()))
        return time.perf_counter() - began


def lengths(most: int, requests: int, numbers: random.Random | None) -> list[int]:
    """How many tokens each prompt has: as many, or half of them at least, drawn at random."""
    return [most if numbers is None else numbers.randint(most // 2, most) for _ in range(requests)]


def kernel_nanoseconds(worker: Any) -> float:
    """What a small kernel takes in a worker of vLLM; 0 on a CPU."""
    import streams
    import torch

    return streams.nanoseconds_of_a_kernel() if torch.cuda.is_available() else 0.0


def stats() -> Any:
    """What the guard's counts say; its file, since the engine is another process."""
    from kvcanary_fx.adapters.vllm import counts

    found, violations = counts.read_all()
    return dict(counts=found, violations=violations, within=counts.compared_within())


def profiled(run: Callable[[int], Any]) -> str:
    """Kernels by time, and Python by time, of one run each, given its number: other prompts than those before."""
    import cProfile
    import io
    import pstats

    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as kernels:
        run(77)
    host = cProfile.Profile()
    host.enable()
    run(78)
    host.disable()
    out = io.StringIO()
    out.write(kernels.key_averages().table(sort_by="cuda_time_total", row_limit=45, max_name_column_width=60))
    pstats.Stats(host, stream=out).sort_stats("tottime").print_stats(45)
    pstats.Stats(host, stream=out).sort_stats("cumulative").print_stats("kvcanary", 60)
    return out.getvalue()


def require_sense(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End where settings contradict each other."""
    if len(args.rounds) not in (1, len(args.shape)):
        parser.error(f"--rounds has {len(args.rounds)} numbers for {len(args.shape)} shapes: give one, or one for each")
    if args.ranks > 1 and args.gpus:
        parser.error("--ranks spreads each engine over several GPUs, --gpus puts engines on each of two: leave one out")
    if args.each < 1:
        parser.error(f"--each {args.each}: at least one engine of each kind")
    if args.each > 1 and (args.gpus or args.alone):
        parser.error("--each starts all engines on one GPU: leave out --gpus and --alone")
    if args.alone and (args.gpus or args.seconds):
        parser.error(
            "--alone makes as many rounds of both engines as --rounds says, on one GPU: leave out --gpus and --seconds"
        )


def main() -> None:
    """Measure, or be an engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["1b"], choices=list(SHAPES))
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--rounds", nargs="+", type=int, default=[5], help="of each shape, or one number for all")
    parser.add_argument("--seconds", type=float, default=0, help="of each row: more rounds, as long as this takes")
    parser.add_argument("--input", type=int, default=512)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--mixed", action="store_true", help="prompts of half of these tokens to all")
    parser.add_argument("--blocks", type=int, default=12000, help="KV cache blocks of each engine")
    parser.add_argument("--share", type=float, default=0.45, help="of the GPU's memory, for each engine")
    parser.add_argument("--gpus", nargs=2, help="two GPUs, each with both engines; default: one")
    parser.add_argument("--each", type=int, default=1, help="engines of each kind, all alive at once on one GPU")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that each engine is spread over, tensor parallel")
    what = "start each engine so often, one after the other; each has the GPU for itself"
    parser.add_argument("--alone", type=int, metavar="STARTS", help=what)
    parser.add_argument("--mode", default="log", choices=["log", "raise"])
    parser.add_argument("--logs", default=tempfile.gettempdir(), help="directory of the engines' logs")
    parser.add_argument("--profile", action="store_true", help="profile one guarded run instead of measuring")
    parser.add_argument("--write", action="store_true", help="write the table to BENCHMARKS.md")
    what = "memory of each KV cache; vLLM does not look for what is free, and all engines start at once"
    parser.add_argument("--kv-gib", type=float, help=what)
    parser.add_argument("--steps", help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        worker(args)
        return
    if args.profile:
        for shape in args.shape:
            engine = Engine(args, shape, args.mode)
            engine.wait()
            for requests in args.requests:
                engine.ask("run", requests, 0)
                print(f"# {shape}, {requests} requests\n{engine.ask('profile', requests)}", flush=True)
            engine.close()
        return
    print(cores.use_one_thread_of_each(), flush=True)
    require_sense(parser, args)
    rounds = args.rounds * len(args.shape) if len(args.rounds) == 1 else args.rounds
    # all at once, where nobody looks at what is free
    pairs = {shape: start(args, shape) for shape in args.shape} if args.kv_gib and not args.alone else {}
    rows = []
    for shape, number in zip(args.shape, rounds, strict=True):
        if args.alone:
            rows += measure_alone(args, shape, number)
        else:
            rows += measure(args, shape, pairs.get(shape) or start(args, shape), number)
    print(report.table(HEADER, rows))
    if args.write:
        command = "python tests/benchmarks/vllm_engine.py " + " ".join(sys.argv[1:])
        report.write_section(
            "vllm-engine",
            f"## vLLM at its defaults\n\n{report.environment('cuda')}: `{command}`\n\n{report.table(HEADER, rows)}",
        )


if __name__ == "__main__":
    main()
