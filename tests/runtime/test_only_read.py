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
        return F.scaled_dot_product_attention(q, key_cache, key_cache)

    def write(new, key_cache, pos):
        key_cache.index_copy_(2, pos, new)
        return new + key_cache.mean()

    look, fill = (torch.no_grad()(torch.compile(f, backend=backend, fullgraph=True)) for f in (read, write))
    for n in range(4):
        look(torch.randn(B, H, 1, D), key_cache)
        fill(torch.randn(B, H, 1, D), key_cache, torch.tensor([n]))
    assert backend.session.violations() == []
    (half,) = backend.session.registry.halves()
    assert half.kind == "kv"
    key_cache.data[0, 0, 1, 1] += 1
    with pytest.raises(kvcanary_fx.KVCacheViolation) as caught:
        look(torch.randn(B, H, 1, D), key_cache)
    assert [(v.row, v.index) for v in caught.value.violations] == [(0, 1)]


class EagerWriter:
    """Layers whose caches eager code writes in the middle of the forward, which breaks the graph."""

    def __init__(self, order: tuple[int, ...], layers: int = 2, attention=F.scaled_dot_product_attention):
        self.backend = CanaryBackend(CanaryConfig(inner="eager", mode="log"))
        self.order, self.length = order, 0
        shape = [(B, H, S, D)[axis] for axis in order]
        self.caches = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(layers)]
        back = [order.index(axis) for axis in range(4)]

        @torch._dynamo.disable
        def put(pool, mask, new):
            pool.permute(back).transpose(1, 2)[mask] = new[mask.any(1)][:, :, 0]

        def layer(q, k_pool, v_pool, mask):
            put(k_pool, mask, q)
            put(v_pool, mask, q * 2)
            return attention(q, k_pool.permute(back), v_pool.permute(back))

        self.layer = torch.no_grad()(torch.compile(layer, backend=self.backend))

    def step(self) -> None:
        q = torch.randn(B, H, 1, D)
        mask = torch.zeros(B, S, dtype=torch.bool)
        mask[:, self.length % S] = True
        self.length += 1
        for pools in self.caches:
            q = self.layer(q, *pools, mask)

    def told(self) -> list[tuple[str, int | None, int]]:
        return [(v.half, v.row, v.index) for v in self.backend.session.violations()]


ORDERS = {"BHSD": (0, 1, 2, 3), "BSHD": (0, 2, 1, 3), "HBSD": (1, 0, 2, 3), "SBHD": (2, 0, 1, 3)}


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_masked_write_that_breaks_the_graph(order, layers):
    writer = EagerWriter(order, layers)
    for _ in range(3):
        writer.step()
    assert writer.told() == []
    row = None if order[0] == 2 else B - 1  # in the last order the sequences share a slot
    for pools in writer.caches:
        for pool, half in zip(pools, "KV", strict=True):
            pool.data.permute([order.index(axis) for axis in range(4)])[B - 1, 1, 1, 3] += 1
            writer.step()
            assert writer.told()[-1] == (half, row, 1)
    assert len(writer.told()) == 2 * layers


PACKED = {
    "in front": ((2, B, H, S, D), lambda kv: kv.unbind(0)),
    "behind the sequences": ((B, 2, H, S, D), lambda kv: (kv[:, 0], kv[:, 1])),
    "side by side": ((B, H, S, 2 * D), lambda kv: kv.chunk(2, -1)),
    "side by side, of which one token is not read": ((B, H, S, 2 * D), lambda kv: kv[:, :, 1:].chunk(2, -1)),
}


def test_keys_that_eager_code_writes_in_front_of_the_graph_that_writes_the_values():
    """A crop lets it write over old keys: the values' write shows which."""
    backend = CanaryBackend(CanaryConfig(inner="eager", mode="log"))
    caches = [(torch.zeros(B, H, S, D), torch.zeros(B, H, S, D)) for _ in range(2)]

    @torch._dynamo.disable
    def put(key_cache, pos, new):
        key_cache[:, :, pos] = new

    def layer(q, key_cache, value_cache, pos):
        put(key_cache, pos, q)
        value_cache.index_copy_(2, pos, q * 2)
        return q + F.scaled_dot_product_attention(q, key_cache, value_cache, (torch.arange(S) <= pos)[None])

    compiled = torch.no_grad()(torch.compile(layer, backend=backend))

    def step(n: int) -> list[tuple[str, int | None, int]]:
        q, before = torch.randn(B, H, 1, D), len(backend.session.violations())
        for pair in caches:
            q = compiled(q, *pair, torch.tensor([n]))
        return [(v.half, v.row, v.index) for v in backend.session.violations()[before:]]

    assert [step(n) for n in (0, 1, 2, 3, 4, 2)] == [[]] * 6
    caches[1][0][1, 0, 1] += 1
    assert step(3) == [("K", 1, 1)]
    for tensor in (*caches[0], *caches[1]):
        tensor[:, :, 2:] = 0
    assert step(2) == []


