"""Caches that a graph only reads: what is found in them, what is legal, and what is none."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import kvcanary_fx
from kvcanary_fx import CanaryBackend, CanaryConfig

B, H, S, D = 2, 2, 6, 8


class Reader:
    """Two layers of cross-attention over caches that other code fills."""

    def __init__(self, inner: str = "eager"):
        self.backend = CanaryBackend(CanaryConfig(inner=inner))
        self.past = [dict(keys=torch.randn(B, H, S, D), values=torch.randn(B, H, S, D)) for _ in range(2)]
        self.compiled = torch.no_grad()(torch.compile(self._read, backend=self.backend, fullgraph=True))

    @staticmethod
    def _read(q, past):
        for layer in past:
            q = q + F.scaled_dot_product_attention(q, layer["keys"], layer["values"])
        return q

    def step(self) -> None:
        self.compiled(torch.randn(B, H, 1, D), self.past)

    def tensors(self) -> list[torch.Tensor]:
        return [t for layer in self.past for t in layer.values()]

    def told(self) -> list[tuple[str, str, str, int, int]]:
        """The violations of the next step."""
        with pytest.raises(kvcanary_fx.KVCacheViolation) as caught:
            self.step()
        return [(v.check, v.pool, v.half, v.row, v.index) for v in caught.value.violations]


@pytest.mark.parametrize("inner", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_flipped_bit_in_each_half_is_found_and_told_once(inner):
    reader = Reader(inner)
    reader.step()
    reader.step()
    for n, (tensor, half) in enumerate(zip(reader.tensors(), "KVKV", strict=True)):
        tensor.data.view(torch.int32)[1, 0, n, 3] ^= 1
        name = f"past[{n // 2}].{'keys' if half == 'K' else 'values'}"
        assert reader.told() == [("content", name, half, 1, n)]
        reader.step()
    assert len(reader.backend.session.violations()) == 4


def test_a_stray_store_by_an_op_is_found():
    reader = Reader()
    reader.step()
    reader.past[1]["values"][0, 1, 2] += 1
    assert reader.told() == [("content", "past[1].values", "V", 0, 2)]


def test_put_right_after_the_report():
    reader = Reader()
    reader.step()
    tensor = reader.past[0]["keys"]
    before = tensor.clone()
    tensor.data[0, 0, 1, 1] += 1
    assert reader.told() == [("content", "past[0].keys", "K", 0, 1)]
    tensor.copy_(before)
    reader.step()
    assert len(reader.backend.session.violations()) == 1
    tensor.data[0, 0, 1, 1] += 1  # the second time is told again
    assert len(reader.told()) == 1


def test_a_new_prompt_and_single_tokens_written_elsewhere():
    reader = Reader()
    reader.step()
    for change in (slice(None), slice(3, 4), slice(5, 6)):
        for tensor in reader.tensors():
            tensor[:, :, change] = torch.randn_like(tensor[:, :, change])
        reader.step()
    assert reader.backend.session.violations() == []
    assert reader.backend.session.stats().adopted == 4 * B * S + B * (S + 1 + 1)  # first seen, then by slot


def test_written_by_one_graph_and_read_by_another():
    backend = CanaryBackend(CanaryConfig(inner="eager"))
    memory = torch.zeros(B, H, S, D)

    def write(new, a, pos):
        a.index_copy_(2, pos, new)
        return new + a.mean()

    def read(q, b):
        return q + b.sum()

    fill, look = (torch.no_grad()(torch.compile(f, backend=backend, fullgraph=True)) for f in (write, read))
    for n in range(4):
        fill(torch.randn(B, H, 1, D), memory, torch.tensor([n]))
        look(torch.randn(1), memory)
    assert backend.session.violations() == []
    assert [[(s.pool, s.kind) for s in p.sites] for p in backend.session.plans] == [[("a", "kv")], [("b", "read")]]
    assert len(backend.session.registry.halves()) == 1
    memory.data[1, 1, 2, 5] += 1
    with pytest.raises(kvcanary_fx.KVCacheViolation) as caught:
        look(torch.randn(1), memory)
    assert [(v.row, v.index) for v in caught.value.violations] == [(1, 2)]


def test_read_first_and_written_later():
    backend = CanaryBackend(CanaryConfig(inner="eager"))
    key_cache = torch.zeros(B, H, S, D)

    def read(q, key_cache):
        return q + key_cache.sum()

    def write(new, key_cache, pos):
        key_cache.index_copy_(2, pos, new)
        return new + key_cache.mean()

    look, fill = (torch.no_grad()(torch.compile(f, backend=backend, fullgraph=True)) for f in (read, write))
    for n in range(4):
        look(torch.randn(1), key_cache)
        fill(torch.randn(B, H, 1, D), key_cache, torch.tensor([n]))
    assert backend.session.violations() == []
    (half,) = backend.session.registry.halves()
    assert half.kind == "kv"
    key_cache.data[0, 0, 1, 1] += 1
    with pytest.raises(kvcanary_fx.KVCacheViolation) as caught:
        look(torch.randn(1), key_cache)
    assert [(v.row, v.index) for v in caught.value.violations] == [(0, 1)]


def test_what_is_no_cache_is_not_watched():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.key_cache = torch.nn.Parameter(torch.randn(B, H, S, D), requires_grad=False)

        def forward(self, x, hidden, position_values, past_values, attn_cache_mask):
            grown = torch.cat((past_values, x), dim=2)
            return (self.key_cache + hidden + position_values + attn_cache_mask).sum() + grown.sum(), grown[:, :, 1:]

    backend = CanaryBackend(CanaryConfig(inner="eager"))
    whole = [torch.randn(B, H, S, D) for _ in range(4)]
    with torch.no_grad():
        torch.compile(Model(), backend=backend)(torch.randn(B, H, 1, D), *whole)
    (plan,) = backend.session.plans
    assert plan.sites == []
    assert plan.functional == ["past_values"]
