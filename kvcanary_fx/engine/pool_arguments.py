"""What each argument of a :class:`~.kv_pool.KVPool` may be; what they may be together is said there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..kernels.writes.layout import SlotLayout
from ..runtime.pool_half import Place
from .arguments import is_whole, unfit_tensor


def _are_names(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(n, str) and n for n in value)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_field(value: Any) -> bool:
    return isinstance(value, str) and value.isidentifier() and not value.startswith("_")


def _are_slots(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(is_whole(slot) for slot in value)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


_FLAG = (_is_flag, "True or False")

#: For each argument that is no tensor, what it may be and how that is said.
RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (_is_name, "a string that is not empty"),
    "layer_names": (
        lambda v: v is None or (_are_names(v) and len(set(v)) == len(v)),
        "a sequence of strings, each another one: checks go by the layer's name; or None",
    ),
    "half_names": (_are_names, "a sequence of strings, such as ('K', 'V')"),
    "paged": _FLAG,
    "order": (lambda v: isinstance(v, str), "'NHD', or 'HND' of paged tensors"),
    "kv_axis": (lambda v: v is None or is_whole(v), "the number of an axis, or None"),
    "table_page_size": (lambda v: is_whole(v, 1), "a whole number of slots, at least 1"),
    "slots_from": (_is_field, "the name of a field of the batch"),
    "reserved": (_are_slots, "a tuple of slots, () for none"),
    "never_read": (_are_slots, "a tuple of reserved slots, () for none"),
    "token_offset": (lambda v: is_whole(v, 0), "a whole number of tokens, 0 or more"),
    "window": (lambda v: v is None or is_whole(v), "a whole number of tokens, or None"),
    "chunk": (lambda v: v is None or is_whole(v), "a whole number of tokens, or None"),
    "padding_row": (lambda v: v is None or is_whole(v), "the number of a row of the request table, or None"),
    "ring": _FLAG,
    "tokens_per_slot": (lambda v: is_whole(v, 1), "a whole number of tokens, at least one"),
    "state": _FLAG,
    "written_once": _FLAG,
    "batch": (lambda v: v is None or _is_field(v), "the name of a field of the batch, or None"),
    "scales": (lambda v: isinstance(v, Mapping) and all(map(_is_name, v)), "a dict of tensors by name"),
    "allocations": _FLAG,
}


def wrong_argument(given: Mapping[str, Any]) -> str | None:
    """What is wrong with the arguments of a pool, each by itself, as text; None if nothing is."""
    for name, (accepts, expected) in RULES.items():
        value = given[name]
        if not accepts(value):
            return f"has {name}={value!r}; it must be {expected}"
    return _wrong_layers(given["layers"]) or _wrong_indices(given)


def _wrong_layers(layers: Any) -> str | None:
    if not isinstance(layers, Sequence) or isinstance(layers, str):
        return f"has layers that are a {type(layers).__name__}: give layers=[(k, v), ...]"
    for number, layer in enumerate(layers):
        if isinstance(layer, torch.Tensor) or not isinstance(layer, Sequence):
            return (
                f"has layers[{number}] that is a {type(layer).__name__}: each layer is a tuple of its tensors, "
                "layers=[(k, v), ...], also where it is a single one, [(latent,), ...]"
            )
        for tensor in layer:
            why = unfit_tensor(tensor)
            if why is not None:
                return f"has in layers[{number}] {why}"
    return None


def _wrong_indices(given: Mapping[str, Any]) -> str | None:
    slot_map = given["slot_map"]
    tensors = {"request_table": given["request_table"], "slot_map": slot_map}
    tensors |= {f"scales[{name!r}]": scale for name, scale in given["scales"].items()}
    for name, tensor in tensors.items():
        why = unfit_tensor(tensor) if tensor is not None or name == "request_table" else None
        if why is not None:
            return f"has a {name} that is {why}"
    if slot_map is not None and (slot_map.dim() != 1 or not is_integer(slot_map)):
        return (
            f"has a slot_map that is {slot_map.dtype} {list(slot_map.shape)}; it must be integer [slots of the table]"
        )
    return None


def is_integer(tensor: torch.Tensor) -> bool:
    """Whether a tensor has whole numbers; bool is none."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def shared_bytes(tensors: Sequence[Sequence[torch.Tensor]]) -> str | None:
    """Tensors of a pool that share a byte, as text: a write to one changes the other.

    A layer that reads another layer's cache has the very same tensors.  Views of other strides or dtypes are not
    compared.

    Args:
        tensors: of each layer, as views ``[slots, ...]``.
    """
    known: list[tuple[str, torch.Tensor, Place]] = []
    for number, layer in enumerate(tensors):
        mine: list[tuple[str, torch.Tensor, Place]] = []
        for place, tensor in enumerate(layer):
            label = f"layers[{number}][{place}]"
            if not tensor.numel():
                return f"has a {label} of {list(tensor.shape)}: a slot needs at least one element, a pool one slot"
            if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
                return (
                    f"has a {label} that is expanded, so that several slots or heads are the same bytes: give its own"
                )
            here = (label, tensor, _place(tensor))
            for other, seen, there in mine:
                if _overlap(tensor, here[2], seen, there):
                    return f"has the same bytes in {other} and {label}: give each layer every tensor once"
            for other, seen, there in known:
                if here[2] != there and _overlap(tensor, here[2], seen, there):
                    return (
                        f"has {other} and {label}, which overlap: layers have bytes of their own, or the same tensors"
                    )
            mine.append(here)
        known += mine
    return None


def _place(tensor: torch.Tensor) -> Place:
    layout = SlotLayout(tuple(tensor.shape), (0,), tensor.dtype)
    return Place(int(tensor.storage_offset()) * tensor.element_size(), tuple(tensor.stride()), layout)


def _overlap(a: torch.Tensor, here: Place, b: torch.Tensor, there: Place) -> bool:
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr() or a.dtype != b.dtype:
        return False
    return here.strides == there.strides and here.overlaps(there)
