"""Prompts of embeddings: a number for the bytes of each stands for its token."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import vllm_runs
from vllm_embeddings import add, embedded, load
from vllm_rig import Rig


@pytest.mark.parametrize("arguments", [{}, {"enforce_eager": False}], ids=["eager", "compiled"])
def test_same_tokens_and_no_violation_over_shared_prefixes(models, arguments):
    (plain,) = vllm_runs.results(models, [{"model": "llama", "scene": "embeddings"}], mode=None)
    rig = Rig("llama", models, enable_prompt_embeds=True, **arguments)
    try:
        load(rig)
        assert rig.tokens == plain["tokens"]
        assert rig.cached == plain["cached"]
        assert rig.cached["one again"] == 64
        assert rig.session.violations() == []
        rig.session.health.check()
        assert rig.session.uncovered == []
    finally:
        rig.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_between_embeddings_keep_their_ids_and_equal_embeddings_have_equal_numbers(dtype):
    from kvcanary_fx.adapters.vllm.identity import features_of, mark_features

    embeds = embedded(1, 6)[:, :5].to(dtype)  # of an odd number of bytes, or words
    embeds[4] = embeds[1]
    is_token = [True, False, False, True, False, False]
    request = SimpleNamespace(mm_features=None, prompt_embeds=embeds, prompt_is_token_ids=is_token)
    prompt = torch.arange(10, 18, dtype=torch.int32)
    mark_features(prompt, 0, features_of(request))
    assert prompt[[0, 3, 6, 7]].tolist() == [10, 13, 16, 17]  # what was generated is behind the prompt
    assert prompt[1] == prompt[4]
    assert len(set(prompt.tolist())) == 7
    assert all(number >= 1 << 30 for number in prompt[[1, 2, 4, 5]].tolist())
    part = torch.zeros(4, dtype=torch.int64)
    mark_features(part, 2, features_of(request))
    assert part.tolist() == [int(prompt[2]), 0, int(prompt[4]), int(prompt[5])]


def test_a_prefix_of_other_embeddings_is_told_where_it_is(models, monkeypatch):
    """As from a prefix cache whose keys leave them out."""
    from vllm.v1.core import kv_cache_utils

    monkeypatch.setattr(kv_cache_utils, "_gen_prompt_embeds_extra_hash_keys", lambda *_: [])
    rig = Rig("llama", models, enable_prompt_embeds=True)
    try:
        add(rig, "one", embedded(1, 80))
        rig.run()
        before = len(rig.session.violations())
        add(rig, "half of it", torch.cat([embedded(1, 80)[:32], embedded(5, 48)]))
        rig.run()
        found = rig.session.violations()[before:]
        assert rig.cached["half of it"] == 64
        assert {(v.check, str(v.request).rpartition("-")[0]) for v in found} == {("token", "half of it")}
        assert {v.position for v in found} == set(range(32, 64))
    finally:
        rig.close()
