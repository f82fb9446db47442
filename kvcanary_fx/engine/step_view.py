"""What a step's inputs look like from outside: by attribute, sliced and filtered like the batch they came from."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import StepInputError
from .batch_fields import fields_of


class Axis(enum.Enum):
    """What a slot has one entry for: a request of the batch, or a token of it."""

    BATCH = "batch"
    TOKENS = "tokens"

    __hash__ = object.__hash__  # enum's own is in Python, and a step looks an axis up some eighty times

    @property
    def unit(self) -> str:
        """What is counted along the axis, for messages."""
        return "requests" if self is Axis.BATCH else "tokens"

    @property
    def setting(self) -> str:
        """The argument of :class:`StepInputs` that reserves room along the axis."""
        return f"max_{self.unit}"


class StepView:
    """One step's inputs, by attribute; made by :meth:`StepInputs.view`.

    A slot is a tensor, [padded_bs or padded_tokens, ...], or None if the batch did not have it.  It lies in the
    persistent buffers, so the next ``fill_from`` writes to it.  Any other attribute is the batch's, as it is there.

    Attributes:
        num_requests, num_tokens: real sizes.
        padded_bs, padded_tokens: sizes of the tensors.
        kept_plans: what was made of the slots alone, by what else it depends on: it holds for each view of the same
            memory; None where the memory is the batch's.
    """

    __slots__ = (
        "_axes", "_batch", "_lengths", "_values", "kept_plans", "num_requests", "num_tokens", "padded_bs",
        "padded_tokens",
    )  # fmt: skip

    def __init__(
        self,
        batch: Any,
        values: dict[str, torch.Tensor | None],
        axes: dict[str, Axis],
        real: tuple[int, int],
        padded: tuple[int, int],
        lengths: torch.Tensor | None,
        kept_plans: dict[Any, Any] | None = None,
    ) -> None:
        self._batch = batch
        self._values = values
        self._axes = axes
        self._lengths = lengths  # [num_requests] tokens of each request, or None: one each
        self.kept_plans = kept_plans
        self.num_requests, self.num_tokens = real
        self.padded_bs, self.padded_tokens = padded

    def __getattr__(self, name: str) -> Any:
        if name in StepView.__slots__ or name.startswith("__"):  # a copy that is not initialised yet
            raise AttributeError(name)
        if name in self._values:
            return self._values[name]
        if isinstance(self._batch, Mapping) and name in self._batch:
            return self._batch[name]
        try:
            return getattr(self._batch, name)
        except AttributeError:
            raise AttributeError(f"{name!r} is neither a slot of this view nor an attribute of the batch") from None

    @property
    def of_batch(self) -> Callable[[str, None], Any]:
        """Gets fields of the batch that are no slots, as they are there; the second argument, None, where it has
        none."""
        return fields_of(self._batch)

    def slice(self, start: int | None = None, stop: int | None = None) -> StepView:
        """Requests ``start:stop``, counted as Python does, with their tokens; padding is left out.

        The slots stay in the buffers.  Attributes that are not slots are carried whole.  Reads the lengths of
        requests back from the device.

        Raises:
            StepInputError: the lengths of requests do not add up to the tokens.
        """
        first, last, _ = slice(start, stop).indices(self.num_requests)
        last = max(first, last)
        begin, end = 0, 0
        if self._has_tokens():
            ends = self._token_ends()
            begin, end = ends[first], ends[last]
        ranges = {Axis.BATCH: (first, last), Axis.TOKENS: (begin, end)}
        return self._map(lambda axis, tensor: tensor[ranges[axis][0] : ranges[axis][1]], (last - first, end - begin))

    def select(self, requests: torch.Tensor | Sequence[bool] | Sequence[int]) -> StepView:
        """The chosen requests, in that order, with their tokens, as copies; padding is left out.

        Args:
            requests: [num_requests] bool, True for those to keep; or their numbers, negative ones from the end.

        Raises:
            StepInputError: a mask of another length, a number out of range, or lengths of requests that do not add
                up to the tokens.
        """
        rows = self._rows(requests)
        tokens = torch.empty(0, dtype=torch.int64, device="cpu")
        if self._has_tokens():
            ends = torch.tensor(self._token_ends(), device="cpu")
            lengths = (ends[1:] - ends[:-1])[rows]
            shift = ends[:-1][rows] - (lengths.cumsum(0) - lengths)  # from a token's new place to its old one
            tokens = torch.arange(int(lengths.sum()), device="cpu") + shift.repeat_interleave(lengths)
        chosen = {Axis.BATCH: rows, Axis.TOKENS: tokens}
        return self._map(lambda axis, t: t.index_select(0, chosen[axis].to(t.device)), (len(rows), len(tokens)))

    def _map(self, pick: Callable[[Axis, torch.Tensor], torch.Tensor], sizes: tuple[int, int]) -> StepView:
        values = {n: None if tensor is None else pick(self._axes[n], tensor) for n, tensor in self._values.items()}
        lengths = None if self._lengths is None else pick(Axis.BATCH, self._lengths)
        return StepView(self._batch, values, self._axes, sizes, sizes, lengths)

    def _has_tokens(self) -> bool:
        return any(v is not None and self._axes[name] is Axis.TOKENS for name, v in self._values.items())

    def _token_ends(self) -> list[int]:
        """Where each request's tokens end, after a leading 0: num_requests + 1 places."""
        lengths = [1] * self.num_requests if self._lengths is None else self._lengths.flatten().tolist()
        ends = list(itertools.accumulate(lengths, initial=0))
        if ends[-1] != self.num_tokens or len(ends) != self.num_requests + 1 or min(lengths, default=0) < 0:
            told = "no slot says how many each has" if self._lengths is None else f"their lengths are {lengths[:8]}"
            raise StepInputError(
                f"cannot tell which of {self.num_tokens} tokens are of which of {self.num_requests} requests: {told}",
                "Register a slot with the tokens of each request and name it as StepInputs' tokens_per_request",
            )
        return ends

    def _rows(self, requests: torch.Tensor | Sequence[bool] | Sequence[int]) -> torch.Tensor:
        """[k] int64 on the CPU: numbers of the chosen requests, none negative."""
        empty = not isinstance(requests, torch.Tensor) and not len(requests)
        chosen = torch.as_tensor(requests, dtype=torch.int64 if empty else None, device="cpu")
        if chosen.dim() != 1 or chosen.is_floating_point():
            raise StepInputError("requests are selected by something else", "Give [n] numbers or a [n] bool mask")
        if chosen.dtype == torch.bool:
            if len(chosen) != self.num_requests:
                raise StepInputError(
                    f"the mask has {len(chosen)} entries for {self.num_requests} requests",
                    "Give one per real request: padding is not selected",
                )
            return chosen.nonzero().flatten()
        wrong = chosen[(chosen < -self.num_requests) | (chosen >= self.num_requests)].tolist()
        if wrong:
            raise StepInputError(f"there is no request {wrong[0]} in {self.num_requests}", "Select those there are")
        return chosen.to(torch.int64) % max(self.num_requests, 1)
