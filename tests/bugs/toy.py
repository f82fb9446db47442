"""A serving engine small enough to plant any bug in: one paged pool of two layers, a request table, a plan.

The faulty act of a bug is done to the toy by hand; nothing in the canary knows that it is a toy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

import kvcanary_fx
from kvcanary_fx import Batch, KVPool

HEADS, DIM, LAYERS = 1, 4, 2


def attend(pools: list[tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor, slots: torch.Tensor, reads: torch.Tensor):
    """Two layers that write the step's K and V and sum what they read."""
    for k_pool, v_pool in pools:
        k = x.unsqueeze(1)
        k_pool[slots] = k
        v_pool[slots] = 2 * k
        x = x + k_pool[reads].mean() + v_pool[reads].mean()
    return x


def embed(token: int, position: int) -> torch.Tensor:
    """What a token's K is made of."""
    generator = torch.Generator("cpu").manual_seed(1000 * token + position)
    return torch.randn(DIM, generator=generator, device="cpu")


@dataclasses.dataclass
class Request:
    """A request of the toy."""

    name: str
    row: int
    tokens: list[int]  # its own history
    stored: int = 0  # tokens whose KV is in the pool


class Toy:
    """The engine.  Slot 0 and row 0 are reserved.  It is on the device that ``torch.device(...)`` sets."""

    def __init__(
        self,
        slots: int = 24,
        rows: int = 5,
        width: int = 12,
        model: Any = attend,
        pools: Sequence[KVPool] | None = None,
        dtype: torch.dtype = torch.float32,
        history: bool = True,
        device: str | None = None,
        inner: str = "eager",
        **settings: Any,
    ):
        self.kv = [
            tuple(torch.zeros(slots, HEADS, DIM, dtype=dtype, device=device) for _ in range(2)) for _ in range(LAYERS)
        ]
        self.table = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self.requests: dict[str, Request] = {}
        self.free_rows = list(range(1, rows))
        self.history = history
        declared = pools(self) if callable(pools) else (KVPool(self.kv, self.table),)
        session = kvcanary_fx.install_canary(*declared, inner=inner, mode="log", **settings)
        assert session is not None
        session.mark_ready()
        self.session = session
        self.pool = next(iter(session.pools.values()))
        self.model = torch.compile(model, backend=session.backend, dynamic=False)

    # ---- what an engine does

    def add(self, name: str, tokens: Sequence[int], prefix: Sequence[int] = ()) -> Request:
        """A request arrives; ``prefix`` are slots that a prefix cache found for it."""
        request = self.requests[name] = Request(name, self.free_rows.pop(0), list(tokens), len(prefix))
        self.table[request.row, : len(prefix)] = torch.tensor(list(prefix), dtype=torch.int32)
        return request

    def take(self, name: str, slots: Sequence[int]) -> None:
        """The allocator hands slots to a request; they go to the end of its row."""
        request = self.requests[name]
        if self.pool.declared.allocations:
            self.pool.allocate(slots, owner=name)
        end = request.stored
        self.table[request.row, end : end + len(slots)] = torch.tensor(list(slots), dtype=torch.int32)

    def plan(self, work: dict[str, Sequence[int]], **changes: Any) -> Batch:
        """A forward that writes the next tokens of each request to the slots given."""
        requests = [self.requests[n] for n in work]
        tokens, positions = [], []
        for request, slots in zip(requests, work.values(), strict=True):
            places = range(request.stored, request.stored + len(slots))
            tokens += [request.tokens[p + self.pool.declared.token_offset] for p in places]
            positions += list(places)
        length = max((len(r.tokens) for r in requests), default=0)
        history = [r.tokens + [0] * (length - len(r.tokens)) for r in requests]
        batch = Batch(
            input_ids=tokens,
            slots=[s for slots in work.values() for s in slots],
            positions=positions,
            request_rows=[r.row for r in requests],
            prefix_lens=[r.stored for r in requests],
            extend_lens=[len(s) for s in work.values()],
            request_ids=[r.name for r in requests],
            history=torch.tensor(history) if self.history else None,
            history_lens=[len(r.tokens) for r in requests] if self.history else None,
        )
        return dataclasses.replace(batch, **changes)

    def forward(self, batch: Batch, slots: Sequence[int] | None = None, reads: Sequence[int] | None = None) -> None:
        """Run the model over a plan; ``slots`` and ``reads`` are what the kernels really get."""
        x = torch.stack([embed(t, p) for t, p in zip(batch.input_ids, batch.positions, strict=True)])
        device = self.table.device
        where = torch.tensor(list(batch.slots if slots is None else slots), device=device)
        with self.session.step(batch), self.session.forward(), torch.no_grad():
            self.model(self.kv, x.to(self.kv[0][0]), where, torch.tensor(list(reads or [0]), device=device))

    def run(self, work: dict[str, Sequence[int]], **changes: Any) -> None:
        """Allocate, plan and run: the legal way for tokens into the pool."""
        for name, slots in work.items():
            self.take(name, slots)
        self.forward(self.plan(work, **changes))
        for name, slots in work.items():
            self.requests[name].stored += len(slots)

    def done(self, name: str, shared: Sequence[int] = ()) -> None:
        """A request ends and gives back its slots and its row."""
        request = self.requests.pop(name)
        own = [s for s in self.table[request.row, : request.stored].tolist() if s not in shared]
        self.pool.release(own, owner=name)
        self.free_rows.insert(0, request.row)

    # ---- what it is asked afterwards

    def found(self) -> list[kvcanary_fx.Violation]:
        """The violations so far."""
        return self.session.violations()


def prefilled(**settings: Any) -> Toy:
    """A toy in which request A has three tokens stored, in slots 3, 4 and 5."""
    toy = Toy(**settings)
    toy.add("A", [5, 6, 7, 8, 9, 10, 11])
    toy.run({"A": [3, 4, 5]})
    return toy
