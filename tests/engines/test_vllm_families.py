"""Models of other families under vLLM: nothing is reported without cause, and a flip in each layer and half is."""

from __future__ import annotations

import pytest
import tiny_configs
import tiny_families
import vllm_v2_flips
from vllm_rig import Rig, mixed_load

#: Each has two layers with K and V of their own.
HALVES = 4

#: Prompts leave out the layers that read the K and V of others.
ARGUMENTS = {"gemma3n": {"kv_sharing_fast_prefill": True}}


@pytest.fixture(params=tiny_families.FAMILIES)
def rig(request, tmp_path, monkeypatch):
    monkeypatch.setitem(tiny_configs.OTHERS, request.param, tiny_families.FAMILIES[request.param])
    made = Rig(request.param, tmp_path, **ARGUMENTS.get(request.param, {}))
    yield made
    made.close()


def test_a_mixed_load_is_silent_and_a_flip_in_each_half_is_found(rig):
    mixed_load(rig)
    assert rig.session.violations() == []
    assert rig.session.uncovered == []
    assert sum(2 * len(group.layers) for group in rig.guard.groups) == HALVES
    flips = vllm_v2_flips.flips(rig)
    assert len(flips) == HALVES
    assert all(found["ok"] for found in flips.values()), flips
