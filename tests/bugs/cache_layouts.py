"""Bugs of layouts, scales, ranks and hardware (I, J, K, L)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from cases import Outcome, bug
from toy import DIM, Toy
from transfers import Layers, expect, land, off_load, read

from kvcanary_fx import KVPool

Model = Callable[[Layers, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
FP8 = torch.float8_e4m3fn


def rows_of(cache: torch.Tensor, contiguous: bool) -> torch.Tensor:
    """A cache as [slots, elements], by its own stride or by the one it would have if it were contiguous."""
    row = cache[0].numel()
    return cache.as_strided((cache.shape[0], row), (row if contiguous else cache.stride(0), 1))


@torch.library.custom_op("bugs::store_strided", mutates_args=("k_cache", "v_cache"))
def store_strided(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    contiguous: bool,
) -> None:
    """A store kernel that computes addresses itself."""
    rows_of(k_cache, contiguous)[slots] = k.flatten(1)
    rows_of(v_cache, contiguous)[slots] = v.flatten(1)


@store_strided.register_fake
def _(*args: object) -> None:
    return None


def attend_strided(write_contiguous: bool = False, read_contiguous: bool = False) -> Model:
    """A model whose kernels take the cache for contiguous, or do not."""

    def model(pools: Layers, x: torch.Tensor, slots: torch.Tensor, reads: torch.Tensor) -> torch.Tensor:
        for k_pool, v_pool in pools:
            k = x.unsqueeze(1)
            torch.ops.bugs.store_strided(k, 2 * k, k_pool, v_pool, slots, write_contiguous)
            x = x + rows_of(k_pool, read_contiguous)[reads].mean() + rows_of(v_pool, read_contiguous)[reads].mean()
        return x

    return model


def interleaved_pool(toy: Toy) -> tuple[KVPool]:
    """K and V are views of one tensor [slots, 2, ...]: each has twice the stride of a contiguous one."""
    toy.kv = [tuple(torch.zeros(k.shape[0], 2, *k.shape[1:]).unbind(1)) for k, _ in toy.kv]
    return (KVPool(toy.kv, toy.table),)


def attend_quantised(pools: Layers, x: torch.Tensor, slots: torch.Tensor, reads: torch.Tensor) -> torch.Tensor:
    """A model that stores fp8 with one scale a token."""
    x = x.float()
    for k_pool, v_pool, k_scale, v_scale in pools:
        k = x.unsqueeze(1)
        scale = k.abs().amax(-1) / 448
        k_scale[slots], v_scale[slots] = scale, 2 * scale
        k_pool[slots] = (k / scale.unsqueeze(-1)).to(FP8)
        v_pool[slots] = (k / scale.unsqueeze(-1)).to(FP8)
        x = x + (k_pool[reads].float() * k_scale[reads].unsqueeze(-1)).mean()
    return x


def quantised_pool(toy: Toy) -> tuple[KVPool]:
    """K, V and their scales."""
    toy.kv = [(k, v, torch.zeros(k.shape[:2]), torch.zeros(k.shape[:2])) for k, v in toy.kv]
    return (KVPool(toy.kv, toy.table),)


def attend_scaled(scale: float) -> Model:
    """A model that stores fp8 with one scale for all."""

    def model(pools: Layers, x: torch.Tensor, slots: torch.Tensor, reads: torch.Tensor) -> torch.Tensor:
        x = x.float()
        for k_pool, v_pool in pools:
            k_pool[slots] = (x.unsqueeze(1) / scale).to(FP8)
            v_pool[slots] = (x.unsqueeze(1) / scale).to(FP8)
            x = x + (k_pool[reads].float() * scale).mean() + (v_pool[reads].float() * scale).mean()
        return x

    return model


def attend_head(head: int) -> Model:
    """One head of a model."""

    def model(pools: Layers, x: torch.Tensor, slots: torch.Tensor, reads: torch.Tensor) -> torch.Tensor:
        for k_pool, v_pool in pools:
            k_pool[slots] = (head + 1) * x.unsqueeze(1)
            v_pool[slots] = (head + 2) * x.unsqueeze(1)
            x = x + k_pool[reads].mean() + v_pool[reads].mean()
        return x

    return model


@bug("I1", "ROCm/aiter#3492", check="operand", also=("bounds",))
def write_with_the_stride_of_a_contiguous_cache(faulty: bool) -> Outcome:
    """The write kernel's offsets are those of contiguous blocks, but K and V are interleaved."""
    toy = Toy(model=attend_strided(write_contiguous=faulty), pools=interleaved_pool)
    toy.add("a", [5, 6, 7, 8])
    toy.run({"a": [4, 5, 6]})
    return Outcome((toy.session,), slot=4, request="a")


