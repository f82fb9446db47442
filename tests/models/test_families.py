"""Models whose cache is more than K and V of every layer: states, shared layers, indexers, cross-attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import Family, Flip

import kvcanary_fx

DOCS = Path(__file__).parents[2] / "docs" / "huggingface.md"

#: What each cache holds, by layer: everything of it must be guarded, and nothing else.
HOLDS = {
    "gemma3": {0: "K V", 1: "K V"},
    "deepseek_v3": {0: "K V", 1: "K V"},
    "mixtral": {0: "K V", 1: "K V"},
    "gemma3n": {0: "K V", 1: "K V"},
    "gemma4": {0: "K V", 1: "K V"},
    "deepseek_v32": {0: "K V indexer", 1: "K V indexer"},
    "mamba": {0: "conv state", 1: "conv state"},
    "mamba2": {0: "conv state", 1: "conv state"},
    "jamba": {0: "conv state", 1: "K V"},
    "bamba": {0: "conv state", 1: "K V"},
    "falcon_h1": {0: "K V conv state", 1: "K V conv state"},
    "zamba2": {0: "conv state", 1: "K V conv state"},
    "qwen3_next": {0: "conv state", 1: "K V"},
    "lfm2": {0: "conv", 1: "K V", 2: "conv"},
    "t5": {0: "K V cross K cross V", 1: "K V cross K cross V"},
    "bart": {0: "K V cross K cross V", 1: "K V cross K cross V"},
    "whisper": {0: "K V cross K cross V", 1: "K V cross K cross V"},
}


@pytest.fixture(autouse=True)
def _lengths_are_dynamic_at_once():
    """A window keeps its length in an int.  Dynamo would trace a step for the first value, and again for any: the two
    graphs differ in nothing that is asked here (test_huggingface.py has both)."""
    with torch.compiler.config.patch(dynamic_sources=r".*\.cumulative_length_int"):
        yield


def everything_is_guarded(family: Family) -> None:
    """The halves of the session are exactly the tensors of the cache."""
    held = family.held()
    by_layer: dict[int, list[str]] = {}
    for layer, half, tensor in held:
        by_layer.setdefault(layer, []).append(half)
        assert family.half_of(tensor) is not None, f"layer {layer} {half} has no guard"
    assert {n: " ".join(halves) for n, halves in by_layer.items()} == HOLDS[family.arch]
    assert len(family.session.registry.halves()) == len(held)


def found_at(family: Family, flip: Flip) -> None:
    """Flipping a bit is one violation, in the right place."""
    with pytest.raises(kvcanary_fx.KVCacheViolation) as caught:
        family.guarded(family.prompts[1], flip)
    told = [(v.check, v.half, v.row, v.index) for v in caught.value.violations]
    assert told == [("content", *family.expected_at(flip))]
    assert f".{flip.layer}." in caught.value.violations[0].layer


def check_family(family: Family) -> None:
    """Same tokens, silence over two prompts in one cache, everything guarded, every flipped bit found."""
    for prompt in (*family.prompts, family.prompts[0]):
        assert torch.equal(family.guarded(prompt), family.plain(prompt))
    assert family.session.violations() == []
    assert family.session.uncovered == []
    everything_is_guarded(family)
    for flip in family.flips():
        found_at(family, flip)
    family.guarded(family.prompts[0])  # silent again
    assert len(family.session.violations()) == len(family.held())


@pytest.mark.parametrize("arch", HOLDS)
def test_guarded(arch, device):
    family = Family(arch, device=device)
    check_family(family)
    assert family.row() in DOCS.read_text()


def test_one_layer_of_states_may_be_reset():
    """Both states of the only layer change together; a flip of one of them is still found."""
    family = Family("jamba")
    for prompt in (*family.prompts, *family.prompts):
        family.guarded(prompt)
    assert family.session.violations() == []
    assert family.session.stats().adopted >= 3 * 2 * 2  # resets, states, sequences


@pytest.mark.parametrize("arch", ["mamba2", "t5"])
def test_the_same_under_inference_mode(arch):
    """Inference tensors do not count who wrote to them."""
    family = Family(arch)
    with torch.inference_mode():
        for prompt in family.prompts:
            family.guarded(prompt)
        assert family.session.violations() == []
        for flip in family.flips():
            found_at(family, flip)


@pytest.mark.parametrize("arch", ["jamba", "t5"])
def test_beam_search(arch):
    """Beams are reordered between steps by index_select, into new tensors."""
    family = Family(arch)
    config = dict(num_beams=2, max_new_tokens=6, do_sample=False, pad_token_id=0, cache_implementation="static")
    for prompt in family.prompts:
        guarded = family.model.generate(prompt, compile_config=family.compiled, **config)
        assert torch.equal(guarded, family.model.generate(prompt, disable_compile=True, **config))
    assert family.session.violations() == []


@pytest.mark.parametrize("arch", ["mamba2", "jamba", "t5", "gemma3n"])
def test_guarded_under_aot_eager(arch):
    check_family(Family(arch, "aot_eager"))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["mamba2", "falcon_h1", "qwen3_next", "t5", "gemma3n", "deepseek_v32"])
def test_guarded_under_inductor(arch, device):
    check_family(Family(arch, "inductor", device))
