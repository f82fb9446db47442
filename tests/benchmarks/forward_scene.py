"""What `forward.py` runs: a pool filled with requests, the canary's configurations over it, and a way to run each."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from decode_models import STEP, Model, Shape

import kvcanary_fx
from kvcanary_fx import Batch, KVPool
from kvcanary_fx.config import CHECKS

#: The settings of each configuration; None: the model without the canary.
CONFIGURATIONS: dict[str, dict[str, Any] | None] = {
    "off": None,
    "identity": {"checks": ("bounds", "poison", "chain", "index", "owner", "namespace", "token")},
    "recorded": {"checks": tuple(c for c in CHECKS if c != "content")},
    "content 1/64": {"verify_fraction": "1/64"},
    "content": {"verify_fraction": "1"},
}

#: Slots in front of those of the first request: slot 0 is reserved, and the requests' own begin aligned.
FIRST = 64

#: How a configuration is run: the model in a graph that we capture, in Inductor's own, or called each time; the last is
#: `plain_cache.py`.
MODES = ("manual", "reduce-overhead", "eager", "zero-configuration")


@dataclasses.dataclass(frozen=True)
class Case:
    """One forward.  A prefill (``added`` > 1) begins at position 0.

    Attributes:
        length: tokens of each request after the forward.
        added: how many of them the forward adds.
    """

    shape: Shape
    requests: int
    length: int
    added: int

    def __post_init__(self) -> None:
        assert self.added in (1, self.length), "attention is causal over all of a request, or one query's"

    @property
    def words(self) -> list[str]:
        """What ``--only`` looks for."""
        decode = self.added == 1
        size = self.requests if decode else self.added
        return [*self.shape.name.split(), "decode" if decode else "prefill", str(size)]

    @property
    def name(self) -> str:
        rest = f" x {self.length}" if self.added == 1 else " tokens"
        return " ".join(self.words) + rest

    @property
    def prefix(self) -> int:
        return self.length - self.added

    @property
    def tokens(self) -> int:
        return self.requests * self.added


@dataclasses.dataclass(frozen=True)
class Counts:
    """What one forward checked, by the counts of the session."""

    identities: float | None  # None: nobody told the session about requests
    digests: float
    recorded: float
    violations: int

    def problems(self, case: Case, settings: dict[str, Any]) -> list[str]:
        """Where they are not what the forward's prefix and its tokens make of the settings."""
        wrong = []
        if self.violations:
            wrong.append(f"{self.violations} violations")
        if self.identities is not None and self.identities != case.requests * case.prefix:
            wrong.append(f"{self.identities:g} identities checked, not {case.requests * case.prefix}")
        # over plain tensors the forward before has written the step's slot, too, and its bytes are still there
        stored = case.prefix if self.identities is not None else case.length
        tensors, least, most = case.shape.tensors, stored, stored
        if "content" not in settings.get("checks", CHECKS):
            least = most = 0
        elif "verify_fraction" not in settings and self.identities is None:  # what the budget leaves
            least = 0
        elif settings.get("verify_fraction") == "1/64":  # of neighbouring slots every 64th: one more or one less
            least, most = stored // 64, -(-stored // 64)
            if self.identities is None:  # what the step writes again is compared before that, whatever its turn
                most += case.length - case.prefix
        least, most = (case.requests * tensors * n for n in (least, most))
        if not least <= self.digests <= most:
            wrong.append(f"{self.digests:g} digests checked, not {least} to {most}")
        if self.recorded != case.tokens * tensors:
            wrong.append(f"{self.recorded:g} digests recorded, not {case.tokens * tensors}")
        return wrong


