"""What a report calls a layer, its K and its V, and a slot, wherever and however they lie in a tensor."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from idioms import hidden_store
from torch import nn

from kvcanary_fx import CanaryBackend, CanaryConfig

B, H, S, D = 2, 3, 8, 4

PARTS = {
    "index": lambda t, axis, n: t[(slice(None),) * axis + (n,)],
    "select": lambda t, axis, n: t.select(axis, n),
    "narrow": lambda t, axis, n: t.narrow(axis, n, 1).squeeze(axis),
    "chunk": lambda t, axis, n: t.chunk(2, axis)[n].squeeze(axis),
    "unbind": lambda t, axis, n: t.unbind(axis)[n],
    "slice": lambda t, axis, n: t[(slice(None),) * axis + (slice(n - 2, n - 1 or None),)].squeeze(axis),
}

SIDES = {
    "slice": lambda row, half: row[..., half * D : half * D + D],
    "narrow": lambda row, half: row.narrow(-1, half * D, D),
    "chunk": lambda row, half: row.chunk(2, -1)[half],
    "split": lambda row, half: row.split([D, D], -1)[half],
}


def compiled(model, *args, steps: int = 1):
    """A guarded model that has run, and its session."""
    torch._dynamo.reset()
    backend = CanaryBackend(CanaryConfig(inner="eager", mode="log"))
    run = torch.no_grad()(torch.compile(model, backend=backend))
    for step in range(steps):
        run(torch.ones(B, H, 1, D) + step, *args, torch.tensor([step]))
    assert backend.session.violations() == []
    return run, backend.session


def called(session):
    return [(s.layer, s.label, s.pool) for s in session.plans[0].sites]


def attend(x, k, v):
    return x + F.scaled_dot_product_attention(x, k, v)


@pytest.mark.parametrize("access", PARTS)
@pytest.mark.parametrize(("order", "stems"), [("layer first", "kv[{}]"), ("half first", "kv[:, {}]")])
def test_a_layer_in_one_tensor_has_the_name_of_its_index(access, order, stems):
    """V is written first: what attention reads says which is which."""
    part = PARTS[access]

    def model(x, kv, pos):
        for layer in range(2):
            if order == "layer first":
                k, v = (part(part(kv, 0, layer), 0, half) for half in range(2))
            else:
                k, v = (part(part(kv, 0, half), 0, layer) for half in range(2))
            v.index_copy_(2, pos, x * 2)
            k.index_copy_(2, pos, x)
            x = attend(x, k, v)
        return x

    _, session = compiled(model, torch.zeros(2, 2, B, H, S, D))
    name = "kv[{0}][{1}]" if order == "layer first" else "kv[{1}][{0}]"
    assert called(session) == [
        (stems.format(layer), "KV"[half], name.format(layer, half)) for layer in range(2) for half in (1, 0)
    ]


def test_a_forward_behind_a_decorator_has_the_names_of_the_model():
    """As in transformers from 5.24 on, whose decorator is called with the model in ``args``."""

    def decorated(forward):
        @functools.wraps(forward)
        def wrapped(*args, **kwargs):
            return forward(*args, **kwargs)

        return wrapped

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("v_cache", torch.zeros(B, H, S, D))

        @decorated
        def forward(self, x, k_cache, pos):
            k_cache.index_copy_(2, pos, x)
            self.v_cache.index_copy_(2, pos, x * 2)
            return attend(x, k_cache, self.v_cache)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer()])

        @decorated
        def forward(self, x, cache, pos):
            return self.layers[0](x, cache, pos)

    _, session = compiled(Model().forward, torch.zeros(B, H, S, D))
    assert called(session) == [("layers.0", "K", "args[2]"), ("layers.0", "V", "layers.0.v_cache")]


@pytest.mark.parametrize("access", SIDES)
def test_k_and_v_side_by_side_in_a_row_are_two_halves(access):
    side = SIDES[access]

    def model(x, cache, pos):
        side(cache, 1).index_copy_(2, pos, x * 2)
        side(cache, 0).index_copy_(2, pos, x)
        return attend(x, side(cache, 0), side(cache, 1))

    cache = torch.zeros(B, H, S, 2 * D)
    run, session = compiled(model, cache, steps=2)
    assert called(session) == [("cache", "V", "cache[..., 4:8]"), ("cache", "K", "cache[..., 0:4]")]
    cache.data[1, 0, 0, 0] += 1
    run(torch.ones(B, H, 1, D), cache, torch.tensor([2]))
    assert [(v.half, v.row, v.index) for v in session.violations()] == [("K", 1, 0)]


def test_parts_of_an_axis_that_was_split_are_no_parts_of_the_input():
    """``[B, S, H * D]`` seen as heads: a head's number is no index of a row's elements."""

    def model(x, keys, values, pos):
        keys.index_copy_(1, pos, x.transpose(1, 2).flatten(2))
        values.index_copy_(1, pos, x.transpose(1, 2).flatten(2))
        k, v = (t.unflatten(2, (H, D)).transpose(1, 2) for t in (keys, values))
        return [attend(x[:, h], k[:, h], v[:, h]) for h in range(H)]

    _, session = compiled(model, torch.zeros(B, S, H * D), torch.zeros(B, S, H * D))
    assert called(session) == [("keys/values", "K", "keys"), ("keys/values", "V", "values")]


def test_heads_written_one_by_one_are_k_and_v_of_their_module():
    class Layer(nn.Module):
        def forward(self, x, kv, pos):
            for half in range(2):
                for head in range(H):
                    kv[half, :, head].index_copy_(1, pos, x[:, head])
            return attend(x, kv[0], kv[1])

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Layer()])

        def forward(self, x, a, b, pos):
            return self.layers[1](self.layers[0](x, a, pos), b, pos)

    _, session = compiled(Model(), torch.zeros(2, B, H, S, D), torch.zeros(2, B, H, S, D))
    assert called(session) == [
        (f"layers.{layer}", "KV"[half], f"{'ab'[layer]}[{half}, :, {head}]")
        for layer in range(2)
        for half in range(2)
        for head in range(H)
    ]


def test_a_latent_is_k_and_v_and_its_rope_part_k():
    def model(x, k_cache, v_cache, pos):
        k_cache.index_copy_(2, pos, x)
        v_cache.index_copy_(2, pos, x)
        q = torch.cat((x, x), -1)
        return F.scaled_dot_product_attention(q, torch.cat((k_cache, v_cache), -1), k_cache)

    _, session = compiled(model, torch.zeros(B, H, S, D), torch.zeros(B, H, S, D))
    assert [site[1:] for site in called(session)] == [("KV", "k_cache"), ("K", "v_cache")]


def test_a_row_is_a_sequence_where_a_view_merges_it_with_heads():
    def model(x, keys, values, pos):
        for cache in (keys, values):
            cache.flatten(0, 1).index_copy_(1, pos, x.flatten(0, 1))
        return attend(x, keys, values)

    keys = torch.zeros(B, H, S, D)
    run, session = compiled(model, keys, torch.zeros(B, H, S, D), steps=2)
    keys.data[1, 2, 1] += 1
    run(torch.ones(B, H, 1, D), keys, torch.zeros(B, H, S, D), torch.tensor([2]))
    assert [(v.half, v.row, v.slot) for v in session.violations()] == [("K", 1, S + 1)]


@pytest.mark.parametrize("write", ["cat", "slice_scatter"])
def test_what_is_written_whole_shows_its_axis_without_attention(write):
    def model(x, cache, pos):
        new = x.permute(2, 0, 1, 3)
        if write == "cat":
            cache.copy_(torch.cat((cache[:3], new, cache[4:])))
        else:
            cache.copy_(torch.slice_scatter(cache, new, 0, 3, 4))
        return cache.sum()

    _, session = compiled(model, torch.zeros(S, B, H, D))
    assert [s.slot_axes for s in session.plans[0].sites] == [(0,)]


def test_a_cache_written_whole_through_a_full_slice():
    def model(x, keys, values, pos):
        keys[:].copy_(x[:])
        values[:].copy_((x * 2)[:])
        return attend(x, keys, values)

    _, session = compiled(model, torch.zeros(B, H, S, D), torch.zeros(B, H, S, D))
    assert [(s.label, s.kind) for s in session.plans[0].sites] == [("K", "kv"), ("V", "kv")]


def test_the_only_layer_of_a_stacked_pool_is_no_sequence():
    def model(x, kv, slots):
        table = torch.arange(B * 4).view(B, 4)
        k, v = kv[0, 0], kv[1, 0]
        for cache in (k, v):
            cache.copy_(cache.index_copy(0, slots, x[:1, :, 0]))
        return attend(x, k[table].transpose(1, 2), v[table].transpose(1, 2))

    _, session = compiled(model, torch.zeros(2, 1, B * S, H, D))
    assert called(session) == [("kv[:, 0]", "K", "kv[0][0]"), ("kv[:, 0]", "V", "kv[1][0]")]
    assert {s.slot_axes for s in session.plans[0].sites} == {(0,)}


def test_copies_made_at_once_show_slots_and_operands():
    def model(x, keys, values, pos):
        torch._foreach_copy_([keys[:, :, 1:2], values[:, :, 1:2]], [x, x * 2])
        return attend(x, keys, values)

    _, session = compiled(model, torch.zeros(B, H, S, D), torch.zeros(B, H, S, D))
    assert [(s.label, s.opaque, s.has_operand) for s in session.plans[0].sites] == [
        ("K", None, True),
        ("V", None, True),
    ]


def put(cache, pos, new):
    """A write that hides its slots."""
    cache.put_(torch.arange(cache.numel()).view(cache.shape)[:, :, pos], new)


@pytest.mark.parametrize(
    ("shape", "half"),
    [
        pytest.param((2, 2, H, S, D), lambda kv: kv[0], id="first of two"),
        pytest.param((2, 2, H, S, D), lambda kv: kv[:, 1], id="second behind the sequences"),
        pytest.param((2, H, S, 2 * D), lambda kv: kv.chunk(2, -1)[0], id="side of each row"),
    ],
)
def test_two_sequences_of_one_half_are_no_k_and_v_where_slots_are_hidden(shape, half):
    def model(x, kv, pos):
        put(half(kv), pos, x)
        return kv.sum()

    _, session = compiled(model, torch.zeros(shape))
    assert len(session.plans[0].sites) == 1


def test_two_tensors_alike_that_an_op_stores_in_one_cache_are_k_and_v():
    def model(x, kv, pos):
        hidden_store(x[0].transpose(0, 1), x[1].transpose(0, 1), kv, pos)
        return kv.sum()

    _, session = compiled(model, torch.zeros(2, S, H * D))
    assert called(session) == [("kv", "K", "kv[0]"), ("kv", "V", "kv[1]")]


def test_what_an_op_computes_into_a_part_of_a_cache_is_no_constant():
    def model(x, cache, pos):
        torch.mul(x.permute(2, 0, 1, 3), 2, out=cache[1:2])
        return cache.sum()

    _, session = compiled(model, torch.zeros(S, B, H, D))
    assert [s.slot_axes for s in session.plans[0].sites] == [(0,)]


MASKED = {
    "index": lambda cache, hit, new: cache.__setitem__((slice(None), slice(None), hit), new),
    "masked_scatter_": lambda cache, hit, new: cache.masked_scatter_(hit.view(1, 1, S, 1).expand_as(cache), new),
}


@pytest.mark.parametrize("write", MASKED)
def test_a_mask_shows_the_axis_of_tokens_without_attention(write):
    def model(x, cache, pos):
        MASKED[write](cache, torch.arange(S) == pos, x)
        return cache.sum()

    _, session = compiled(model, torch.zeros(B, H, S, D))
    assert [(s.slot_axes, s.paged) for s in session.plans[0].sites] == [((0, 2), False)]


@pytest.mark.parametrize("last", ["index_add_", "put_"])
def test_an_index_shows_the_slots_of_a_cache_though_other_writes_have_no_operand(last):
    def model(x, keys, pos):
        keys.index_fill_(2, pos, 0)
        if last == "put_":
            put(keys, pos, x)
        else:
            keys.index_add_(2, pos, x)
        return keys.sum()

    _, session = compiled(model, torch.zeros(B, H, S, D))
    (site,) = session.plans[0].sites
    assert (site.slot_axes, site.paged, site.opaque is None) == ((0, 2), False, last == "index_add_")
