"""One Hugging Face model with a cache of its own, generating with and without guard: what the family tests share.

``python tests/models/families.py`` prints the table of docs/huggingface.md.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvcanary_fx import CanaryBackend, CanaryConfig
from kvcanary_fx.adapters.huggingface.caches import cache_name
from kvcanary_fx.proof import tiny

transformers = pytest.importorskip("transformers")

BATCH, PROMPT, NEW = 2, 5, 14  # past the sliding window of 8


@dataclasses.dataclass(frozen=True)
class Flip:
    """One bit of a cache: element ``at`` of ``half`` in ``layer``, after decode step ``step``."""

    layer: int
    half: str
    at: tuple[int, ...]
    step: int


class _Strike(transformers.StoppingCriteria):
    """Never stops; flips a bit once, unseen by PyTorch, between two steps of generate."""

    def __init__(self, flip: Flip, cache: Any):
        self.flip, self.cache, self.steps = flip, cache, 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.steps += 1
        if self.steps == self.flip.step:
            held = {(layer, half): t for layer, half, t in tiny.cache_tensors(self.cache)}
            held[self.flip.layer, self.flip.half].data.view(torch.int32)[self.flip.at] ^= 1 << 5
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Family:
    """A tiny model, a static cache that outlives a prompt, and a canary backend."""

    def __init__(self, arch: str, inner: str = "eager", device: str = "cpu", **settings: Any):
        self.arch = arch
        try:
            self.model = tiny.build(arch).to(device)
            self.prompts = [tiny.prompt(self.model, BATCH, PROMPT) for _ in range(2)]
            self.cache = self.new_cache()
        except (AttributeError, KeyError) as e:  # transformers 5.17 lacks some models, and static hybrid layers
            pytest.skip(f"transformers {transformers.__version__} has no static cache for {arch}: {e!r}")
        self.backend = CanaryBackend(CanaryConfig(inner=inner, **settings))
        self.session = self.backend.session
        self.compiled = self._compile_config(self.backend)
        self.cache_name = cache_name(self.model)

    @staticmethod
    def _compile_config(backend: Any) -> Any:
        config = transformers.CompileConfig(backend=backend, mode=None)
        config._compile_all_devices = True  # transformers compiles on GPUs only, unless told
        return config

    def new_cache(self) -> Any:
        encoder = PROMPT if self.model.main_input_name != "input_features" else self.model.config.max_source_positions
        return tiny.static_cache(self.model, PROMPT + NEW, encoder)

    def plain(self, prompt: torch.Tensor) -> torch.Tensor:
        """Tokens of the unprotected model, with a cache of its own."""
        return self._generate(prompt, self.new_cache(), disable_compile=True)

    def guarded(self, prompt: torch.Tensor, flip: Flip | None = None, **options: Any) -> torch.Tensor:
        """Tokens of the guarded model, with the one cache, which is reset before."""
        self.cache.reset()
        stop = transformers.StoppingCriteriaList([_Strike(flip, self.cache)] if flip else [])
        return self._generate(prompt, self.cache, compile_config=self.compiled, stopping_criteria=stop, **options)

    def _generate(self, prompt: torch.Tensor, cache: Any, **options: Any) -> torch.Tensor:
        given = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
        out = self.model.generate(prompt, **{self.cache_name: cache}, generation_config=self._generation(), **given)
        return out if isinstance(out, torch.Tensor) else out["sequences"]

    def _generation(self) -> Any:
        return copy.deepcopy(self.model.generation_config)

    def held(self) -> list[tuple[int, str, torch.Tensor]]:
        """``(layer, half, tensor)`` of everything in the cache."""
        return tiny.cache_tensors(self.cache)

    def half_of(self, tensor: torch.Tensor) -> Any:
        """The guarded half that is all of a cache tensor; None if there is none."""
        storage = self.session.registry.known(tensor)
        halves = list(storage.halves.values()) if storage is not None else []
        whole = [h for h in halves if h.place.layout.shape == tuple(tensor.shape)]
        return whole[0] if len(halves) == len(whole) == 1 else None

    def flips(self) -> list[Flip]:
        """One flip in everything that the cache holds, at the last element of a slot that has been written."""
        flips = []
        for number, (layer, half, tensor) in enumerate(self.held()):
            last = [size - 1 for size in tensor.shape]
            last[0] = number % BATCH
            slot_axes = self.half_of(tensor).place.layout.slot_axes
            if len(slot_axes) == 2:
                last[slot_axes[1]] = 1 + number % (PROMPT - 1)
            flips.append(Flip(layer, half, tuple(last), NEW - 3 - number % 2))
        return flips

    def expected_at(self, flip: Flip) -> tuple[str, int | None, int]:
        """``(half, row, index)`` as a report of ``flip`` must have them."""
        tensor = next(t for layer, half, t in self.held() if (layer, half) == (flip.layer, flip.half))
        axes = self.half_of(tensor).place.layout.slot_axes
        label = {"indexer": "K"}.get(flip.half, flip.half.removeprefix("cross "))
        return (label, flip.at[0], flip.at[axes[1]]) if len(axes) == 2 else (label, None, flip.at[0])

    def row(self) -> str:
        """This family's line of the table in docs/huggingface.md, from what the session guarded."""
        writes: dict[str, dict[str, None]] = {}
        for _, half, tensor in self.held():
            info = self.half_of(tensor).info
            sites = [
                s for plan in self.session.plans for s in plan.sites if (s.layer, s.label) == (info.layer, info.half)
            ]
            ways = {", ".join(f"`{w}`" for w in s.writes) or "only read" for s in sites}
            writes.setdefault(half, {}).update(dict.fromkeys(sorted(ways)))
        by_way: dict[str, list[str]] = {}
        for half, ways in writes.items():
            by_way.setdefault(" or ".join(ways), []).append(half)
        cells = "; ".join(f"{', '.join(halves)}: {way}" for way, halves in by_way.items())
        return f"| `{type(self.model).__name__}` | {self._layers()} | {cells} |"

    def _layers(self) -> str:
        """The kinds of cache layers, as transformers calls them."""
        own = getattr(self.cache, "self_attention_cache", self.cache)
        kept = [layer for layer in own.layers if type(layer).__name__ != "DummyLayer"]  # 5.19's for another's cache
        names = [type(layer).__name__ for layer in kept]
        text = ", ".join(f"`{name}`" for name in dict.fromkeys(names))
        return f"{text}, twice" if own is not self.cache else text


def table(archs: Sequence[str]) -> str:
    """The table of docs/huggingface.md: every family generates once, and tells what was guarded."""
    lines = ["| model | layers of its static cache | guarded, and how the graph writes it |", "|---|---|---|"]
    for arch in archs:
        torch._dynamo.reset()
        family = Family(arch)
        family.guarded(family.prompts[0])
        lines.append(family.row())
    return "\n".join(lines)


if __name__ == "__main__":
    from test_families import HOLDS

    print(table(list(HOLDS)))
