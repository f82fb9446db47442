"""Breakable CUDA graphs: vLLM captures pieces around ops that it keeps and runs again.  The capture is made up."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest
import torch

LAYER = "model.layers.0.self_attn.attn"

#: What a process does in which vLLM is asked for such graphs after its plugins were loaded.
LATER = """
import os
os.environ.pop("VLLM_USE_BREAKABLE_CUDAGRAPH", None)
from kvcanary_fx.adapters.vllm.plugin import register
register()
os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture
from vllm.model_executor.layers.attention import attention, mla_attention
from vllm.model_executor.layers.mamba import short_conv
kept = []
BreakableCUDAGraphCapture.current = classmethod(lambda cls: cls)
BreakableCUDAGraphCapture._capturing = True
BreakableCUDAGraphCapture.add_eager = kept.append
for op in (
    attention.unified_attention_with_output, mla_attention.unified_mla_attention_with_output, short_conv.short_conv
):
    op()
print("kept", len(kept))
print("asked for", os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"])
"""


@pytest.fixture
def asked_for(monkeypatch):
    """vLLM's configuration asks for such graphs."""
    from vllm.compilation import breakable_cudagraph

    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    monkeypatch.setattr(breakable_cudagraph, "weak_ref_tensor", lambda given: given)


@pytest.fixture
def capture():
    """A capture without a GPU: it keeps ops, and the pieces between them are nothing."""
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture

    class MadeUp(BreakableCUDAGraphCapture):
        def _begin_segment(self):
            self._capturing = True

        def _end_segment(self):
            self._capturing = False

    return MadeUp()


def forward_of(attention, mode):
    """vLLM's context of a forward with one layer."""
    from vllm import forward_context
    from vllm.config import CUDAGraphMode

    layer = types.SimpleNamespace(impl=types.SimpleNamespace(forward=attention), kv_cache=torch.zeros(2))
    return forward_context.override_forward_context(
        forward_context.ForwardContext(
            no_compile_layers={LAYER: layer},
            attn_metadata={LAYER: None},
            slot_mapping={},
            cudagraph_runtime_mode=CUDAGraphMode[mode],
        )
    )


@pytest.mark.parametrize("mode", ["log", "raise"])
def test_ops_end_a_piece_also_where_the_plugin_was_loaded_before_vllm_was_configured(mode):
    """vLLM would have captured attention, as it ran in the warm-up."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVCANARY_")} | {"KVCANARY_MODE": mode}
    done = subprocess.run(
        [sys.executable, "-c", LATER], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert "kept 3\nasked for 1" in done.stdout, done.stderr[-2000:]


def test_what_is_run_again_between_pieces_has_the_checks_in_it(asked_for, capture, monkeypatch):
    from kvcanary_fx.adapters.vllm import ops
    from kvcanary_fx.kernels.context import forward_context

    ops.register()
    side = types.SimpleNamespace(joined=0)
    side.join = lambda: setattr(side, "joined", side.joined + 1)
    context = types.SimpleNamespace(layers={LAYER: None}, sides={torch.device("cpu"): side}, compared=True)
    ran, recorded = [], []
    monkeypatch.setattr(ops, "_verify", lambda *_: None)
    monkeypatch.setattr(ops, "record", lambda output, key, value, layer: recorded.append((key, value, layer)))
    q, k, v, out = (torch.full((2, 1, 4), float(i)) for i in range(4))

    with forward_of(lambda *_, **__: ran.append("captured"), "PIECEWISE"), capture:
        torch.ops.vllm.unified_attention_with_output(q, k, v, out, LAYER)
    assert (ran, recorded, len(capture.segments)) == (["captured"], [], 1), "a warm-up, which nothing checks"

    replayed = forward_of(lambda *_, **__: ran.append("replayed"), "PIECEWISE")
    with replayed, forward_context(context), ops.one_forward() as guarded:
        capture.replay()
    assert ran == ["captured", "replayed"]
    ((key, value, layer),) = recorded
    assert (key.tolist(), value.tolist(), layer) == (k.tolist(), v.tolist(), LAYER)
    assert (guarded.outside, guarded.in_graph) == ({LAYER}, set())
    assert side.joined == 1, "before the next piece writes where K and V are"


def test_elsewhere_the_model_does_not_wait(asked_for, monkeypatch):
    """In a forward without graphs, and where all of it is captured, K and V stay where they are."""
    from kvcanary_fx.adapters.vllm import ops

    assert not ops.next_piece_overwrites()
    for mode in ("NONE", "FULL"):
        with forward_of(None, mode):
            assert not ops.next_piece_overwrites()
    with forward_of(None, "PIECEWISE"):
        assert ops.next_piece_overwrites()
        monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "0")
        assert not ops.next_piece_overwrites(), "pieces of what vLLM compiled keep K and V"
