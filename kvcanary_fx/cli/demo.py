"""Generate text with a guarded tiny model, then flip one bit and show the report.

A tiny Llama with random weights generates twice, unguarded and guarded: same tokens, no violation.  Then
one bit of one layer's K is flipped between two steps of generation.
"""

from __future__ import annotations

import argparse
import logging
import time
from typing import Any

import torch

from ..adapters.huggingface.caches import cache_name
from ..compile.backend import CanaryBackend
from ..config import CanaryConfig, given_in_environment
from ..errors import MissingExtraError
from ..proof import tiny
from ..reports.violation import KVCacheViolation
from .device import add_device
from .inner import add_inner

PROMPT, NEW = 6, 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_inner(parser, "graph")
    add_device(parser)
    parser.add_argument("--layers", type=_layers, default=4, help="layers of the model (default: 4)")


def _layers(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give 1 or more; a bit of one of them is flipped")
    return int(text)


def run(args: argparse.Namespace) -> int:
    try:
        import transformers  # noqa: F401
    except ImportError as e:
        raise MissingExtraError("transformers", "demo", "the demo") from e
    given = given_in_environment()
    if given:
        print(f"The demo compares everything and raises, whatever {', '.join(given)} says.")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    demo = _Demo(args.inner, args.device, args.layers)
    print(f"A Llama of {args.layers} layers with random weights, compiled with {args.inner} on {args.device}.")
    expected = demo.generate("unguarded", demo.plain)
    got = demo.generate("guarded  ", demo.guarded)
    same = torch.equal(expected, got)
    print(f"Same tokens: {same}\n\n{demo.backend.session.summary()}\n")
    layer = args.layers // 2
    print(f"Now one bit of layer {layer}'s K is flipped between two steps.\n")
    try:
        demo.generate("struck   ", demo.guarded, strike=layer)
    except KVCacheViolation as e:
        print(e)
        return 0 if same else 1
    print("The flipped bit was NOT found.")
    return 1


class _Demo:
    """One model, one cache, two backends."""

    def __init__(self, inner: str, device: str, layers: int):
        from transformers import StaticCache

        self.model = tiny.build("llama", layers, device=device)
        self.backend = CanaryBackend(CanaryConfig(mode="raise", inner=inner, budget=None))
        self.plain, self.guarded = self._compile_config(inner), self._compile_config(self.backend)
        self.ids = torch.randint(1, self.model.config.vocab_size, (1, PROMPT)).to(device)
        cache = StaticCache(config=self.model.config, max_cache_len=PROMPT + NEW)
        self.cache, self.given = cache, {cache_name(self.model): cache}

    @staticmethod
    def _compile_config(backend: Any) -> Any:
        from transformers import CompileConfig

        config = CompileConfig(backend=backend, mode=None)
        config._compile_all_devices = True  # transformers compiles on GPUs only, unless told
        return config

    def generate(self, what: str, config: Any, strike: int | None = None) -> torch.Tensor:
        """Generate greedily; with ``strike``, flip a bit of that layer's K half-way."""
        self.cache.reset()
        self.model.__dict__.pop("_compiled_call", None)  # transformers keeps its first backend
        steps = 0

        def between_steps(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            nonlocal steps
            steps += 1
            if steps == NEW // 2 and strike is not None:
                self.cache.layers[strike].keys.view(torch.int32)[0, 1, 3, 5] ^= 1 << 20
            return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

        started = time.perf_counter()
        out: torch.Tensor = self.model.generate(
            self.ids,
            **self.given,
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            compile_config=config,
            stopping_criteria=[between_steps],
        )
        print(f"{what} {out[0, PROMPT:].tolist()}  ({time.perf_counter() - started:.1f} s)")
        return out
