"""What must be found: the step it happens, with layer, half, row and position, under every circumstance."""

from __future__ import annotations

import copy

import pytest
import torch
from toys import (
    HEAD_DIM,
    HEADS,
    Rig,
    new_caches,
    write_by_op,
    write_in_subgraph,
    write_mapped,
    write_rolled,
    write_where,
)

import kvcanary_fx
from kvcanary_fx import CanaryBackend, CanaryConfig, KVCacheViolation


def content(layer: int, half: str, row: int, position: int):
    return ("content", f"layers.{layer}", half, row, position)


@pytest.mark.parametrize("by_op", [False, True], ids=["unseen", "by_op"])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("half", [0, 1], ids=["K", "V"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_flip_in_each_layer_and_half(layer, half, inner, by_op):
    rig = Rig.build(3, inner=inner)
    rig.step(5, guarded=False)
    rig.step()
    rig.step()
    rig.flip(layer, half, row=1, position=3, by_op=by_op)
    with pytest.raises(KVCacheViolation) as caught:
        rig.step()
    assert caught.value.total == 1
    assert rig.found() == [content(layer, "KV"[half], 1, 3)]


def test_last_slot_and_first_slot():
    rig = Rig.build()
    rig.step(5)
    for position in (4, 0):
        rig.flip(1, 0, row=0, position=position, by_op=True)
        with pytest.raises(KVCacheViolation):
            rig.step()
        rig.length += 1  # the forward itself was done
    assert [f[-1] for f in rig.found()] == [4, 0]


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_k_and_v_of_one_slot_in_the_middle_of_a_row(layers):
    rig = Rig.build(layers)
    rig.step(6)
    for half in (0, 1):
        rig.flip(layers - 1, half, row=0, position=2, by_op=True)
    with pytest.raises(KVCacheViolation):
        rig.step()
    assert rig.found() == [content(layers - 1, "K", 0, 2), content(layers - 1, "V", 0, 2)]


def test_one_slot_overwritten_in_all_layers_by_an_op():
    rig = Rig.build(3)
    rig.step(6)
    for pair in rig.caches:
        for tensor in pair:
            tensor[0, :, 2] = tensor[1, :, 2]  # what follows in the row was not computed from it: a stray copy
    with pytest.raises(KVCacheViolation) as caught:
        rig.step()
    assert caught.value.total == 6
    assert {f[-1] for f in rig.found()} == {2}


def test_all_layers_overwritten_without_an_op():
    rig = Rig.build(2)
    rig.step(6)
    for pair in rig.caches:
        for tensor in pair:
            tensor.data[0, :, 2:6] += 1
    with pytest.raises(KVCacheViolation) as caught:
        rig.step()
    assert caught.value.total == 2 * 2 * 4


def test_flip_hidden_among_a_legal_rewrite_of_another_row():
    rig = Rig.build(2)
    rig.step(6)
    for pair in rig.caches:
        for tensor in pair:
            tensor[1, :, :6] = torch.randn(HEADS, 6, HEAD_DIM)
    rig.flip(1, 0, row=0, position=2, by_op=True)
    with pytest.raises(KVCacheViolation):
        rig.step()
    assert rig.found() == [content(1, "K", 0, 2)]
    assert rig.session.stats().adopted == 6


def test_flip_while_inference_tensors_keep_no_version():
    with torch.inference_mode():
        rig = Rig.build(2)
        rig.step(5, guarded=False)
        rig.step()
        rig.flip(0, 1, row=1, position=3)
        with pytest.raises(KVCacheViolation):
            rig.step()
    assert rig.found() == [content(0, "V", 1, 3)]


def test_flip_after_a_crop():
    rig = Rig.build()
    rig.step(8)
    rig.flip(0, 0, row=0, position=2)
    with pytest.raises(KVCacheViolation):
        rig.step(at=4)
    assert rig.found() == [content(0, "K", 0, 2)]


def test_each_corruption_is_told_once():
    rig = Rig.build()
    rig.step(5)
    rig.flip(0, 0)
    with pytest.raises(KVCacheViolation):
        rig.step()
    rig.step()
    rig.step()
    assert len(rig.found()) == 1


def test_a_reported_slot_is_adopted_only_as_it_was_before():
    """Seen: whatever happened next to a slot that had been reported was taken for its repair."""
    rig = Rig.build(mode="log")
    rig.step(5)
    row = rig.caches[1][0].view(torch.int32)[0, 0, 2]  # changed by an op, which PyTorch counts
    for bit in (4, 7, 9):
        row[3] ^= 1 << bit
        rig.step()
    assert rig.found() == [content(1, "K", 0, 2)] * 3
    row[3] ^= 1 << 4 | 1 << 7 | 1 << 9
    rig.step()
    assert len(rig.found()) == 3
    row[3] ^= 1 << 4
    rig.step()
    assert len(rig.found()) == 4


@pytest.mark.parametrize("every", [2, 3, 5])
def test_within_n_steps_when_a_fraction_is_checked(every):
    for position in range(5):
        torch._dynamo.reset()
        rig = Rig.build(verify_fraction=f"1/{every}", mode="log")
        rig.step(8)
        rig.flip(1, 1, row=1, position=position)
        for _ in range(every):
            rig.step()
        assert rig.found() == [content(1, "V", 1, position)]


def test_states_are_compared_before_each_rewrite_when_a_fraction_is_checked():
    def step(x, conv_states, ssm_states):
        conv_states.copy_(torch.cat((conv_states, x[..., :1]), dim=-1)[..., 1:])
        ssm_states.copy_(ssm_states * 0.5 + x)
        return ssm_states.sum() + conv_states.sum()

    backend = CanaryBackend(CanaryConfig(inner="eager", mode="log", verify_fraction="1/8"))
    run = torch.no_grad()(torch.compile(step, backend=backend))
    states = [torch.randn(2, 4, 4), torch.randn(2, 4, 8)]
    run(torch.randn(2, 4, 8), *states)
    wanted = []
    for n in range(16):
        which, sequence = n // 2 % 2, n % 2
        states[which].data[sequence, 1, 2] += 1
        run(torch.randn(2, 4, 8), *states)
        wanted.append((n + 2, ("conv_states", "ssm_states")[which], sequence))
    assert [(v.step, v.pool, v.slot) for v in backend.session.violations()] == wanted


def test_a_slot_is_compared_before_it_is_written_again_when_a_fraction_is_checked():
    rig = Rig.build(verify_fraction="1/64", mode="log")
    rig.step(8)
    rig.flip(1, 0, row=1, position=5)
    rig.step(at=5)
    assert rig.found() == [content(1, "K", 1, 5)]


@pytest.mark.parametrize("write", [write_where, write_rolled, write_in_subgraph])
def test_a_cache_that_may_be_written_anywhere_is_compared_whole_when_a_fraction_is_checked(write):
    rig = Rig.build(write=write, verify_fraction="1/64", mode="log")
    rig.step(8)
    for position in (1, 7):
        rig.flip(1, 0, row=1, position=24 - rig.length + position if write is write_rolled else position)
        rig.step()
    assert [v.step for v in rig.session.violations()] == [2, 3]


def written_where_the_old_says(cache, new, at):
    """The slot depends on what was read before: until then nobody knows which."""
    seen = (cache.sum() * 0).long()
    cache.index_copy_(2, at + seen, new)
    return cache.sum()


def test_a_write_that_nobody_can_foresee_is_compared_when_a_fraction_is_checked():
    backend = CanaryBackend(CanaryConfig(inner="eager", mode="log", verify_fraction="1/64"))
    run = torch.no_grad()(torch.compile(written_where_the_old_says, backend=backend))
    cache = torch.zeros(2, HEADS, 12, HEAD_DIM)
    for position in (0, 1, 1):
        run(cache, torch.randn(2, HEADS, 1, HEAD_DIM), torch.tensor([position]))
        cache.data[1, 0, 1, 3] += 1
    assert [(v.step, v.row, v.index) for v in backend.session.violations()] == [(3, 1, 1)]


@pytest.mark.parametrize("inner", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_cache_that_is_written_under_vmap(inner):
    rig = Rig.build(write=write_mapped, inner=inner, mode="log")
    plain = copy.deepcopy(rig.caches)
    for tokens in (3, 1, 1):
        at, seed = rig.length, rig.length + 1
        torch.manual_seed(seed)
        guarded = rig.step(tokens)
        rig.caches, plain = plain, rig.caches
        torch.manual_seed(seed)
        torch.testing.assert_close(rig.step(tokens, guarded=False, at=at), guarded)
        rig.caches, plain = plain, rig.caches
    assert rig.session.violations() == []
    assert rig.session.stats().recorded == 2 * 2 * 2 * 5  # layers, halves, rows, tokens
    rig.flip(1, 1, row=1, position=2)
    rig.step()
    (found,) = rig.session.violations()
    assert (found.check, found.layer, found.half, found.row, found.index) == ("content", "layers.1", "V", 1, 2)


@pytest.mark.parametrize("write", [write_in_subgraph, write_by_op], ids=["axes shown", "nothing shown"])
def test_prefix_from_outside_is_guarded_where_the_graph_hides_its_slots(write):
    rig = Rig.build(batch=3, write=write, mode="log")
    rig.step(5, guarded=False)
    rig.step()
    adopted = rig.session.stats().adopted
    assert adopted == 2 * 2 * 3 * 5  # layers, halves, rows, tokens
    rig.flip(1, 0, row=1, position=3)
    rig.step()
    assert [(v.check, v.step) for v in rig.session.violations()] == [("content", 2)]
    assert rig.session.stats().adopted == adopted


def test_prefix_from_outside_is_guarded_where_nobody_can_foresee_the_write():
    backend = CanaryBackend(CanaryConfig(inner="eager", mode="log"))
    run = torch.no_grad()(torch.compile(written_where_the_old_says, backend=backend))
    cache = torch.zeros(2, HEADS, 12, HEAD_DIM)
    cache[:, :, :5] = torch.randn(2, HEADS, 5, HEAD_DIM)
    run(cache, torch.randn(2, HEADS, 1, HEAD_DIM), torch.tensor([5]))
    assert backend.session.stats().adopted == 2 * 5
    for n in (0, 1):
        cache.data[n, 1, 2 * n, 3] += 1
        run(cache, torch.randn(2, HEADS, 1, HEAD_DIM), torch.tensor([6 + n]))
    assert [(v.step, v.row, v.index) for v in backend.session.violations()] == [(2, 0, 0), (3, 1, 2)]


@pytest.mark.parametrize("zeroed", [True, False], ids=["zeroed", "overwritten"])
@pytest.mark.parametrize(("layers", "break_at"), [(1, None), (2, 1), (3, 2)])
def test_newest_token_of_one_layer_changed_by_an_op(layers, break_at, zeroed):
    """K and V of the only layer in a graph: the pattern says little, so a single slot is not enough."""
    rig = Rig.build(layers, break_at=break_at, mode="log")
    rig.step(5, guarded=False)
    rig.step()
    rig.step()
    for tensor in rig.caches[layers - 1]:
        tensor[0, :, 6] = 0 if zeroed else torch.randn(HEADS, HEAD_DIM)
    rig.step()
    assert [(f[0], *f[2:]) for f in rig.found()] == [("content", half, 0, 6) for half in "KV"]


def test_newest_tokens_emptied_in_all_layers_while_the_sequence_goes_on():
    rig = Rig.build(2, mode="log")
    rig.step(6)
    for pair in rig.caches:
        for tensor in pair:
            tensor[0, :, 4:] = 0
    rig.step()
    assert {f[3:] for f in rig.found()} == {(0, 4), (0, 5)}


def test_a_row_copied_in_part_is_no_beam():
    rig = Rig.build(1, mode="log")
    rig.step(6)
    for tensor in rig.caches[0]:
        tensor[0, :, 2] = tensor[1, :, 2]
    rig.step()
    assert rig.found() == [content(0, half, 0, 2) for half in "KV"]


def test_fraction_checks_that_share_of_the_slots():
    full, third = Rig.build(slots=64), Rig.build(slots=64, verify_fraction="1/3")
    for rig in (full, third):
        rig.step(30)
        for _ in range(9):
            rig.step()
    assert third.session.stats().checked == pytest.approx(full.session.stats().checked / 3, rel=0.05)


def test_two_models_each_get_their_own_blame():
    backend = CanaryBackend(CanaryConfig(inner="eager", mode="log"))
    small, large = Rig.build(2, backend=backend), Rig.build(3, backend=backend)
    for rig in (small, large, small, large):
        rig.step()
    large.flip(2, 0, row=0, position=0)
    small.step()
    large.step()
    assert large.found() == [content(2, "K", 0, 0)]


def test_flip_in_a_cache_that_takes_turns():
    rig = Rig.build()
    caches = [new_caches(), new_caches()]
    for cache in caches:
        rig.caches, rig.length = cache, 0
        rig.step(4)
    rig.flip(1, 0, row=1, position=2)  # in the second cache
    rig.caches, rig.length = caches[0], 4
    rig.step()
    rig.caches, rig.length = caches[1], 4
    with pytest.raises(KVCacheViolation):
        rig.step()


def test_positions_that_jump_while_decoding():
    rig = Rig.build(mode="log")
    rig.step(4)
    rig.step()
    rig.step()
    assert rig.found() == []
    rig.step(positions=torch.tensor([[0], [6]]))  # row 0: built without the cache's offset
    assert rig.found() == [("chain", "layers.0", "K", 0, 6)]
    violation = rig.session.violations()[0]
    assert (violation.stored, violation.found, violation.slot) == (6, 0, 6)


def test_positions_that_stay_at_zero():
    rig = Rig.build(mode="log")
    rig.step(4)
    for _ in range(3):
        rig.step(positions=torch.zeros(2, 1, dtype=torch.int64))
    assert {v.check for v in rig.session.violations()} == {"chain"}


def test_a_row_moved_to_another_layer():
    rig = Rig.build(3)
    rig.step(6)
    rig.caches[2][0].data[0, :, 3] = rig.caches[1][0].data[0, :, 3]
    with pytest.raises(KVCacheViolation):
        rig.step()
    assert rig.found() == [content(2, "K", 0, 3)]


def test_k_and_v_swapped_in_one_layer():
    rig = Rig.build(2)
    rig.step(6)
    k, v = (t.data for t in rig.caches[1])
    kept = k[0, :, 3].clone()
    k[0, :, 3], v[0, :, 3] = v[0, :, 3].clone(), kept
    with pytest.raises(KVCacheViolation):
        rig.step()
    assert rig.found() == [content(1, "K", 0, 3), content(1, "V", 0, 3)]


def test_wide_digest_is_kept_and_shown():
    rig = Rig.build(digest_bits=64)
    rig.step(4)
    rig.flip()
    with pytest.raises(KVCacheViolation) as caught:
        rig.step()
    assert caught.value.violations[0].stored & 0xFFFFFFFFFFFFFFFF > 2**32


@pytest.mark.parametrize("check", ["content", "bounds", "poison", "operand", "chain"])
def test_a_check_that_is_switched_off_stays_silent(check):
    others = tuple(c for c in ("content", "operand", "bounds", "poison", "chain") if c != check)
    rig = Rig.build(checks=others)
    rig.step(4)
    rig.step()
    rig.step()
    if check == "content":
        rig.flip()
        rig.step()
    if check == "poison":
        rig.model.layers[1].qkv.data[HEADS * HEAD_DIM] = float("inf")
        rig.step()
    if check == "chain":
        rig.step(positions=torch.zeros(2, 1, dtype=torch.int64))
    assert rig.found() == []
    assert f"off      {check}: switched off by the setting 'checks'" in rig.session.summary()


def test_forget_after_a_rewrite_that_no_op_made():
    rig = Rig.build()
    rig.step(5)
    for pair in rig.caches:
        for tensor in pair:
            tensor.data[:, :, 1:4] += 1
    assert rig.session.forget(*[t for pair in rig.caches for t in pair]) == 4
    rig.step()
    rig.step()
    assert rig.found() == []


def test_out_of_range_stops_before_the_write_on_the_cpu():
    rig = Rig.build()
    rig.step(5)
    before = [t.clone() for pair in rig.caches for t in pair]
    with pytest.raises(kvcanary_fx.KVCacheViolation, match="index 24 is out of range"):
        rig.step(at=24)
    assert all(torch.equal(a, t) for a, t in zip(before, [t for pair in rig.caches for t in pair], strict=True))


def pools(slots: int = 12):
    return torch.zeros(slots, HEADS, HEAD_DIM), torch.zeros(slots, HEADS, HEAD_DIM)


def paged_layer(inner: str, write=None, **settings):
    """A compiled function that writes K and V of each token to its slot and reads them."""

    def layer(k_pool, v_pool, k, v, slots):
        if write is None:
            k_pool[slots], v_pool[slots] = k, v
        else:
            write(k_pool, v_pool, k, v, slots)
        return (k_pool * v_pool).sum()

    backend = CanaryBackend(CanaryConfig(inner=inner, **settings))
    return torch.compile(layer, backend=backend), backend.session


@torch.library.custom_op("test_detection::store", mutates_args=("k_pool", "v_pool"))
def store_one_too_far(
    k_pool: torch.Tensor, v_pool: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> None:
    k_pool[slots] = k
    v_pool[slots + 1] = v


@store_one_too_far.register_fake
def _(k_pool, v_pool, k, v, slots):
    return None


INNER = pytest.mark.parametrize("inner", ["eager", "aot_eager"])


@INNER
def test_write_that_lands_in_another_slot(inner):
    run, session = paged_layer(inner, store_one_too_far, mode="log")
    tokens = torch.randn(2, 2, HEADS, HEAD_DIM)
    with torch.no_grad():
        run(*pools(), *tokens, torch.tensor([3, 7]))
    assert [(v.check, v.half, v.slot, v.phase) for v in session.violations()] == [
        ("operand", "V", 3, "post"),
        ("operand", "V", 7, "post"),
    ]


@torch.library.custom_op("test_detection::store_padded", mutates_args=("k_pool", "v_pool"))
def store_padded(
    k_pool: torch.Tensor, v_pool: torch.Tensor, k: torch.Tensor, v: torch.Tensor, where: torch.Tensor
) -> None:
    """As vLLM's: the slots say how many tokens there are, what follows in ``k`` and ``v`` is a batch's padding."""
    k_pool[where] = k[: len(where)]
    v_pool[where] = v[: len(where)].roll(1, 0)


@store_padded.register_fake
def _(k_pool, v_pool, k, v, where):
    return None


kvcanary_fx.register_kv_write("test_detection::store_padded", slots="where", pools={"k_pool": "k", "v_pool": "v"})


@INNER
def test_rows_of_padding_beyond_the_slots_of_a_store_are_no_operand(inner):
    run, session = paged_layer(inner, store_padded, mode="log")
    with torch.no_grad():
        run(*pools(), *torch.randn(2, 4, HEADS, HEAD_DIM), torch.tensor([3, 7]))
    assert [(v.check, v.half, v.slot) for v in session.violations()] == [("operand", "V", 3), ("operand", "V", 7)]


@INNER
def test_index_that_wraps_stops_before_the_write_on_the_cpu(inner):
    run, _ = paged_layer(inner)
    pair = pools()
    with torch.no_grad(), pytest.raises(KVCacheViolation, match="index -1 is out of range and wrapped to slot 11"):
        run(*pair, *torch.randn(2, 2, HEADS, HEAD_DIM), torch.tensor([3, -1]))
    assert all(not pool.any() for pool in pair)


@INNER
def test_index_past_the_end_is_reported_as_no_slot(inner):
    run, _ = paged_layer(inner)
    with torch.no_grad(), pytest.raises(KVCacheViolation, match=r"index 12 is out of range\n.*, no slot of k_pool"):
        run(*pools(), *torch.randn(2, 2, HEADS, HEAD_DIM), torch.tensor([3, 12]))


@INNER
def test_two_tokens_sent_to_one_slot(inner):
    run, session = paged_layer(inner, mode="log")
    tokens = torch.randn(2, 3, HEADS, HEAD_DIM)
    with torch.no_grad():
        run(*pools(), *tokens, torch.tensor([3, 7, 3]))
    found = session.violations()
    assert {(v.check, v.slot, v.detail) for v in found} == {("bounds", 3, 1)}
    assert {v.half for v in found} == {"K", "V"}
    assert "two tokens of one step were written to the same slot" in found[0].explain()


@INNER
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_value_that_is_no_number_is_written(inner, bad, dtype):
    run, session = paged_layer(inner, mode="log")
    tokens = torch.randn(2, 3, HEADS, HEAD_DIM, dtype=dtype)
    tokens[1, 2, 0, 5] = bad
    with torch.no_grad():
        run(*(p.to(dtype) for p in pools()), *tokens, torch.tensor([3, 7, 4]))
    word = 5 * dtype.itemsize // 4
    assert [(v.check, v.half, v.slot, v.detail) for v in session.violations()] == [("poison", "V", 4, word)]


def test_layers_that_interleave_in_one_pool_and_are_compiled_one_by_one():
    """[slots, layers, ...]: the layers' bytes alternate, so a graph for one must not drop the other's shadow."""

    def layer(pool, number, k, slots):
        pool[slots, number] = k
        return pool[:, number].sum()

    backend = CanaryBackend(CanaryConfig(inner="eager", mode="log"))
    run = torch.compile(layer, backend=backend, dynamic=False)
    pool = torch.zeros(12, 2, HEADS, HEAD_DIM)
    with torch.no_grad():
        for step in range(4):
            for number in (0, 1):
                run(pool, number, torch.randn(2, HEADS, HEAD_DIM), torch.tensor([2 * step, 2 * step + 1]))
        pool.data.view(torch.int32)[3, 0, 1, 2] ^= 1
        run(pool, 0, torch.randn(1, HEADS, HEAD_DIM), torch.tensor([9]))
    assert [(v.check, v.slot) for v in backend.session.violations()] == [("content", 3)]


MASKED = {
    "where": lambda cache, mask, new: cache.copy_(torch.where(mask, new, cache)),
    "sums": lambda cache, mask, new: cache.mul_(~mask).add_(mask * new),
}


@pytest.mark.parametrize("put", MASKED.values(), ids=MASKED)
def test_a_cache_written_whole_under_a_mask_is_no_window_that_rolls(put):
    """Its last slot does not hold the newest token: positions counted back from there were -6."""
    k_cache, v_cache = (torch.zeros(2, HEADS, 8, HEAD_DIM) for _ in "KV")
    embedding = torch.nn.Embedding(50, HEADS * HEAD_DIM)

    def forward(input_ids, input_pos, k_cache, v_cache):
        new = embedding(input_ids).view(2, -1, HEADS, HEAD_DIM).transpose(1, 2)
        for cache in (k_cache, v_cache):
            if input_ids.shape[1] > 1:
                cache[:, :, input_pos] = new
            else:
                put(cache, (torch.arange(8) == input_pos)[:, None], new)
        mask = torch.arange(8) <= input_pos[:, None]
        return torch.nn.functional.scaled_dot_product_attention(new, k_cache, v_cache, attn_mask=mask)

    backend = CanaryBackend(CanaryConfig(inner="eager", mode="log"))
    compiled = torch.compile(forward, backend=backend)
    with torch.no_grad():
        compiled(torch.tensor([[7, 8, 9]] * 2), torch.arange(3), k_cache, v_cache)
        compiled(torch.tensor([[10]] * 2), torch.tensor([3]), k_cache, v_cache)
        for slot in (2, 3):
            k_cache.data[1, 0, slot, 0] += 1
        compiled(torch.tensor([[11]] * 2), torch.tensor([4]), k_cache, v_cache)
    found = [(v.row, v.index, v.position, v.token) for v in backend.session.violations()]
    assert found == [(1, 2, 2, 9), (1, 3, None, None)]  # the second token's place is hidden in the mask
