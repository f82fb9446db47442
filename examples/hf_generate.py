"""Guard a Hugging Face model's KV cache, show that nothing changes, then flip one bit at a time.

    python examples/hf_generate.py --arch llama --inner inductor

The model is tiny and random, so no download is needed.  Three things are shown: the guarded model
generates the same tokens with no violation, everything in its cache is guarded (K and V of every layer, states,
indexers, cross-attention), and a single flipped bit in any layer and half, planted between two decode steps, is found
in the very next step at the right place.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, StaticCache, StoppingCriteria, StoppingCriteriaList

import kvcanary_fx
from kvcanary_fx.adapters.huggingface.caches import cache_name
from kvcanary_fx.proof import tiny


@dataclass
class Flip:
    """One bit to flip: in which tensor of the cache, where, and after which decode step."""

    layer: int
    half: str  # as tiny.cache_tensors calls it: "K", "state", "cross V"
    row: int
    slot: int
    after_step: int
    out_of_band: bool  # bypass PyTorch's version counter, as a flipped bit in memory does

    @property
    def in_state(self) -> bool:
        """Whether it strikes a running state, where a slot is a sequence and not a token."""
        return self.half.startswith(("conv", "state"))

    def strike(self, cache: Any) -> None:
        tensor = next(t for layer, half, t in tiny.cache_tensors(cache) if (layer, half) == (self.layer, self.half))
        tensor = tensor.data if self.out_of_band else tensor
        words = tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)
        place = [size - 1 for size in words.shape]
        place[0] = self.row
        if not self.in_state:
            place[-2] = self.slot
        words[tuple(place)] ^= 1

    def told(self, position: int) -> tuple[Any, ...]:
        """``(half, row, index, position)`` as the report must have them."""
        if self.in_state:
            return self.half, None, self.row, None
        label = "K" if self.half == "indexer" else self.half.removeprefix("cross ")
        return label, self.row, self.slot, None if self.half.startswith("cross") else position


class BetweenSteps(StoppingCriteria):
    """Never stops; flips a bit once, between two steps of generate."""

    def __init__(self, flip: Flip, cache: Any):
        self.flip, self.cache, self.steps = flip, cache, 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.steps += 1
        if self.steps == self.flip.after_step:
            self.flip.strike(self.cache)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Demo:
    """One model, its cache, and its two compiled ways to generate."""

    def __init__(self, arch: str, inner: str, mode: str | None, device: str, batch: int, prompt: int, new: int):
        self.model = tiny.build(arch, device=device)
        self.backend = kvcanary_fx.CanaryBackend(kvcanary_fx.CanaryConfig(mode="raise", inner=inner, budget=None))
        self.guarded = self._compile_config(self.backend, mode)
        # "eager" runs what was traced as it is: the plain model need not be traced for that
        self.plain = self._compile_config(inner, mode if inner == "inductor" else None) if inner != "eager" else None
        self.ids = tiny.prompt(self.model, batch, prompt)
        self.prompt, self.new = prompt, new
        self.encoder = getattr(self.model.config, "max_source_positions", prompt)
        self.cache = tiny.static_cache(self.model, prompt + new, self.encoder)
        self.cache_name = cache_name(self.model)

    @staticmethod
    def _compile_config(backend: Any, mode: str | None) -> CompileConfig:
        config = CompileConfig(backend=backend, mode=mode)
        config._compile_all_devices = True  # without it, transformers compiles on GPUs only
        return config

    def generate(self, config: CompileConfig | None, criteria: StoppingCriteria | None = None) -> torch.Tensor:
        self.cache.reset()
        self.model.__dict__.pop("_compiled_call", None)  # transformers keeps the first backend it was given
        self.model.__dict__.pop("_last_compile_config", None)
        out: torch.Tensor = self.model.generate(
            self.ids,
            **{self.cache_name: self.cache},
            max_new_tokens=self.new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            compile_config=config,
            disable_compile=config is None,
            stopping_criteria=StoppingCriteriaList([criteria] if criteria else []),
        )
        return out

    def flips(self) -> list[Flip]:
        """One flip in everything that the cache holds, at a slot that holds a token by then."""
        flips = []
        for i, (layer, half, tensor) in enumerate(tiny.cache_tensors(self.cache)):
            slots = self.encoder if half.startswith("cross") else tensor.shape[-2]
            slot = max(0, min(slots - 2, self.prompt - 1 + layer))
            flips.append(Flip(layer, half, i % self.ids.shape[0], slot, self.new - 3 - i % 2, bool(i % 2)))
        return flips

    def position_of(self, flip: Flip) -> int:
        """The token position that the struck slot holds when the flip happens."""
        held = {(layer, half): t for layer, half, t in tiny.cache_tensors(self.cache)}
        prompt = 1 if self.model.config.is_encoder_decoder else self.prompt
        written = prompt + flip.after_step - 1
        return flip.slot + max(0, written - held[flip.layer, flip.half].shape[-2])

    def strike(self, flip: Flip) -> str:
        """Flip one bit and say what the canary said: ``"found"``, or what went wrong."""
        before = self.backend.session.stats().steps
        try:
            self.generate(self.guarded, BetweenSteps(flip, self.cache))
        except kvcanary_fx.KVCacheViolation as e:
            v = e.violations[0]
            steps = self.backend.session.stats().steps - before
            told = (e.total, v.check, (v.half, v.row, v.index, v.position), steps)
            true = (1, "content", flip.told(self.position_of(flip)), flip.after_step)
            if told == true and f".{flip.layer}." in v.layer:
                return "found"
            return f"WRONG PLACE {told} in {v.layer}, expected {true}"
        return "MISSED"


class CapturedDecode:
    """The same model without generate: an eager prefill, then decode steps replayed from one CUDA graph."""

    def __init__(self, arch: str, batch: int, prompt: int, new: int):
        self.model = tiny.build(arch, device="cuda")
        self.ids = torch.randint(1, self.model.config.vocab_size, (batch, prompt), device="cuda")
        self.prompt, self.new = prompt, new
        self.backend = kvcanary_fx.CanaryBackend(kvcanary_fx.CanaryConfig(mode="raise", budget=None))
        self.compiled = torch.compile(self.model.forward, backend=self.backend)
        self.cache = StaticCache(config=self.model.config, max_cache_len=prompt + new)
        self.cache_name = cache_name(self.model)
        self.token = torch.zeros(batch, 1, dtype=torch.int64, device="cuda")
        self.positions = torch.zeros(batch, 1, dtype=torch.int64, device="cuda")
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits = torch.zeros(0)

    @torch.no_grad()
    def prefill(self, cache: StaticCache) -> torch.Tensor:
        cache.reset()
        out: torch.Tensor = self.model(self.ids, **{self.cache_name: cache}).logits[:, -1:].argmax(-1)
        return out

    @torch.no_grad()
    def expected(self, steps: int) -> list[list[int]]:
        """Tokens of the plain model."""
        cache = StaticCache(config=self.model.config, max_cache_len=self.prompt + self.new)
        token, told = self.prefill(cache), []
        for n in range(steps):
            positions = torch.full_like(token, self.prompt + n)
            token = self.model(token, position_ids=positions, **{self.cache_name: cache}).logits[:, -1:].argmax(-1)
            told.append(token.flatten().tolist())
        return told

    def _forward(self) -> torch.Tensor:
        out: torch.Tensor = self.compiled(
            self.token, position_ids=self.positions, **{self.cache_name: self.cache}
        ).logits
        return out

    @torch.no_grad()
    def capture(self) -> None:
        """Warm up past any sliding window, so that the captured step is the one that repeats, and capture it."""
        self.token.copy_(self.prefill(self.cache))
        self.position = self.prompt
        for _ in range(max(3, WINDOW + 4 - self.prompt)):
            self.positions.fill_(self.position)
            self.token.copy_(self._forward()[:, -1:].argmax(-1))
            self.position += 1
        torch.cuda.synchronize()
        self.positions.fill_(self.position)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self._forward()

    def replay(self) -> list[int]:
        """One decode step from the graph, checked."""
        assert self.graph is not None
        self.positions.fill_(self.position)
        self.position += 1
        self.graph.replay()
        self.backend.session.check()  # no Python of ours runs in a replay
        self.token.copy_(self.logits[:, -1:].argmax(-1))
        return self.token.flatten().tolist()


#: The sliding window of the tiny models that have one.
WINDOW = 8


def run_captured(arch: str, batch: int, prompt: int, new: int) -> bool:
    """Show the guarded model under manual capture: same tokens, flips found on replay."""
    demo = CapturedDecode(arch, batch, prompt, new + 16)
    demo.capture()
    warm = demo.position - prompt
    expected = demo.expected(warm + 4)[warm:]
    got = [demo.replay() for _ in range(4)]
    session, ok = demo.backend.session, True
    print(f"{arch} manual capture: tokens equal {expected == got}, violations {session.stats().violations}")
    for layer in range(len(demo.cache.layers)):
        for i, half in enumerate("KV"):
            slot = (3 * layer + i) % min(WINDOW, prompt)
            flip = Flip(layer, half, (layer + i) % batch, slot, 0, out_of_band=True)
            flip.strike(demo.cache)
            try:
                demo.replay()
                verdict = "MISSED"
            except kvcanary_fx.KVCacheViolation as e:
                told = [(v.check, v.half, v.row, v.index) for v in e.violations]
                found = told == [("content", half, flip.row, slot)] and f".{layer}." in e.violations[0].layer
                verdict = "found" if found else f"WRONG PLACE {told}"
            ok &= verdict == "found"
            print(f"  bit flipped in layer {layer} {half} slot {slot} between replays: {verdict}", flush=True)
    return ok and expected == got and session.stats().violations == 2 * len(demo.cache.layers)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="llama", choices=sorted({**tiny.ARCHITECTURES, **tiny.OTHERS}))
    parser.add_argument("--inner", default="inductor", help="backend that compiles the guarded graph")
    parser.add_argument("--mode", default=None, help="torch.compile mode, e.g. reduce-overhead")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=5, help="prompt length in tokens")
    parser.add_argument("--new", type=int, default=14, help="tokens to generate")
    parser.add_argument("--capture", action="store_true", help="decode from a CUDA graph captured by hand (GPU)")
    args = parser.parse_args(argv)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if args.capture:
        ok = run_captured(args.arch, args.batch, args.prompt, args.new)
        print("ok" if ok else "FAILED")
        return 0 if ok else 1

    demo = Demo(args.arch, args.inner, args.mode, args.device, args.batch, args.prompt, args.new)
    started = time.perf_counter()
    expected = demo.generate(demo.plain)
    skips = counters["inductor"]["cudagraph_skips"]
    got = demo.generate(demo.guarded)
    skips = counters["inductor"]["cudagraph_skips"] - skips
    stats = demo.backend.session.stats()
    plans = demo.backend.session.plans
    guarded, held = min(len(plan.sites) for plan in plans), len(tiny.cache_tensors(demo.cache))
    print(
        f"{args.arch} {args.inner}: tokens equal {torch.equal(expected, got)}, violations {stats.violations}, "
        f"guarded {guarded} of {held} halves in each of {len(plans)} graphs, "
        f"{stats.checked} fingerprints checked, {skips} cudagraph skips, {time.perf_counter() - started:.1f} s"
    )
    ok = torch.equal(expected, got) and stats.violations == 0 and guarded == held and skips == 0
    for flip in demo.flips():
        verdict = demo.strike(flip)
        ok &= verdict == "found"
        how = "out of band" if flip.out_of_band else "by an op"
        print(
            f"  bit flipped {how:11s} in layer {flip.layer} {flip.half} "
            f"{f'row {flip.row}' if flip.in_state else f'slot {flip.slot}'}: {verdict}",
            flush=True,
        )
    print("ok" if ok else "FAILED")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
