"""The launch that records several layers of a pool at once, see :class:`.layer.HeldRecords`."""

from __future__ import annotations

import functools
import operator
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..bound_launch import BoundLaunch
from ..side_stream import capturing
from ..slots.space import RequestPlan
from ..staging import HostRing, lasting
from ..writes.geometry import geometry_of
from . import layer
from . import triton_layer as records
from .gpu_layer import MOST_FORMS, Part, operand_parts, record_args, record_launch, record_tile
from .gpu_pool import table_row
from .launch_args import strided_grid
from .layer_tables import BEHIND, LayerTables

#: Words on the device for what calls in CUDA graphs are given: 700 calls of a model of 64 layers.
CAPTURED = 1 << 18

#: Calls that the host may be ahead of the device: a prompt that is not held at once makes several.
AHEAD = 64

#: Memory layouts, by how many tokens there are, whose launches are kept.
LAYOUTS = 4096

#: Of the arguments for a layer, those that the table has.
_IN_TABLE = ("base", "counters_ptr", "digest_ptr", "rows_ptr", "seed1", "seed2", "half", "token_stride")


class _Form(NamedTuple):
    """The launch for K and V of one memory layout.

    Attributes:
        places: for each half of a layer, which of K and V is its operand, or None.
        steps: units from token to token, for each half.
    """

    launch: BoundLaunch
    places: tuple[int | None, ...]
    steps: tuple[int, ...]