class Scene:
    """A pool with the prefixes of all requests in it, and the batch that comes next.

    Every configuration has a session of its own over the same tensors.  All write the same bytes to the same slots,
    and what they check are the prefixes, which nobody writes.
    """

    def __init__(self, case: Case, device: torch.device):
        self.case, self.device = case, device
        slots = FIRST + case.requests * case.length
        self.pools = case.shape.pools(slots, device)
        for tensor in (t for layer in self.pools for t in layer):
            tensor.normal_()
        self.owned = torch.arange(FIRST, slots, device=device).view(case.requests, case.length)
        self.table = torch.zeros(case.requests + 1, case.length, dtype=torch.int32, device=device)  # row 0: nobody's
        self.table[1:] = self.owned
        self.history = torch.randint(case.shape.vocab, (case.requests, case.length), device=device)
        self.owners = [f"request-{i}" for i in range(case.requests)]
        self.batch = self._batch()
        self.last = torch.arange(case.added - 1, case.tokens, case.added, device=device)
        self._shadow: Any = None
        STEP.pools = dict(zip(case.shape.layer_names, self.pools, strict=True))
        STEP.slots, STEP.first = self.batch.slots, FIRST
        STEP.requests, STEP.length = case.requests, case.length

    def _batch(self) -> Batch:
        """All on the device, and with everything that a check can look at."""
        case, device = self.case, self.device

        def each(value: int) -> torch.Tensor:
            return torch.full((case.requests,), value, device=device)

        return Batch(
            input_ids=self.history[:, case.prefix :].flatten().contiguous(),
            slots=self.owned[:, case.prefix :].flatten().contiguous(),
            request_rows=torch.arange(1, case.requests + 1, device=device),
            prefix_lens=each(case.prefix),
            extend_lens=each(case.added),
            positions=torch.arange(case.prefix, case.length, device=device).repeat(case.requests),
            request_ids=self.owners,
            namespaces=torch.arange(case.requests, device=device) % 3,
            history=self.history,
            history_lens=each(case.length),
        )

    def session(self, **settings: Any) -> Any:
        """A session that knows the prefixes: who is in their slots, and what bytes."""
        pool = KVPool(self.pools, self.table, layer_names=self.case.shape.layer_names)
        sizes: dict[str, Any] = dict(max_requests=self.case.requests, max_tokens=self.case.tokens)
        made = kvcanary_fx.install_canary(pool, mode="log", health_every=0, **sizes, **settings)
        assert made is not None
        made.mark_ready()
        for slots, owner in zip(self.owned, self.owners, strict=True):
            made.pool.allocate(slots, owner=owner)
        if self.case.prefix:
            self._fill(made)
        return made

    def _fill(self, session: Any) -> None:
        """The first session reads all bytes; the others take over what it knows."""
        stored = self.owned[:, : self.case.prefix].flatten()
        if self._shadow is not None:
            session.pool.import_(self._shadow, stored)
            return
        where = torch.arange(self.case.prefix, device=self.device)
        for number, owner in enumerate(self.owners):
            slots, tokens = self.owned[number, : self.case.prefix], self.history[number, : self.case.prefix]
            session.pool.adopt(slots, tokens=tokens, positions=where, namespace=number % 3, owner=owner)
        self._shadow = session.pool.export(stored)


class Runner:
    """One configuration of a case, compiled, and ready to be run over and over.

    Attributes:
        session: None without the canary.
        seconds: what it took to compile, fill and capture.
        runs: one forward, by each of the graphs captured of it; on a GPU a call only starts it.
        problems: what went wrong and no count says.
    """

    def __init__(self, scene: Scene, model: Model, settings: dict[str, Any] | None, mode: str, captures: int = 1):
        started = time.perf_counter()
        inner = "eager" if mode == "eager" else "inductor"
        self.case, self.scene, self.settings, self.problems = scene.case, scene, settings, []
        self.session = None if settings is None else scene.session(inner=inner, **settings)
        backend: Any = inner if self.session is None else self.session.backend
        given = "reduce-overhead" if mode == "reduce-overhead" else None
        self._compiled = torch.compile(model, backend=backend, dynamic=False, fullgraph=True, mode=given)
        for _ in range(3):  # compiles, warms up, and lets Inductor capture its graph
            self._call()
        self.runs: list[Callable[[], Any]] = [self._call]
        if mode == "manual":
            self._graphs = [self._captured() for _ in range(captures)]
            self.runs = [graph.replay for graph in self._graphs]
            for run in self.runs:
                run()
        if scene.device.type == "cuda":
            torch.cuda.synchronize()
        self._before = self._read()
        self.seconds = time.perf_counter() - started

    def _call(self) -> None:
        """As an engine calls its model; Inductor is told that the last output is no longer needed."""
        torch.compiler.cudagraph_mark_step_begin()
        with kvcanary_fx.step(self.session, self.scene.batch), kvcanary_fx.forward(self.session), torch.no_grad():
            self._compiled(self.scene.batch.input_ids, self.scene.last)

    def _captured(self) -> torch.cuda.CUDAGraph:
        """The forward in a graph, together with the checks before and after it."""
        if self.session is not None:
            self.session.inputs.freeze()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        step, forward = kvcanary_fx.step(self.session, self.scene.batch), kvcanary_fx.forward(self.session)
        with step, torch.no_grad(), torch.cuda.graph(graph), forward:
            self._compiled(self.scene.batch.input_ids, self.scene.last)
        return graph

    def next_turn(self) -> None:
        """What the step of an engine does to a captured forward's ``verify_fraction``: other slots are due."""
        if self.session is not None:
            self.session.inputs.counts[2].add_(1)

    def _read(self) -> Any:
        return None if self.session is None else self.session.stats()

    def counts(self) -> Counts | None:
        """What the forwards since the warm-up checked, each; violations since the beginning."""
        if self.session is None:
            return None
        self.session.health.check()  # is the last forward's digest there in every layer?
        after, before = self._read(), self._before
        forwards = max(1, after.forwards - before.forwards)
        return Counts(
            (after.slots_checked - before.slots_checked) / forwards,
            (after.checked - before.checked) / forwards,
            (after.recorded - before.recorded) / forwards,
            after.violations + len(self.session.uncovered),
        )
