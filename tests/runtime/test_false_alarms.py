"""What may legally happen to a cache, none of which is a violation."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from gpu_on_cpu import use_gpu_kernels
from torch import nn
from toys import Rig, new_caches, write_at_index, write_by_op, write_in_subgraph, write_rolled, write_where

import kvcanary_fx
from kvcanary_fx import CanaryBackend, CanaryConfig


@pytest.fixture(params=["eager", "aot_eager"])
def rig(request):
    return Rig.build(inner=request.param)


def silent(rig: Rig) -> bool:
    return rig.session.violations() == [] and rig.session.uncovered == []


def test_prefill_and_decode(rig):
    rig.step(5)
    for _ in range(6):
        rig.step()
    assert silent(rig)
    assert rig.session.stats().adopted == 0


def test_prefill_outside_the_graph_is_adopted(rig):
    rig.step(5, guarded=False)
    rig.step()
    rig.step()
    assert silent(rig)
    assert rig.session.stats().adopted == 5 * 2 * 2 * 2  # slots, rows, layers, halves


def test_cropped_where_slots_of_v_are_computed_behind_the_write_of_k():
    """Seen: V's check did not know where its next write goes, and took the tail, zeroed outside, for lost tokens."""

    def layer(q, k, v, kv, pos):
        for new, part in ((k, kv[..., :8]), (v, kv[..., 8:])):
            part.index_put_((torch.arange(2).unsqueeze(1), pos.unsqueeze(0)), new)
        return torch.nn.functional.scaled_dot_product_attention(q, kv[..., :8], kv[..., 8:])

    backend = CanaryBackend(CanaryConfig(inner="eager", mode="log"))
    run, kv = torch.compile(layer, backend=backend), torch.zeros(2, 16, 16)
    with torch.no_grad():
        for n in (0, 1, 2, 3, 4, 5, 3, 4, 5):
            kv[:, n:] = 0
            run(*torch.randn(3, 2, 1, 8), kv, torch.tensor([n]))
    assert backend.session.violations() == []


def test_second_prefill_chunk_outside_the_graph(rig):
    rig.step(4)
    rig.step()
    rig.step(3, guarded=False)
    rig.step()
    rig.step()
    assert silent(rig)


def test_reset_and_start_over(rig):
    for prompt in (5, 3, 7):
        rig.reset()
        rig.step(prompt, guarded=False)
        for _ in range(4):
            rig.step()
    assert silent(rig)


def test_reset_and_compiled_prefill(rig):
    for prompt in (5, 3, 7):
        rig.reset()
        rig.step(prompt)
        for _ in range(4):
            rig.step()
    assert silent(rig)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_reset_then_a_prompt_that_ends_where_the_last_sequence_did(layers):
    rig = Rig.build(layers)
    rig.step(4, guarded=False)
    for _ in range(3):
        rig.step()
    rig.reset()
    rig.step(7, guarded=False)  # the first compiled write continues the row, all bytes before it are new
    rig.step()
    rig.step()
    assert silent(rig)
    assert rig.session.stats().adopted > 0


def test_padded_prompt_outside_that_ends_where_the_last_sequence_did(rig):
    rig.step(4)
    for _ in range(3):
        rig.step()
    rig.reset()
    rig.step(7, guarded=False, positions=(torch.arange(7) - 2).clamp(min=0).expand(2, 7))
    rig.step(positions=torch.full((2, 1), 5))
    assert silent(rig)


def test_prompt_that_shares_most_tokens_with_the_last_one():
    """The first layer's K and V depend on the token alone: they stay, while all layers above change."""
    rig = Rig.build(3)
    tokens = torch.randint(0, 50, (2, 8))
    for first, prompt in ((3, tokens[:, :7]), (4, tokens)):
        prompt[:, 0] = first
        index = torch.arange(prompt.shape[1])
        with torch.no_grad():
            rig.model(prompt, index.expand_as(prompt), index, rig.caches)
        rig.length = prompt.shape[1]
        rig.step()
    assert silent(rig)
    assert rig.session.stats().adopted > 0


