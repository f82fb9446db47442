"""The decode of `decode_models.py` over plain preallocated tensors, as PyTorch users write it, and `protect` alone.

The graph shows each write of K and V and the attention over the cache, so the canary finds both by itself: no session
is installed, and no request is known.  Each configuration has a cache of its own over the same weights: a write of the
others would look like somebody else's to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from decode_models import Layer, Model, normed
from forward_scene import Case, Counts
from torch import nn

import kvcanary_fx

#: Without the canary, and each forward is waited for, as mode ``raise`` does: what the device then waits for the host
#: is none of the canary's.
WAITED: dict[str, Any] = {"waited": True}

#: The settings of each configuration; None: compiled by Inductor alone.
CONFIGURATIONS: dict[str, dict[str, Any] | None] = {
    "off": None,
    "off, waited for": WAITED,
    "log, default": {"mode": "log"},
    "raise, default": {"mode": "raise"},
    "log, content": {"mode": "log", "verify_fraction": "1"},
    "log, content 1/64": {"mode": "log", "verify_fraction": "1/64"},
}


#: Calls, at most, after which a budget has chosen the share of the bytes that is compared, and between looks for it.
UNTIL_SETTLED, LOOKS = 1500, 20


class PlainLayer(nn.Module):
    """A layer with the weights of another, and K and V in buffers ``[requests, heads, length, dim]``."""

    def __init__(self, layer: Layer, requests: int, length: int):
        super().__init__()
        attention = layer.attention
        self.qkv, self.out, self.up, self.down = attention.qkv, attention.out, layer.up, layer.down
        self.sizes, self.heads, (kv_heads, self.dim) = attention.sizes, attention.heads, attention.row
        for name in ("keys", "values"):
            stored = torch.empty(requests, kv_heads, length, self.dim, dtype=self.qkv.dtype, device=self.qkv.device)
            self.register_buffer(name, stored.normal_())

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        x = x + self.attended(normed(x), position).flatten(1) @ self.out
        gate, up = (normed(x) @ self.up).chunk(2, -1)
        return x + (F.silu(gate) * up) @ self.down

    def attended(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.view(t.shape[0], -1, 1, self.dim) for t in (x @ self.qkv).split(self.sizes, -1))
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        # the step's token is the last of the cache: nothing is to be masked
        return F.scaled_dot_product_attention(q, self.keys, self.values, enable_gqa=True)


class PlainModel(nn.Module):
    """Token ids (int64 ``[requests, 1]``) and their position (int64 ``[1]``) to logits ``[requests, vocab]``."""

    def __init__(self, model: Model, case: Case):
        super().__init__()
        self.embedding, self.head = model.embedding, model.head
        self.layers = nn.ModuleList(PlainLayer(layer, case.requests, case.length) for layer in model.layers)

    def forward(self, ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        x = F.embedding(ids[:, 0], self.embedding)
        for layer in self.layers:
            x = layer(x, position)
        return normed(x) @ self.head


class PlainRunner:
    """One configuration: a forward writes the last token of every request, over and over, and reads all before it.

    Attributes:
        session: None without the canary.
        seconds: what it took to compile and to warm up.
        runs: the one way to run a forward: call the model.
        problems: what went wrong and no count says.
    """

    def __init__(self, case: Case, model: Model, settings: dict[str, Any] | None, device: torch.device):
        started = time.perf_counter()
        self.case, self.settings, self.problems = case, settings, []
        eager, self._waits = device.type == "cpu", settings is WAITED and device.type != "cpu"
        if settings is WAITED:
            settings = None
        self._model = PlainModel(model, case)
        self._ids = torch.randint(case.shape.vocab, (case.requests, 1), device=device)
        self._position = torch.tensor([case.prefix], device=device)
        how: dict[str, Any] = dict(dynamic=False, fullgraph=True)
        if settings is None:
            how |= dict(backend="eager") if eager else dict(mode="reduce-overhead")
            self._model.compile(**how)
        else:
            how |= dict(inner="eager") if eager else dict(compile_mode="reduce-overhead")
            kvcanary_fx.protect(self._model, **settings, **how)
        self.session = None if settings is None else kvcanary_fx.session_of(self._model)
        for _ in range(4):  # compiles, takes in what is stored, captures Inductor's graph
            self._call()
        self._settle()
        if not eager:
            torch.cuda.synchronize()
        self.runs: list[Callable[[], Any]] = [self._call]
        self._before = self._read()
        self.seconds = time.perf_counter() - started

    def _settle(self) -> None:
        """Call until a budget, if there is one, has chosen: until then it looks for its share with a few dear calls."""
        pace = None if self.session is None else self.session.pace
        if pace is None:
            return
        for number in range(UNTIL_SETTLED):
            if number % LOOKS == 0:
                if pace.controller.settled:
                    return
                if self._ids.is_cuda:
                    torch.cuda.synchronize()
            self._call()
        self.problems.append(f"the budget had chosen no share after {UNTIL_SETTLED} calls")

    def _call(self) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            self._model(self._ids, self._position)
        if self._waits:
            torch.cuda.synchronize()

    def next_turn(self) -> None:
        """Each forward's own count gives ``verify_fraction`` its turn."""

    def _read(self) -> Any:
        return None if self.session is None else self.session.stats()

    def counts(self) -> Counts | None:
        """What the forwards since the warm-up checked, each; violations since the beginning."""
        if self.session is None:
            return None
        after, before = self._read(), self._before
        forwards = max(1, after.steps - before.steps)
        checked, recorded = ((getattr(after, n) - getattr(before, n)) / forwards for n in ("checked", "recorded"))
        return Counts(None, checked, recorded, after.violations + len(self.session.uncovered))
