"""A graph split at attention, as piecewise engines do: of identical layers, one piece is compiled, guarded or not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from opaque_engine import DIM, HEADS, METADATA, Model
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import fresh_cache
from toys import Decoder, Rig, new_caches

sys.path.append(str(Path(__file__).parents[2] / "examples" / "paged_engine"))

from split import Piecewise

import kvcanary_fx
from kvcanary_fx import Batch, CanaryBackend, CanaryConfig, KVPool

pytestmark = pytest.mark.slow

LAYERS = 5


def in_namespace(*names: str) -> Callable[[torch.fx.Node], bool]:
    return lambda node: str(node.target).split(".")[0] in names


def compiled(run: Callable[[Piecewise], None], apart: Callable[[torch.fx.Node], bool]) -> tuple[int, int, int]:
    """``(pieces, misses of the FX cache, misses of the AOT cache)`` of a first call, with empty caches."""
    torch._dynamo.reset()
    counters.clear()
    backend = Piecewise(compile_fx, apart)
    with fresh_cache(), torch.no_grad():
        run(backend)
    misses = counters["inductor"]["fxgraph_cache_miss"], counters["aot_autograd"]["autograd_cache_miss"]
    hits = counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"]
    # otherwise a piece went past the caches: a number of misses would mean nothing
    assert [a + b for a, b in zip(hits, misses, strict=True)] == [sum(backend.pieces)] * 2
    return sum(backend.pieces), *misses


def opaque(guarded: bool, hoisted: bool) -> Callable[[Piecewise], None]:
    """A call of the model of an engine, attention in one op."""
    names, slots = [f"layers.{i}" for i in range(LAYERS)], [3, 4, 5]
    kv = [tuple(torch.zeros(16, HEADS, DIM) for _ in range(2)) for _ in names]
    METADATA.pools, METADATA.redirect = dict(zip(names, kv, strict=True)), {}
    METADATA.slots = METADATA.reads = torch.tensor(slots)
    model, x = Model(LAYERS, hoisted), torch.randn(3, HEADS * DIM)

    def run(backend: Piecewise) -> None:
        if not guarded:
            torch.compile(model, backend=backend, dynamic=False)(x)
            return
        table = torch.zeros(3, 8, dtype=torch.int32)
        table[1, :3] = torch.tensor(slots)
        session = kvcanary_fx.install_canary(KVPool(kv, table, layer_names=names), inner=backend, mode="raise")
        session.mark_ready()
        session.pool.allocate(slots, owner="A")
        with session.step(Batch([0, 1, 2], slots, [1], [0], [3], request_ids=["A"])), session.forward():
            torch.compile(model, backend=session.backend, dynamic=False)(x)
        assert session.stats().recorded == 3 * 2 * LAYERS

    return run


@pytest.mark.parametrize("hoisted", [False, True], ids=["name is a constant", "name is an input"])
def test_identical_pieces_compile_once_with_our_ops_beside_attention(hoisted):
    apart = in_namespace("opaque_engine", "kvcanary")
    plain = compiled(opaque(False, hoisted), apart)
    assert plain[0] == LAYERS + 1
    assert plain[1] == 3  # the first, the last, and one for all between
    assert compiled(opaque(True, hoisted), apart) == plain


def test_identical_pieces_with_our_ops_in_them_are_one_where_the_layer_is_an_input():
    apart = in_namespace("opaque_engine")
    plain, guarded = compiled(opaque(False, True), apart), compiled(opaque(True, True), apart)
    assert guarded[:2] == plain[:2]


def visible(layers: int) -> Callable[[Piecewise], None]:
    """A call of a model whose graph shows its writes, guarded."""

    def run(backend: Piecewise) -> None:
        canary = CanaryBackend(CanaryConfig(inner=backend))
        model = Decoder(layers).eval()
        rig = Rig(model, canary, torch.compile(model, backend=canary, dynamic=False), new_caches(layers))
        rig.step(3)
        assert rig.session.stats().recorded == 3 * 2 * 2 * layers

    return run


def test_more_layers_compile_no_more_pieces_where_writes_are_visible():
    ours = in_namespace("kvcanary")

    def apart(node: torch.fx.Node) -> bool:
        return ours(node) or node.target is F.scaled_dot_product_attention

    few, many = compiled(visible(3), apart), compiled(visible(LAYERS), apart)
    assert many[0] > few[0]
    assert many[1:] == few[1:]
