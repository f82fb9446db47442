"""Caches that a model returns instead of writing: what it returns is what the next call is given, and is guarded so."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kvcanary_fx import CanaryBackend, CanaryConfig, KVCacheViolation

B, H, S, D = 2, 2, 12, 8


@torch.library.custom_op("returned_caches::update", mutates_args=())
def update(cache: torch.Tensor, new: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    return cache.index_copy(2, pos, new)


@torch.library.custom_op("returned_caches::update_both", mutates_args=())
def update_both(
    kc: torch.Tensor, vc: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return kc.index_copy(2, pos, k), vc.index_copy(2, pos, v)


update.register_fake(lambda cache, new, pos: torch.empty_like(cache))
update_both.register_fake(lambda kc, vc, k, v, pos: (torch.empty_like(kc), torch.empty_like(vc)))


def index_copy(cache, new, pos):
    return torch.index_copy(cache, 2, pos, new)


def scatter(cache, new, pos):
    return cache.scatter(2, pos.view(1, 1, -1, 1).expand_as(new), new)


def where(cache, new, pos):
    spread = torch.zeros_like(cache).index_copy(2, pos, new)
    mask = (torch.arange(S).view(S, 1) == pos).any(1)
    return torch.where(mask.view(1, 1, S, 1), spread, cache)


def clone_and_write(cache, new, pos):
    cache = cache.clone()
    cache[:, :, pos] = new
    return cache


def clone_and_write_through_a_view(cache, new, pos):
    cache = cache.clone()
    cache.transpose(1, 2)[:, pos] = new.transpose(1, 2)
    return cache


def update_and_write(cache, new, pos):
    cache = torch.index_copy(cache, 2, pos, new)
    cache[:, :, S - 1] = 0.5  # a sink that is written each time
    return cache


STYLES = {
    "index_copy": index_copy,
    "scatter": scatter,
    "where": where,
    "clone_and_write": clone_and_write,
    "clone_and_write_through_a_view": clone_and_write_through_a_view,
    "update_and_write": update_and_write,
    "custom_op": update,
    "custom_op_of_both": update_both,
}


def attention(style):
    def forward(q, k, v, kc, vc, pos):
        if style is update_both:
            kc, vc = update_both(kc, vc, k, v, pos)
        else:
            kc, vc = style(kc, k, pos), style(vc, v, pos)
        return F.scaled_dot_product_attention(q, kc, vc), kc, vc

    return forward


class Chain:
    """Calls of one compiled model, each with the caches that the last one returned, beside the plain model."""

    def __init__(self, forward, **settings):
        self.forward = forward
        self.backend = CanaryBackend(CanaryConfig(**{"inner": "eager", **settings}))
        self.run = torch.compile(forward, backend=self.backend, dynamic=False)
        self.start()

    def start(self) -> None:
        self.caches, self.length = (torch.zeros(B, H, S, D), torch.zeros(B, H, S, D)), 0

    def step(self, tokens: int = 1) -> None:
        given = (*torch.randn(3, B, H, tokens, D), *self.caches, torch.arange(self.length, self.length + tokens))
        with torch.no_grad():
            got, expected = self.run(*given), self.forward(*given)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        self.caches, self.length = got[1:], self.length + tokens


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("style", STYLES)
def test_returned_caches_are_guarded_between_calls(style, inner):
    chain = Chain(attention(STYLES[style]), inner=inner)
    chain.step(3)
    after_prefill = chain.caches
    for _ in range(3):
        chain.step()
    chain.caches, chain.length = after_prefill, 3  # the same prompt, continued another way
    chain.step()
    chain.step()
    assert [(s.label, s.slot_axes, s.output) for s in chain.backend.session.plans[0].sites] == [
        ("K", (0, 2), 1),
        ("V", (0, 2), 2),
    ]
    chain.caches[1].data[1, 1, 2, 3] += 1
    with pytest.raises(KVCacheViolation) as caught:
        chain.step()
    assert [(v.check, v.half, v.row, v.index) for v in caught.value.violations] == [("content", "V", 1, 2)]


@pytest.mark.parametrize(("axis", "slot_axes"), [(0, (0,)), (2, (0, 2))])
def test_a_mask_that_is_expanded_shows_which_axis_counts_tokens(axis, slot_axes):
    shape = [B, H, S, D] if axis else [S, B, H, D]

    def update(new, keys, pos):
        mask = (torch.arange(S) == pos).view([-1 if a == axis else 1 for a in range(4)]).expand(shape)
        return torch.where(mask, new, keys)

    backend = CanaryBackend(CanaryConfig(inner="eager"))
    torch.compile(update, backend=backend)(torch.randn(shape), torch.zeros(shape), torch.tensor(1))
    assert [site.slot_axes for site in backend.session.plans[0].sites] == [slot_axes]


@pytest.mark.slow
def test_returned_caches_under_inductor():
    chain = Chain(attention(index_copy), inner="inductor")
    chain.step(3)
    chain.step()
    chain.caches[0].data[0, 1, 2, 3] += 1
    with pytest.raises(KVCacheViolation) as caught:
        chain.step()
    assert [(v.check, v.half, v.row, v.index) for v in caught.value.violations] == [("content", "K", 0, 2)]


def test_update_that_loses_a_slot_is_found_by_the_next_call():
    """An update whose slots are known may change no other: a wrong copy is no write."""

    def lossy(gm, _):
        def run(*args):
            out = gm.forward(*args)
            if any(a.shape == (B, H, 1, D) for a in args):
                out[1].data[1, 0, 0] = 0
            return out

        return run

    chain = Chain(attention(index_copy), inner=lossy)
    with torch.no_grad():
        caches = chain.caches
        for position, tokens in ((0, 3), (3, 1)):
            pos = torch.arange(position, position + tokens)
            _, *caches = chain.run(*torch.randn(3, B, H, tokens, D), *caches, pos)
        with pytest.raises(KVCacheViolation) as caught:
            chain.run(*torch.randn(3, B, H, 1, D), *caches, torch.tensor([4]))
    assert [(v.check, v.half, v.row, v.index) for v in caught.value.violations] == [("content", "K", 1, 0)]


def test_operand_and_bounds_are_checked_where_the_update_shows_its_slots():
    chain = Chain(attention(index_copy))
    chain.step(3)
    chain.length = S
    with pytest.raises(KVCacheViolation) as caught:
        chain.step()
    assert {v.check for v in caught.value.violations} == {"bounds"}
    summary = chain.backend.session.summary()
    assert "index_copy, returned for the next call" in summary
    assert "operand" not in summary.partition("graph 0/0")[2]


def test_changes_by_torch_between_two_calls_are_adopted_and_a_new_cache_starts_anew():
    chain = Chain(attention(index_copy))
    for _ in range(2):
        chain.step(3)
        chain.step()
        for cache in chain.caches:
            cache.zero_()
        chain.length = 0
        chain.step(2)
        chain.start()
    assert chain.backend.session.violations() == []


def test_one_cache_may_be_returned_and_written_in_turn():
    chain = Chain(attention(index_copy))

    def in_place(q, k, v, kc, vc, pos):
        kc.index_copy_(2, pos, k)
        vc.index_copy_(2, pos, v)
        return F.scaled_dot_product_attention(q, kc, vc)

    write = torch.compile(in_place, backend=chain.backend, dynamic=False)
    chain.step(3)
    for _ in range(3):
        chain.step()
        with torch.no_grad():
            write(*torch.randn(3, B, H, 1, D), *chain.caches, torch.tensor([1]))
    assert chain.backend.session.violations() == []


def test_inference_mode_may_come_and_go():
    chain = Chain(attention(index_copy))
    for inside in (True, False, True):
        with torch.inference_mode(inside):
            chain.start()
            chain.step(3)
            chain.step()
            chain.step()
    assert chain.backend.session.violations() == []


class Attributes(nn.Module):
    """Replaces its buffers and a list's entries."""

    def __init__(self):
        super().__init__()
        self.register_buffer("k_cache", torch.zeros(B, H, S, D))
        self.layers = [torch.zeros(B, H, S, D)]

    def forward(self, k, pos):
        self.k_cache = index_copy(self.k_cache, k, pos)
        self.layers[0] = self.layers[0].index_copy(2, pos, k)
        return (self.k_cache * self.layers[0]).sum()


