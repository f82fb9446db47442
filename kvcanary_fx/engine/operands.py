"""What an engine says that its layers wrote: whether the operand check can compare it with what is in the slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import EngineError
from ..kernels.checks import Check
from ..kernels.content.layer import LayerRecord
from ..kernels.slots.checks import taken_of
from ..kernels.slots.space import RequestPlan
from .arguments import integer_tensor

#: Shapes whose view is known.
_SHAPES = 4096

_ARGUMENTS = ("key", "value")


def received(slots: Any, plan: RequestPlan | None) -> torch.Tensor | None:
    """The slots that a layer's write received, int ``[n]``, for as many tokens as were planned; None without a plan.

    Raises:
        EngineError: they are no tensor of integers.
    """
    given = integer_tensor(slots, "the slots that a layer's write received")
    return None if plan is None else taken_of(plan, given.reshape(-1)).contiguous()


class _Stored(NamedTuple):
    """A tensor of a layer that an operand is compared with.

    Attributes:
        place: 0 for K, 1 for V.
        row: its shape for one slot, of ``elements``.
    """

    place: int
    dtype: torch.dtype
    row: tuple[int, ...]
    elements: int


class Operands:
    """Looks at the K and V of each layer, on the host alone, and counts those that are not compared.

    Attributes:
        total: K and V that were to be compared.
        lacking: those that are not, by the reason.
    """

    def __init__(self) -> None:
        self._stored: dict[str, tuple[_Stored, ...]] = {}  # by layer
        self._shaped: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._rows: dict[tuple[Any, torch.Size], int] = {}  # by what is given, where that is not yet shaped
        self._seen: set[tuple[str, ...]] = set()  # layers that were looked at, each of them, when they came together
        self.reset()

    def reset(self) -> None:
        """Count from here on."""
        self.total, self.lacking = 0, Counter[str]()

    def take_as(self, shaped: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        """From now on K and V are such that ``shaped`` makes a view of them with a row for each token."""
        self._shaped = shaped

    def look(
        self,
        layer: str,
        record: LayerRecord,
        plan: RequestPlan,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        times: int = 1,
    ) -> None:
        """Can the K and V of a layer be compared?

        Args:
            plan: of the forward, in the pool of the layer.
            times: how many layers were given such.

        Raises:
            EngineError: K or V is of the cache's type, and has fewer rows than the forward has tokens, or other rows.
        """
        stored = self._stored.get(layer)
        if stored is None:
            stored = self._stored[layer] = _stored_by(record)
        self.total += len(stored) * times
        for each in stored:
            given = value if each.place else key
            if plan.taken is not None:
                self.lacking["of slots that stand for several tokens"] += times
            elif given is None:
                self.lacking["None"] += times
            elif not isinstance(given, torch.Tensor):
                raise EngineError(_wrong(layer, each, plan, f"a {type(given).__name__}"))
            elif given.dtype is not each.dtype:
                self.lacking[f"{given.dtype} where the cache is {each.dtype}"] += times
            else:
                n, rows = plan.slots.shape[0], self._rows_of(given)
                # as rows_of() takes them: the first n, or all of them in a batch of one
                if n and (not rows or given.numel() * min(rows, n) != n * rows * each.elements):
                    raise EngineError(_wrong(layer, each, plan, f"{list(given.shape)}"))

    def look_at_all(
        self,
        layers: tuple[str, ...],
        records: Sequence[LayerRecord],
        plan: RequestPlan,
        keys: Sequence[torch.Tensor | None],
        values: Sequence[torch.Tensor | None],
    ) -> None:
        """:meth:`look` for layers that come together, again and again.

        To ask all of them each time took the host 70 us of a prompt's step (64 tensors): it is done the first time, and
        then the first and the last one tell.
        """
        last = len(layers) - 1
        if layers not in self._seen:
            for at, layer in enumerate(layers):
                self.look(layer, records[at], plan, keys[at], values[at])
            self._seen.add(layers)
            return
        self.look(layers[0], records[0], plan, keys[0], values[0], times=max(last, 1))
        if last:
            self.look(layers[last], records[last], plan, keys[last], values[last])

    def told(self) -> str | None:
        """What was not compared so far, in words; None if all was."""
        if not self.lacking:
            return None
        why = ", ".join(f"{count} were {reason}" for reason, count in self.lacking.most_common())
        return f"of {self.total} K and V given to EagerLayers.record {why}"

    @property
    def none_compared(self) -> bool:
        """Whether there were some, and none was compared."""
        return bool(self.lacking) and self.lacking.total() == self.total

    def _rows_of(self, given: torch.Tensor) -> int:
        shape = given.shape
        if self._shaped is None:
            return shape[0] if shape else 0
        rows = self._rows.get((self._shaped, shape))
        if rows is None:
            if len(self._rows) >= _SHAPES:
                self._rows = {}
            rows = self._rows[self._shaped, shape] = self._shaped(given).shape[0]
        return rows


def _stored_by(record: LayerRecord) -> tuple[_Stored, ...]:
    found = []
    for half in record.written:
        layout = half.site.layout
        if half.place < len(_ARGUMENTS) and half.site.checks & Check.OPERAND:
            elements = layout.row_bytes // layout.dtype.itemsize
            found.append(_Stored(half.place, layout.dtype, layout.row_shape, elements))
    return tuple(found)


def _wrong(layer: str, stored: _Stored, plan: RequestPlan, what: str) -> str:
    n, argument = plan.slots.shape[0], _ARGUMENTS[stored.place]
    return (
        f"record({layer!r}) was given {argument} as {what}: give what was written, a tensor with a row of "
        f"{list(stored.row)} for each of the forward's {n} tokens (more rows are padding), or None"
    )
