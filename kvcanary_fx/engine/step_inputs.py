"""The inputs of one engine step, in buffers with fixed addresses: one registry for captured and eager steps.

A CUDA graph reads the addresses it was captured over, so each step's inputs are copied to the same place::

    inputs = StepInputs("cuda", max_requests=64, max_tokens=64)
    inputs.register("input_ids", "tokens", torch.int64)
    inputs.register("extend_lens", "batch", torch.int32)
    inputs.register("starts", "batch", torch.int64, compute=lambda batch, inputs: ...)
    inputs.fill_from(batch)
    view = inputs.view(padded_bs=64, padded_tokens=64)   # view.input_ids: [64], the same address each step

A field that the batch lacks this step is None in the view, never the previous step's contents.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import torch

from ..errors import StepInputError
from ..kernels.side_stream import capturing
from .gathered import Gathered, numbers_of, plain_numbers
from .refill import Form
from .step_slot import StepSlot, as_tensor, require_pad, shape_text
from .step_view import Axis, StepView

if TYPE_CHECKING:
    from ..kernels.waiting import Waiting

#: Sizes of a batch whose views are kept.
SHOWN = 256

#: Source of a slot: a tensor, or numbers on the host.
Source: TypeAlias = "torch.Tensor | array[int]"


class StepInputs:
    """Persistent device buffers for the inputs of a step.

    Args:
        device: where the buffers are.
        max_requests, max_tokens: room to reserve along each axis, rounded up to a power of two.  Without them
            the buffers are built for the first batch, and a larger one moves them: give them before capturing.
        no_copy: pass the batch's own tensors through if they have the slot's dtype and device, as long as
            nothing is frozen and no padding is asked for.  Their addresses are the batch's: call
            :meth:`freeze` before you take the view that a CUDA graph is captured over.
        tokens_per_request: the batch-axis slot with the number of tokens of each request; a view's
            token slots follow it when its requests are sliced.  None, or None in a step: one token per request.

    Attributes:
        step: number of the step, set by the engine.
        clock: int64 ``[1]`` on the device that gets ``clock_word(step)`` along with a batch like the one before;
            None: nothing does.  Set before the first fill.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        max_requests: int | None = None,
        max_tokens: int | None = None,
        no_copy: bool = False,
        tokens_per_request: str | None = "extend_lens",
    ) -> None:
        self._reserved = {Axis.BATCH: max_requests or 0, Axis.TOKENS: max_tokens or 0}
        for axis, size in self._reserved.items():
            if size < 0:
                raise StepInputError(f"{axis.setting} is {size}", "Give a whole number above 0, or None")
        self._no_copy = no_copy
        self._lengths_name = tokens_per_request
        self._slots: dict[str, StepSlot] = {}
        self._capacity = {Axis.BATCH: 0, Axis.TOKENS: 0}
        self._frozen = False
        self._batch: Any = None
        self._shown: dict[tuple[int, ...], _Shown] = {}
        # This step's slots: None, the slot's buffer, or with no_copy the batch's own tensor.
        self._filled: dict[str, torch.Tensor | None] = {}
        # This step's real sizes; the slot that set each is kept for error messages.
        self._sizes: dict[Axis, tuple[str, int]] = {}
        # Tensors made in inference mode could not be written outside it.
        with torch.inference_mode(False):
            self._counts = torch.zeros(3, dtype=torch.int64, device=device)
        self._gathered = Gathered(self._counts.device)
        self._filling = self._together = False  # a fill is running, and its copies are gathered
        self._captured = False  # this fill is part of a graph
        self._real_counts: torch.Tensor | None = None  # this step's, on the device
        self._owned: set[int] | None = None  # addresses of the buffers; None: not looked up yet
        self.step = 0
        self._by_graph = {Axis.BATCH: 0, Axis.TOKENS: 0}  # entries that are not padding, and that no fill wrote
        self._filled_by: tuple[int, int] | None = None  # requests and tokens of the graph that filled them last
        self._written: tuple[int | None, ...] = (0, 0, 0)  # what ``counts`` holds, as far as known
        self._unknown = False  # a graph writes to ``counts`` at each replay
        self._device = self._counts.device  # "cuda" has become "cuda:0" here
        self._form: Form | None = None  # of the last fill, if the next one may have it too
        self._sources: dict[str, Source | None] = {}  # of the running fill
        self._sends = 0  # of the running fill
        self._last: tuple[Any, ...] = ()  # sizes and fields of the last fill
        self._again = False  # this step's inputs were filled by the form
        self.clock: torch.Tensor | None = None
        self.clock_word: Callable[[int], int] = int

    @property
    def counts(self) -> torch.Tensor:
        """[3] int64 on the device: the real number of requests and of tokens, and ``step``.

        Updated in place, so that a captured kernel knows how much of its padded input is real, and which step it is in.
        """
        self._send()
        return self._counts

    @property
    def num_requests(self) -> int:
        """Real requests of this step; 0 if no slot of that axis was set."""
        return self._real(Axis.BATCH)

    @property
    def num_tokens(self) -> int:
        """Real tokens of this step; 0 if no slot of that axis was set."""
        return self._real(Axis.TOKENS)

    @property
    def frozen(self) -> bool:
        """Whether the buffers can no longer move."""
        return self._frozen

    @property
    def plain_slots(self) -> list[str]:
        """Names of the slots that are copied from the batch, in the order of registration."""
        return [slot.name for slot in self._slots.values() if slot.compute is None and slot.memory is None]

    def capacity(self, axis: Axis | str) -> int:
        """Capacity of the buffers of ``axis``; 0 before the first is built."""
        return self._capacity[_axis(axis)]

    def buffer(self, name: str) -> torch.Tensor | None:
        """The whole buffer of a slot, [capacity, ...], also if it is kept out of views; None before its first fill.

        Raises:
            StepInputError: there is no such slot.
        """
        self._send()
        if name not in self._slots:
            raise StepInputError(f"there is no slot {name!r}", f"The slots are: {', '.join(self._slots) or 'none'}")
        return self._slots[name].buffer

    def register(
        self,
        name: str,
        axis: Axis | str,
        dtype: torch.dtype,
        *,
        pad: int | float = 0,
        compute: Callable[[Any, StepInputs], torch.Tensor | array[int] | list[int]] | None = None,
        exposed: bool = True,
    ) -> None:
        """Add a slot: [n] or [n, ...] of ``dtype``, with n requests or tokens.

        Args:
            name: the attribute (or key) of the batch that it is copied from, and of the view.
            pad: the value of the padding.
            compute: makes the slot's tensor, or a list or an array ("q") of its numbers, from the batch and this
                registry, each step, in the order of registration.  In ``inputs.view()`` it sees the plain slots, and
                the computed ones registered before it.
            exposed: False keeps a computed slot out of views; :meth:`buffer` still has it.

        Raises:
            StepInputError: the name is taken or cannot be used, the registry is frozen, ``pad`` does not fit
                ``dtype``, or a slot that is not computed is to be kept out of views.
        """
        axis = _axis(axis)
        if self._frozen:
            raise StepInputError(f"slot {name!r} is registered after freeze()", "Register all slots before capturing")
        if name in self._slots:
            raise StepInputError(f"slot {name!r} is registered twice", "Give each slot a name of its own")
        if not name.isidentifier() or name.startswith("_") or hasattr(StepView, name):
            raise StepInputError(f"{name!r} cannot be the name of a slot: views use it", "Choose another name")
        if not exposed and compute is None:
            raise StepInputError(f"slot {name!r} is not computed, yet kept out of views", "Do not register it")
        if name == self._lengths_name and (axis is not Axis.BATCH or dtype.is_floating_point):
            raise StepInputError(
                f"slot {name!r} is tokens_per_request, but not whole numbers along axis 'batch'",
                "Register it so, or name another slot as tokens_per_request",
            )
        require_pad(name, pad, dtype)
        self._slots[name] = StepSlot(name, axis, dtype, pad, compute, exposed)

    def register_memory(
        self, name: str, axis: Axis | str, dtype: torch.dtype, *, pad: int | float = 0, trailing: tuple[int, ...] = ()
    ) -> None:
        """Add a slot [n, *trailing] without a source: memory for kernels, whose graphs keep its address.

        Its first n entries are left as they are in each step; the rest is padding.

        Raises:
            StepInputError: as :meth:`register` does.
        """
        self.register(name, axis, dtype, pad=pad)
        self._slots[name].memory = trailing

    def freeze(self) -> None:
        """From now on refuse what would move a buffer: a CUDA graph is captured over them, or about to be."""
        self._frozen = True
        for slot in self._slots.values():
            if slot.buffer is not None:
                slot.trailing = tuple(slot.buffer.shape[1:])

    def fill_from(self, batch: Any) -> None:
        """Copy this step's inputs from ``batch``, an object with attributes or a mapping, then compute the rest.

        A plain slot's source is a tensor on any device, or a sequence of numbers.  A field that the batch lacks,
        or that is None, is None in this step's views, and its buffer holds padding.  Integers of another width
        are converted as torch does, unchecked: a check would wait for the device.  While a CUDA graph is captured, the
        copies become part of it; a batch whose size varies from replay to replay gives it in ``real_counts``, int64
        ``[2]`` on the device: how many of its requests and tokens, the first ones, are real.

        Raises:
            StepInputError: a source has a wrong shape or dtype, slots of one axis have different lengths, or the
                buffers are frozen and too small.  There is nothing to view until the next fill.
        """
        if self.fill_again(batch):
            return
        captured = capturing()
        self._forget()
        self._captured, self._real_counts = captured, _lookup(batch, "real_counts")
        self._filling, self._together = True, self._gathers()
        try:
            with torch.no_grad():
                self._fill_plain(batch)
                self._batch = batch
                if not self._together:  # computed slots may read them
                    self._write_counts()
                self._fill_computed(batch)
                self._send()
                self._form = self._form_of()
        except BaseException:
            self._forget()
            self._gathered.send()  # so that the buffers hold what we assume
            raise
        finally:
            self._filling = False
            self._sources.clear()

    @property
    def may_come_again(self) -> bool:
        """Whether a batch of the form of the last one is filled in at once."""
        return self._form is not None

    def fill_again(self, batch: Any, waiting: Waiting | None = None) -> bool:
        """Fill from a batch of the form of the last one; whether it is: else nothing is filled.

        Args:
            waiting: where the host's numbers may wait for the next launch of something else; the caller sends them.
        """
        form = self._form
        if form is None or capturing():
            return False
        try:
            if not form.fill(batch, self, self._gathered, self._owns, waiting):
                return False
        except BaseException:
            self._forget()
            raise
        self._batch, self._again = batch, True
        self._written = (None, None, None) if self._unknown else (*form.sizes, self.step)
        return True

    def _form_of(self) -> Form | None:
        """The form of the fill that is about to end, if it was that of the one before: it will probably come again."""
        sizes = self.num_requests, self.num_tokens
        last, self._last = self._last, (*sizes, *(source is None for source in self._sources.values()))
        if last != self._last or not self._together or self._real_counts is not None or self._sends != 1:
            return None
        real = {axis: self._real(axis) for axis in Axis}
        shown = self._shown_in(real)
        if shown.kept_plans is None:
            return None
        slots = list(self._slots.values())
        view = shown.values, shown.axes, sizes, sizes, shown.lengths, shown.kept_plans
        return Form.of(slots, self._sources, real, self._counts, self.clock, self._gathered, view)

    def _gathers(self) -> bool:
        """Whether the copies of a fill go to the device together; in a graph each is made where its slot is filled."""
        return self._device.type != "cpu" and not self._captured

    def _send(self) -> None:
        """In a fill, send what was gathered so far to the device."""
        if self._filling:
            self._sends += 1
            self._write_counts()
            self._gathered.send()

    def filled_by_graph(self, requests: int, tokens: int) -> None:
        """Something on the device has written so much of each buffer, and ``counts``: the next fill pads it."""
        if self._filled_by == (requests, tokens):
            return
        for axis, count in ((Axis.BATCH, requests), (Axis.TOKENS, tokens)):
            self._sizes[axis] = "a graph", count
            self._by_graph[axis] = max(self._by_graph[axis], count)
        self._written = (None, None, None)
        self._form, self._again = None, False
        self._filled_by = requests, tokens

    def view(self, padded_bs: int | None = None, padded_tokens: int | None = None) -> StepView:
        """This step's inputs with ``padded_bs`` requests and ``padded_tokens`` tokens; by default the real ones.

        Raises:
            StepInputError: nothing was filled, a padded size is below the real one, or the buffers are frozen and
                too small.
        """
        if self._batch is None:
            raise StepInputError("there is no batch to view", "Call fill_from(batch) first, and let it succeed")
        if self._again and padded_bs is None and padded_tokens is None and self._form is not None:
            return StepView(self._batch, *self._form.view)
        self._send()
        asked = {Axis.BATCH: padded_bs, Axis.TOKENS: padded_tokens}
        sizes = {axis: self._padded(axis, size) for axis, size in asked.items()}
        if self._frozen or any(sizes[axis] > self._real(axis) for axis in Axis):
            if not self._filling:
                self._captured = capturing()
            self._move_in(sizes)
            self._send()
        real, padded = (self.num_requests, self.num_tokens), (sizes[Axis.BATCH], sizes[Axis.TOKENS])
        shown = self._shown_in(sizes)
        return StepView(self._batch, shown.values, shown.axes, real, padded, shown.lengths, shown.kept_plans)

    def _shown_in(self, sizes: Mapping[Axis, int]) -> _Shown:
        """What is shown of this step's slots in padded sizes."""
        requests = self.num_requests
        form = requests, sizes[Axis.BATCH], sizes[Axis.TOKENS], *map(id, self._filled.values())
        shown = self._shown.get(form)
        if shown is None:
            shown = _Shown.of(self._slots, self._filled, sizes, self._lengths_name, requests)
            if shown.kept_plans is not None:
                if len(self._shown) >= SHOWN:
                    self._shown.clear()
                self._shown[form] = shown
        return shown

    def _forget(self) -> None:
        for slot in self._slots.values() if any(self._by_graph.values()) else ():
            slot.used = max(slot.used, self._by_graph[slot.axis])
        self._by_graph, self._filled_by = {Axis.BATCH: 0, Axis.TOKENS: 0}, None
        self._batch = self._form = None
        self._again, self._sends = False, 0
        self._filled.clear()
        self._sizes.clear()

    def _real(self, axis: Axis) -> int:
        return self._sizes[axis][1] if axis in self._sizes else 0

    def _padded(self, axis: Axis, size: int | None) -> int:
        real = self._real(axis)
        if size is None:
            return real
        if size < real:
            argument = "padded_bs" if axis is Axis.BATCH else "padded_tokens"
            raise StepInputError(
                f"{argument} is {size}, but the batch has {real} {axis.unit}", f"Pad to at least {real}, or not at all"
            )
        return size

    def _fill_plain(self, batch: Any) -> None:
        slots = [slot for slot in self._slots.values() if slot.compute is None and slot.memory is None]
        sources = {slot.name: self._checked(slot, _lookup(batch, slot.name)) for slot in slots}
        for slot in slots:  # before anything is written: this may be refused
            if sources[slot.name] is not None and not self._hands_through(sources[slot.name], slot):
                self._reserve(slot.axis, self._real(slot.axis))
        self._sources.update(sources)
        for slot in slots:
            source = sources[slot.name]
            if self._hands_through(source, slot):
                self._filled[slot.name] = source
                self._settle(slot, source)
            else:
                self._store(slot, source)

    def _fill_computed(self, batch: Any) -> None:
        for slot in self._slots.values():
            if slot.memory is not None:
                self._reserve(slot.axis, self._real(slot.axis))
                self._filled[slot.name] = self._buffer(slot, slot.memory)
                slot.pad_from(self._real(slot.axis), self._captured, self._gathering)
            elif slot.compute is not None:
                source = self._checked(slot, slot.compute(batch, self))
                if source is None:
                    raise StepInputError(f"slot {slot.name!r} was computed as None", "Return a tensor at each step")
                self._sources[slot.name] = source
                self._reserve(slot.axis, self._real(slot.axis))
                self._store(slot, source)

    def _hands_through(self, source: Source | None, slot: StepSlot) -> TypeGuard[torch.Tensor]:
        if not isinstance(source, torch.Tensor) or not self._no_copy or self._frozen:
            return False
        return source.dtype == slot.dtype and source.device == self._device

    def _move_in(self, sizes: Mapping[Axis, int]) -> None:
        """Make room for padded ``sizes``, and copy the tensors that were passed through."""
        for axis in {self._slots[name].axis for name, tensor in self._filled.items() if tensor is not None}:
            self._reserve(axis, sizes[axis])
        with torch.no_grad():
            for name, tensor in self._filled.items():
                if tensor is not None and tensor is not self._slots[name].buffer:
                    self._store(self._slots[name], tensor)

    def _checked(self, slot: StepSlot, source: Any) -> Source | None:
        """``source``, checked against ``slot`` and the other slots of its axis."""
        if source is None:
            return None
        if self._together and slot.dtype == torch.int64 and not slot.trailing:
            packed = type(source) is array and source.typecode == "q"
            numbers = source if packed else plain_numbers(source)
            if numbers is not None:
                self._require_size(slot, len(numbers))
                return numbers
        tensor = as_tensor(slot, source)
        if tensor.dim() == 0:
            raise StepInputError(f"slot {slot.name!r} was given a single value", f"Give one per {slot.axis.unit[:-1]}")
        trailing = tuple(tensor.shape[1:])
        if slot.trailing is not None and trailing != slot.trailing:
            raise StepInputError(
                f"slot {slot.name!r} has shape {shape_text(slot.trailing)} since its first fill, and was given "
                f"{shape_text(trailing)}",
                "Keep what follows the first dimension the same at each step, or register another slot",
            )
        self._require_size(slot, len(tensor))
        if self._owns(tensor):  # a view of our buffer, which is written before all of it is read
            return tensor.clone()
        return tensor.detach() if tensor.requires_grad else tensor

    def _require_size(self, slot: StepSlot, given: int) -> None:
        first, size = self._sizes.setdefault(slot.axis, (slot.name, given))
        if size != given:
            raise StepInputError(
                f"slots {first!r} and {slot.name!r} disagree on the number of {slot.axis.unit}: {size} and {given}",
                f"Slots of axis {slot.axis.value!r} have one entry for each; check the batch and the axis",
            )

    def _owns(self, tensor: torch.Tensor) -> bool:
        if tensor.device != self._device:
            return False
        if self._owned is None:
            buffers = [slot.buffer for slot in self._slots.values() if slot.buffer is not None]
            self._owned = {buffer.untyped_storage().data_ptr() for buffer in buffers}
        return tensor.untyped_storage().data_ptr() in self._owned

    def _buffer(self, slot: StepSlot, trailing: tuple[int, ...]) -> torch.Tensor:
        before = slot.buffer
        made = slot.make_buffer(self._capacity[slot.axis], trailing, self._device)
        if made is not before:
            self._owned = None
        return made

    @property
    def _gathering(self) -> Gathered | None:
        """Collects the copies of the running fill; None: they are made at once."""
        return self._gathered if self._filling and self._together else None

    def _reserve(self, axis: Axis, needed: int) -> None:
        """Make the buffers of ``axis`` hold ``needed`` entries; what this step has filled so far is moved."""
        old = self._capacity[axis]
        if old and needed <= old:
            return
        if old and self._frozen:
            raise StepInputError(
                f"the buffers of axis {axis.value!r} have room for {old} {axis.unit}, {needed} are needed, and a CUDA "
                "graph was captured over them, so they cannot move",
                f"Give install_canary, or StepInputs, {axis.setting}={needed} or more",
            )
        self._form = None
        if old:
            self._send()  # to the buffers as they were
        self._capacity[axis] = 1 << (max(needed, self._reserved[axis], 1) - 1).bit_length()
        for slot in self._slots.values():
            if slot.axis is axis and slot.buffer is not None:
                moved, slot.buffer = slot.buffer, None
                if self._filled.get(slot.name) is moved:
                    self._store(slot, moved[: self._real(axis)])

    def _store(self, slot: StepSlot, source: Source | None) -> None:
        """Write ``source`` to the head of the slot's buffer and padding after it."""
        if source is None:  # a captured graph still reads the buffer
            self._filled[slot.name] = None
            slot.pad_from(0, self._captured, self._gathering)
            return
        self._copy(self._buffer(slot, _trailing(source)), source)
        slot.pad_from(len(source), self._captured, self._gathering)
        self._filled[slot.name] = slot.buffer
        self._settle(slot, source)

    def _copy(self, buffer: torch.Tensor, source: Source) -> None:
        """Write ``source`` to the head of a buffer."""
        gathered, n = self._gathering, len(source)
        if gathered is not None and n:
            on_host = isinstance(source, array) or source.device.type == "cpu"
            if on_host and buffer.dtype == torch.int64:
                gathered.numbers(buffer, 0, source if isinstance(source, array) else numbers_of(source))
                return
            if not isinstance(source, array) and source.device == self._device:
                gathered.tensor(buffer[:n], source)
                return
        if not isinstance(source, array):
            # A copy to the CPU must be waited for, or it would be read before it arrives.
            buffer[:n].copy_(source, non_blocking=self._device.type != "cpu")

    def _settle(self, slot: StepSlot, source: Source) -> None:
        """Fix the slot's trailing shape; an empty list does not show it, but a captured graph relies on it."""
        if len(source) or self._frozen:
            slot.trailing = _trailing(source)

    def _write_counts(self) -> None:
        """Tell the device how much is real.  A graph writes the counts of its batch at each replay, but never the step:
        that is the step of the replay."""
        # fill_ takes its value along with the launch: there is no host memory that the next step could overwrite.
        captured, counted, real = self._captured, (self.num_requests, self.num_tokens), self._real_counts
        for place, (count, written) in enumerate(zip((*counted, self.step), self._written, strict=True)):
            if (place == 2 and captured) or (place < 2 and real is not None):
                continue
            if count != written or captured:
                if self._gathering is not None:
                    self._gathering.numbers(self._counts, place, array("q", [count]))
                else:
                    self._counts[place].fill_(count)
        if real is not None:
            self._counts[:2].copy_(real)
        unknown = captured or self._unknown or real is not None
        self._unknown = self._unknown or captured
        self._written = (None, None, None) if unknown else (*counted, self.step)