@pytest.mark.parametrize("name", ["k_cache", "layers[0]"])
def test_caches_in_attributes_and_lists(name):
    model, backend = Attributes(), CanaryBackend(CanaryConfig(inner="eager"))
    run = torch.compile(model, backend=backend)
    with torch.no_grad():
        for position in range(3):
            run(torch.randn(B, H, 1, D), torch.tensor([position]))
        cache = model.k_cache if name == "k_cache" else model.layers[0]
        cache.data[0, 1, 1, 3] += 1
        with pytest.raises(KVCacheViolation) as caught:
            run(torch.randn(B, H, 1, D), torch.tensor([3]))
    assert [(v.check, v.pool, v.row, v.index) for v in caught.value.violations] == [("content", name, 0, 1)]


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_a_token_changed_in_one_of_several_layers_that_share_a_graph(damaged):
    """Seen: one working shadow served all layers, so that what one of them showed looked like a prompt in all."""

    def layer(x, kc, vc, pos):
        kc, vc = kc.index_copy(0, pos, x), vc.index_copy(0, pos, x + 1)
        return x + torch.tanh(kc.mean(0, True) + vc.mean(0, True)), kc, vc

    backend = CanaryBackend(CanaryConfig(inner="eager", mode="log"))
    run = torch.no_grad()(torch.compile(layer, backend=backend, fullgraph=True))
    caches = [(torch.zeros(S, H, D), torch.zeros(S, H, D)) for _ in range(3)]

    def step(position: int) -> None:
        x = torch.randn(1, H, D)
        for n, (keys, values) in enumerate(caches):
            x, *caches[n] = run(x, keys, values, torch.tensor([position]))

    for position in range(4):
        step(position)
    for half in (half for pair in caches for half in pair):  # a prompt from outside, in all layers
        half[:4] = torch.randn(4, H, D)
    step(4)
    assert backend.session.violations() == []
    for half in caches[damaged]:
        half[1] = half[3]  # a stray copy of K and V, by an op that counts
    step(5)
    number = f" #{damaged + 1}" if damaged else ""
    told = [(v.pool, v.half, v.slot) for v in backend.session.violations()]
    assert told == [("kc" + number, "K", 1), ("vc" + number, "V", 1)]


