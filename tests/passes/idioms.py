"""The ways in which models write a KV cache, each as a one-layer attention step with its cache.

An idiom is a function of the new K and V (``[B, H, T, D]``), the query, and whatever cache it keeps; the
tests compile it, compare it with eager, corrupt its cache and look at its graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

B, H, S, D, T = 2, 2, 16, 16, 2  # flex_attention on a GPU wants a D of 16 at least
PAGES, PAGE = 8, 4
SLOTS = PAGES * PAGE


@torch.library.custom_op("kvcanary_test::store_kv", mutates_args=("k_cache", "v_cache"))
def store_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """An engine's cache write, with the argument names that engines use."""
    heads, dim = k.shape[1:]
    keep = slot_mapping >= 0
    k_cache.view(-1, heads, dim)[slot_mapping[keep]] = k[keep]
    v_cache.view(-1, heads, dim)[slot_mapping[keep]] = v[keep]


@store_kv.register_fake
def _(k, v, k_cache, v_cache, slot_mapping):
    return None


@torch.library.custom_op("kvcanary_test::hidden_store", mutates_args=("kv_cache",))
def hidden_store(k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, meta: torch.Tensor) -> None:
    """A cache write whose arguments do not say where it goes."""
    heads, dim = k.shape[1:]
    kv_cache[0].view(-1, heads, dim)[meta] = k
    kv_cache[1].view(-1, heads, dim)[meta] = v


@hidden_store.register_fake
def _(k, v, kv_cache, meta):
    return None


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def tokens_first(x: torch.Tensor) -> torch.Tensor:
    """[1, H, T, D] as an engine's [T, H, D]."""
    return x[0].transpose(0, 1)


def heads_first(pool: torch.Tensor) -> torch.Tensor:
    """[slots, H, D] as [1, H, slots, D]."""
    return pool.transpose(0, 1).unsqueeze(0)


# ---- caches of [B, H, S, D]


def setitem(q, k, v, kc, vc, pos):
    kc[:, :, pos] = k
    vc[:, :, pos] = v
    return attend(q, kc, vc)


def setitem_slice(q, k, v, kc, vc, pos):
    kc[:, :, 3:5] = k
    vc[:, :, 3:5] = v
    return attend(q, kc, vc)


def setitem_batch_slice(q, k, v, kc, vc, pos):
    kc[:B, :, 3:5] = k
    vc[:B, :, 3:5] = v
    return attend(q, kc, vc)


def setitem_rows_and_positions(q, k, v, kc, vc, pos):
    rows = torch.arange(B, device=q.device).unsqueeze(1)
    kc[rows, :, pos.expand(B, T)] = k.transpose(1, 2)
    vc[rows, :, pos.expand(B, T)] = v.transpose(1, 2)
    return attend(q, kc, vc)


def setitem_at_a_number(q, k, v, kc, vc, pos):
    kc[:, :, pos] = k[:, :, 1]
    vc[:, :, pos] = v[:, :, 1]
    return attend(q, kc, vc)


def setitem_of_a_row_at_a_number(q, k, v, kc, vc, pos):
    for row in range(B):
        kc[row, :, pos] = k[row, :, 1]
        vc[row, ..., pos, :] = v[row, :, 1]
    return attend(q, kc, vc)


def keys_with_positions_last(q, k, v, kc, vc, pos):
    kc[..., pos] = k.transpose(2, 3)
    vc[:, :, pos] = v
    return torch.softmax(q @ kc, -1) @ vc


def index_copy_of_positions_last(q, k, v, kc, vc, pos):
    kc.index_copy_(3, pos, k.transpose(2, 3))
    vc.index_copy_(2, pos, v)
    return torch.softmax(q @ kc, -1) @ vc


def index_copy(q, k, v, kc, vc, pos):
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    return attend(q, kc, vc)


def index_put(q, k, v, kc, vc, pos):
    kc.transpose(1, 2).index_put_((torch.arange(B, device=q.device).unsqueeze(1), pos.unsqueeze(0)), k.transpose(1, 2))
    vc.transpose(1, 2).index_put_((torch.arange(B, device=q.device).unsqueeze(1), pos.unsqueeze(0)), v.transpose(1, 2))
    return attend(q, kc, vc)


def scatter(q, k, v, kc, vc, pos):
    index = pos.view(1, 1, T, 1).expand(B, H, T, D)
    kc.scatter_(2, index, k)
    vc.scatter_(2, index, v)
    return attend(q, kc, vc)