@dataclasses.dataclass
class _Shown:
    """What views of the same sizes and memory have in common.

    Attributes:
        memory: it is kept, so that its ids are its own.
    """

    values: dict[str, torch.Tensor | None]
    axes: dict[str, Axis]
    lengths: torch.Tensor | None
    kept_plans: dict[Any, Any] | None
    memory: tuple[torch.Tensor | None, ...]

    @classmethod
    def of(
        cls,
        slots: Mapping[str, StepSlot],
        filled: Mapping[str, torch.Tensor | None],
        sizes: Mapping[Axis, int],
        lengths_name: str | None,
        requests: int,
    ) -> _Shown:
        """Of this step's slots."""
        values = {
            name: None if tensor is None else _head(tensor, sizes[slots[name].axis])
            for name, tensor in filled.items()
            if slots[name].exposed
        }
        lengths = None if lengths_name is None else filled.get(lengths_name)
        return cls(
            values=values,
            axes={name: slots[name].axis for name in values},
            lengths=None if lengths is None else _head(lengths, requests),
            kept_plans={} if all(t is None or t is slots[name].buffer for name, t in filled.items()) else None,
            memory=tuple(filled.values()),
        )


def _trailing(source: Source) -> tuple[int, ...]:
    """The dimensions after the first."""
    return () if isinstance(source, array) else tuple(source.shape[1:])


def _axis(axis: Axis | str) -> Axis:
    try:
        return Axis(axis)
    except ValueError:
        raise StepInputError(f"there is no axis {axis!r}", "Use 'batch' or 'tokens'") from None


def _head(tensor: torch.Tensor, size: int) -> torch.Tensor:
    return tensor if len(tensor) == size else tensor[:size]


def _lookup(batch: Any, name: str) -> Any:
    return batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)
