"""A serving engine for random schedules: chunked prefill, decode, drafts, a prefix cache with eviction, retraction,
reuse, padding, or a sliding window with slots of its own.  Faults are planted where it calls :meth:`Engine.strike`.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvcanary_fx import Batch, EngineSession, KVPool, Prefix, install_canary
from kvcanary_fx.kernels.slots.space import REFERENCE

LAYERS, DIM = 2, 4
SLOTS, ROWS, WIDTH = 33, 6, 24
WINDOW = 6  # tokens before the one that is added
TOKENS, READS = 32, 96  # what the model's inputs are padded to
VOCABULARY = 40

#: The cache's name as an owner of slots.
CACHE = "cache"

#: What is done between a forward's layers; an op, so that compiled graphs call it and do not see what it does.
_meanwhile: list[Callable[[], None]] = []


@torch.library.custom_op("kvcanary_schedules::meanwhile", mutates_args=())
def meanwhile(x: torch.Tensor) -> torch.Tensor:
    while _meanwhile:
        _meanwhile.pop()()
    return x.clone()


@meanwhile.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


Missing = tuple[tuple[int, int], ...]


def attend(kv: Any, x: torch.Tensor, slots: list[torch.Tensor], reads: torch.Tensor, missing: Missing) -> torch.Tensor:
    """Layers that write K and V to the slots they get, but for the missing (layer, half), and sum what they read."""
    for layer, (k_pool, v_pool) in enumerate(kv):
        k = x.unsqueeze(1)
        if (layer, 0) not in missing:
            k_pool[slots[layer]] = k
        if (layer, 1) not in missing:
            v_pool[slots[layer]] = 2 * k + 1
        x = meanwhile(x + k_pool[reads].mean() - v_pool[reads].mean() / 3)
    return x


class Guarded:
    """Our side: a pool, its request table, its session and the compiled model, made once for many schedules."""

    def __init__(self, windowed: bool):
        self.windowed = windowed
        self.kv = [tuple(torch.zeros(SLOTS, 1, DIM) for _ in range(2)) for _ in range(LAYERS)]
        self.table = torch.zeros(ROWS, WIDTH, dtype=torch.int32)
        self.map = torch.zeros(ROWS * WIDTH + 1, dtype=torch.int64) if windowed else None
        window = WINDOW + 1 if windowed else None
        declared = KVPool(self.kv, self.table, slot_map=self.map, window=window, padding_row=0)
        session = install_canary(declared, inner="eager", mode="log", health_every=0)
        assert session is not None
        self.session: EngineSession = session
        self.model = torch.compile(attend, backend=session.backend, dynamic=False)
        self.embeddings = torch.randn(VOCABULARY, WIDTH, DIM, generator=torch.Generator().manual_seed(1))

    @property
    def pool(self) -> Any:
        return self.session.pool

    def reset(self) -> None:
        """An empty pool, and nothing known of it."""
        for tensor in (self.table, *([self.map] if self.map is not None else []), *(t for kv in self.kv for t in kv)):
            tensor.zero_()
        space = self.pool.space
        while len(held := ((space.flags[1:-1] >= REFERENCE).nonzero().flatten() + 1)):
            self.pool.release(held)
        self.session.mark_ready()


@dataclasses.dataclass(eq=False)
class Node:
    """A cached token: a trie with one slot a node."""

    token: int
    slot: int
    parent: Node | None
    children: dict[int, Node] = dataclasses.field(default_factory=dict)
    users: int = 0

    def below(self) -> Iterator[Node]:
        for child in self.children.values():
            yield child
            yield from child.below()

    @property
    def depth(self) -> int:
        return -1 if self.parent is None else self.parent.depth + 1


@dataclasses.dataclass(eq=False)
class Request:
    """``tokens`` are all that are known of it, ``stored`` of them are in the pool, of these ``nodes`` the cache's."""

    name: str
    tokens: list[int]
    goal: int
    row: int = 0
    stored: int = 0
    nodes: list[Node] = dataclasses.field(default_factory=list)
    spare: int = 0  # entries of its row behind the stored ones


@dataclasses.dataclass
class Work:
    """What a forward does of one request; ``tokens`` and ``positions`` are the truth, whatever the batch says."""

    request: Request
    tokens: list[int]
    positions: list[int]
    entries: list[int]
    drafted: int = 0


