"""What attention does with a cache tells K from V, and a sequence from a token, where names and shapes do not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from kvcanary_fx import CanaryBackend, CanaryConfig

H, S, D = 2, 10, 8


def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def by_name(q, k, v):
    return F.scaled_dot_product_attention(query=q, key=k, value=v)


def products(q, k, v):
    weights = F.softmax(q @ k.mT / 8 + torch.zeros(1, 1, 1, S), dim=-1).to(v.dtype)
    return torch.matmul(F.dropout(weights, 0.0), v)


def einsums(q, k, v):
    weights = torch.einsum("bhtd,bhsd->bhts", q, k).softmax(-1)
    return torch.einsum("bhts,bhsd->bhtd", weights, v)


def sums(q, k, v):
    weights = (q * k).sum(-1).softmax(-1)
    return (weights.unsqueeze(-1) * v).sum(2, keepdim=True)


def grouped(q, k, v):
    q = torch.cat((q, q), dim=1)
    k, v = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(x.shape[0], -1, S, D) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v)[:, ::2]


def flexible(q, k, v):
    return flex_attention(q, k, v)


def hide(cache: torch.Tensor, where: torch.Tensor, new: torch.Tensor) -> None:
    """A write that does not show its slots; ``cache`` is [B, H, S, D]."""
    cache.masked_scatter_(where.view(1, 1, S, 1).expand_as(cache), new)


def guarded(run, *args, steps: int = 3):
    torch._dynamo.reset()
    backend = CanaryBackend(CanaryConfig(inner="eager", mode="log"))
    compiled = torch.no_grad()(torch.compile(run, backend=backend))
    for step in range(steps):
        compiled(*args, torch.tensor([step]))
    assert backend.session.violations() == []
    return compiled, backend.session


def told(session) -> list[tuple[str, str, int | None, int]]:
    return [(v.layer, v.half, v.row, v.index) for v in session.violations()]


ORDERS = {"BHSD": (0, 1, 2, 3), "BSHD": (0, 2, 1, 3), "HBSD": (1, 0, 2, 3)}
ATTENTIONS = [fused, by_name, products, einsums, sums, grouped, flexible]


@pytest.mark.parametrize(
    ("order", "attention"),
    [(order, fused) for order in ORDERS] + [("BSHD", attention) for attention in ATTENTIONS[1:]],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_the_slots_of_a_cache_whose_write_is_hidden(order, attention):
    """K and V by neither name nor order: V is written first."""
    order = ORDERS[order]

    def run(q, a, b, pos):
        a, b = a.permute(order), b.permute(order)
        hide(b, torch.arange(S) == pos, q * 2)
        hide(a, torch.arange(S) == pos, q)
        return attention(q, a, b)

    batch = 3
    caches = [torch.zeros(batch, H, S, D).permute(order).contiguous() for _ in range(2)]  # its own inverse
    compiled, session = guarded(run, torch.randn(batch, H, 1, D), *caches)
    assert [(s.layer, s.label) for s in session.plans[0].sites] == [("a/b", "V"), ("a/b", "K")]
    for cache, half in zip(caches, "KV", strict=True):
        cache.permute(order).data[2, 1, 1, 3] += 1
        compiled(torch.randn(batch, H, 1, D), *caches, torch.tensor([3]))
        assert told(session)[-1] == ("a/b", half, 2, 1)
    assert len(told(session)) == 2


@pytest.mark.parametrize("hidden", [False, True], ids=["seen", "hidden"])
@pytest.mark.parametrize("stacked", [False, True], ids=["tuple", "one tensor"])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_cache_of_two_parts_is_one_layer(batch, stacked, hidden):
    def run(q, cache, pos):
        for half, new in ((0, q), (1, q * 2)):
            if hidden:
                hide(cache[half], torch.arange(S) == pos, new)
            else:
                cache[half].index_copy_(2, pos, new)
        return F.scaled_dot_product_attention(q, cache[0], cache[1])

    whole = torch.zeros(2, batch, H, S, D)
    cache = whole if stacked else tuple(whole.unbind(0))
    compiled, session = guarded(run, torch.randn(batch, H, 1, D), cache)
    assert [(s.layer, s.label) for s in session.plans[0].sites] == [("cache", "K"), ("cache", "V")]
    cache[1].data[0, 0, 1, 3] += 1
    compiled(torch.randn(batch, H, 1, D), cache, torch.tensor([3]))
    assert told(session) == [("cache", "V", 0, 1)]


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_another_prompt_for_a_layer_of_two_parts(batch):
    def run(q, cache, pos):
        cache[0].index_copy_(2, pos, q)
        cache[1].index_copy_(2, pos, q * 2)
        return F.scaled_dot_product_attention(q, cache[0], cache[1])

    cache = tuple(torch.zeros(batch, H, S, D) for _ in range(2))
    compiled, session = guarded(run, torch.randn(batch, H, 1, D), cache, steps=4)
    for half in cache:
        half[:, :, :4] = torch.randn(batch, H, 4, D)
    compiled(torch.randn(batch, H, 1, D), cache, torch.tensor([4]))
    assert told(session) == []


@torch.library.custom_op("attention_reads::updated", mutates_args=())
def updated(kv_cache: torch.Tensor, new: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    return kv_cache.index_copy(1, pos, new)


updated.register_fake(lambda kv_cache, new, pos: torch.empty_like(kv_cache))


def test_k_and_v_that_an_op_returns():
    """By what attention does with the op's result: V comes first, and names say nothing."""

    def run(q, caches, pos):
        v, k = updated(caches[0], q * 2, pos), updated(caches[1], q, pos)
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))), [v, k]

    backend = CanaryBackend(CanaryConfig(inner="eager", mode="log"))
    compiled = torch.no_grad()(torch.compile(run, backend=backend))
    caches = [torch.zeros(2, S, H, D) for _ in range(2)]
    for step in range(3):
        _, caches = compiled(torch.randn(2, 1, H, D), caches, torch.tensor([step]))
    assert [(s.label, s.pool, s.slot_axes) for s in backend.session.plans[0].sites] == [
        ("V", "caches[0]", (0, 1)),
        ("K", "caches[1]", (0, 1)),
    ]
    caches[0].data[1, 1] += 1
    compiled(torch.randn(2, 1, H, D), caches, torch.tensor([3]))
    assert told(backend.session) == [("caches[1]/caches[0]", "V", 1, 1)]