@pytest.mark.parametrize("packed", PACKED)
def test_keys_and_values_in_one_tensor(packed):
    shape, halves = PACKED[packed]
    past_kv, backend = torch.randn(shape), CanaryBackend(CanaryConfig(inner="eager", mode="log"))

    def read(q, past_kv):
        return F.scaled_dot_product_attention(q, *halves(past_kv))

    look = torch.no_grad()(torch.compile(read, backend=backend, fullgraph=True))
    look(torch.randn(B, H, 1, D), past_kv)
    for half in halves(past_kv):
        half.data[1, 0, 2, 3] += 1
        look(torch.randn(B, H, 1, D), past_kv)
    token = 2 if "not read" not in packed else 3
    told = [(v.check, v.half, v.row, v.index) for v in backend.session.violations()]
    assert told == [("content", "K", 1, token), ("content", "V", 1, token)]


def test_a_latent_cache_whose_values_are_a_part_of_its_keys_is_named():
    backend = CanaryBackend(CanaryConfig(inner="eager"))

    def read(q, latent_cache):
        return F.scaled_dot_product_attention(q, latent_cache, latent_cache[..., : D // 2])

    look = torch.no_grad()(torch.compile(read, backend=backend, fullgraph=True))
    look(torch.randn(B, H, 1, D), torch.randn(B, 1, S, D))
    (plan,) = backend.session.plans
    why = "it is only read in this graph, in a way that does not show which of its axes counts tokens"
    assert (plan.sites, plan.unguarded) == ([], [("latent_cache", why)])


def test_a_cache_whose_slot_axes_nothing_shows_is_named():
    def hidden(q, k, v):
        return q + (q * k.mean() * v.mean()).exp()

    writer = EagerWriter(ORDERS["BSHD"], attention=hidden)
    writer.step()
    plan = next(p for p in writer.backend.session.plans if p.unguarded)
    assert plan.sites == []
    why = "it is only read in this graph, in a way that does not show which of its axes counts tokens"
    assert plan.unguarded == [("k_pool", why), ("v_pool", why)]
    assert why in writer.backend.session.summary()


def test_keys_and_values_on_their_way_between_graphs_are_no_cache():
    def run(q, x):
        k, v = x + 1, x * 2
        torch._dynamo.graph_break()
        return F.scaled_dot_product_attention(q, k, v)

    backend = CanaryBackend(CanaryConfig(inner="eager"))
    with torch.no_grad():
        torch.compile(run, backend=backend)(torch.randn(B, H, 1, D), torch.randn(B, H, S, D))
    assert [(p.sites, p.unguarded) for p in backend.session.plans] == [([], []), ([], [])]


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


def rolled(cache, new):
    cache = cache.roll(-1, 2)
    cache[:, :, -1:] = new
    return cache


REPLACED = {
    "rolled": rolled,
    "shifted": lambda cache, new: torch.cat([cache[:, :, 1:], new], 2),
    "behind sinks": lambda cache, new: torch.cat([cache[:, :, :2], cache[:, :, 3:], new], 2),
    "evicted": lambda cache, new: torch.cat([cache.index_select(2, torch.arange(S - 1)), new], 2),
}


@pytest.mark.parametrize("replace", REPLACED.values(), ids=REPLACED)
def test_a_window_that_is_replaced_each_step_is_not_said_to_be_guarded(replace):
    """Attention reads what was made of the cache, and the next call gets that tensor: nothing would be compared."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.past = [torch.zeros(B, H, S, D) for _ in "KV"]

        def forward(self, q):
            self.past = [replace(cache, q) for cache in self.past]
            return F.scaled_dot_product_attention(q, *self.past)

    backend = CanaryBackend(CanaryConfig(inner="eager"))
    with torch.no_grad():
        torch.compile(Layer(), backend=backend)(torch.randn(B, H, 1, D))
    (plan,) = backend.session.plans
    assert plan.sites == []
    assert [why for _, why in plan.unguarded] == ["replaced by a new tensor each step"] * 2


def test_attention_as_large_as_its_keys_does_not_replace_them():
    """A graph that breaks behind attention returns what it computed."""

    def read(q, key_cache, value_cache):
        out = F.scaled_dot_product_attention(q, key_cache, value_cache)
        torch._dynamo.graph_break()
        return out * 2

    backend = CanaryBackend(CanaryConfig(inner="eager"))
    with torch.no_grad():
        torch.compile(read, backend=backend)(*(torch.randn(B, H, S, D) for _ in range(3)))
    plan = next(p for p in backend.session.plans if p.sites)
    assert (len(plan.sites), plan.unguarded) == (2, [])