def test_threads_have_chains_of_their_own():
    backend = CanaryBackend(CanaryConfig(inner="eager"))
    first = Chain(attention(index_copy))
    run = first.run = torch.compile(first.forward, backend=backend, dynamic=False)
    first.step(2)
    first.step()

    def work(number: int) -> None:
        chain = Chain(first.forward)
        chain.run = run
        chain.step(2)
        for _ in range(8):
            chain.step()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    assert backend.session.violations() == []
    assert backend.session.stats().adopted == 0


def test_copies_of_what_was_returned_are_told(caplog):
    chain = Chain(attention(index_copy))
    with caplog.at_level(logging.WARNING, "kvcanary"):
        chain.step(2)
        for _ in range(4):
            chain.step()
        assert "pass on the tensor" not in caplog.text
        for _ in range(4):
            chain.caches = tuple(c.clone() for c in chain.caches)
            chain.step()
    told = [r.getMessage() for r in caplog.records if "pass on the tensor" in r.getMessage()]
    assert len(told) == 2


def test_layers_that_return_their_activations_have_no_cache():
    """The same shapes as a cache that is replaced, from call to call the same tensor, and nobody's cache."""

    def layer(x, residual):
        residual = residual + x
        return torch.relu(residual).contiguous(), residual

    backend = CanaryBackend(CanaryConfig(inner="eager"))
    run, x = torch.compile(layer, backend=backend), (torch.randn(B, S, D), torch.zeros(B, S, D))
    with torch.no_grad():
        for _ in range(3):
            x = run(*x)
    assert [(plan.sites, plan.unguarded) for plan in backend.session.plans] == [([], [])]
