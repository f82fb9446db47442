"""What a step of Model Runner V2 takes the canary's own host code, by part, without a device.

    PYTHONPATH=. .venv-vllm/bin/python tests/benchmarks/vllm_host.py [--requests 12] [--layers 32] [--prompt 512]
    PYTHONPATH=. .venv-vllm/bin/python tests/benchmarks/vllm_host.py --at-once 32 --requests 128 --layers 16 --rounds 24

A laboratory: batches are those of a runner that is made up (``tests/engines/v2_runner.py``), and the host code of a GPU
runs over CPU tensors and launches nothing (:mod:`without_device`).  Between our parts the made-up runner prepares its
batch in plain code, which empties the core's caches as vLLM's own does, as do 4 MiB that are read before the last
part, which is where a step's tokens are read: a served 8B on an H200, with clocks around the same parts, took 0.15,
0.33 and 0.33 ms of a prompt's step where this takes 0.13, 0.20 and 0.24.

Requests come one after the other, or so many at once, each with a prompt, and the oldest end.  The kinds of a step:

* ``prompt``: one with prompts, whose layers run from Python;
* ``behind``: the one behind it;
* ``left``: the oldest request is in the batch no more;
* ``told``: the step after that, when its blocks are given up;
* ``fills``: requests get pages, and nothing else happens;
* ``goes on``: any other.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import report
import torch
from without_device import pretend

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engines"))
from v2_runner import DIM, HEADS, Runner, Sizes

#: Parts of a step, in their order; ``layers`` only where these run from Python.
PARTS = ("before the step", "before the model", "layers", "behind the model", "read")
KINDS = ("prompt", "behind", "left", "told", "fills", "goes on")

PAGE = 16

#: Decode steps between two prompts, and the one of them in which the oldest request is gone.
DECODES, LEAVES = 10, 5


class Host(Runner):
    """A runner whose calls of the guard are timed.

    Attributes:
        taken: microseconds of each part, by the kind of the step and the part.
        kind: of the step that runs.
    """

    def __init__(self, sizes: Sizes, layer: Callable[..., None]):
        """
        Args:
            layer: the op that runs in the place of a layer's attention.
        """
        self.taken: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.kind, self._layer = "", layer
        self._rows: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # K and V of the layers, by tokens
        self._output, self._other_work = torch.zeros(1), torch.zeros(1 << 20)
        super().__init__(KVCANARY_BUDGET="1%", KVCANARY_VERIFY_AFTER="0", sizes=sizes)
        connector = self.kv_connector
        self.guard.begin_step = self._timed(PARTS[0], self.guard.begin_step)
        self.kv_connector = SimpleNamespace(
            pre_forward=self._timed(PARTS[1], connector.pre_forward),
            finish_forward=self._timed(PARTS[3], connector.finish_forward),
        )
        self.guard.read = self._timed(PARTS[4], self.guard.read, after_other_work=True)

    def _timed(self, part: str, function: Callable[..., Any], after_other_work: bool = False) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            if after_other_work:
                self._other_work.add_(1)  # as the sampler does, and the device's time between
            began = time.perf_counter()
            made = function(*given)
            self.taken[self.kind, part].append(1e6 * (time.perf_counter() - began))
            return made

        return timed

    def _model(self, slots: torch.Tensor, layers: Any = None) -> None:
        n, taken = len(slots), 0.0
        if n not in self._rows:
            shape = n, HEADS, DIM
            self._rows[n] = [(torch.zeros(shape), torch.zeros(shape)) for _ in self.layers]
        for name, (key, value) in zip(self.layers, self._rows[n], strict=True):
            began = time.perf_counter()
            self._layer(None, key, value, self._output, name)
            taken += time.perf_counter() - began
        self.taken[self.kind, PARTS[2]].append(1e6 * taken)

    def _replay(self, batch: Any, slots: torch.Tensor) -> None:
        """A graph has all layers in it."""


class Load:
    """Requests that come, get pages and end."""

    def __init__(self, host: Host, requests: int, prompt: int, at_once: int):
        self._host, self._most, self._prompt, self._at_once = host, requests, prompt, at_once
        self._free = list(range(1, host.sizes.pages))
        self._live: dict[str, list[int]] = {}
        self._gone: dict[str, list[int]] = {}  # they have left, and nobody was told
        self._began = 0

    def round(self) -> None:
        """Prompts, and the decode steps up to the next ones."""
        more, tokens = self._more(), dict.fromkeys(self._live, 1)
        new = {}
        for _ in range(self._at_once):
            self._began += 1
            name = f"request {self._began}"
            self._live[name] = pages = self._take(self._prompt // PAGE + 1)
            tokens[name], new[name] = self._prompt, list(pages)
        self._step("prompt", tokens, new=new, more=more)
        for number in range(DECODES):
            told = bool(self._gone)
            left = number == LEAVES and len(self._live) > self._most
            for oldest in list(self._live)[: self._at_once] if left else ():
                self._gone[oldest] = self._live.pop(oldest)
            kind = "left" if left else "behind" if not number else "told" if told else ""
            self._decode(kind, list(self._gone) if told else [])

    def _decode(self, kind: str, ended: list[str]) -> None:
        more = self._more()
        first = next(iter(self._live.values()))[0]
        kind = kind or ("fills" if more else "goes on")
        self._step(kind, dict.fromkeys(self._live, 1), more=more, finished=ended, wrong=first)
        for name in ended:
            self._free += self._gone.pop(name)

    def _step(self, kind: str, tokens: dict[str, int], **given: Any) -> None:
        self._host.kind = kind
        self._host.step(tokens, cached=True, **given)
        self._host.read()

    def _more(self) -> dict[str, list[int]]:
        """The pages that requests need for their next token."""
        full = [name for name, pages in self._live.items() if len(pages) * PAGE <= self._host._stored(name)]
        more = {name: self._take(1) for name in full}
        for name, pages in more.items():
            self._live[name] += pages
        return more

    def _take(self, pages: int) -> list[int]:
        taken, self._free = self._free[:pages], self._free[pages:]
        return taken


def rows(taken: dict[tuple[str, str], list[float]]) -> list[list[str]]:
    """Of the table; the first quarter of the steps is not in it."""
    made = []
    for kind in KINDS:
        of_kind = {part: taken[kind, part][len(taken[kind, part]) // 4 :] for part in PARTS if taken.get((kind, part))}
        if not of_kind:
            continue
        medians = {part: statistics.median(each) for part, each in of_kind.items()}
        cells = [f"{medians[part]:.0f}" if part in medians else "" for part in PARTS]
        made.append([kind, str(len(of_kind[PARTS[1]])), *cells, f"{sum(medians.values()):.0f}"])
    return made


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=12, help="that run at once")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--at-once", type=int, default=1, help="prompts of a step")
    parser.add_argument("--rounds", type=int, default=60, help="steps with prompts, ten others behind each")
    args = parser.parse_args()
    for name in ("requests", "layers", "prompt", "at_once", "rounds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: at least 1")
    try:
        from kvcanary_fx.adapters.vllm import ops
        from kvcanary_fx.adapters.vllm.v2.warm_up import WarmUp
    except ModuleNotFoundError as e:
        sys.exit(f"{e}: this wants vLLM, as in the environment of `make .venv-vllm/installed`")
    torch.set_num_threads(1)
    pretend()
    logging.disable(logging.WARNING)  # what is launched nowhere finds out nothing
    WarmUp.prove = lambda self, config: None  # type: ignore[method-assign]  nor does its proof
    alive = args.requests + 2 * args.at_once  # those that nobody was told have ended among them
    # others' prompts are steps of all
    length = args.prompt + (DECODES + 1) * (args.requests // args.at_once + 2) + PAGE
    pages = 2 + alive * (length // PAGE + 1)
    layers = tuple(f"layers.{number}" for number in range(args.layers))
    sizes = Sizes(PAGE, pages, args.requests + alive, args.at_once * args.prompt + args.requests + 1, length, layers)
    host = Host(sizes, ops._guarded(lambda *_, **__: None, in_graph=True))
    load = Load(host, args.requests, args.prompt, args.at_once)
    for _ in range(args.rounds):
        load.round()
    print(f"{report.environment('cpu')}. Microseconds, medians; launches left out.\n")
    print(report.table(["step", "how many", *PARTS, "sum"], rows(host.taken)))


if __name__ == "__main__":
    main()
