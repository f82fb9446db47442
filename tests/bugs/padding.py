"""Bugs of padding, reserved slots and NaN (H)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from cases import Outcome, bug
from toy import DIM, Toy, attend
from transfers import Layers

from kvcanary_fx import Batch, KVPool

Model = Callable[[Layers, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
NAN = float("nan")


@torch.library.custom_op("bugs::store_kv", mutates_args=("k_cache", "v_cache"))
def store_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, skip: int
) -> None:
    """A generic store kernel, told which slot to leave alone (-1: none)."""
    kept = slots != skip
    k_cache[slots[kept]], v_cache[slots[kept]] = k[kept], v[kept]


@torch.library.custom_op("bugs::store_latent", mutates_args=("cache",))
def store_latent(latent: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, skip: int) -> None:
    """The store kernel of an MLA model."""
    kept = slots != skip
    cache[slots[kept]] = latent[kept]


@store_kv.register_fake
@store_latent.register_fake
def _(*args: object) -> None:
    return None


def padded(x: torch.Tensor, slots: torch.Tensor, value: float) -> torch.Tensor:
    """The rows of a batch that was padded to the size of a captured graph."""
    return torch.nn.functional.pad(x, (0, 0, 0, slots.shape[0] - x.shape[0]), value=value)


def attend_padded(pools: Layers, x: torch.Tensor, slots: torch.Tensor, reads: torch.Tensor) -> torch.Tensor:
    """:func:`toy.attend` over a padded batch."""
    return attend(pools, padded(x, slots, 0.0), slots, reads)


def attend_over_store_op(skip: int) -> Model:
    """A model whose padding rows hold NaN, and whose K and V are stored by :func:`store_kv`."""

    def model(pools: Layers, x: torch.Tensor, slots: torch.Tensor, reads: torch.Tensor) -> torch.Tensor:
        x = padded(x, slots, NAN)
        for k_pool, v_pool in pools:
            k = x.unsqueeze(1)
            torch.ops.bugs.store_kv(k, 2 * k, k_pool, v_pool, slots, skip)
            x = x + k_pool[reads].mean() + v_pool[reads].mean()
        return x

    return model


def attend_latent(skip: int) -> Model:
    """An MLA model whose padding rows hold NaN."""

    def model(pools: Layers, x: torch.Tensor, slots: torch.Tensor, reads: torch.Tensor) -> torch.Tensor:
        x = padded(x, slots, NAN)
        for (cache,) in pools:
            torch.ops.bugs.store_latent(x, cache, slots, skip)
            x = x + cache[reads].mean()
        return x

    return model


def attend_sparse(masked: bool) -> Model:
    """A sparse MLA model: it reads the ``reads`` that are not -1; ``masked``: the others count as zeros."""

    def model(pools: Layers, x: torch.Tensor, slots: torch.Tensor, reads: torch.Tensor) -> torch.Tensor:
        chosen = (reads >= 0).unsqueeze(1)
        for (cache,) in pools:
            cache[slots] = x
            rows = cache[reads.clamp(min=0)]
            if masked:
                rows = torch.where(chosen, rows, 0.0)
            x = x + (chosen * rows).sum(0)
        return x

    return model


def attend_in_tiles(length: int, masked: bool) -> Model:
    """A model that reads a whole tile and weighs what lies beyond ``length`` with 0; ``masked``: as zeros."""

    def model(pools: Layers, x: torch.Tensor, slots: torch.Tensor, reads: torch.Tensor) -> torch.Tensor:
        inside = (torch.arange(reads.shape[0], device=reads.device) < length).view(-1, 1, 1)
        for k_pool, v_pool in pools:
            k_pool[slots] = x.unsqueeze(1)
            v_pool[slots] = 2 * x.unsqueeze(1)
            v = v_pool[reads]
            if masked:
                v = torch.where(inside, v, 0.0)
            x = x + (inside * v).sum(0)
        return x

    return model


def latent_pool(toy: Toy) -> tuple[KVPool]:
    """One latent a token and layer."""
    toy.kv = [(torch.zeros(k.shape[0], DIM),) for k, _ in toy.kv]
    return (KVPool(toy.kv, toy.table),)


def decode(toy: Toy, name: str, slot: int, slots: Sequence[int] | None, reads: Sequence[int]) -> None:
    """One token; ``slots`` are those that the write kernel gets, padding included."""
    toy.take(name, [slot])
    toy.forward(toy.plan({name: [slot]}), slots=slots, reads=reads)


@bug("H1", "vllm-project/vllm#43810", check="bounds", also=("content",))
def padding_slot_used_as_an_index(faulty: bool) -> Outcome:
    """Padding rows have slot -1, which as an index is the last slot of the pool."""
    toy = Toy(model=attend_padded)
    toy.add("b", [8, 9])
    toy.run({"b": [23]})
    toy.add("a", [5, 6])
    toy.take("a", [1])
    toy.forward(toy.plan({"a": [1]}), slots=[1, -1] if faulty else [1, 0])
    return Outcome((toy.session,), slot=23, request="b")


@bug("H2", "vllm-project/vllm#43682", check="bounds")
def length_of_a_padding_row_bumped_to_one(faulty: bool) -> Outcome:
    """The lengths of padding rows are raised from 0 to 1, and their row of the request table holds -1."""
    toy = Toy(history=False)
    toy.table[4] = -1
    toy.add("a", [5, 6, 7])
    toy.run({"a": [1, 2]})
    toy.take("a", [3])
    padding = 1 if faulty else 0
    toy.forward(
        Batch(
            input_ids=[7],
            slots=[3],
            request_rows=[toy.requests["a"].row, 4],
            prefix_lens=[2, padding],
            extend_lens=[1, 0],
            positions=[2],
            request_ids=["a", None],
        )
    )
    return Outcome((toy.session,), slot=-1)


@bug("H4", "sgl-project/sglang#32477", check="poison", also=("bounds",))
def padding_rows_write_nan_to_slot_0(faulty: bool) -> Outcome:
    """The store kernel writes what padding rows hold to the reserved slot, where window tiles load it."""
    toy = Toy(model=attend_over_store_op(skip=-1 if faulty else 0))
    toy.add("a", [5, 6, 7])
    toy.run({"a": [1, 2]})
    decode(toy, "a", 3, slots=[3, 0], reads=[0, 1, 2, 3])
    return Outcome((toy.session,), slot=0)


@bug("H6", "sgl-project/sglang#36207", check="poison", also=("bounds",))
def mla_writer_without_the_guard_of_slot_0(faulty: bool) -> Outcome:
    """The generic store kernel spares the reserved slot, the one for MLA latents does not."""
    toy = Toy(model=attend_latent(skip=-1 if faulty else 0), pools=latent_pool)
    toy.add("a", [5, 6, 7])
    toy.run({"a": [1, 2]})
    decode(toy, "a", 3, slots=[3, 0], reads=[0, 1, 2, 3])
    return Outcome((toy.session,), slot=0)


@bug("H8", "vllm-project/vllm#57158", check="poison", also=("bounds",))
def absent_index_of_sparse_mla_clamped_to_0(faulty: bool) -> Outcome:
    """Sparse attention clamps the -1 of an absent index to 0, and 0 times the NaN that lies there is NaN."""
    toy = Toy(model=attend_sparse(masked=not faulty), pools=latent_pool)
    for (cache,) in toy.kv:
        cache[0] = NAN  # memory that nobody ever wrote
    toy.add("a", [5, 6, 7])
    toy.take("a", [1, 2])
    toy.forward(toy.plan({"a": [1, 2]}), reads=[1, 2, -1])
    return Outcome((toy.session,), slot=1, request="a")


@bug("H11", "vllm-project/vllm#56524", check="owner", also=("poison",))
def state_block_not_cleared_on_allocation(faulty: bool) -> Outcome:
    """A recurrent layer starts from the state that the last tenant of its block left."""
    toy = Toy()
    toy.add("a", [5, 6])
    toy.run({"a": [1]})
    toy.done("a")
    request = toy.add("b", [7, 8])
    toy.take("b", [1])  # b's initial state
    request.stored = 1
    if not faulty:
        for layer in toy.kv:
            for state in layer:
                state[1] = 0
        toy.pool.adopt([1])
    toy.run({"b": [2]})
    return Outcome((toy.session,), slot=1, request="b")


@bug("H12", "Dao-AILab/flash-attention#1745", check="poison")
def nan_beyond_the_length_reaches_the_output(faulty: bool) -> Outcome:
    """The kernel loads a whole tile and weighs what lies beyond the length with 0, also the NaN there."""
    toy = Toy(model=attend_in_tiles(length=1, masked=not faulty))
    for _, v in toy.kv:
        v[2:] = NAN  # memory that nobody ever wrote
    toy.add("a", [5])
    decode(toy, "a", 1, slots=None, reads=[1, 2, 3])
    return Outcome((toy.session,), slot=1, request="a")
