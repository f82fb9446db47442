"""Where the bytes of a slot are in the cache of a layer of vLLM, and what finding that leaves behind."""

from __future__ import annotations

from types import SimpleNamespace

import packed_cache
import pytest
import torch

HEADS, DIM, SIZE = 2, 8, 4


def layer_with(cache, kind, backend):
    """One of vLLM's attention layers, as far as its cache is concerned."""
    from kvcanary_fx.adapters.vllm import pools

    layer = pools.Attention.__new__(pools.Attention)
    torch.nn.Module.__init__(layer)
    layer.num_kv_heads, layer.head_size, layer.head_size_v = HEADS, DIM, DIM
    layer.kv_cache, layer.kv_cache_dtype, layer.impl = cache, kind, backend
    return layer


def halves_of(layer):
    from kvcanary_fx.adapters.vllm import layouts, pools

    return pools._halves(layer, SIZE, layouts.Known())


class Backend:
    """It makes what it writes with of the first cache that it sees."""

    def __init__(self, make):
        self.write, self._make = None, make

    def do_kv_cache_update(self, layer, key, value, cache, slots):
        self.write = self.write or self._make()
        self.write(key, value, cache, slots)


def by_rows():
    def write(key, value, cache, slots):
        cache[slots // SIZE, :, slots % SIZE] = torch.cat([key, value], -1)

    return write


def test_cache_of_a_type_that_is_not_known_is_refused_before_anything_is_written():
    backend = SimpleNamespace(do_kv_cache_update=lambda *_: pytest.fail("written"))
    layer = layer_with(torch.zeros(5, HEADS, SIZE, DIM, dtype=torch.uint8), "nvfp4", backend)
    assert "a KV cache of nvfp4 is not supported" in halves_of(layer)


@pytest.mark.parametrize(
    ("kind", "dtype", "width", "make"),
    [
        ("auto", torch.float32, 2 * DIM, by_rows),
        ("int8_per_token_head", torch.int8, 2 * DIM + 8, packed_cache.PerTokenAndHead),
    ],
)
def test_what_a_backend_keeps_of_its_first_cache_is_of_its_own(kind, dtype, width, make):
    """Seen: Triton's took our scratch page for its cache, and its kernels wrote there when that was gone."""
    layer = layer_with(torch.zeros(5, HEADS, SIZE, width, dtype=dtype), kind, Backend(make))
    key, value = halves_of(layer)
    assert key.shape == value.shape == (5, SIZE, HEADS, width // 2)
    assert layer.impl.write is None, "it begins with vLLM's cache"
    assert not layer.kv_cache.any()
