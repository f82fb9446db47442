"""The ways in which models write new K and V into a cache.

Most write one half: a function of the half's view, the new tokens with their axes as in the half, and where they go.
The others write K and V at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from fuzz.layouts import PAGE
from kvcanary_fx import register_kv_write


class At(NamedTuple):
    """Where the new tokens go.

    Attributes:
        index: int64: their positions ``[T]``, the same in every sequence; in a pool their slots ``[B * T]``.
        start: the first position as an int, if the idiom wants it; else 0.
        count: T.
        axis: the half's axis of tokens or slots.
        batch: the half's axis of sequences, -1 without one.
    """

    index: torch.Tensor
    start: int
    count: int
    axis: int
    batch: int


def _full(axis: int, part: Any) -> tuple[Any, ...]:
    return (slice(None),) * axis + (part,)


def _spread(index: torch.Tensor, axis: int, like: torch.Tensor) -> torch.Tensor:
    """``index`` along ``axis`` of a tensor of ``like``'s shape."""
    return index.view([-1 if a == axis else 1 for a in range(like.dim())]).expand(like.shape)


# ---- at chosen positions or slots


def setitem(cache, new, at):
    cache[_full(at.axis, at.index)] = new


def index_copy(cache, new, at):
    cache.index_copy_(at.axis, at.index, new)


def index_put(cache, new, at):
    if at.axis == 0:
        cache.index_put_((at.index,), new)
    else:
        cache.transpose(0, at.axis).index_put_((at.index,), new.transpose(0, at.axis))


def scatter(cache, new, at):
    cache.scatter_(at.axis, _spread(at.index, at.axis, new), new)


def moved_axis(cache, new, at):
    cache.movedim(at.axis, 0)[at.index] = new.movedim(at.axis, 0)


def index_copy_moved(cache, new, at):
    cache.movedim(at.axis, 0).index_copy_(0, at.index, new.movedim(at.axis, 0))


def aten_index_put(cache, new, at):
    where = [None] * at.axis + [at.index]
    torch.ops.aten.index_put_.default(cache, where, new)


def aten_index_copy(cache, new, at):
    torch.ops.aten.index_copy_.default(cache, at.axis, at.index, new)


def detached(cache, new, at):
    cache.detach()[_full(at.axis, at.index)] = new


def cleared_first(cache, new, at):
    cache[_full(at.axis, at.index)] = 0
    cache[_full(at.axis, at.index)] = new


def filled_first(cache, new, at):
    cache.index_fill_(at.axis, at.index, 0)
    cache.index_copy_(at.axis, at.index, new)


def added_onto_zeros(cache, new, at):
    cache.index_fill_(at.axis, at.index, 0)
    cache.index_add_(at.axis, at.index, new)


def zero_added_first(cache, new, at):
    cache.add_(0)
    cache.index_copy_(at.axis, at.index, new)


def twice(cache, new, at):
    cache.index_copy_(at.axis, at.index, new * 2)
    cache.index_copy_(at.axis, at.index, new)


def accumulated(cache, new, at):
    place = _full(at.axis, at.index)
    cache[place] *= 0
    cache[place] += new


def in_checkpoint(cache, new, at):
    def body(cache, new, index):
        cache.index_copy_(at.axis, index, new)
        return new.sum()

    checkpoint(body, cache, new, at.index, use_reentrant=False)


def in_cond(cache, new, at):
    def same(cache, new, index):
        cache.index_copy_(at.axis, index, new)
        return new.sum()

    def doubled(cache, new, index):
        cache.index_copy_(at.axis, index, new * 2)
        return new.sum()

    torch.cond(at.index.sum() >= 0, same, doubled, (cache, new, at.index))


@torch.compiler.nested_compile_region
def _region(cache, new, index, axis):
    cache.index_copy_(axis, index, new)
    return new.sum()


def in_region(cache, new, at):
    _region(cache, new, at.index, at.axis)


def by_helper(cache, new, at):
    def write(where):
        for n in range(1):
            cache.index_copy_(at.axis + n, where, new)

    write(at.index)


def linear_put(cache, new, at):
    flat = torch.arange(cache.numel()).view(cache.shape).index_select(at.axis, at.index)
    cache.put_(flat, new)


