"""A fill of the step inputs that is like the one before: the same fields, as many requests and tokens.

Then no slot is looked up, nothing is padded, and all numbers of the host go into one array at once.
"""

from __future__ import annotations

import dataclasses
import struct
from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .batch_fields import fields_of
from .gathered import COPIED, Gathered, Sent, hands_over, numbers_of, packed
from .step_slot import StepSlot
from .step_view import Axis

if TYPE_CHECKING:
    from ..kernels.handed import Part, Places
    from ..kernels.waiting import Waiting

#: What numbers are taken from without a conversion that could change them.
_INTEGERS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))

_LISTED = frozenset((list, tuple, range))


@dataclasses.dataclass(frozen=True)
class Device:
    """A field that was on the device.

    Attributes:
        out: the head of its buffer.
        along: it is copied by the launch that brings the numbers of the host.
    """

    name: str
    dtype: torch.dtype
    out: torch.Tensor
    along: bool

    def takes(self, source: Any, owns: Callable[[torch.Tensor], bool]) -> bool:
        """Whether a source is such a field; not if it lies in the buffers itself."""
        if not isinstance(source, torch.Tensor) or source.dtype != self.dtype or source.shape != self.out.shape:
            return False
        return source.device == self.out.device and not owns(source)


@dataclasses.dataclass(frozen=True)
class Form:
    """What two fills have in common.

    Attributes:
        sizes: of the batch, requests and tokens.
        absent: fields that it lacks.
        host, device: fields from the host, with their lengths, and from the device.
        computed: slots that are computed as numbers of the host, with their lengths.
        sent: where the numbers go: those of ``host``, the three counts, the clock's, and those of ``computed``; and
            what of ``device`` comes along.
        view: the arguments of the view of it, after the batch.
    """

    sizes: tuple[int, int]
    absent: tuple[str, ...]
    host: tuple[tuple[str, int], ...]
    device: tuple[Device, ...]
    computed: tuple[tuple[StepSlot, int], ...]
    sent: Sent | Places
    view: tuple[Any, ...]

    @classmethod
    def of(
        cls,
        slots: Iterable[StepSlot],
        sources: Mapping[str, Any],
        sizes: Mapping[Axis, int],
        counts: torch.Tensor,
        clock: torch.Tensor | None,
        gathered: Gathered,
        view: tuple[Any, ...],
    ) -> Form | None:
        """The form of a fill that is over; None if a fill like it would have something else to do.

        Args:
            sources: what each slot was filled from.
            clock: int64 ``[1]``, where the device reads which step it is in.
        """
        absent: list[str] = []
        host: list[tuple[str, int]] = []
        device: list[Device] = []
        computed: list[tuple[StepSlot, int]] = []
        for slot in slots:
            source = sources.get(slot.name)
            n = 0 if source is None and slot.memory is None else sizes[slot.axis]
            if slot.buffer is not None and max(slot.used, slot.replayed) > n:
                return None  # padding to write
            if slot.memory is not None:
                continue
            if slot.dtype != torch.int64 or slot.trailing or (source is not None and not n):
                return None
            if source is None:
                absent.append(slot.name)
            elif isinstance(source, array) or source.device.type == "cpu":
                (host.append((slot.name, n)) if slot.compute is None else computed.append((slot, n)))
            elif slot.compute is None and slot.buffer is not None:
                along = hands_over(source.device) and source.dtype in COPIED
                device.append(Device(slot.name, source.dtype, slot.buffer[:n], along))
            else:
                return None
        by_name = {slot.name: slot for slot in slots}
        told = [(by_name[name].buffer, n) for name, n in host] + [(counts, 3), (clock, 1)]
        buffers = told + [(slot.buffer, n) for slot, n in computed]
        places = [(buffer, 0, n) for buffer, n in buffers if buffer is not None]
        real = sizes[Axis.BATCH], sizes[Axis.TOKENS]
        fixed = tuple(absent), tuple(host), tuple(device), tuple(computed)
        copied = [(field.out, field.dtype) for field in device if field.along]
        return cls(real, *fixed, gathered.places(places, copied), view)

    def fill(
        self,
        batch: Any,
        inputs: Any,
        gathered: Gathered,
        owns: Callable[[torch.Tensor], bool],
        waiting: Waiting | None = None,
    ) -> bool:
        """Fill the buffers from a batch; whether it had this form.  If it has not, nothing was written.

        Args:
            inputs: the registry, for what is computed.
            owns: whether a tensor lies in the buffers.
            waiting: as of :meth:`.Gathered.send_to`.
        """
        get = fields_of(batch)
        if get("real_counts", None) is not None or not gathered.holds(self.sent):
            return False
        for name in self.absent:
            if get(name, None) is not None:
                return False
        given = [(field, get(field.name, None)) for field in self.device] if self.device else ()
        for field, source in given:
            if not field.takes(source, owns):
                return False
        try:
            parts = self._numbers(batch, inputs, get)
            if parts is None:
                return False
            if given:
                copied = (source for field, source in given if field.along)
                parts.append([number for source in copied for number in (source.data_ptr(), source.stride(0))])
            numbers = gathered.put(self.sent, parts)
        except (TypeError, OverflowError, struct.error):  # the fill in full says what is wrong
            return False
        for field, source in given:
            if not field.along:
                gathered.tensor(field.out, source)
        gathered.send_to(self.sent, numbers, waiting)
        return True

    def _numbers(self, batch: Any, inputs: Any, get: Callable[[str, None], Any]) -> list[Part] | None:
        """The numbers of the host, as one list where lists follow each other; None if they have another form.

        Raises:
            TypeError, OverflowError: there is something else among them.
        """
        listed: list[int] = []
        parts: list[Part] = [listed]
        for name, n in self.host:
            source = get(name, None)
            if type(source) is list and len(source) == n and type(source[0]) is int:
                listed += source
                continue
            taken = _taken(source, n)
            if taken is None:
                return None
            listed = []
            parts += (taken, listed)
        listed += self.sizes
        listed.append(inputs.step)
        if inputs.clock is not None:
            listed.append(inputs.clock_word(inputs.step))
        for slot, n in self.computed:
            assert slot.compute is not None
            taken = _taken(slot.compute(batch, inputs), n)
            if taken is None:
                return None
            parts.append(taken)
        return parts


def _taken(source: Any, n: int) -> array[int] | None:
    """``n`` whole numbers, if that is what the source is.

    Raises:
        TypeError, OverflowError: there are others among them.
    """
    if type(source) is array:
        return source if source.typecode == "q" and len(source) == n else None
    if isinstance(source, torch.Tensor):
        if source.dtype not in _INTEGERS or source.dim() != 1 or len(source) != n or source.device.type != "cpu":
            return None
        return numbers_of(source)
    if type(source) in _LISTED:
        return packed(source) if len(source) == n and type(source[0]) is int else None
    return None