@bug("I2", "ROCm/aiter#3498", check=None)
def read_with_the_stride_of_a_contiguous_cache(faulty: bool) -> Outcome:
    """The decode kernel reads at the offsets of contiguous blocks; what is stored is right."""
    toy = Toy(model=attend_strided(read_contiguous=faulty), pools=interleaved_pool)
    toy.add("a", [5, 6, 7, 8])
    toy.run({"a": [4, 5, 6]})
    toy.take("a", [7])
    toy.forward(toy.plan({"a": [7]}), reads=[4, 5, 6])
    return Outcome((toy.session,))


@bug("I5", "vllm-project/vllm#43988", check="bounds")
def block_count_multiplied_by_the_compress_ratio(faulty: bool) -> Outcome:
    """The spec of a compressed cache counts 128 times the rows that its blocks have, and the last one is used."""
    blocks, rows, ratio = 8, 2, 128
    toy = Toy(slots=blocks * rows)
    toy.add("a", [5, 6])
    toy.take("a", [blocks * rows * (ratio if faulty else 1) - 1])
    return Outcome((toy.session,), slot=blocks * rows * ratio - 1, request="a")


@bug("J2", "ROCm/ATOM#2146", check="content")
def scales_stay_behind_on_off_load(faulty: bool) -> Outcome:
    """Only the fp8 values travel to the host and back: they meet the scales of the block's last tenant."""
    toy = Toy(model=attend_quantised, pools=quantised_pool, dtype=FP8)
    rows, shadow = off_load(toy, "a", [5, 6, 7], [1, 2])
    off_load(toy, "b", [8, 9, 10], [11, 12])
    expect(toy, "a2", [5, 6, 7], [11, 12])
    known = 2 if faulty else 4  # tensors of a layer that the connector was told of
    land([layer[:known] for layer in toy.kv], [11, 12], [layer[:known] for layer in rows])
    toy.pool.import_(shadow, [11, 12])
    toy.run({"a2": [13]})
    return Outcome((toy.session,), slot=11, request="a2")


@bug("J4", "sgl-project/sglang#20705", check=None)
def loaded_scales_never_reach_the_kernels(faulty: bool) -> Outcome:
    """The checkpoint's scale is 0.5, the kernels write and read with 1.0."""
    toy = Toy(model=attend_scaled(1.0 if faulty else 0.5), dtype=FP8)
    toy.add("a", [5, 6, 7])
    toy.run({"a": [1, 2]})
    toy.take("a", [3])
    toy.forward(toy.plan({"a": [3]}), reads=[1, 2])
    return Outcome((toy.session,))