class HeldRecords(layer.HeldRecords):
    """One launch, where all layers and their operands have the same memory layout."""

    def __init__(self, records: Sequence[layer.LayerRecord], tables: LayerTables | None = None):
        super().__init__(records, tables)
        halves = [half for record in self.records for half in record.written]
        parts = [Part(half.site, geometry_of(half.view, half.site.layout.slot_axes)) for half in halves]
        places = [[half.place for half in record.written] for record in self.records]
        self._alike = all(part.alike(parts[0]) for part in parts) and all(each == places[0] for each in places)
        self._halves, self._aligned = len(places[0]), all(half.view.data_ptr() % 16 == 0 for half in halves)
        device = self._device = halves[0].view.device
        rows = [table_row(half.site, half.view.data_ptr()) for half in halves]
        self._table = torch.tensor(rows, dtype=torch.int64, device="cpu").to(device)
        self._row_of = {id(record): at * self._halves for at, record in enumerate(self.records)}
        self._told: _Told | _ByGraph = _Told(device, 3 * len(halves)) if tables is None else _ByGraph(tables)
        self._control = halves[0].site.control
        self._stamps = self._control.stamps
        self._forms: dict[tuple[Any, ...], _Form | None] = {}
        self._found: dict[tuple[Any, ...], tuple[list[layer.LayerRecord], _Form | None]] = {}
        # what the last call was given, but for the addresses
        self._written: list[layer.LayerRecord] = []
        self._form: _Form | None = None
        self._same, self._ops = array("q"), 0

    def __call__(self, plan: RequestPlan, held: layer.WrittenLayers) -> None:
        slots = plan.real_slots
        assert slots is not None
        if slots.shape[0] == 0 or not self._alike or not (_one_stride(held.keys) and _one_stride(held.values)):
            super().__call__(plan, held)
            return
        addresses = _addresses(held.keys), _addresses(held.values)
        bits = functools.reduce(operator.or_, addresses[1], functools.reduce(operator.or_, addresses[0], 0))
        form = self._form_for(plan, held, aligned=not bits & 15)
        if form is None:
            super().__call__(plan, held)
            return
        words, ops = self._words(form, held.records, addresses)
        given = self._told.place(words)
        if given is None:
            super().__call__(plan, held)
            return
        self._launch(form, slots, given, len(held) * self._halves, ops)

    def settle(self) -> None:
        self._told.settle()

    def _form_for(self, plan: RequestPlan, held: layer.WrittenLayers, aligned: bool) -> _Form | None:
        """The launch for what layers were given; None: one launch cannot take it.

        For its shape and type each tensor is asked once, if the first and the last layer are given what they were:
        those between have as many tokens.  To ask 64 tensors took the host 70 us of a prompt's step.

        Args:
            held: K of all layers have the same strides, and V have.
            aligned: each begins at a multiple of 16 bytes.
        """
        records, keys, values, slots = held.records, held.keys, held.values, plan.real_slots
        assert slots is not None
        n, at = slots.shape[0], slots.data_ptr() & 15
        if self._stamps is not self._control.stamps or len(self._forms) >= MOST_FORMS or len(self._found) >= LAYOUTS:
            self._forms, self._found, self._stamps = {}, {}, self._control.stamps
        ends = *map(_layout, (keys[0], values[0], keys[-1], values[-1])), id(records[0])
        given = *ends, n, at, aligned, plan.taken is None
        known = self._found.get(given)
        if known is None or known[0] != records:
            form = self._look_for_form(plan, held, aligned) if _one_layout(keys) and _one_layout(values) else None
            known = self._found[given] = records, form
        return known[1]

    def _look_for_form(self, plan: RequestPlan, held: layer.WrittenLayers, aligned: bool) -> _Form | None:
        slots = plan.real_slots
        assert slots is not None
        n, key, value = slots.shape[0], self.whole(held.keys[0]), self.whole(held.values[0])
        rows = tuple(None if t is None else (t.dtype, t.shape[1:], t.stride(), t.shape[0] >= n) for t in (key, value))
        known = rows, record_tile(n), plan.taken is None, slots.data_ptr() & 15, aligned
        if known not in self._forms:
            self._forms[known] = self._bind(plan, held.records[0], (key, value), n, aligned)
        return self._forms[known]

    def _words(
        self, form: _Form, records: Sequence[layer.LayerRecord], addresses: tuple[array[int], array[int]]
    ) -> tuple[array[int], int]:
        """What the kernel is given of each half, and how many ops that is.

        Args:
            addresses: of K of each layer, and of V.
        """
        if records != self._written or form is not self._form:  # else the layers of the step before
            self._written, self._form = list(records), form
            self._same, self._ops = self._words_without_addresses(form, records)
        words = self._same[:]
        for at, place in enumerate(form.places):
            if place is not None:
                words[3 * at + 1 :: 3 * len(form.places)] = addresses[place]
        return words, self._ops

    def _words_without_addresses(self, form: _Form, records: Sequence[layer.LayerRecord]) -> tuple[array[int], int]:
        words, ops = array("q"), 0
        for record in records:
            ops += record.ops
            for at, step in enumerate(form.steps):
                words.extend((self._row_of[id(record)] + at, 0, step))
        return words, ops

    def _launch(self, form: _Form, slots: torch.Tensor, given: torch.Tensor, rows: int, ops: int) -> None:
        n = slots.shape[0]
        grid = -(-strided_grid(n * rows, record_tile(n).slots, self._device) // rows), rows, 1
        if form.launch.ready:
            form.launch(grid, (given.data_ptr(), slots.data_ptr(), n, ops), None)
        else:
            form.launch.first(grid, (given, slots, n, ops), None)

    def _bind(
        self,
        plan: RequestPlan,
        one: layer.LayerRecord,
        given: tuple[torch.Tensor | None, torch.Tensor | None],
        n: int,
        aligned: bool,
    ) -> _Form | None:
        """The launch for about ``n`` slots of layers that were given what this one was; None if one cannot take them.

        Args:
            given: K and V, as :meth:`.LayerRecord.record` takes them.
        """
        parts = operand_parts(one, plan, *given)
        if parts is None or not all(part.alike(parts[0]) for part in parts):
            return None
        found = record_args(parts[0], parts[0], n, layer.WRITE, 0, False)
        arguments = {k: v for k, v in found.items() if k not in _IN_TABLE and not k.startswith("other_")}
        arguments |= dict(table_ptr=self._table, ALIGNED=self._aligned, OPERANDS_ALIGNED=aligned)
        del arguments["ops"]
        changing = "given_ptr", "slot_ptr", "n", "ops"
        launch = record_launch(records.record_pool_kernel, self._device, arguments, changing, n)
        places = [half.place if part.operand is not None else None for part, half in zip(parts, one.written)]  # noqa: B905
        steps = [(part.operand or part.geometry).slot_strides[1] for part in parts]
        return _Form(launch, tuple(places), tuple(steps))


class _ByGraph:
    """Where a launch finds what it is told, in the tables of its graph, which copies it itself if it is captured."""

    def __init__(self, tables: LayerTables):
        self._tables = tables

    def place(self, words: array[int]) -> torch.Tensor | None:
        return self._tables.place(BEHIND, words)

    def settle(self) -> None:
        """Nothing is left to send."""


class _Told:
    """The same without a graph of ours.  What calls in CUDA graphs are told is at addresses that never change.

    Such a graph cannot copy it from the host, whose side would have to stay as it is.  Until it was sent, the words are
    0: a replay whose plan has no token reads nothing by them.
    """

    def __init__(self, device: torch.device, most: int):
        """
        Args:
            most: words that a call is told.
        """
        self._device, self._ring = device, HostRing(AHEAD, most, device)
        self._words = lasting(CAPTURED, dtype=torch.int64, device=device).zero_()
        self._host, self._sent = array("q"), 0

    def place(self, words: array[int]) -> torch.Tensor | None:
        """Where they are, or will be, aligned as the whole is; None if there is no room for another capture."""
        if not capturing(self._device):
            return self._ring.put(words)
        start, end = len(self._host), len(self._host) + len(words)
        if end > self._words.shape[0]:
            return None
        self._host += words
        if end % 2:
            self._host.append(0)
        return self._words[start:end]

    def settle(self) -> None:
        """Copy what was not yet, in the current stream."""
        start, end = self._sent, len(self._host)
        if start < end:
            self._words[start:end].copy_(torch.tensor(self._host[start:end], dtype=torch.int64, device="cpu"))
            self._sent = end


def _addresses(tensors: Sequence[torch.Tensor | None]) -> array[int]:
    """Where they are, or 0 each if there are none."""
    if tensors[0] is None:
        return array("q", bytes(8 * len(tensors)))
    return array("q", map(torch.Tensor.data_ptr, tensors))  # type: ignore[arg-type]


def _one_stride(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether all have it, or none is a tensor."""
    try:
        return len(set(map(torch.Tensor.stride, tensors))) == 1  # type: ignore[arg-type]
    except TypeError:
        return tensors.count(None) == len(tensors)


def _layout(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype)


def _one_layout(tensors: Sequence[torch.Tensor | None]) -> bool:
    layouts = list(map(_layout, tensors))
    return layouts.count(layouts[0]) == len(layouts)