@dataclasses.dataclass
class Forward:
    """A forward as both canaries are told of it, and what its kernels really get."""

    work: list[Work]
    rows: list[int]
    prefix_lens: list[int]
    extend_lens: list[int]
    names: list[str]
    input_ids: list[int]
    positions: list[int]
    entries: list[int]  # of the request table; slots, but for a map
    histories: list[list[int]]
    kernel: list[list[int]] = dataclasses.field(default_factory=list)  # slots, of each layer
    missing: Missing = ()
    runs: bool = True

    @property
    def expected(self) -> tuple[list[int], list[int]]:
        """The tokens and positions that the requests' own histories ask for, padded as the batch."""
        padding = [0] * (len(self.input_ids) - sum(len(w.tokens) for w in self.work))
        tokens = [t for w in self.work for t in w.tokens] + padding
        return tokens, [p for w in self.work for p in w.positions] + padding


class Engine:
    """One schedule.

    Attributes:
        strike: plants the fault at one of the engine's points; returns whether it did, just now.
        trie: the root of the prefix cache.
        seen: how often what happened, so that nobody takes a dull schedule for a proof.
    """

    def __init__(self, guarded: Guarded, rng: random.Random, strike: Callable[[str, Engine, Any], bool] | None = None):
        self.guarded, self.rng, self._strike = guarded, rng, strike
        self.pool, self.table, self.map = guarded.pool, guarded.table, guarded.map
        self.free = list(range(1, SLOTS))
        rng.shuffle(self.free)
        self.free_entries = list(range(1, len(self.map))) if self.map is not None else []
        self.free_rows = list(range(1, ROWS))
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.trie = Node(-1, -1, None)
        self.texts = [[rng.randrange(1, VOCABULARY) for _ in range(12)] for _ in range(3)]
        self.chunk = rng.choice([3, 5, 8])
        self.drafts = rng.choice([0, 0, 2, 3])
        self.keeps_rejected = rng.random() < 0.5
        self.caches = self.map is None and rng.random() < 0.85
        self.born = 0
        self.seen: collections.Counter[str] = collections.Counter()

    def strike(self, point: str, subject: Any = None) -> bool:
        return self._strike is not None and self._strike(point, self, subject)

    # ---- slots

    def slot(self, entry: int) -> int:
        """Where an entry of the request table lies in the pool."""
        return entry if self.map is None else int(self.map[entry])

    def entries(self, request: Request, start: int = 0, stop: int | None = None) -> list[int]:
        return self.table[request.row, start : request.stored if stop is None else stop].tolist()

    def readable(self, request: Request) -> list[int]:
        """Slots of the prefix that the request's next forward reads, in order."""
        first = 0 if self.map is None else max(0, request.stored - WINDOW)
        return [self.slot(e) for e in self.entries(request, first)]

    def take(self, count: int, owner: str) -> list[int]:
        """Entries for tokens to come, which the allocator hands to a request."""
        if not count:
            return []
        slots = [self.free.pop() for _ in range(count)]
        self.pool.allocate(slots, owner=owner)
        if self.map is None:
            return slots
        entries = [self.free_entries.pop() for _ in range(count)]
        self.map[entries] = torch.tensor(slots, dtype=torch.int64)
        return entries

    def give(self, entries: list[int], owner: str) -> None:
        """Entries go back to the allocator, with the slots that they still have."""
        if not entries:
            return
        slots = [s for s in map(self.slot, entries) if s]
        self.pool.release(slots, owner=owner)
        self.free += slots
        if self.map is not None:
            self.map[entries] = 0
            self.free_entries += entries

    # ---- a step

    def step(self, head: Callable[[Forward], None], tail: Callable[[Forward], None]) -> None:
        """Admit, plan, run, and keep what became of it; ``head`` and ``tail`` are called around the model."""
        self.strike("between")
        self._arrive()
        forward = self._plan()
        if forward is None:
            return
        self.strike("planned", forward)
        forward.kernel = [[self.slot(e) for e in forward.entries] for _ in range(LAYERS)]
        self.strike("kernel", forward)
        batch = self._batch(forward)
        session = self.guarded.session
        with session.step(batch), session.forward(), torch.no_grad():
            head(forward)
            if forward.runs:
                self._run(forward)
            _meanwhile.clear()
            tail(forward)
        self.strike("after", forward)
        for work in forward.work:
            self._keep(work)

    def _run(self, forward: Forward) -> None:
        guarded, padding = self.guarded, TOKENS - len(forward.input_ids)
        x = guarded.embeddings[
            forward.input_ids + [0] * padding, [p % WIDTH for p in forward.positions] + [0] * padding
        ]
        slots = [torch.tensor(k + [0] * padding) for k in forward.kernel]
        reads = [s for w in forward.work for s in self.readable(w.request)] + forward.kernel[0]
        reads = (reads + [0] * READS)[:READS]
        guarded.model(guarded.kv, x, slots, torch.tensor(reads), forward.missing)

    def _batch(self, forward: Forward) -> Batch:
        longest = max(map(len, forward.histories))
        return Batch(
            input_ids=forward.input_ids,
            slots=forward.entries,
            request_rows=forward.rows,
            prefix_lens=forward.prefix_lens,
            extend_lens=forward.extend_lens,
            positions=forward.positions,
            request_ids=forward.names,
            history=torch.tensor([h + [0] * (longest - len(h)) for h in forward.histories]),
            history_lens=[len(h) for h in forward.histories],
        )

    def _arrive(self) -> None:
        rng = self.rng
        if len(self.waiting) + len(self.running) < 2 or rng.random() < 0.35:
            text = rng.choice(self.texts)
            tokens = text[: rng.randrange(1, 13)] + [rng.randrange(1, VOCABULARY) for _ in range(rng.randrange(1, 4))]
            self.born += 1
            self.waiting.append(Request(f"r{self.born}", tokens, min(len(tokens) + rng.randrange(1, 8), WIDTH - 4)))
        while self.waiting and self.free_rows and len(self.running) < 3:
            self._admit(self.waiting.pop(0))

    def _admit(self, request: Request) -> None:
        request.row, request.stored, request.spare, request.nodes = self.free_rows.pop(0), 0, 0, []
        self.running.append(request)
        node = self.trie
        while self.caches and request.stored < len(request.tokens) - 1:
            found = node.children.get(request.tokens[request.stored])
            if found is None:
                break
            node = found
            request.nodes.append(node)
            request.stored += 1
        self.seen["cache hits"] += bool(request.nodes)
        self.strike("admitted", request)
        self._hold(request, request.nodes)
        self.table[request.row, : request.stored] = torch.tensor([n.slot for n in request.nodes], dtype=torch.int32)

    def _hold(self, request: Request, nodes: list[Node]) -> None:
        if not nodes:
            return
        for node in nodes:
            node.users += 1
        self.pool.share([n.slot for n in nodes], owner=request.name)

    def _plan(self) -> Forward | None:
        rng = self.rng
        chosen = [r for r in self.running if rng.random() < 0.9] or self.running[:1]
        work = [w for r in chosen if r in self.running and (w := self._work(r)) is not None]
        work = [w for w in work if w.request in self.running]  # one may have been retracted for another's sake
        if not work:
            return None
        forward = Forward(
            work=work,
            rows=[w.request.row for w in work],
            prefix_lens=[w.request.stored for w in work],
            extend_lens=[len(w.tokens) for w in work],
            names=[w.request.name for w in work],
            input_ids=[t for w in work for t in w.tokens],
            positions=[p for w in work for p in w.positions],
            entries=[e for w in work for e in w.entries],
            histories=[list(w.request.tokens) for w in work],
        )
        self._pad(forward)
        return forward

    def _pad(self, forward: Forward) -> None:
        """Row 0 is padding: without tokens anywhere in a batch, with one of slot 0 each at its end."""
        for _ in range(self.rng.choice([0, 0, 1, 2])):
            self.seen["padded rows"] += 1
            inside = self.rng.random() < 0.4
            at = self.rng.randrange(len(forward.rows)) if inside else len(forward.rows)
            forward.rows.insert(at, 0)
            forward.prefix_lens.insert(at, self.rng.choice([0, 1, 5]))
            forward.extend_lens.insert(at, 0 if inside else 1)
            forward.names.insert(at, "")
            forward.histories.insert(at, [])
            if not inside:
                forward.input_ids.append(0)
                forward.positions.append(0)
                forward.entries.append(0)

    def _work(self, request: Request) -> Work | None:
        """The next tokens of a request with room for them; None if it had to go."""
        left = len(request.tokens) - request.stored
        tokens = request.tokens[request.stored : request.stored + self.chunk]
        drafted = self.rng.randrange(1, self.drafts + 1) if left == 1 and self.drafts else 0
        tokens = tokens + [self.rng.randrange(1, VOCABULARY) for _ in range(drafted)]
        self.seen[
            "chunks" if left > self.chunk else "drafts" if drafted else "decodes" if left == 1 else "prefills"
        ] += 1
        needed = max(len(tokens) - request.spare, 0)
        if not self._make_room(needed, request):
            self.retract(request)
            return None
        kept, end = min(request.spare, len(tokens)), request.stored + len(tokens)
        new = self.take(needed, request.name)
        self.table[request.row, request.stored + kept : end] = torch.tensor(new, dtype=torch.int32)
        request.spare = max(request.spare, len(tokens))
        entries = self.entries(request, request.stored, end)
        return Work(request, tokens, list(range(request.stored, end)), entries, drafted)

    def _make_room(self, needed: int, request: Request) -> bool:
        while len(self.free) < needed:
            idle = [n for n in self.trie.below() if not n.children and not n.users]
            others = [r for r in self.running if r is not request]
            if idle:
                self.evict(self.rng.choice(idle))
            elif others and len(self.running) > 1 and self.rng.random() < 0.8:
                self.retract(others[-1])
            else:
                return False
        return True

    def evict(self, node: Node) -> None:
        assert node.parent is not None
        self.seen["evictions"] += 1
        node.parent.children.pop(node.token, None)
        self.give([node.slot], CACHE)

    def retract(self, request: Request) -> None:
        """A request gives its slots back and waits."""
        self.seen["retractions"] += 1
        self.running.remove(request)
        if self.strike("retracted", request):
            self.running.append(request)  # it goes on as if nothing had happened
            return
        self._leave(request)
        request.stored = request.spare = 0
        self.waiting.append(request)

    def _leave(self, request: Request) -> None:
        own = self.entries(request, len(request.nodes), request.stored + request.spare)
        self.give(own, request.name)
        self.drop(request)
        self.table[request.row] = 0
        self.free_rows.append(request.row)

    def drop(self, request: Request) -> None:
        if not request.nodes:
            return
        for node in request.nodes:
            node.users -= 1
        self.pool.release([n.slot for n in request.nodes], owner=request.name)
        request.nodes = []

    # ---- behind the forward

    def _keep(self, work: Work) -> None:
        """What a forward computed is stored; drafts are accepted in part, and what ends goes to the cache."""
        request, rng = work.request, self.rng
        accepted = rng.randrange(work.drafted + 1)
        end = request.stored + request.spare
        request.stored += len(work.tokens) - work.drafted + accepted
        request.spare = end - request.stored
        if work.drafted:
            request.tokens += work.tokens[1 : 1 + accepted]
            self._reject(request, end)
        if request.stored == len(request.tokens):
            request.tokens.append(rng.randrange(1, VOCABULARY))
        self._leave_window(request)
        if request.stored >= request.goal:
            self.finish(request)
        elif self.caches and rng.random() < 0.3:
            self.cache(request)

    def _reject(self, request: Request, end: int) -> None:
        rejected = self.entries(request, request.stored, end)
        self.seen["rejected drafts"] += len(rejected)
        if rejected and self.strike("rejected", (request, end)):
            return
        if self.keeps_rejected:
            self.pool.reject([self.slot(e) for e in rejected])
        else:
            self.give(rejected, request.name)
            request.spare = 0
            self.table[request.row, request.stored : end] = 0

    def _leave_window(self, request: Request) -> None:
        if self.map is None:
            return
        early = int(self.strike("windowed", request))
        gone = [e for e in self.entries(request, 0, max(0, request.stored - WINDOW + early)) if self.slot(e)]
        if not gone:
            return
        self.seen["left a window"] += len(gone)
        slots = [self.slot(e) for e in gone]
        self.pool.release(slots, owner=request.name)
        self.free += slots
        self.map[gone] = 0

    def cache(self, request: Request) -> None:
        """Put what a running request has stored into the cache; it shares from there on."""
        node = request.nodes[-1] if request.nodes else self.trie
        new, copies, held = [], [], []
        for position in range(len(request.nodes), request.stored):
            slot, token = int(self.table[request.row, position]), request.tokens[position]
            if token in node.children:
                node = node.children[token]
                copies.append(slot)
                self.table[request.row, position] = node.slot
            else:
                node.children[token] = node = Node(token, slot, node)
                new.append(slot)
            held.append(node)
        if held:
            self._hold(request, held)
            request.nodes += held
            self.pool.hand_over(new, owner=CACHE)
            self.give(copies, request.name)

    def finish(self, request: Request) -> None:
        self.seen["requests"] += 1
        if self.strike("finished", request):
            return
        if self.caches:
            self.cache(request)
        self.running.remove(request)
        self._leave(request)

    # ---- what the cache lists

    def listed(self) -> list[tuple[int, int, int]]:
        """Slot, position and the slot before of each cached token."""
        nodes = [(n, n.parent) for n in self.trie.below()]
        return [(n.slot, n.depth, p.slot if p is not None else -1) for n, p in nodes]

    def prefixes(self) -> list[Prefix]:
        """The same for our sweep: a prefix a branch."""
        made: list[Prefix] = []

        def branch(node: Node, parent: Prefix | None) -> None:
            slots = [node.slot]
            while len(node.children) == 1:
                node = next(iter(node.children.values()))
                slots.append(node.slot)
            made.append(prefix := Prefix(slots, parent=parent, owner=CACHE))
            for child in node.children.values():
                branch(child, prefix)

        for child in self.trie.children.values():
            branch(child, None)
        return made