def narrow_copy(q, k, v, kc, vc, pos):
    kc.narrow(2, 3, T).copy_(k)
    vc.narrow(2, 3, T).copy_(v)
    return attend(q, kc, vc)


def slice_copy(q, k, v, kc, vc, pos):
    kc[:, :, 3:5].copy_(k)
    vc[:, :, 3:5].copy_(v)
    return attend(q, kc, vc)


def rolling(q, k, v, kc, vc, pos):
    for cache, new in ((kc, k), (vc, v)):
        cache.copy_(torch.cat((cache[:, :, T:], new), dim=2))
    return attend(q, kc, vc)


def flex(q, k, v, kc, vc, pos):
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    return flex_attention(q, kc, vc)


def in_checkpoint(q, k, v, kc, vc, pos):
    def body(q, k, v, kc, vc, pos):
        kc.index_copy_(2, pos, k)
        vc.index_copy_(2, pos, v)
        return attend(q, kc, vc)

    return checkpoint(body, q, k, v, kc, vc, pos, use_reentrant=False)


def in_cond(q, k, v, kc, vc, pos):
    def write(k, v, kc, vc, pos):
        kc.index_copy_(2, pos, k)
        vc.index_copy_(2, pos, v)
        return k + 1

    def write_scaled(k, v, kc, vc, pos):
        kc.index_copy_(2, pos, k * 2)
        vc.index_copy_(2, pos, v * 2)
        return k + 2

    extra = torch.cond(pos.sum() > 0, write, write_scaled, (k, v, kc, vc, pos))
    return attend(q, kc, vc) + extra.sum() * 0


@torch.compiler.nested_compile_region
def _region(q, k, v, kc, vc, pos):
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    return attend(q, kc, vc)


def in_subgraph(q, k, v, kc, vc, pos):
    return _region(q, k, v, kc, vc, pos) + _region(q, k + 1, v + 1, kc, vc, pos + 2)


# ---- one tensor for K and V, or for all layers


def halves(q, k, v, kv, slot):
    kv[0][slot] = tokens_first(k)
    kv[1][slot] = tokens_first(v)
    return attend(q, heads_first(kv[0]), heads_first(kv[1]))


def unbind(q, k, v, kv, slot):
    kc, vc = kv.unbind(0)
    kc[slot] = tokens_first(k)
    vc[slot] = tokens_first(v)
    return attend(q, heads_first(kc), heads_first(vc))


def select_int_in_index(q, k, v, kv, slot):
    kv[0, slot] = tokens_first(k)
    kv[1, slot] = tokens_first(v)
    return attend(q, heads_first(kv[0]), heads_first(kv[1]))


def stacked_layers(q, k, v, pool, slot):
    for layer in range(2):
        pool[layer][0][slot] = tokens_first(k) + layer
        pool[layer][1].index_copy_(0, slot, tokens_first(v) + layer)
    return attend(q, heads_first(pool[0, 0]), heads_first(pool[1, 1]))


def interleaved(q, k, v, kv, slot):
    kv[:, 0][slot] = tokens_first(k)
    kv[:, 1][slot] = tokens_first(v)
    return attend(q, heads_first(kv[:, 0]), heads_first(kv[:, 1]))


# ---- K and V written at once, sequences written one by one


def stacked_at_once(q, k, v, kv, slot):
    kv[:, slot] = torch.stack([tokens_first(k), tokens_first(v)])
    return attend(q, heads_first(kv[0]), heads_first(kv[1]))


def pairs_at_once(q, k, v, kv, slot):
    kv[slot] = torch.stack([tokens_first(k), tokens_first(v)], dim=1)
    return attend(q, heads_first(kv[:, 0]), heads_first(kv[:, 1]))


def rows_at_once(q, k, v, kv, pos):
    kv[:, :, :, pos] = torch.stack([k, v])
    return attend(q, *kv.unbind(0))


def row_by_row(q, k, v, kc, vc, pos):
    for row in range(B):
        kc[row].index_copy_(1, pos, k[row])
        vc[row].index_copy_(1, pos, v[row])
    return attend(q, kc, vc)


def row_by_row_tokens_first(q, k, v, kv, pos):
    for row in range(B):
        kv[0].select(1, row).index_copy_(0, pos, k[row].transpose(0, 1))
        kv[1].select(1, row).index_copy_(0, pos, v[row].transpose(0, 1))
    return attend(q, *kv.permute(0, 2, 3, 1, 4).unbind(0))


