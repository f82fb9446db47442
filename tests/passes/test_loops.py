"""Loops over sequences or heads in a graph without attention, as behind a graph break: what their axis counts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kvcanary_fx import CanaryBackend, CanaryConfig

H, S, D = 3, 8, 4


def by_select(cache, b, pos, new):
    cache.select(0, b).index_copy_(1, pos, new.select(0, b))


def by_unbind(cache, b, pos, new):
    cache.unbind(0)[b].index_copy_(1, pos, new.unbind(0)[b])


def by_getitem(cache, b, pos, new):
    cache[b, :, pos] = new[b]


def by_setitem_of_a_part(cache, b, pos, new):
    cache[b][:, pos] = new[b]


def by_slice(cache, b, pos, new):
    cache[b : b + 1].index_copy_(2, pos, new[b : b + 1])


def compiled(model, **given):
    """A guarded model without attention, and its session, after two steps."""
    torch._dynamo.reset()
    backend = CanaryBackend(CanaryConfig(inner="eager", mode="log"))
    run = torch.no_grad()(torch.compile(model, backend=backend, fullgraph=True))
    for at in range(2):
        run(pos=torch.tensor([at]), **given)
    return run, backend.session


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("write", [by_select, by_unbind, by_getitem, by_setitem_of_a_part, by_slice])
def test_a_loop_over_rows_without_attention_writes_sequences(write, batch):
    def model(x, cache, pos):
        for b in range(batch):
            write(cache, b, pos, x)
        return cache.sum()

    cache, x = torch.zeros(batch, H, S, D), torch.ones(batch, H, 1, D)
    run, session = compiled(model, x=x, cache=cache)
    assert [(s.pool, s.slot_axes) for s in session.plans[0].sites] == [("cache", (0, 2))]
    cache.data[batch - 1, 1, 0, 2] += 1
    run(x=x, cache=cache, pos=torch.tensor([2]))
    assert [(v.row, v.index) for v in session.violations()] == [(batch - 1, 0)]


@pytest.mark.parametrize("attends", [False, True])
def test_sequences_behind_the_tokens_are_slots_with_and_without_attention(attends):
    """``[S, B, H, D]``: without attention the tokens were taken for sequences, with it each write for one of all."""

    def model(x, cache, pos):
        for b in range(3):
            cache.select(1, b).index_copy_(0, pos, x.select(1, b))
        q, keys = x.permute(1, 2, 0, 3), cache.permute(1, 2, 0, 3)
        return F.scaled_dot_product_attention(q, keys, keys) if attends else cache.sum()

    cache, x = torch.zeros(S, 3, H, D), torch.ones(1, 3, H, D)
    run, session = compiled(model, x=x, cache=cache)
    assert [(s.slot_axes, s.paged, s.opaque) for s in session.plans[0].sites] == [((0, 1), True, None)]
    cache.data[1, 0] += 1
    run(x=x, cache=cache, pos=torch.tensor([2]))
    assert [(v.row, v.slot) for v in session.violations()] == [(None, 3)]


@pytest.mark.parametrize(("name", "labels"), [("keys", ["K"]), ("kv_cache", ["K", "V"])])
def test_a_name_says_whether_an_axis_of_two_is_sequences_or_k_and_v(name, labels):
    def model(x, pos, **caches):
        (cache,) = caches.values()
        for b in range(2):
            by_select(cache, b, pos, x)
        return cache.sum()

    _, session = compiled(model, x=torch.ones(2, H, 1, D), **{name: torch.zeros(2, H, S, D)})
    assert [s.label for s in session.plans[0].sites] == labels


def test_two_sequences_or_k_and_v_is_not_guessed_but_said():
    def model(x, cache, pos):
        for b in range(2):
            by_select(cache, b, pos, x)
        return cache.sum()

    cache, x = torch.zeros(2, H, S, D), torch.ones(2, H, 1, D)
    run, session = compiled(model, x=x, cache=cache)
    assert "cache: it is written at the constants 0 and 1 of an axis of two" in session.summary()
    assert "KVPool" in session.summary()
    cache.data[1, 1, 0, 2] += 1
    run(x=x, cache=cache, pos=torch.tensor([2]))
    assert session.violations() == []


def test_two_sequences_of_one_half_of_a_cache_are_rows():
    """``kv[0]`` is K: what is picked of it is a sequence."""

    def model(x, cache, pos):
        for half, new in enumerate((x, x * 2)):
            for b in range(2):
                by_select(cache[half], b, pos, new.transpose(0, 1).transpose(0, 1))
        return cache.sum()

    _, session = compiled(model, x=torch.ones(2, H, 1, D), cache=torch.zeros(2, 2, H, S, D))
    assert [(s.label, s.pool, s.slot_axes) for s in session.plans[0].sites] == [
        ("K", "cache[0]", (0, 2)),
        ("V", "cache[1]", (0, 2)),
    ]


@pytest.mark.parametrize("batch", [1, 3])
def test_k_and_v_from_two_tensors_are_no_sequences(batch):
    def model(k, v, cache, pos):
        cache[0].index_copy_(1, pos, k[0])
        cache[1].index_copy_(1, pos, v[0])
        return cache.sum()

    new = torch.ones(batch, H, 1, D)
    _, session = compiled(model, k=new, v=new, cache=torch.zeros(2, H, S, D))
    assert [(s.label, s.pool) for s in session.plans[0].sites] == [("K", "cache[0]"), ("V", "cache[1]")]


def test_heads_without_attention_are_parts_of_one_half():
    def model(x, cache, pos):
        for head in range(H):
            cache[:, head].index_copy_(1, pos, x[:, head])
        return cache.sum()

    _, session = compiled(model, x=torch.ones(2, H, 1, D), cache=torch.zeros(2, H, S, D))
    sites = session.plans[0].sites
    assert [(s.label, s.pool) for s in sites] == [("KV", f"cache[:, {head}]") for head in range(H)]