def test_two_graphs_that_see_one_cache_in_two_ways():
    def by_head(cache, k, pos):
        cache.index_copy_(2, pos, k)
        return cache.sum()

    def by_position(cache, k, pos):
        turned = cache.transpose(1, 2)
        turned[:, pos] = k.transpose(1, 2)
        return cache.sum()

    def flat(cache, k, pos):
        cache.view(2, 2 * 16, 8)[:, pos] = k[:, 0]  # other slots: heads and positions as one axis
        return cache.sum()

    backend = CanaryBackend(CanaryConfig(inner="eager"))
    runs = [torch.compile(f, backend=backend) for f in (by_head, by_position, flat)]
    cache = torch.zeros(2, 2, 16, 8)
    with torch.no_grad():
        for n in range(12):
            runs[n % 3](cache, torch.randn(2, 2, 1, 8), torch.tensor([n // 3]))
    assert backend.session.violations() == []


def test_same_under_inference_mode_where_tensors_have_no_version():
    with torch.inference_mode():
        rig = Rig.build(2)
        rig.step(4, guarded=False)
        for _ in range(3):
            rig.step()
        rig.reset()
        rig.step(7, guarded=False)
        rig.step()
        rig.step()
    assert silent(rig)


def test_new_cache_in_an_old_graph(rig):
    for _ in range(3):
        rig.caches, rig.length = new_caches(), 0
        rig.step(4, guarded=False)
        rig.step()
        rig.step()
    assert silent(rig)
    assert len(rig.session.plans) <= 2  # dynamic sizes may make a second


def test_new_cache_at_the_address_of_the_old_one(rig):
    addresses = set()
    for _ in range(4):
        rig.step(4)
        rig.step()
        rig.step()
        addresses.add(rig.caches[0][0].data_ptr())
        del rig.caches
        rig.caches, rig.length = new_caches(), 0
    assert silent(rig)


def test_beams_reordered_in_place(rig):
    rig.step(5)
    for order in ([1, 0], [0, 0], [1, 1]):
        rig.step()
        for pair in rig.caches:
            for tensor in pair:
                tensor.copy_(tensor[order])
        rig.step()
    assert silent(rig)


def test_beams_reordered_into_new_tensors(rig):
    rig.step(5)
    for order in ([1, 0], [0, 0]):
        rig.step()
        rig.caches = [tuple(t.index_select(0, torch.tensor(order)) for t in pair) for pair in rig.caches]
        rig.step()
    assert silent(rig)


#: Writes that name their slots, that reach all of them, and that hide them.
WRITES = pytest.mark.parametrize(
    "write", [write_at_index, write_where, write_rolled, write_in_subgraph, write_by_op], ids=lambda w: w.__name__
)
write_by_op.__name__ = "write_by_op"


@WRITES
@pytest.mark.parametrize("layers", [1, 2])
def test_reset_and_beams_whatever_way_the_cache_is_written(layers, write):
    rig = Rig.build(layers, batch=3, slots=32, write=write)
    torch.manual_seed(1)  # no sequence has a token where the one before had it: it may leave the same bytes
    rig.step(4, guarded=False)
    for _ in range(3):
        rig.step()
    for prompt in (lambda: None, lambda: rig.step(7, guarded=False), lambda: rig.step(5)):
        rig.reset()
        prompt()
        rig.step()
        rig.step()
    for order in ([1, 0, 2], [0, 0, 1], [2, 2, 2]):
        for pair in rig.caches:
            for tensor in pair:
                tensor.copy_(tensor[order])
        rig.step()
    assert silent(rig)


def test_reset_of_a_cache_with_a_slot_that_nobody_ever_wrote():
    """A prompt is encoded into a cache with room for one token more, which only other graphs read."""

    def encode(new, past):
        for i, layer in enumerate(past):
            for half, cache in enumerate(layer):
                cache.index_copy_(2, torch.arange(5), new * (i + 1) + half)
        return new.sum()

    def read(past):
        return sum(k.sum() + v.mean() for k, v in past)

    backend = CanaryBackend(CanaryConfig(inner="eager"))
    fill, look = (torch.no_grad()(torch.compile(f, backend=backend)) for f in (encode, read))
    past = [tuple(torch.zeros(2, 2, 6, 8) for _ in "kv") for _ in range(2)]
    fill(torch.randn(2, 2, 5, 8), past)
    look(past)
    for length in (0, 5, 3):
        for tensor in (t for layer in past for t in layer):
            tensor.zero_()
            tensor[:, :, :length] = torch.randn(2, 2, length, 8)
        look(past)
    assert backend.session.violations() == []


@pytest.mark.parametrize("shared", [[1], [0, 3], [0, 1, 4]])
def test_prompt_that_shares_tokens_with_the_last_one_in_a_cache_of_one_layer(shared):
    """A token's K and V in the only layer depend on nothing but the token: they stay where the prompts agree."""
    rig = Rig.build(1)
    tokens = torch.randperm(50)[:16].view(2, 8)
    tokens[1, shared] = tokens[0, shared]
    for prompt, length in zip(tokens, (7, 8), strict=True):  # the step after it continues the row
        index = torch.arange(length)
        with torch.no_grad():
            rig.model(prompt[:length].expand(2, length), index.expand(2, length), index, rig.caches)
        rig.length = length
        rig.step()
    assert silent(rig)


def test_states_swapped_and_reset_in_a_model_with_one_of_them():
    def step(x, ssm_states):
        ssm_states.copy_(ssm_states * 0.5 + x)
        return ssm_states.sum()

    backend = CanaryBackend(CanaryConfig(inner="eager"))
    run = torch.no_grad()(torch.compile(step, backend=backend))
    state = torch.zeros(3, 4, 8)
    for change in (lambda: state.copy_(state[[2, 0, 1]]), state.zero_, lambda: state[1].zero_()):
        run(torch.randn(3, 4, 8), state)
        change()
    run(torch.randn(3, 4, 8), state)
    assert backend.session.violations() == []


def test_cropped_and_continued(rig):
    rig.step(8)
    rig.step()
    rig.step(at=4)
    rig.step()
    rig.step(3, at=2)
    rig.step()
    assert silent(rig)


def test_cropped_by_zeroing_the_tail_outside(rig):
    rig.step(8)
    for pair in rig.caches:
        for tensor in pair:
            tensor[:, :, 5:] = 0
    rig.step(at=5)
    rig.step()
    assert silent(rig)


def test_what_a_crop_left_is_cleared_when_its_place_is_reached():
    """Seen: with one layer in a graph, the one token that was left looked like a fault."""
    rig = Rig.build(1, mode="log")
    rig.step(6)
    rig.step(4, at=0)
    rig.step()
    for half in rig.caches[0]:
        half[:, :, 5:] = 0
    rig.step()
    assert silent(rig)


def write_row_by_row(cache: torch.Tensor, index: torch.Tensor, new: torch.Tensor) -> None:
    for row in range(cache.shape[0]):
        cache[row].index_copy_(1, index, new[row])


@pytest.mark.parametrize("layers", [1, 2])
def test_prompts_outside_of_sequences_that_are_written_one_by_one(layers):
    """Seen: when the first sequence was written, nothing said where the others go on, and they were checked then."""
    rig = Rig.build(layers, batch=3, write=write_row_by_row, mode="log")
    rig.step(4)
    rig.step()
    for prompt in (7, 2):  # a longer one, and a shorter one whose tail is zeroed
        rig.step(prompt, guarded=False, at=0)
        for half in (half for pair in rig.caches for half in pair):
            half[:, :, prompt:] = 0
        rig.step()
        rig.step()
    assert silent(rig)
    rig.flip(layers - 1, 1, row=2, position=1)
    rig.step()
    assert [(v.check, v.half, v.row, v.index) for v in rig.session.violations()] == [("content", "V", 2, 1)]


def write_onto_zeros(cache: torch.Tensor, index: torch.Tensor, new: torch.Tensor) -> None:
    cache.index_fill_(2, index, 0)
    cache.index_add_(2, index, new)


@pytest.mark.parametrize("layers", [1, 2])
def test_slot_that_is_cleared_and_given_the_token_that_it_had(layers):
    """Seen: only the clearing was recorded, since the second write left the bytes from before the step."""
    rig = Rig.build(layers, write=write_onto_zeros, mode="log")
    torch.manual_seed(1)
    rig.step(4)
    torch.manual_seed(1)
    rig.step(4, at=0)
    rig.step()
    assert silent(rig)


def test_rejected_drafts_are_overwritten(rig):
    rig.step(5)
    for accepted in (1, 3, 2):
        start = rig.length
        rig.step(4)
        rig.length = start + accepted
    assert silent(rig)


def test_batch_of_different_lengths_with_left_padding(rig):
    positions = torch.tensor([[1, 1, 0, 1, 2], [0, 1, 2, 3, 4]])  # as Hugging Face numbers padded tokens
    rig.step(5, positions=positions)
    for n in range(4):
        rig.step(positions=torch.tensor([[3 + n], [5 + n]]))
    assert silent(rig)


@pytest.mark.parametrize("padding", [1, 2])  # Hugging Face fills with 1; repeating the last position is as common
def test_positions_in_right_padding(rig, padding):
    rig.step(5, positions=torch.tensor([[0, 1, 2, padding, padding], [0, 1, 2, 3, 4]]))
    for n in range(3):
        rig.step(positions=torch.tensor([[3 + n], [5 + n]]))
    assert silent(rig)


def test_two_caches_take_turns(rig):
    caches = [new_caches(), new_caches()]
    for cache in caches:
        rig.caches, rig.length = cache, 0
        rig.step(4)
    for n in range(4):
        for cache in caches:
            rig.caches, rig.length = cache, 4 + n
            rig.step()
    assert silent(rig)


def test_two_models_share_a_session():
    backend = CanaryBackend(CanaryConfig(inner="eager"))
    rigs = [Rig.build(backend=backend), Rig.build(3, backend=backend)]
    for rig in rigs:
        rig.step(4)
    for _ in range(4):
        for rig in rigs:
            rig.step()
    assert silent(rigs[0])


def test_two_threads_with_caches_of_their_own():
    backend = CanaryBackend(CanaryConfig(inner="eager"))
    failures = []

    def work():
        try:
            rig = Rig.build(backend=backend)
            rig.step(4)
            for _ in range(12):
                rig.step()
        except Exception as e:
            failures.append(e)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert backend.session.violations() == []
    assert backend.session.uncovered == []


@pytest.mark.parametrize("at", [0, 1, 2])
def test_graph_break_between_layers(at):
    rig = Rig.build(3, break_at=at)
    rig.step(4)
    for _ in range(4):
        rig.step()
    assert silent(rig)
    assert len(rig.session.registry.halves()) == 6
    assert rig.session.stats().recorded == 6 * 2 * (4 + 4)


def test_reset_of_one_tensor_whose_layers_are_compiled_one_by_one():
    """Seen: the first layer's graph took note that something had written to the tensor, and no other was told."""
    rig = Rig.build(3, mode="log")
    rig.caches = list(torch.zeros(3, 2, 2, 2, 24, 8))
    for layer in rig.model.layers:
        layer.compile(backend=rig.backend)
    for _ in range(2):
        rig.step(3, guarded=False)
        rig.step(guarded=False)
        rig.reset()
    assert silent(rig)
    assert rig.session.stats().adopted > 0
    rig.step(3, guarded=False)
    rig.caches[2][0].data[1, 1, 1, 3] += 1
    rig.step(guarded=False)
    assert [(v.row, v.index) for v in rig.session.violations()] == [(1, 1)]


class LayerOfAll(torch.nn.Module):
    """A layer that gets the caches of all layers, and writes all of its own."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number

    def forward(self, x, start, mask, keys, values):
        own = keys[self.number], values[self.number]
        for cache in own:
            cache.copy_(torch.cat((cache[:, :, :start], x, cache[:, :, start + 2 :]), 2))
        return x + F.scaled_dot_product_attention(x, *own, mask)


def test_cleared_crop_of_layers_compiled_one_by_one_that_get_the_caches_of_all():
    """The first layer's graph finds it in all layers, before the others' writes show where the sequences end."""
    backend = CanaryBackend(CanaryConfig(mode="log", inner="eager"))
    layers = [LayerOfAll(0), LayerOfAll(1)]
    for layer in layers:
        layer.compile(backend=backend)
    keys, values = (torch.zeros(2, 2, 2, 12, 8) for _ in range(2))

    def step(start: int) -> list[tuple[int, int]]:
        x, mask = torch.randn(2, 2, 2, 8), torch.arange(12) <= start + torch.arange(2)[:, None]
        with torch.no_grad():
            for layer in layers:
                x = layer(x, start, mask, keys, values)
        return [(v.row, v.slot) for v in backend.session.violations()]

    step(0)
    step(2)
    for half in keys, values:
        half[..., 3:, :] = 0
    assert step(3) == []
    values.data[1, 1, 1, 2] += 1
    assert step(5) == [(1, 14)]


@pytest.mark.parametrize("change", ["reset", "prompt", "crop", "reorder"])
def test_change_outside_of_graphs_that_hold_one_half_each(change):
    """Seen: one half says nothing alone, and the graph that has the other one was not asked."""

    def layer(q, kc, vc, pos):
        kc.index_copy_(2, pos, q)
        torch._dynamo.graph_break()
        vc.index_copy_(2, pos, q * 2)
        return torch.nn.functional.scaled_dot_product_attention(q, kc, vc)

    backend = CanaryBackend(CanaryConfig(inner="eager", mode="log"))
    run, caches = torch.compile(layer, backend=backend), [torch.zeros(2, 2, 16, 8) for _ in range(2)]
    with torch.no_grad():
        for n in range(4):
            run(torch.randn(2, 2, 1, 8), *caches, torch.tensor([n]))
        for cache in caches:
            if change == "reset":
                cache.zero_()
            elif change == "prompt":
                cache[:, :, :4] = torch.randn(2, 2, 4, 8)
            elif change == "crop":
                cache[:, :, 2:] = 0
            else:
                cache.copy_(cache.flip(0))
        start = {"reset": 0, "crop": 2}.get(change, 4)
        for n in (start, start + 1):
            run(torch.randn(2, 2, 1, 8), *caches, torch.tensor([n]))
        assert backend.session.violations() == []
        caches[1][1, 1, 1, 3] += 1  # V alone, by an op that counts
        run(torch.randn(2, 2, 1, 8), *caches, torch.tensor([start + 2]))
    assert [(v.half, v.row, v.index) for v in backend.session.violations()] == [("V", 1, 1)]


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "no rows"])
def test_short_prompt_outside_of_layers_whose_graphs_hold_one_half_each(rows):
    """Seen: one half alone wants two slots and half of the row, though all layers show the prompt."""

    def layer(x, kc, vc, pos):
        kc.index_copy_(axis, pos, x)
        torch._dynamo.graph_break()
        vc.index_copy_(axis, pos, x * 2)
        return x + torch.tanh(kc.mean(axis, True) + vc.mean(axis, True))

    backend, axis = CanaryBackend(CanaryConfig(inner="eager", mode="log")), 1 if rows else 0
    run = torch.compile(layer, backend=backend)
    caches = torch.zeros(3, 2, *((2, 8) if rows else (8, 2)), 4)
    token = (2, 1, 4) if rows else (1, 2, 4)

    def step(n: int) -> None:
        x = torch.randn(token)
        for cache in caches:
            x = run(x, *cache, torch.tensor([n]))

    with torch.no_grad():
        for n in range(4):
            step(n)
        if rows:
            caches[:, :, :, 3] = torch.randn(3, 2, 2, 4)  # the newest token, anew
        else:
            caches[:, :, 0] = torch.randn(3, 2, 2, 4)
        step(4)
        assert backend.session.violations() == []
        caches[2].narrow(axis + 1, 3, 1).add_(1)  # a stray store to K and V of one layer, by an op that counts
        step(5)
    assert {(v.pool, v.slot % 8) for v in backend.session.violations()} == {("kc #3", 3), ("vc #3", 3)}


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "no rows"])
def test_prompt_outside_of_a_graph_with_v_of_one_layer_and_k_of_the_next(rows):
    """Seen: V of the first layer was asked to change with every token, though it depends on the token alone."""

    def model(x, caches, pos):
        (k0, v0), (k1, v1), (k2, v2) = caches
        k0.index_copy_(axis, pos, x)
        torch._dynamo.graph_break()
        v0.index_copy_(axis, pos, x * 2)
        x = x + torch.tanh(k0.mean(axis, True) + v0.mean(axis, True))
        k1.index_copy_(axis, pos, x)
        torch._dynamo.graph_break()
        v1.index_copy_(axis, pos, x * 2)
        x = x + torch.tanh(k1.mean(axis, True) + v1.mean(axis, True))
        k2.index_copy_(axis, pos, x)
        torch._dynamo.graph_break()
        v2.index_copy_(axis, pos, x * 2)
        return x + torch.tanh(k2.mean(axis, True) + v2.mean(axis, True))

    backend, axis = CanaryBackend(CanaryConfig(inner="eager", mode="log")), 1 if rows else 0
    run = torch.compile(model, backend=backend)
    caches = [tuple(torch.zeros((2, 8, 4) if rows else (8, 2, 4)) for _ in range(2)) for _ in range(3)]

    def step(n: int) -> None:
        run(torch.randn((2, 1, 4) if rows else (1, 2, 4)), caches, torch.tensor([n]))

    with torch.no_grad():
        for n in range(4):
            step(n)
        for n, half in enumerate(half for pair in caches for half in pair):
            first = 2 if n < 2 else 1  # the second token is the same, and its K and V in the first layer
            half.narrow(axis, first, 4 - first).normal_()
        step(4)
        assert backend.session.violations() == []
        for half in caches[1]:
            half.narrow(axis, 2, 1).add_(1)  # a stray store to K and V of one layer, by an op that counts
        step(5)
    assert {(v.pool, v.slot % 8) for v in backend.session.violations()} == {("k1", 2), ("v1", 2)}


def test_prompt_outside_of_two_layers_whose_graphs_write_k_and_v_into_one_tensor():
    """Seen: the two tensors were taken for K and V of one layer, so both were asked to change with every token."""

    def layer(x, pool, pos, second):
        pool.index_copy_(1, pos, torch.cat((x, x * (2 if second else 3)), -1))
        torch._dynamo.graph_break()
        k, v = pool.chunk(2, -1)
        return x + torch.nn.functional.scaled_dot_product_attention(x, k, v)

    backend = CanaryBackend(CanaryConfig(inner="eager", mode="log"))
    run, pools = torch.compile(layer, backend=backend), torch.zeros(2, 2, 8, 8)

    def step(n: int) -> None:
        x = torch.randn(2, 1, 4)
        for number, pool in enumerate(pools):
            x = run(x, pool, torch.tensor([n]), number == 1)

    with torch.no_grad():
        for n in range(4):
            step(n)
        kept = pools[0, :, 1].clone()
        pools[:, :, :4].normal_()
        pools[0, :, 1] = kept  # the same token
        step(4)
        assert backend.session.violations() == []
        pools[1, 1, 2] += 1
        step(5)
    assert [(v.row, v.index) for v in backend.session.violations()] == [(1, 2)]


def test_prompt_over_a_longer_sequence_where_all_of_the_cache_is_rewritten():
    """Seen: what lies behind the next write was asked, too, though it is of no sequence any more."""
    rig = Rig.build(1, write=write_where, mode="log")
    rig.step(8)
    rig.step(2, guarded=False, at=0)
    rig.step()
    assert silent(rig)
    rig.flip(half=1, by_op=True)
    rig.step()
    assert rig.found() == [("content", "layers.0", "V", 0, 1)]


def test_a_latent_and_its_rope_part_in_layers_compiled_one_by_one():
    """Seen: bytes of one tensor were taken for those of the other, and what was known of them dropped."""

    def layer(q, latent, rope, pos):
        latent.index_copy_(1, pos, q)
        rope.index_copy_(1, pos, q[..., :4])
        return q + (latent.sum() + rope.sum())

    backend = CanaryBackend(CanaryConfig(inner="eager", mode="log"))
    run = torch.compile(layer, backend=backend)
    latents, ropes = torch.zeros(2, 1, 12, 8), torch.zeros(2, 1, 12, 4)
    with torch.no_grad():
        for n in (0, 1, 2, 0, 1, 2):
            if n == 0:
                latents.zero_(), ropes.zero_()
            x = torch.randn(1, 1, 8)
            for latent, rope in zip(latents, ropes, strict=True):
                x = run(x, latent, rope, torch.tensor([n]))
        assert backend.session.violations() == []
        for cache in (latents, ropes):
            cache.data[0, 0, 1, 3] += 1
        run(x, latents[0], ropes[0], torch.tensor([3]))
    assert [(v.pool, v.index) for v in backend.session.violations()] == [("latent", 1), ("rope", 1)]


@pytest.mark.parametrize("pair", [True, False], ids=["K and V", "one of them"])
def test_op_that_hides_where_it_writes_in_the_window_that_it_is_given(pair):
    """Seen: the window was taken for the cache, which then lay at another place in each step."""

    def layer(k, v, cache, at):
        windows = [half.narrow(2, at, 1) for half in cache]
        if pair:
            torch._foreach_copy_(windows, [k, v])
        else:
            for window, new in zip(windows, (k, v), strict=True):
                torch._foreach_copy_([window], [new])
        return torch.nn.functional.scaled_dot_product_attention(k, cache[0], cache[1])

    backend = CanaryBackend(CanaryConfig(inner="eager", mode="log"))
    run = torch.compile(layer, backend=backend)
    cache = [torch.zeros(2, 2, 16, 8) for _ in range(2)]
    with torch.no_grad():
        for n in range(4):
            run(*torch.randn(2, 2, 2, 1, 8), cache, n)
        assert backend.session.violations() == []
        cache[1].data[1, 1, 0, 3] += 1
        run(*torch.randn(2, 2, 2, 1, 8), cache, 4)
    assert [(v.half, v.row, v.index) for v in backend.session.violations()] == [("V", 1, 0)]


def test_graph_break_between_write_and_attention():
    def layer(k, v, kc, vc, pos):
        kc.index_copy_(2, pos, k)
        torch._dynamo.graph_break()
        vc.index_copy_(2, pos, v)
        torch._dynamo.graph_break()
        return torch.nn.functional.scaled_dot_product_attention(k, kc, vc)

    backend = CanaryBackend(CanaryConfig(inner="eager"))
    run = torch.compile(layer, backend=backend)
    kc, vc = torch.zeros(2, 2, 16, 8), torch.zeros(2, 2, 16, 8)
    with torch.no_grad():
        for n in range(5):
            run(torch.randn(2, 2, 1, 8), torch.randn(2, 2, 1, 8), kc, vc, torch.tensor([n]))
    assert backend.session.violations() == []
    assert [[s.pool for s in p.sites] for p in backend.session.plans if p.sites] == [["kc"], ["vc"], ["kc", "vc"]]


def test_recompiled_for_new_shapes():
    rig = Rig.build(compile_options={"dynamic": False})
    for n in (2, 3, 4, 1, 2, 3):
        rig.step(n)
    assert silent(rig)
    assert len(rig.session.plans) == 4


def test_dynamic_shapes():
    rig = Rig.build(compile_options={"dynamic": True})
    for n in (2, 3, 4, 1, 2, 3):
        rig.step(n)
    assert silent(rig)


def test_exception_inside_a_forward_leaves_the_session_usable(rig):
    rig.step(4)
    with pytest.raises((IndexError, RuntimeError, kvcanary_fx.KVCacheViolation)):
        rig.step(at=100)
    rig.length = 4
    rig.step()
    rig.step()
    assert [v.check for v in rig.session.violations()] == ["bounds"] * len(rig.session.violations())


def test_training_mode_with_gradients():
    rig = Rig.build()
    ids, index = torch.zeros(2, 3, dtype=torch.int64), torch.arange(3)
    plain = [tuple(t.clone() for t in pair) for pair in rig.caches]
    loss = rig.guarded(ids, index.expand(2, 3), index, rig.caches).sum()
    expected = rig.model(ids, index.expand(2, 3), index, plain).sum()
    loss.backward()
    assert torch.allclose(loss, expected)
    assert rig.session.violations() == []


@pytest.mark.parametrize("fraction", ["1/2", "1/3", "1/7"])
def test_checking_a_fraction_of_the_slots(fraction):
    rig = Rig.build(verify_fraction=fraction)
    for prompt in (5, 6):
        rig.reset()
        rig.step(prompt, guarded=False)
        for _ in range(9):
            rig.step()
    assert silent(rig)


def test_overwritten_at_the_end_of_a_ring():
    rig = Rig.build(slots=6)
    rig.step(4)
    for n in range(4, 20):
        rig.step(at=n % 6, positions=torch.full((2, 1), n))
    assert silent(rig)


def test_padding_sent_to_slot_zero_of_a_pool_without_rows():
    def write(pool, k, slot):
        pool.index_copy_(0, slot, k)
        return pool.sum()

    backend = CanaryBackend(CanaryConfig(inner="eager"))
    run = torch.compile(write, backend=backend)
    pool = torch.zeros(12, 2, 8)
    with torch.no_grad():
        for n in range(1, 5):
            run(pool, torch.randn(4, 2, 8), torch.tensor([0, n, 0, n + 6]))
    assert backend.session.violations() == []


def test_slot_rewritten_by_a_new_request_outside_the_graph():
    def layer(pools, k, slot):
        for i, pool in enumerate(pools):
            pool[0][slot] = k + i
            pool[1][slot] = k - i
        return sum(p.sum() for p in pools)

    backend = CanaryBackend(CanaryConfig(inner="eager"))
    run = torch.compile(layer, backend=backend)
    pools = [torch.zeros(2, 12, 2, 8) for _ in range(3)]
    with torch.no_grad():
        run(pools, torch.randn(3, 2, 8), torch.tensor([1, 2, 3]))
        layer(pools, torch.randn(2, 2, 8), torch.tensor([2, 7]))
        run(pools, torch.randn(1, 2, 8), torch.tensor([4]))
    assert backend.session.violations() == []
    assert backend.session.stats().adopted > 0


@pytest.mark.parametrize("capacity", [3, 20, 50])
def test_legal_rewrite_larger_than_the_ring(capacity):
    rig = Rig.build(3, ring_capacity=capacity)
    rig.step(4, guarded=False)
    for _ in range(3):
        rig.step()
    rig.reset()
    rig.step(7, guarded=False)
    rig.step()
    rig.step()
    assert silent(rig)
    assert rig.session.stats().violations == 0


@pytest.mark.parametrize("inner", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_write_that_casts_to_the_dtype_of_the_cache(dtype, inner):
    """Inductor rounds once, from float32, where eager PyTorch rounds to bf16 first."""

    def layer(cache, x, w, start):
        cache[:, :, start : start + x.shape[2]] = (x * w).sin() * 1.37
        return cache.float().sum()

    backend = CanaryBackend(CanaryConfig(inner=inner, mode="log"))
    run = torch.compile(layer, backend=backend)
    cache = torch.zeros(2, 2, 64, 64, dtype=dtype)
    with torch.no_grad():
        for start in (0, 16, 32):
            run(cache, *torch.randn(2, 2, 2, 16, 64, dtype=torch.bfloat16), start)
    assert backend.session.violations() == []
    assert all(site.has_operand for plan in backend.session.plans for site in plan.sites)


@torch.library.custom_op("test_false_alarms::store_scaled", mutates_args=("k_pool",))
def store_scaled(k: torch.Tensor, k_pool: torch.Tensor, slots: torch.Tensor, scale: float) -> None:
    k_pool[slots] = (k / scale).to(k_pool.dtype)


@store_scaled.register_fake
def _(k, k_pool, slots, scale):
    return None


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_custom_op_that_scales_as_it_casts(inner):
    def layer(k_pool, k, slots):
        torch.ops.test_false_alarms.store_scaled(k, k_pool, slots, 0.25)
        return k_pool.float().sum()

    backend = CanaryBackend(CanaryConfig(inner=inner, mode="log"))
    run = torch.compile(layer, backend=backend)
    pool = torch.zeros(12, 2, 8, dtype=torch.float8_e4m3fn)
    with torch.no_grad():
        for step in range(3):
            run(pool, torch.randn(2, 2, 8, dtype=torch.bfloat16), torch.tensor([3 * step, 3 * step + 1]))
    assert backend.session.violations() == []
    assert "its writes show no operand in the cache's dtype" in backend.session.summary()
    pool.data.view(torch.uint8)[4, 1, 2] ^= 1
    with torch.no_grad():
        run(pool, torch.randn(1, 2, 8, dtype=torch.bfloat16), torch.tensor([9]))
    assert [(v.check, v.slot) for v in backend.session.violations()] == [("content", 4)]


class OwnCaches(nn.Module):
    """A layer whose caches are buffers, and which gives logits for each token."""

    def __init__(self):
        super().__init__()
        self.embed, self.qkv = nn.Embedding(50, 16), nn.Linear(16, 48)
        self.register_buffer("k_cache", torch.zeros(2, 2, 32, 8))
        self.register_buffer("v_cache", torch.zeros(2, 2, 32, 8))

    def forward(self, ids, pos):
        q, k, v = self.qkv(self.embed(ids)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        self.k_cache[:, :, pos] = k
        self.v_cache[:, :, pos] = v
        mask = torch.arange(32) <= pos.unsqueeze(1)
        return F.scaled_dot_product_attention(q, self.k_cache, self.v_cache, attn_mask=mask)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_steps_without_tokens(monkeypatch, kernels):
    """Seen: such a step raised IndexError in our op, where the graph shows tokens."""
    if kernels == "triton":
        use_gpu_kernels(monkeypatch.setattr)
    model, backend = OwnCaches(), CanaryBackend(CanaryConfig(inner="eager", mode="log"))
    run, none = torch.compile(model, backend=backend), torch.zeros(2, 0, dtype=torch.int64)
    with torch.no_grad():
        run(torch.zeros(2, 5, dtype=torch.int64), torch.arange(5))
        for n in range(5, 9):
            assert run(none, torch.arange(n, n)).shape == (2, 2, 0, 8)
            run(torch.full((2, 1), n), torch.tensor([n]))
        stats = backend.session.stats()
        assert (stats.violations, stats.adopted) == (0, 0)
        model.k_cache.data.view(torch.int32)[1, 0, 3, 2] ^= 4
        run(none, torch.arange(9, 9))
    assert [(v.half, v.row, v.index) for v in backend.session.violations()] == [("K", 1, 3)]