# ---- paged pools


def paged_view(q, k, v, kc, vc, slot):
    kc.view(-1, H, D)[slot] = tokens_first(k)
    vc.view(-1, H, D)[slot] = tokens_first(v)
    return attend(q, heads_first(kc.view(-1, H, D)), heads_first(vc.view(-1, H, D)))


def page_and_offset(q, k, v, kc, vc, slot):
    kc[slot // PAGE, slot % PAGE] = tokens_first(k)
    vc[slot // PAGE, slot % PAGE] = tokens_first(v)
    return attend(q, heads_first(kc.view(-1, H, D)), heads_first(vc.view(-1, H, D)))


def custom_op(q, k, v, kc, vc, slot):
    torch.ops.kvcanary_test.store_kv(tokens_first(k), tokens_first(v), kc, vc, slot)
    return attend(q, heads_first(kc.view(-1, H, D)), heads_first(vc.view(-1, H, D)))


def hidden_custom_op(q, k, v, kv, slot):
    torch.ops.kvcanary_test.hidden_store(tokens_first(k), tokens_first(v), kv, slot)
    return attend(q, heads_first(kv[0].view(-1, H, D)), heads_first(kv[1].view(-1, H, D)))


def functionalised_custom_op(q, k, v, kc, vc, slot):
    _, new_k, new_v = torch.ops.higher_order.auto_functionalized(
        torch.ops.kvcanary_test.store_kv.default,
        k=tokens_first(k),
        v=tokens_first(v),
        k_cache=kc,
        v_cache=vc,
        slot_mapping=slot,
    )
    kc.copy_(new_k)
    vc.copy_(new_v)
    return attend(q, heads_first(kc.view(-1, H, D)), heads_first(vc.view(-1, H, D)))


# ---- running states: no axis counts tokens


def named_states(q, k, v, conv_states, ssm_states):
    conv_states.copy_(torch.cat((conv_states, k[:, 0].transpose(1, 2)), dim=-1)[..., -4:])
    ssm_states.copy_(ssm_states * 0.9 + k.transpose(2, 3) @ v)
    return q @ ssm_states + conv_states.mean()


def unnamed_states(q, k, v, taps, memory):
    taps.copy_(torch.cat((taps, k[:, 0].transpose(1, 2)), dim=-1)[..., -4:])
    memory.copy_(memory.lerp(k.transpose(2, 3) @ v, 0.1))
    return q @ memory + taps.mean()


# ---- what is not a KV write


def moe_scatter(q, k, v, kc, vc, pos):
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    out = attend(q, kc, vc)
    mixed = torch.zeros_like(out)
    mixed.index_add_(2, torch.arange(T, device=q.device), out)
    mixed[:, :, 0] = out[:, :, 0]
    return mixed


def counter_and_mask(q, k, v, kc, vc, pos, counter, mask):
    counter.add_(T)
    mask[:, :, :, pos] = 0.0
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    return F.scaled_dot_product_attention(q, kc, vc, attn_mask=mask)


def output_buffer(q, k, v, out, pos):
    out[:, :, pos] = attend(q, k, v)
    return q


def computed_mask(q, k, v, kc, vc, pos, visible):
    visible[:, :, pos] = torch.arange(S, device=q.device).le(pos.unsqueeze(1)).to(q.dtype)
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    return attend(q, kc, vc) + visible.sum()


def running_mean(q, k, v, kc, vc, pos, mean):
    mean[pos] = mean[pos] * 0.9 + k.mean(dim=(0, 1))
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    return attend(q, kc, vc) + mean.mean()


def hidden_scratch(q, k, v, scratch, slot):
    torch.ops.kvcanary_test.hidden_store(tokens_first(k), tokens_first(v), scratch, slot)
    return q + scratch.sum()


@dataclasses.dataclass(frozen=True)
class Idiom:
    """One way to write a cache.

    Attributes:
        run: the function; its tensors come from ``make``.
        caches: which arguments after q, k, v are caches.
        halves: how many halves must be guarded.
        readable: slots and operand are known, so operand and bounds run.
        writes: how many ops write a half.
        refused: AOTAutograd refuses the graph as it is.
        name: the function's name.
    """

    run: Callable[..., torch.Tensor]
    make: Callable[[], tuple[Any, ...]]
    halves: int = 2
    readable: bool = True
    writes: int = 1
    refused: bool = False

    @property
    def name(self) -> str:
        return self.run.__name__


def _qkv(batch: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(batch, H, T, D) for _ in range(3))


def static_cache() -> tuple[Any, ...]:
    return (*_qkv(B), torch.zeros(B, H, S, D), torch.zeros(B, H, S, D), torch.tensor([3, 4]))


def keys_turned() -> tuple[Any, ...]:
    """K as ``[B, H, D, S]``, so that ``q @ k`` needs no transpose."""
    q, k, v, _, vc, pos = static_cache()
    return q, k, v, torch.zeros(B, H, D, S), vc, pos


def one_position() -> tuple[Any, ...]:
    return (*static_cache()[:-1], torch.tensor(3))


def one_tensor(*shape: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (*_qkv(1), torch.zeros(*shape), torch.tensor([5, 9]))


def paged() -> tuple[Any, ...]:
    return (*_qkv(1), torch.zeros(PAGES, PAGE, H, D), torch.zeros(PAGES, PAGE, H, D), torch.tensor([5, 9]))


IDIOMS = [
    Idiom(setitem, static_cache),
    Idiom(setitem_slice, static_cache),
    Idiom(setitem_batch_slice, static_cache),
    Idiom(setitem_rows_and_positions, static_cache),
    Idiom(setitem_at_a_number, one_position, refused=True),
    Idiom(setitem_of_a_row_at_a_number, one_position, writes=B, refused=True),
    Idiom(keys_with_positions_last, keys_turned),
    Idiom(index_copy_of_positions_last, keys_turned),
    Idiom(index_copy, static_cache),
    Idiom(index_put, static_cache),
    Idiom(scatter, static_cache),
    Idiom(narrow_copy, static_cache),
    Idiom(slice_copy, static_cache),
    Idiom(rolling, static_cache),
    Idiom(flex, static_cache),
    Idiom(in_checkpoint, static_cache, readable=False),
    Idiom(in_subgraph, static_cache, readable=False),
    Idiom(halves, one_tensor(2, SLOTS, H, D)),
    Idiom(unbind, one_tensor(2, SLOTS, H, D)),
    Idiom(select_int_in_index, one_tensor(2, SLOTS, H, D)),
    Idiom(stacked_layers, one_tensor(2, 2, SLOTS, H, D), halves=4),
    Idiom(interleaved, one_tensor(SLOTS, 2, H, D)),
    Idiom(stacked_at_once, one_tensor(2, SLOTS, H, D)),
    Idiom(pairs_at_once, one_tensor(SLOTS, 2, H, D)),
    Idiom(rows_at_once, lambda: (*_qkv(B), torch.zeros(2, B, H, S, D), torch.tensor([3, 4]))),
    Idiom(row_by_row, static_cache, writes=B),
    Idiom(row_by_row_tokens_first, lambda: (*_qkv(B), torch.zeros(2, S, B, H, D), torch.tensor([3, 4])), writes=B),
    Idiom(paged_view, paged),
    Idiom(page_and_offset, paged),
    Idiom(custom_op, paged),
    Idiom(hidden_custom_op, one_tensor(2, PAGES, PAGE, H, D), readable=False),
    Idiom(functionalised_custom_op, paged, readable=True),
]

if TorchVersion(torch.__version__) >= "2.13":  # 2.11 refuses a branch that writes to its inputs
    IDIOMS.append(Idiom(in_cond, static_cache, readable=False))

STATES = [
    Idiom(run, lambda: (*_qkv(B), torch.zeros(B, D, 4), torch.zeros(B, H, D, D)))
    for run in (named_states, unnamed_states)
]

NOT_KV = [
    Idiom(moe_scatter, static_cache),
    Idiom(
        counter_and_mask,
        lambda: (*static_cache(), torch.zeros((), dtype=torch.int64), torch.full((B, 1, T, S), -1.0)),
    ),
    Idiom(output_buffer, lambda: (*_qkv(B), torch.zeros(B, H, S, D), torch.tensor([3, 4])), halves=0),
    Idiom(computed_mask, lambda: (*static_cache(), torch.zeros(B, 1, S, S))),
    Idiom(running_mean, lambda: (*static_cache(), torch.zeros(S, D))),
    Idiom(hidden_scratch, one_tensor(2, PAGES, PAGE, H, D), halves=0),
]