@bug("K1", "sgl-project/sglang#10214", check="digest")
def ranks_evict_differently(faulty: bool) -> Outcome:
    """The ranks of a pipeline have pools of different sizes, and the small one evicts a prefix the other keeps."""
    prefix, ranks, matched = [1, 2, 3, 4], (Toy(slots=10), Toy(slots=8 if faulty else 10)), []
    for rank in ranks:
        rank.add("a", [5, 6, 7, 8, 9])
        rank.run({"a": prefix})
        rank.done("a", shared=prefix)  # the prefix cache keeps them
        free, kept = list(range(5, rank.kv[0][0].shape[0])), prefix
        if len(free) < 4:
            rank.pool.release(prefix)
            free, kept = prefix, []
        rank.add("b", [15, 16, 17, 18, 19])
        rank.run({"b": free[:4]})
        matched.append(rank.session.digest(kept))
    ranks[0].session.compare_digests(*matched, request="a2")
    return Outcome(tuple(rank.session for rank in ranks), request="a2")


@bug("K4", "ModelEngine-Group/unified-cache-management#716", check="chain", also=("content", "digest"))
def only_rank_0_loads(faulty: bool) -> Outcome:
    """The connector copies on rank 0 only; the other ranks go on with slots that nobody filled."""
    ranks = (Toy(), Toy())
    for number, rank in enumerate(ranks):
        rows, shadow = off_load(rank, "a", [5, 6, 7], [1, 2])
        expect(rank, "a2", [5, 6, 7], [11, 12])
        if number == 0 or not faulty:
            land(rank.kv, [11, 12], rows)
        rank.pool.import_(shadow, [11, 12])  # the scheduler tells all ranks that the load is done
        rank.run({"a2": [13]})
    return Outcome(tuple(rank.session for rank in ranks), slot=11, request="a2")


@bug("K5", "vllm-project/vllm-ascend#3366", check="digest", also=("content",))
def wrong_copy_of_a_shared_head(faulty: bool) -> Outcome:
    """With two heads on four ranks, rank r holds head r // 2, and is sent head r % 2."""
    heads, ranks, digests = [Toy(model=attend_head(h)) for h in range(2)], (Toy(), Toy()), []
    for prefill in heads:
        prefill.add("a", [5, 6, 7])
        prefill.run({"a": [1, 2]})
    for number, rank in enumerate(ranks):  # the two that share head 0
        source = heads[number % 2 if faulty else number // 2]
        expect(rank, "a", [5, 6, 7], [11, 12])
        land(rank.kv, [11, 12], read(source.kv, [1, 2]))
        rank.pool.import_(source.pool.export([1, 2]), [11, 12])
        digests.append(rank.session.digest([11, 12], what="content"))
    ranks[0].session.compare_digests(*digests, request="a")
    return Outcome(tuple(toy.session for toy in (*heads, *ranks)), request="a")


@bug("L1", "arXiv:2604.17249", check="content", also=("sweep",))
def bit_flip_in_a_shared_prefix(faulty: bool) -> Outcome:
    """One bit of a cached bf16 value flips before the prefix is used again."""
    toy = Toy(dtype=torch.bfloat16)
    toy.add("a", [5, 6, 7])
    toy.run({"a": [1, 2]})
    toy.pool.share([1, 2], owner="b")
    toy.add("b", [5, 6, 8], prefix=[1, 2])
    if faulty:
        toy.kv[1][1].view(torch.int16)[1, 0, DIM - 1] ^= 1 << 3
    toy.run({"b": [3]})
    return Outcome((toy.session,), slot=1, request="a")


@bug("L3", "ggml-org/llama.cpp#28056", check="index", also=("chain",))
def graph_inputs_overwritten_before_use(faulty: bool) -> Outcome:
    """Inputs are not copied on an integrated GPU, so the next micro-batch overwrites those of one still waiting."""
    toy = Toy()
    work, buffer, given = {"a": 1, "b": 11}, torch.zeros(1, dtype=torch.int64), []
    for name, slot in work.items():
        toy.add(name, [slot + 4, slot + 5])
        toy.take(name, [slot])
        buffer[0] = slot
        given.append(buffer if faulty else buffer.clone())
    for (name, slot), slots in zip(work.items(), given, strict=True):
        toy.forward(toy.plan({name: [slot]}), slots=slots)
    return Outcome((toy.session,), slot=1, request="a")