def token_loop(cache, new, at):
    for n in range(new.shape[at.axis]):
        cache.index_copy_(at.axis, at.index[n : n + 1], new.narrow(at.axis, n, 1))


def token_setitem(cache, new, at):
    for n in range(new.shape[at.axis]):
        cache[_full(at.axis, at.index[n])] = new.select(at.axis, n)


def scatter_each_token(cache, new, at):
    for n in range(new.shape[at.axis]):
        one = new.narrow(at.axis, n, 1)
        cache.scatter_(at.axis, at.index[n].expand(one.shape), one)


# ---- where sequences are rows


def rows_and_positions(cache, new, at):
    rows = torch.arange(cache.shape[at.batch]).unsqueeze(1)
    where = at.index.expand(cache.shape[at.batch], at.count)
    new = new.movedim((at.batch, at.axis), (0, 1))
    cache.movedim((at.batch, at.axis), (0, 1))[rows, where] = new


def rows_index_put(cache, new, at):
    rows = torch.arange(cache.shape[at.batch]).unsqueeze(1)
    new = new.movedim((at.batch, at.axis), (0, 1))
    cache.movedim((at.batch, at.axis), (0, 1)).index_put_((rows, at.index.unsqueeze(0)), new)


def row_loop(cache, new, at):
    for row in range(cache.shape[at.batch]):
        cache.select(at.batch, row).movedim(at.axis - (at.axis > at.batch), 0)[at.index] = new.select(
            at.batch, row
        ).movedim(at.axis - (at.axis > at.batch), 0)


def row_index_copy(cache, new, at):
    for row in range(cache.shape[at.batch]):
        cache.select(at.batch, row).index_copy_(at.axis - (at.axis > at.batch), at.index, new.select(at.batch, row))


def rows_unbound(cache, new, at):
    axis = at.axis - (at.axis > at.batch)
    for row, fresh in zip(cache.unbind(at.batch), new.unbind(at.batch), strict=True):
        row.index_copy_(axis, at.index, fresh)


def rows_slice(cache, new, at):
    batch = new.shape[at.batch]
    cache.narrow(at.batch, 0, batch)[_full(at.axis, at.index)] = new


# ---- at a position that is an int


def setitem_slice(cache, new, at):
    cache[_full(at.axis, slice(at.start, at.start + at.count))] = new


def slice_copy(cache, new, at):
    cache[_full(at.axis, slice(at.start, at.start + at.count))].copy_(new)


def narrow_copy(cache, new, at):
    cache.narrow(at.axis, at.start, at.count).copy_(new)


def select_copy(cache, new, at):
    for n in range(at.count):
        cache.select(at.axis, at.start + n).copy_(new.select(at.axis, n))


def setitem_int(cache, new, at):
    for n in range(at.count):
        cache[_full(at.axis, at.start + n)] = new.select(at.axis, n)


def slice_foreach(cache, new, at):
    torch._foreach_copy_([cache.narrow(at.axis, at.start, at.count)], [new])


def slice_scatter_back(cache, new, at):
    cache.copy_(torch.slice_scatter(cache, new, at.axis, at.start, at.start + at.count))


def cat_back(cache, new, at):
    end = at.start + at.count
    before = cache.narrow(at.axis, 0, at.start)
    after = cache.narrow(at.axis, end, cache.shape[at.axis] - end)
    cache.copy_(torch.cat((before, new, after), at.axis))


def out_of_an_op(cache, new, at):
    torch.mul(new, 1, out=cache.narrow(at.axis, at.start, at.count))


def slice_zero_then_add(cache, new, at):
    part = cache.narrow(at.axis, at.start, at.count)
    part.zero_()
    part.add_(new)


# ---- all of a half


def index_copy_back(cache, new, at):
    cache.copy_(cache.index_copy(at.axis, at.index, new))


def where_back(cache, new, at):
    wide = torch.zeros_like(cache).index_copy(at.axis, at.index, new)
    hit = torch.zeros(cache.shape[at.axis], dtype=torch.bool).index_fill(0, at.index, True)
    cache.copy_(torch.where(_spread(hit, at.axis, cache), wide, cache))


def where_setitem(cache, new, at):
    wide = torch.zeros_like(cache).index_copy(at.axis, at.index, new)
    hit = torch.zeros(cache.shape[at.axis], dtype=torch.bool).index_fill(0, at.index, True)
    cache[:] = torch.where(_spread(hit, at.axis, cache), wide, cache)


