"""The declaration of a pool, the same for every layout; an error says what cannot be guarded."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from ..errors import EngineError
from ..kernels.writes.layout import POOL_DTYPES
from .layouts import layouts_of
from .layouts.base import Layout
from .pool_arguments import is_integer, shared_bytes, wrong_argument

#: Labels of a layer's tensors, in the order in which they are given.
HALF_LABELS = ("K", "V", "K scale", "V scale")

Slots = torch.Tensor | Sequence[int]


@dataclasses.dataclass(frozen=True)
class KVPool:
    """The KV tensors of a group of layers that share slot numbers, as an engine describes them.

    docs/layouts.md has an example for each kind of cache.

    Attributes:
        layers: for each layer its tensors: K and V, or an MLA latent alone; scales may follow.  Each is
            ``[slots, ...]``, or ``[pages, page_size, ...]`` with ``paged=True``, in any strides: parts of one
            tensor are given as views.  A layer that reads another layer's cache has that layer's tensors.
        request_table: integer ``[requests, width]``: for each request the pages (slots, with
            ``table_page_size=1``) of its positions.  Read on the device in each forward; never copied.
        name: for reports.
        layer_names: names of the layers for reports, by default ``layers.0``, ``layers.1``, ...
        half_names: names of a layer's tensors for reports, by default ``K``, ``V``, ``K scale``, ``V scale``.
        paged: whether the tensors have two slot axes.
        order: of a paged tensor: ``NHD`` is ``[pages, page_size, heads, dim]``, ``HND``
            ``[pages, heads, page_size, dim]``.
        kv_axis: the axis, of length 2, along which each tensor holds K and V; None: a tensor holds one of them.
        table_page_size: slots of one entry of the request table.
        slot_map: integer, from the index space of the table to this pool's, for a sliding window with slots
            of its own; what it maps to a reserved slot is outside the window, and reported if it is not.
        slots_from: the batch's field with the slots planned for this pool.
        reserved: slots that take the padding of a batch.
        never_read: those of the reserved slots that no kernel reads: a sweep looks for NaN in the others only.
        padding_row: a row of the request table that means padding wherever it stands in the batch, as SGLang's row 0:
            what such an entry reads is not checked, and its tokens go to reserved slots or to none.  None: padding
            stands at the end of a batch.
        token_offset: the slot of position p holds the token of position p + token_offset (an EAGLE draft's: 1).
        window: tokens that attention sees, the token itself included, as in a Hugging Face config's
            ``sliding_window``; None for all.
        chunk: tokens of a chunk, where attention sees those of a token's own chunk alone, as in a config's
            ``attention_chunk_size`` (Llama 4); None: there are no chunks.
        ring: a request's row is used again and again: position p is in column ``p // table_page_size`` modulo
            the width.  Needs a window that fits into the row.
        tokens_per_slot: tokens that a slot stands for, in a compressed cache: slot e of a request is written when
            its token ``(e + 1) * tokens_per_slot - 1`` is, and goes by that token.
        state: a slot is the state of a whole request, rewritten in each step; the table is ``[requests, 1]``.
        written_once: a slot is written once and then only read, by graphs that may never write it, as in
            cross-attention.
        batch: the batch's field with a batch of this pool's own, where its tokens are not the decoder's.
        scales: tensors of any shape by name that every slot's meaning depends on, such as scales per tensor: their
            bytes are compared before each forward.
        allocations: the engine reports allocate and release.  False: the owner check is off.

    Raises:
        EngineError: a layout that cannot be guarded, with the reason.
    """

    layers: Sequence[Sequence[torch.Tensor]]
    request_table: torch.Tensor
    name: str = "kv"
    layer_names: Sequence[str] | None = None
    half_names: Sequence[str] = HALF_LABELS
    paged: bool = False
    order: Literal["NHD", "HND"] = "NHD"
    kv_axis: int | None = None
    table_page_size: int = 1
    slot_map: torch.Tensor | None = None
    slots_from: str = "slots"
    reserved: tuple[int, ...] = (0,)
    never_read: tuple[int, ...] = ()
    padding_row: int | None = None
    token_offset: int = 0
    window: int | None = None
    chunk: int | None = None
    ring: bool = False
    tokens_per_slot: int = 1
    state: bool = False
    written_once: bool = False
    batch: str | None = None
    scales: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    allocations: bool = True

    def __post_init__(self) -> None:
        self._refuse_if(wrong_argument(vars(self)))
        if not self.layers or not all(len(layer) for layer in self.layers):
            self._refuse("has no layers, or a layer without tensors: give layers=[(k, v), ...]")
        if self.layer_names is not None and len(self.layer_names) != len(self.layers):
            self._refuse(f"has {len(self.layers)} layers and {len(self.layer_names)} layer_names")
        table = self.request_table
        if table.dim() != 2 or not is_integer(table):
            self._refuse(
                f"has a request_table that is {table.dtype} {list(table.shape)}; it must be integer [requests, width]"
            )
        self._require_one_device()
        self._require_slots()
        self._refuse_if(shared_bytes(self.tensors))
        self._require_index_space()
        self._require_layout()

    def _refuse(self, why: str) -> None:
        raise EngineError(f"pool {self.name!r} {why}")

    def _refuse_if(self, why: str | None) -> None:
        if why is not None:
            self._refuse(why)

    def _require_one_device(self) -> None:
        devices = list(dict.fromkeys(str(tensor.device) for layer in self.tensors for tensor in layer))
        if len(devices) > 1:
            self._refuse(f"has tensors on {', '.join(devices)}: the layers of each device are a pool of their own")

    def _require_slots(self) -> None:
        if self.order not in ("NHD", "HND") or (self.order == "HND" and not self.paged):
            self._refuse(f"has order={self.order!r}: it is 'NHD', or 'HND' of paged tensors")
        counts = {self._slots_of(tensor) for layer in self.tensors for tensor in layer}
        if len(counts) > 1:
            self._refuse(
                f"has tensors with different numbers of slots: {sorted(counts)}. Layers that do not share slot numbers "
                "are pools of their own; a scale that several slots share changes whenever one of them is written, and "
                "cannot be told from a corrupted one: keep one scale per slot, or give a scale that stays as it is as "
                "scales={name: tensor}"
            )
        outside = [s for s in self.reserved if not 0 <= s < self.slots]
        if outside:
            self._refuse(f"has {self.slots} slots, and reserved={outside} are not among them")
        others = sorted(set(self.never_read) - set(self.reserved))
        if others:
            self._refuse(f"has never_read={others}, which are not among its reserved slots: name them there, too")
        for name, scale in self.scales.items():
            if scale.dtype not in POOL_DTYPES or not scale.numel():
                self._refuse(f"has scales[{name!r}] of {scale.dtype} {list(scale.shape)}; it must be floating-point")

    def _require_index_space(self) -> None:
        if self.window is not None and self.window < 1:
            self._refuse(
                f"has window={self.window}: it counts the tokens that attention sees, the newest included, so it is at "
                "least 1; None is no window"
            )
        if self.chunk is not None and self.chunk < 1:
            self._refuse(f"has chunk={self.chunk}: it counts the tokens of a chunk, at least 1; None is no chunks")
        if self.padding_row is not None and not 0 <= self.padding_row < self.request_table.shape[0]:
            self._refuse(
                f"has padding_row={self.padding_row}, and a request_table of {self.request_table.shape[0]} rows: give "
                "the row that padded entries of a batch have, or None"
            )

    def _require_layout(self) -> None:
        """Refuse declarations that need two numberings of tokens at once, or that do not fit theirs."""
        given = layouts_of(self)
        if len(given) > 1:
            names = " and ".join(layout.argument for layout in given)
            self._refuse(f"has {names}: a slot's token can be told by one of them only")
        self._refuse_if(self.layout.refusal())

    @functools.cached_property
    def layout(self) -> Layout:
        """How the tokens of a request are numbered in slots."""
        return layouts_of(self)[0]

    @functools.cached_property
    def tensors(self) -> list[list[torch.Tensor]]:
        """Each layer's halves as views ``[slots, ...]`` or ``[pages, page_size, ...]``, K and V apart."""
        return [[view for tensor in layer for view in self._views(tensor)] for layer in self.layers]

    @functools.cached_property
    def names_of_layers(self) -> list[str]:
        """``layer_names``, or the defaults."""
        return list(self.layer_names or (f"layers.{number}" for number in range(len(self.layers))))

    @functools.cached_property
    def layer_numbers(self) -> list[int]:
        """The number of each layer in the whole model, which its digests start from: the last one in its name.

        Its place in the pool where names have none, or the same one twice: a shadow then fits pools that are cut alike.
        """
        numbers = [[int(part) for part in name.split(".") if part.isdecimal()] for name in self.names_of_layers]
        found = [own[-1] for own in numbers if own]
        return found if len(set(found)) == len(self.layers) else list(range(len(self.layers)))

    def _views(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [tensor]
        if self.kv_axis is not None:
            axis = self.kv_axis
            if not -tensor.dim() <= axis < tensor.dim() or tensor.shape[axis] != 2:
                self._refuse(f"has kv_axis={axis}, and a tensor {list(tensor.shape)} that has no 2 there")
            parts = list(tensor.unbind(axis))
        if self.order == "NHD":
            return parts
        if any(part.dim() < 3 for part in parts):
            self._refuse(
                f"has order='HND', and a tensor {list(tensor.shape)}; it must be [pages, heads, page_size, ...]"
            )
        return [part.transpose(1, 2) for part in parts]

    def _slots_of(self, tensor: torch.Tensor) -> int:
        axes = 2 if self.paged else 1
        if tensor.dtype not in POOL_DTYPES or tensor.dim() < axes:
            self._refuse(
                f"has a tensor that is {tensor.dtype} {list(tensor.shape)}; it must be [slots, ...], or "
                "[pages, page_size, ...] with paged=True, in a floating-point or 8-bit type: give packed or wider "
                "integers as tensor.view(torch.uint8)"
            )
        return tensor.shape[0] * (tensor.shape[1] if self.paged else 1)

    @property
    def slots(self) -> int:
        return self._slots_of(self.tensors[0][0])

    @property
    def device(self) -> torch.device:
        return self.layers[0][0].device

    def describe(self) -> str:
        """The layout in one line: what is special about the numbering, pages, bytes of a row of each half."""
        first = self.tensors[0][0]
        widths = "+".join(str(t[(0,) * (1 + self.paged)].numel() * t.element_size()) for t in self.tensors[0])
        shown = ["slots through a map"] if self.slot_map is not None else []
        shown += [f"window {self.window}"] if self.window is not None else []
        shown += [f"chunks of {self.chunk}"] if self.chunk is not None else []
        shown += self.layout.describe()
        shown += [f"{len(self.scales)} scales"] if self.scales else []
        shown += [f"token offset {self.token_offset}"] if self.token_offset else []
        shown += [] if self.allocations else ["allocations not reported, so owner is off"]
        shown += [f"pages of {first.shape[1]}, {self.order}"] if self.paged else []
        shown += [f"table in pages of {self.table_page_size}"] if self.table_page_size > 1 else []
        shown += [f"reserved {_named(self.reserved)}"] if self.reserved != (0,) else []
        shown += [f"rows of {widths} bytes, {first.stride(int(self.paged)) * first.element_size()} bytes apart"]
        return ", ".join(shown)


def _named(slots: Sequence[int]) -> str:
    """Slots in words: engines reserve whole pages of them."""
    if len(slots) > 4 and list(slots) == list(range(slots[0], slots[0] + len(slots))):
        return f"{slots[0]} to {slots[-1]}"
    return str(list(slots))
