"""Prompts of embeddings: a number for the bytes of each stands for its token."""

from __future__ import annotations

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
