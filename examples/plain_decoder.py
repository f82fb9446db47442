"""Guard hand-written models through the decorator: a cache of [B, H, S, D], and a paged pool of [slots, H, D].

    python examples/plain_decoder.py --inner inductor

Both models are a few dozen lines of plain PyTorch.  Each is run unguarded and guarded, must give the same
tokens without a violation, and then a bit is flipped in every layer and half between two steps: each flip
has to be found in the next step, at the right place.
"""

from __future__ import annotations

import abc
import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import kvcanary_fx

VOCAB, DIM, HEADS, HEAD_DIM, LAYERS, LENGTH, BATCH = 64, 32, 4, 8, 3, 32, 2
PAGE, PAGES = 4, 20


class StaticCache(nn.Module):
    """One layer's K and V, preallocated: the cache of gpt-fast."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.zeros(BATCH, HEADS, LENGTH, HEAD_DIM))

    def update(self, input_pos: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.k_cache[:, :, input_pos] = k
        self.v_cache[:, :, input_pos] = v
        return self.k_cache, self.v_cache


class Block(nn.Module):
    """Attention and a small MLP; subclasses know where K and V go."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * HEADS * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def project(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """q, k and v, each ``[..., HEADS, HEAD_DIM]``."""
        qkv = self.qkv(F.layer_norm(x, (DIM,)))
        return iter(qkv.unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(-3))

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = x + self.out(attended.flatten(-2))
        return x + self.mlp(F.layer_norm(x, (DIM,)))


class StaticBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.kv_cache = StaticCache()

    def forward(self, x: torch.Tensor, input_pos: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.project(x))
        keys, values = self.kv_cache.update(input_pos, k, v)
        attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return self.finish(x, attended.transpose(1, 2))


class Decoder(nn.Module):
    """A decoder with a preallocated cache, ``[B, H, S, D]`` a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.layers = nn.ModuleList([StaticBlock() for _ in range(LAYERS)])
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, input_ids: torch.Tensor, input_pos: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids) + self.places(input_pos)
        mask = torch.arange(LENGTH, device=x.device) <= input_pos.unsqueeze(1)
        for layer in self.layers:
            x = layer(x, input_pos, mask)
        return self.head(x[:, -1])


def example() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """For ``python -m kvcanary_fx explain examples/plain_decoder.py:example``."""
    return Decoder().eval(), (torch.zeros(BATCH, 3, dtype=torch.int64), torch.arange(3))