def scatter_back(cache, new, at):
    cache.copy_(cache.scatter(at.axis, _spread(at.index, at.axis, new), new))


def one_hot_back(cache, new, at):
    hit = torch.zeros(cache.shape[at.axis], dtype=cache.dtype).index_fill(0, at.index, 1)
    hit = _spread(hit, at.axis, cache)
    wide = torch.zeros_like(cache).index_copy(at.axis, at.index, new)
    cache.copy_(cache * (1 - hit) + wide * hit)


def masked_scatter(cache, new, at):
    hit = torch.zeros(cache.shape[at.axis], dtype=torch.bool).index_fill(0, at.index, True)
    cache.masked_scatter_(_spread(hit, at.axis, cache), new)


def boolean_mask(cache, new, at):
    hit = torch.zeros(cache.shape[at.axis], dtype=torch.bool).index_fill(0, at.index, True)
    cache[_full(at.axis, hit)] = new


def rolled_by_cat(cache, new, at):
    kept = cache.narrow(at.axis, at.count, cache.shape[at.axis] - at.count)
    cache.copy_(torch.cat((kept, new), at.axis))


def rolled(cache, new, at):
    moved = cache.roll(-at.count, at.axis)
    moved.narrow(at.axis, cache.shape[at.axis] - at.count, at.count).copy_(new)
    cache.copy_(moved)


def rolled_in_place(cache, new, at):
    cache.copy_(cache.roll(-at.count, at.axis))
    cache.narrow(at.axis, cache.shape[at.axis] - at.count, at.count).copy_(new)


# ---- heads, views


def head_loop(cache, new, at):
    for head in range(new.shape[1]):
        cache[:, head].index_copy_(1, at.index, new[:, head])


def heads_merged(cache, new, at):
    cache.flatten(0, 1).index_copy_(1, at.index, new.flatten(0, 1))


def heads_split(cache, new, at):
    for part, fresh in zip(cache.split(1, dim=1), new.split(1, dim=1), strict=True):
        part.index_copy_(2, at.index, fresh)


def as_strided_view(cache, new, at):
    view = cache.as_strided(cache.shape, cache.stride(), cache.storage_offset())
    view.index_copy_(at.axis, at.index, new)


def ellipsis(cache, new, at):
    cache[..., at.index, :] = new


def permuted(cache, new, at):
    cache.permute(2, 0, 1, 3)[at.index] = new.permute(2, 0, 1, 3)


# ---- pages


