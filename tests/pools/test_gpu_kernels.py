"""Sessions with several pools, checked by the GPU's kernels, interpreted: what test_shapes.py shows on a GPU."""

from __future__ import annotations

import pytest
import torch
from gpu_on_cpu import use_gpu_kernels
from rig import Rig
from shapes import groups_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands in for a missing GPU")


@pytest.mark.parametrize("shape", ["recurrent and conv state", "DeepSeek-V4 groups"])
def test_pools_with_fewer_slots_than_tokens_leave_the_others_alone(shape, monkeypatch):
    """Each walk notes where the requests' tokens end in its pool: in memory of the pool's own."""
    use_gpu_kernels(monkeypatch.setattr)
    rig = Rig(groups_of(shape, "cpu"), kernel=False)
    for tokens in (9, 1, 1):
        rig.run("A", tokens)
    assert rig.found() == []
    first = rig.session.pools[rig.groups[0].name].space
    assert first.counters.tolist()[2] == min(9, first.window or 9) + 2  # all tokens that the pool keeps were stored