class PagedBlock(Block):
    def forward(
        self, x: torch.Tensor, pool: torch.Tensor, slot_mapping: torch.Tensor, read: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        q, k, v = self.project(x)
        pool[0][slot_mapping] = k
        pool[1][slot_mapping] = v
        keys, values = pool[0][read], pool[1][read]  # [tokens, context, HEADS, HEAD_DIM]
        attended = F.scaled_dot_product_attention(
            q.unsqueeze(2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask[:, None, None]
        )
        return self.finish(x, attended.squeeze(2))


class PagedDecoder(nn.Module):
    """A decoder of an engine: requests packed into one row of tokens, K and V in a paged pool a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.layers = nn.ModuleList([PagedBlock() for _ in range(LAYERS)])
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        tables: torch.Tensor,
        pools: list[torch.Tensor],
    ) -> torch.Tensor:
        x = self.tokens(input_ids) + self.places(positions)
        mask = torch.arange(tables.shape[1], device=x.device) <= positions.unsqueeze(1)
        for layer, pool in zip(self.layers, pools, strict=True):
            x = layer(x, pool, slot_mapping, tables, mask)
        return self.head(x)


@dataclass
class Place:
    """Where a bit is flipped, and what the report must say."""

    tensor: torch.Tensor
    index: tuple[int, ...]
    layer: str
    half: str
    slot: int
    position: int


class Run(abc.ABC):
    """Drives a model: a prompt, then one token a step, in a CUDA graph if asked to."""

    name = ""

    def __init__(self, model: nn.Module, settings: dict[str, Any] | None, device: str, capture: bool):
        self.model, self.device, self.capture = model.to(device).eval(), device, capture
        if settings is not None:
            kvcanary_fx.protect(self.model, **settings)
        self.guarded = settings is not None
        self.length = 0
        self.ids = torch.zeros(0)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.static: list[torch.Tensor] = []
        self.logits = torch.zeros(0)

    @abc.abstractmethod
    def inputs(self) -> list[torch.Tensor]:
        """The tensors of this step; what does not change from step to step is in :meth:`call`."""

    def call(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        return self.model(*inputs)

    @abc.abstractmethod
    def next_ids(self, logits: torch.Tensor) -> torch.Tensor: ...

    @torch.no_grad()
    def step(self) -> list[int]:
        """One forward; the tokens chosen."""
        inputs = self.inputs()
        if self.capture and self.guarded and inputs[0].shape[-1] == self.ids_per_step():
            logits = self._replay(inputs)
        else:
            torch.compiler.cudagraph_mark_step_begin()
            logits = self.call(inputs)
        self.ids = self.next_ids(logits)
        return self.ids.flatten().tolist()

    @abc.abstractmethod
    def ids_per_step(self) -> int: ...

    def _replay(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        """Run the step from a CUDA graph, captured at the first call after a warm-up."""
        if self.graph is None:
            self.static = [t.clone() for t in inputs]
            for _ in range(2):  # writes the same slots again, which is legal
                self.call(self.static)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.logits = self.call(self.static)
        for static, fresh in zip(self.static, inputs, strict=True):
            static.copy_(fresh)
        self.graph.replay()
        kvcanary_fx.session_of(self.model).check()  # no Python of ours runs in a replay
        return self.logits

    @abc.abstractmethod
    def restart(self) -> None:
        """Forget the sequence; the caches keep their memory."""

    @abc.abstractmethod
    def places(self) -> list[Place]:
        """One bit to flip in each layer and half."""


class StaticRun(Run):
    """Drives :class:`Decoder`."""

    name = "[B, H, S, D] cache"

    def __init__(self, settings: dict[str, Any] | None, device: str, capture: bool):
        super().__init__(Decoder(), settings, device, capture)
        self.blocks: Any = self.model.layers
        for block in self.blocks:  # so that CUDA graphs take the caches as they are
            torch._dynamo.mark_static_address(block.kv_cache.k_cache)
            torch._dynamo.mark_static_address(block.kv_cache.v_cache)
        self.restart()

    def restart(self) -> None:
        for buffer in self.model.buffers():
            buffer.zero_()
        self.length = 0
        self.ids = torch.arange(10, device=self.device).view(BATCH, 5) % VOCAB

    def inputs(self) -> list[torch.Tensor]:
        new = self.ids.shape[1]
        self.length += new
        return [self.ids, torch.arange(self.length - new, self.length, device=self.device)]

    def ids_per_step(self) -> int:
        return 1

    def next_ids(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1, keepdim=True)

    def places(self) -> list[Place]:
        made = []
        for i, block in enumerate(self.blocks):
            for half in "KV":
                tensor = getattr(block.kv_cache, f"{half.lower()}_cache")
                row, position = (i + (half == "V")) % BATCH, 2 + i
                slot = row * LENGTH + position
                made.append(Place(tensor, (row, 1, position, 3), f"layers.{i}", half, slot, position))
        return made


class PagedRun(Run):
    """Drives :class:`PagedDecoder`: two requests, pages handed out in an odd order."""

    name = "paged [slots, H, D] pool"

    def __init__(self, settings: dict[str, Any] | None, device: str, capture: bool):
        super().__init__(PagedDecoder(), settings, device, capture)
        self.pools = [torch.zeros(2, PAGES * PAGE, HEADS, HEAD_DIM, device=device) for _ in range(LAYERS)]
        for pool in self.pools:
            torch._dynamo.mark_static_address(pool)
        pages = torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(1)) + 1
        slots = (pages[: BATCH * 8].view(BATCH, 8, 1) * PAGE + torch.arange(PAGE)).flatten(1)
        self.tables = slots.to(device)  # [request, position] -> slot
        self.restart()

    def restart(self) -> None:
        self.length = 0
        self.ids = torch.arange(10, device=self.device) % VOCAB

    def inputs(self) -> list[torch.Tensor]:
        new = self.ids.shape[0] // BATCH
        positions = torch.arange(self.length, self.length + new, device=self.device).repeat(BATCH)
        slots = self.tables[:, self.length : self.length + new].flatten()
        self.length += new
        return [self.ids, positions, slots, self.tables.repeat_interleave(new, 0)]

    def call(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        return self.model(*inputs, self.pools)

    def ids_per_step(self) -> int:
        return BATCH

    def next_ids(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.view(BATCH, -1, VOCAB)[:, -1].argmax(-1)

    def places(self) -> list[Place]:
        made = []
        for i, pool in enumerate(self.pools):
            for h, half in enumerate("KV"):
                request, position = (i + h) % BATCH, 1 + i
                slot = int(self.tables[request, position])
                made.append(Place(pool, (h, slot, 2, 5), f"layers.{i}", half, slot, position))
        return made


def strike(run: Run, place: Place) -> str:
    """Run a few steps, flip a bit, run one more; ``"found"``, or what went wrong."""
    run.restart()
    for _ in range(4):
        run.step()
    place.tensor.view(torch.int32)[place.index] ^= 1 << 13
    try:
        run.step()
    except kvcanary_fx.KVCacheViolation as e:
        v = e.violations[0]
        told = (e.total, v.check, v.layer, v.half, v.slot, v.position)
        true = (1, "content", place.layer, place.half, place.slot, place.position)
        return "found" if told == true else f"WRONG PLACE {told}, expected {true}"
    return "MISSED"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inner", default="inductor", help="backend that compiles the guarded graph")
    parser.add_argument("--mode", default=None, help="torch.compile mode, e.g. reduce-overhead")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--capture", action="store_true", help="decode from a CUDA graph captured by hand")
    args = parser.parse_args(argv)
    settings: dict[str, Any] = {"mode": "raise", "inner": args.inner, "dynamic": False, "budget": None}
    if args.mode:
        settings["compile_mode"] = args.mode

    ok = True
    for kind in (StaticRun, PagedRun):
        skips = counters["inductor"]["cudagraph_skips"]
        plain, guarded = kind(None, args.device, False), kind(settings, args.device, args.capture)
        expected, got = ([run.step() for _ in range(8)] for run in (plain, guarded))
        session = kvcanary_fx.session_of(guarded.model)
        stats, sites = session.stats(), min(len(p.sites) for p in session.plans)
        skips = counters["inductor"]["cudagraph_skips"] - skips
        print(
            f"{kind.name}: tokens equal {expected == got}, violations {stats.violations}, guarded {sites} of "
            f"{2 * LAYERS} halves, {stats.checked} fingerprints checked, {skips} cudagraph skips"
        )
        ok &= expected == got and stats.violations == 0 and sites == 2 * LAYERS and skips == 0
        for place in guarded.places():
            verdict = strike(guarded, place)
            ok &= verdict == "found"
            print(f"  bit flipped in {place.layer} {place.half} slot {place.slot}: {verdict}", flush=True)
    print("ok" if ok else "FAILED")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
