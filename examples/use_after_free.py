"""The engine of docs/tutorial.md: it frees the pages of an aborted request that the next step still runs.

python examples/use_after_free.py                    # without the canary: wrong tokens, and no word
python examples/use_after_free.py --mode raise       # the step that would read a freed page ends with a report
python examples/use_after_free.py --mode raise --incidents /tmp/incidents
python examples/use_after_free.py --mode raise --mended
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

import kvcanary_fx
from kvcanary_fx import Batch, KVPool

PAGE, PAGES, LENGTH, ROWS = 4, 8, 16, 4
VOCAB, LAYERS, HEADS, DIM = 64, 2, 2, 8


class Model(nn.Module):
    """Attention over a paged pool, twice: each layer's K and V are ``[slots, HEADS, DIM]``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCAB, HEADS * DIM)
        self.qkv = nn.ModuleList(nn.Linear(HEADS * DIM, 3 * HEADS * DIM) for _ in range(LAYERS))
        self.kv = [tuple(torch.zeros(PAGE * PAGES, HEADS, DIM) for _ in "kv") for _ in range(LAYERS)]

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, row: torch.Tensor):
        """The next token; ``slots`` receive the new tokens, ``row`` lists all slots of the request."""
        x = self.embed(tokens)
        mask = torch.arange(LENGTH) <= positions[:, None]
        for qkv, (keys, values) in zip(self.qkv, self.kv, strict=True):
            q, k, v = qkv(x).unflatten(-1, (3, HEADS, DIM)).unbind(1)
            keys[slots] = k
            values[slots] = v
            q, k, v = (t.transpose(0, 1) for t in (q, keys[row], values[row]))
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1).flatten(1)
        return (x[-1] @ self.embed.weight.T).argmax()


class Engine:
    """Pages, a request table, and one forward for each request in each step."""

    def __init__(self, mode: str = "off", incidents: str | None = None, mended: bool = False) -> None:
        self.mended = mended
        self.tokens: dict[str, list[int]] = {}
        self.pages: dict[str, list[int]] = {}
        self.rows: dict[str, int] = {}
        self.free = list(range(1, PAGES))  # page 0 is for padding
        self.table = torch.zeros(ROWS, LENGTH, dtype=torch.int32)
        model = Model()
        pool = KVPool(model.kv, self.table)  # canary
        self.canary = kvcanary_fx.install_canary(pool, mode=mode, inner="eager", incidents=incidents)  # canary
        self.model = model if self.canary is None else torch.compile(model, backend=self.canary.backend)  # canary
        if self.canary is not None:
            self.canary.mark_ready()  # canary

    def submit(self, name: str, prompt: list[int]) -> None:
        self.tokens[name], self.pages[name], self.rows[name] = prompt, [], len(self.rows)
        self.forward(name, start=0)

    def abort(self, name: str) -> None:
        """The client has gone.  The mistake: the pages are free, and the next step still runs the request."""
        self.free = self.pages[name] + self.free
        if self.canary is not None:
            self.canary.pool.release(self.pages[name], owner=name, page_size=PAGE)  # canary
        if self.mended:
            del self.tokens[name]

    def step(self) -> None:
        for name in list(self.tokens):
            self.forward(name, start=len(self.tokens[name]) - 1)

    def forward(self, name: str, start: int) -> None:
        """Store the request's tokens from ``start`` on, and add the next one."""
        new, row, end = self.tokens[name][start:], self.rows[name], len(self.tokens[name])
        self.reserve(name, end)
        slots = self.table[row, start:end].long()
        batch = Batch(new, slots, [row], [start], [len(new)], request_ids=[name])
        with kvcanary_fx.step(self.canary, batch), kvcanary_fx.forward(self.canary), torch.no_grad():  # canary
            token = self.model(torch.tensor(new), torch.arange(start, end), slots, self.table[row].long())
        self.tokens[name] = [*self.tokens[name], int(token)]

    def reserve(self, name: str, length: int) -> None:
        """Give the request pages for ``length`` tokens."""
        for first in range(len(self.pages[name]) * PAGE, length, PAGE):
            page = self.free.pop(0)
            self.pages[name].append(page)
            self.table[self.rows[name], first : first + PAGE] = torch.arange(page * PAGE, (page + 1) * PAGE)
            if self.canary is not None:
                self.canary.pool.allocate([page], owner=name, page_size=PAGE)  # canary


def serve(engine: Engine) -> None:
    engine.submit("alice", [5, 6, 7, 8, 9])
    engine.step()
    engine.abort("alice")
    engine.submit("bob", [20, 21, 22, 23, 24, 25, 26])
    for _ in range(3):
        engine.step()
    print(f"bob: {engine.tokens['bob'][7:]}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("off", "log", "raise"), default="off")
    parser.add_argument(
        "--incidents", default=os.environ.get("KVCANARY_INCIDENTS"), help="a directory for the file of an incident"
    )
    parser.add_argument("--mended", action="store_true", help="an aborted request leaves the next step, too")
    args = parser.parse_args(argv)
    try:
        serve(Engine(args.mode, args.incidents, args.mended))
    except kvcanary_fx.KVCacheViolation as violation:
        print(violation)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