def page_and_offset(cache, new, at):
    cache[at.index // PAGE, at.index % PAGE] = new


def page_and_offset_hnd(cache, new, at):
    cache[at.index // PAGE, :, at.index % PAGE] = new


def page_index_put(cache, new, at):
    cache.index_put_((torch.div(at.index, PAGE, rounding_mode="floor"), torch.remainder(at.index, PAGE)), new)


def page_view(cache, new, at):
    cache.view(-1, *cache.shape[2:])[at.index] = new


def page_view_index_copy(cache, new, at):
    cache.view(-1, *cache.shape[2:]).index_copy_(0, at.index, new)


def page_flattened(cache, new, at):
    cache.flatten(0, 1)[at.index] = new


def page_turned(cache, new, at):
    cache.transpose(1, 2)[at.index // PAGE, at.index % PAGE] = new


# ---- custom ops


@torch.library.custom_op("kvcanary_fuzz::store_one", mutates_args=("kv_cache",))
def store_one(new: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    kv_cache.view(-1, *new.shape[1:])[slot_mapping] = new


@store_one.register_fake
def _(new, kv_cache, slot_mapping):
    return None


@torch.library.custom_op("kvcanary_fuzz::store_pair", mutates_args=("k_cache", "v_cache"))
def store_pair(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    k_cache.view(-1, *k.shape[1:])[slot_mapping] = k
    v_cache.view(-1, *v.shape[1:])[slot_mapping] = v


@store_pair.register_fake
def _(k, v, k_cache, v_cache, slot_mapping):
    return None


@torch.library.custom_op("kvcanary_fuzz::hidden_pair", mutates_args=("k_cache", "v_cache"))
def hidden_pair(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: torch.Tensor
) -> None:
    k_cache.view(-1, *k.shape[1:])[meta] = k
    v_cache.view(-1, *v.shape[1:])[meta] = v


@hidden_pair.register_fake
def _(k, v, k_cache, v_cache, meta):
    return None


@torch.library.custom_op("kvcanary_fuzz::hidden_rows", mutates_args=("k_cache", "v_cache"))
def hidden_rows(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: torch.Tensor, axis: int
) -> None:
    k_cache.index_copy_(axis, meta, k)
    v_cache.index_copy_(axis, meta, v)


@hidden_rows.register_fake
def _(k, v, k_cache, v_cache, meta, axis):
    return None


@torch.library.custom_op("kvcanary_fuzz::hidden_both", mutates_args=("kv_cache",))
def hidden_both(k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, meta: torch.Tensor) -> None:
    kv_cache[0].view(-1, *k.shape[1:])[meta] = k
    kv_cache[1].view(-1, *v.shape[1:])[meta] = v


@hidden_both.register_fake
def _(k, v, kv_cache, meta):
    return None


#: What ``store_badly`` does wrong: in how many calls, in which half, how.
GLITCH: list[Any] = []


@torch.library.custom_op("kvcanary_fuzz::keep", mutates_args=("first", "second"))
def keep(first: torch.Tensor, second: torch.Tensor, a: torch.Tensor, b: torch.Tensor, where: torch.Tensor) -> None:
    first.view(-1, *a.shape[1:])[where] = a
    second.view(-1, *b.shape[1:])[where] = b


@keep.register_fake
def _(first, second, a, b, where):
    return None


register_kv_write("kvcanary_fuzz::keep", slots="where", pools={"first": "a", "second": "b"})


@torch.library.custom_op("kvcanary_fuzz::returned", mutates_args=())
def returned(kv_cache: torch.Tensor, new: torch.Tensor, index: torch.Tensor, axis: int) -> torch.Tensor:
    return kv_cache.index_copy(axis, index, new)


@returned.register_fake
def _(kv_cache, new, index, axis):
    return torch.empty_like(kv_cache)


def op_one(cache, new, at):
    torch.ops.kvcanary_fuzz.store_one(new, cache, at.index)


# ---- K and V at once


def op_pair(kc, vc, k, v, at):
    torch.ops.kvcanary_fuzz.store_pair(k, v, kc, vc, at.index)


@torch.library.custom_op("kvcanary_fuzz::store_badly", mutates_args=("k_cache", "v_cache"))
def store_badly(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """The same, as long as nothing is in :data:`GLITCH`: calls until it strikes, the half, and how."""
    for half, (cache, new) in enumerate(((k_cache, k), (v_cache, v))):
        slots, fresh = slot_mapping, new
        if GLITCH and GLITCH[0] == 0 and GLITCH[1] == half:
            if GLITCH[2] == "slot":
                slots = slots + 1
            elif GLITCH[2] == "stride":
                slots = slots * 2 % (cache.numel() // new[0].numel())
            else:
                fresh = new.flip(-1)
        cache.view(-1, *new.shape[1:])[slots] = fresh
    if GLITCH:
        GLITCH[0] -= 1


@store_badly.register_fake
def _(k, v, k_cache, v_cache, slot_mapping):
    return None


def op_badly(kc, vc, k, v, at):
    torch.ops.kvcanary_fuzz.store_badly(k, v, kc, vc, at.index)


def op_registered(kc, vc, k, v, at):
    torch.ops.kvcanary_fuzz.keep(kc, vc, k, v, at.index)


def op_hidden_pair(kc, vc, k, v, at):
    torch.ops.kvcanary_fuzz.hidden_pair(k, v, kc, vc, at.index)


def op_hidden_rows(kc, vc, k, v, at):
    torch.ops.kvcanary_fuzz.hidden_rows(k, v, kc, vc, at.index, at.axis)


def functionalised_op(kc, vc, k, v, at):
    _, new_k, new_v = torch.ops.higher_order.auto_functionalized(
        torch.ops.kvcanary_fuzz.store_pair.default, k=k, v=v, k_cache=kc, v_cache=vc, slot_mapping=at.index
    )
    kc.copy_(new_k)
    vc.copy_(new_v)


def foreach_copy(kc, vc, k, v, at):
    torch._foreach_copy_([c.narrow(at.axis, at.start, at.count) for c in (kc, vc)], [k, v])


def pair_loop(kc, vc, k, v, at):
    for cache, new in ((kc, k), (vc, v)):
        cache.index_copy_(at.axis, at.index, new)


def values_first(kc, vc, k, v, at):
    vc.index_copy_(at.axis, at.index, v)
    kc.index_copy_(at.axis, at.index, k)


def op_hidden_both(kv, k, v, at):
    torch.ops.kvcanary_fuzz.hidden_both(k, v, kv, at.index)


def stacked_setitem(kv, k, v, at):
    kv[_full(at.axis + 1, at.index)] = torch.stack((k, v))


def stacked_index_copy(kv, k, v, at):
    kv.index_copy_(at.axis + 1, at.index, torch.stack((k, v)))


def stacked_narrow(kv, k, v, at):
    kv.narrow(at.axis + 1, at.start, at.count).copy_(torch.stack((k, v)))


def stacked_behind(kv, k, v, at):
    kv[at.index] = torch.stack((k, v), 1)


def stacked_behind_index_copy(kv, k, v, at):
    kv.index_copy_(0, at.index, torch.stack((k, v), 1))


def joint_rows(kv, k, v, at):
    kv.index_copy_(at.axis, at.index, torch.cat((k, v), -1))


def joint_setitem(kv, k, v, at):
    kv[_full(at.axis, at.index)] = torch.cat((k, v), -1)


# ---- a new cache for each step: what is returned is the cache of the next one


def new_index_copy(cache, new, at):
    return cache.index_copy(at.axis, at.index, new)


def new_scatter(cache, new, at):
    return cache.scatter(at.axis, _spread(at.index, at.axis, new), new)


def new_slice_scatter(cache, new, at):
    return torch.slice_scatter(cache, new, at.axis, at.start, at.start + at.count)


def new_where(cache, new, at):
    wide = torch.zeros_like(cache).index_copy(at.axis, at.index, new)
    hit = torch.zeros(cache.shape[at.axis], dtype=torch.bool).index_fill(0, at.index, True)
    return torch.where(_spread(hit, at.axis, cache), wide, cache)


def new_of_an_op(cache, new, at):
    return torch.ops.kvcanary_fuzz.returned(cache, new, at.index, at.axis)


def new_clone(cache, new, at):
    cache = cache.clone()
    cache[_full(at.axis, at.index)] = new
    return cache


ROWS = ("bhsd", "bshd", "sbhd", "bsf")
ONE_AXIS = (*ROWS, "flat", "flatf")
SHARED = ("kv0", "kv1", "joint", "layers", "layers_kv", "kv_layers")
ANY = ("pair", *SHARED)


@dataclasses.dataclass(frozen=True)
class Idiom:
    """One way to write a cache.

    Attributes:
        unit: what ``write`` is given: a half, a ``pair`` of halves, or the tensor that holds ``both``; or a half of
            which it returns a ``new`` one.
        families, packings: the layouts that it fits.
        rolls: all cells are written, moved by the number of new tokens.
        start: it wants the position as an int.
        moved: it writes to a view whose first axis numbers tokens, so that there are no rows.
        named: a name must say that it is a cache: what is computed from itself is otherwise a running state.
    """

    write: Callable[..., None]
    families: tuple[str, ...] = ONE_AXIS
    packings: tuple[str, ...] = ANY
    unit: str = "half"
    rolls: bool = False
    start: bool = False
    named: bool = False
    moved: bool = False

    @property
    def name(self) -> str:
        return self.write.__name__


_AT_INDEX = (
    setitem, index_copy, scatter, aten_index_put, aten_index_copy, detached,
    cleared_first, filled_first, added_onto_zeros, zero_added_first, twice, accumulated, in_checkpoint,
    in_region, by_helper, linear_put, token_loop, token_setitem, scatter_each_token, index_copy_back, where_back,
    where_setitem, scatter_back, as_strided_view,
)  # fmt: skip
_IN_ROWS = (
    rows_and_positions, rows_index_put, row_loop, row_index_copy, rows_unbound, rows_slice, masked_scatter,
    boolean_mask,
)  # fmt: skip
_AT_START = (
    setitem_slice, slice_copy, narrow_copy, select_copy, setitem_int, slice_foreach, slice_scatter_back, cat_back,
    out_of_an_op, slice_zero_then_add,
)  # fmt: skip
_MOVED = (index_put, moved_axis, index_copy_moved)
_BY_HEAD = (head_loop, heads_split, ellipsis)
_PAGED = (page_and_offset, page_index_put, page_view, page_view_index_copy, page_flattened)
_MERGEABLE = tuple(p for p in ANY if p != "kv1")  # the first two axes of a half are one in memory
_POOLS = ("flat", "flatf", "paged")

ALL = (
    *(Idiom(write) for write in _AT_INDEX),
    *(Idiom(write, ROWS) for write in _IN_ROWS),
    *(Idiom(write, ROWS, start=True) for write in _AT_START),
    *(Idiom(write, ("bhsd",)) for write in _BY_HEAD),
    Idiom(in_cond, ("bhsd", "bshd", "flat"), ("pair",)),  # few: eager compiles each call
    *(Idiom(write, moved=True) for write in _MOVED),
    Idiom(permuted, ("bhsd",), moved=True),
    Idiom(heads_merged, ("bhsd",), _MERGEABLE),
    *(Idiom(write, ROWS, rolls=True) for write in (rolled_by_cat, rolled, rolled_in_place)),
    *(Idiom(write, ("paged",), _MERGEABLE) for write in _PAGED),
    *(Idiom(write, ("hnd",)) for write in (page_and_offset_hnd, page_turned)),
    Idiom(one_hot_back, ONE_AXIS, ("pair", "layers"), named=True),
    Idiom(op_one, _POOLS, ("pair", "kv0", "layers", "layers_kv", "kv_layers")),
    Idiom(op_pair, _POOLS, ("pair", "kv0", "layers", "layers_kv", "kv_layers"), "pair"),
    Idiom(op_hidden_pair, _POOLS, ("pair", "kv0", "layers", "layers_kv", "kv_layers"), "pair"),
    Idiom(op_hidden_rows, ("bhsd", "bshd"), ("pair",), "pair"),
    Idiom(functionalised_op, _POOLS, ("pair",), "pair"),
    Idiom(foreach_copy, ROWS, ANY, "pair", start=True),
    Idiom(pair_loop, ONE_AXIS, ANY, "pair"),
    Idiom(values_first, ONE_AXIS, ANY, "pair"),
    Idiom(op_badly, _POOLS, ("pair", "kv0", "layers", "layers_kv", "kv_layers"), "pair"),
    Idiom(op_registered, _POOLS, ("pair", "kv0", "layers", "layers_kv", "kv_layers"), "pair"),
    *(Idiom(write, ONE_AXIS, ("pair",), "new") for write in (new_index_copy, new_scatter, new_where, new_of_an_op)),
    Idiom(new_clone, ONE_AXIS, ("pair",), "new"),
    Idiom(new_slice_scatter, ROWS, ("pair",), "new", start=True),
    Idiom(op_hidden_both, _POOLS, ("kv0",), "both"),
    Idiom(stacked_setitem, ONE_AXIS, ("kv0",), "both"),
    Idiom(stacked_index_copy, ONE_AXIS, ("kv0",), "both"),
    Idiom(stacked_narrow, ROWS, ("kv0",), "both", start=True),
    Idiom(stacked_behind, ("flat", "flatf"), ("kv1",), "both"),
    Idiom(stacked_behind_index_copy, ("flat", "flatf"), ("kv1",), "both"),
    Idiom(joint_rows, ONE_AXIS, ("joint",), "both"),
    Idiom(joint_setitem, ONE_AXIS, ("joint",), "both"),
)
IDIOMS = {idiom.name: idiom for idiom in ALL}

#: Ways whose slots the graph does not show: an op hides them, or the whole cache is written or returned.
UNSHOWN = frozenset({
    "zero_added_first", "in_checkpoint", "in_region", "in_cond", "linear_put",
    "masked_scatter", "boolean_mask", "index_copy_back", "where_back", "where_setitem", "scatter_back",
    "slice_scatter_back", "cat_back", "one_hot_back", "rolled_by_cat", "rolled", "rolled_in_place", "op_hidden_pair",
    "op_hidden_rows", "op_hidden_both", "new_where", "new_of_an_op",
})  # fmt: skip