def by_index_copy(cache, row, pos, new):
    cache[row].index_copy_(1, pos, new[row])


def by_index(cache, row, pos, new):
    cache[row, :, pos] = new[row]


def by_slice(cache, row, pos, new):
    cache[row : row + 1].index_copy_(2, pos, new[row : row + 1])


def by_index_of_a_turned_row(cache, row, pos, new):
    cache[row].transpose(0, 1)[pos] = new[row].transpose(0, 1)


def rows_apart(q, k, v):
    rows = range(q.shape[0])
    return torch.stack([F.scaled_dot_product_attention(q[r], k[r], v[r]) for r in rows])


@pytest.mark.parametrize("attention", [fused, rows_apart], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "write", [by_index_copy, by_index, by_slice, by_index_of_a_turned_row], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_sequences_that_are_written_one_by_one(batch, write, attention):
    """With a prompt that eager code wrote: each row of it is adopted, and guarded from then on."""

    def run(q, cache, pos):
        for row in range(batch):
            write(cache[0], row, pos + 4, q)
            write(cache[1], row, pos + 4, q * 2)
        return attention(q, cache[0], cache[1])

    cache = [torch.zeros(batch, H, S, D) for _ in range(2)]
    for half in cache:
        half[:, :, :4] = torch.randn(batch, H, 4, D)
    compiled, session = guarded(run, torch.randn(batch, H, 1, D), cache, steps=2)
    sites = session.plans[0].sites
    assert [(s.layer, s.label, s.slot_axes) for s in sites] == [("cache", "K", (0, 2)), ("cache", "V", (0, 2))]
    cache[1].data[batch - 1, 0, 1, 3] += 1
    compiled(torch.randn(batch, H, 1, D), cache, torch.tensor([2]))
    assert told(session) == [("cache", "V", batch - 1, 1)]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("shape", [(2, S, H, D), (2, 3, H, S, D)], ids=["slots", "rows"])
def test_k_and_v_written_at_once(shape, layers):
    """A change that PyTorch's version counter shows, of V alone and of the newest slot, is no legal rewrite."""

    def run(q, caches, pos):
        for kv in caches:
            new = torch.stack([q, q * 2])
            if kv.dim() == 4:
                kv[:, pos] = new[:, 0].transpose(1, 2)
                k, v = (x.transpose(0, 1).unsqueeze(0) for x in (kv[0], kv[1]))
            else:
                kv[:, :, :, pos] = new
                k, v = kv.unbind(0)
            q = F.scaled_dot_product_attention(q, k, v)
        return q

    caches = [torch.zeros(shape) for _ in range(layers)]
    q = torch.randn(1 if len(shape) == 4 else 3, H, 1, D)
    compiled, session = guarded(run, q, caches)
    names = [(f"caches[{i}]", half) for i in range(layers) for half in "KV"]
    assert [(s.layer, s.label) for s in session.plans[0].sites] == names
    half = caches[-1][1]
    (half[2] if half.dim() == 3 else half[1, :, 2]).add_(1)
    compiled(q, caches, torch.tensor([3]))
    assert told(session) == [(f"caches[{layers - 1}]", "V", None if half.dim() == 3 else 1, 2)]
