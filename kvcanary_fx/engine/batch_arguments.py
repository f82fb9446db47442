"""What the fields of a :class:`~.batch_fields.Batch` may be: types, shapes, dtypes, and values where the host has them.

Values on a GPU are not checked: that would wait for the device in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import StepInputError
from .arguments import integer_tensor
from .batch_fields import fields_of
from .gathered import plain_numbers
from .request_ids import require_ids

#: Fields with one integer for each token, or for each request.
_LISTED = (
    "input_ids",
    "positions",
    "parents",
    "request_rows",
    "prefix_lens",
    "extend_lens",
    "namespaces",
    "history_lens",
)

_WHOLE = frozenset((int,))
_FLAGS = frozenset((bool, type(None)))


def require_batch(batch: Any, slots_from: Sequence[str]) -> None:
    """
    Args:
        slots_from: the fields that pools take their slots from.

    Raises:
        StepInputError, EngineError: naming the field.
    """
    get = fields_of(batch)
    for name in (*_LISTED, *slots_from):
        value = get(name, None)
        # a list of int, as almost always: its other numbers are looked at when they are copied
        if value is not None and not (type(value) is list and value and type(value[0]) is int):
            _require_listed(name, value)
    _require_lengths(get)
    given = get("request_ids", None)
    if isinstance(given, torch.Tensor):
        _require_listed("request_ids", given)
    elif given is not None:
        require_ids(given)
    _require_counts(get("real_counts", None))
    for name in ("in_flight", "history_by_row"):
        value = get(name, None)
        if value is not None and not isinstance(value, bool):
            raise StepInputError(f"{name} is {value!r}", "Give True or False, known to the host")


def is_plainly_right(batch: Any) -> bool:
    """Whether nothing that :func:`require_batch` looks at is wrong, where each field is known to hold integers ``[n]``.

    In a few microseconds, for a batch that is like the one before; False: it has to be looked at.
    """
    get = fields_of(batch)
    ids = get("request_ids", None)
    if not (type(ids) is list or ids is None):
        return False
    if type(get("in_flight", None)) not in _FLAGS or type(get("history_by_row", None)) not in _FLAGS:
        return False
    prefix, added, tokens = get("prefix_lens", None), get("extend_lens", None), get("input_ids", None)
    if type(prefix) is not list or type(added) is not list:
        prefix, added = _lengths(prefix), _lengths(added)
    if prefix is None or added is None:
        return False
    try:
        if type(added) is list and added.count(1) == len(added):  # as in most steps, and counted in no time
            return len(added) <= len(tokens) and (not prefix or min(prefix) >= 0)
        return min(prefix, default=0) >= 0 and min(added, default=0) >= 0 and sum(added) <= len(tokens)
    except (TypeError, ValueError):
        return False


def _lengths(given: Any) -> Sequence[int] | None:
    """Lengths as far as the host has them; None if they have to be looked at."""
    if type(given) is list:
        return given
    if isinstance(given, torch.Tensor):
        return given.tolist() if given.device.type == "cpu" else ()
    return () if given is None else None


def stored_in(batch: Any) -> float:
    """How many tokens a batch has stored before, over all requests; 0 if the host does not know."""
    given = fields_of(batch)("prefix_lens", None)
    if isinstance(given, torch.Tensor) and given.device.type != "cpu":
        return 0
    try:
        return float(sum(_lengths(given) or ()))
    except TypeError:  # wrong numbers, as is said where they are taken in
        return 0


def _require_listed(name: str, value: Any) -> None:
    """Refuse values that would be converted to other numbers, or read along another axis."""
    nested = False
    if isinstance(value, torch.Tensor):
        integer_tensor(value, f"the batch's {name}")
        nested = value.dim() > 1
    elif isinstance(value, Sequence) and len(value):  # the numbers are looked at when they are copied
        if isinstance(value[0], bool):
            raise StepInputError(f"the batch's {name} is a list of bool", "Give whole numbers")
        nested = isinstance(value[0], Sequence)
    if nested:
        remedy = "Give one for each request, or for each token"
        if name == "positions":
            remedy = "Give one for each token; where a token has several (M-RoPE), leave positions out"
        raise StepInputError(f"the batch's {name} has more than one dimension", remedy)


def _require_lengths(get: Callable[[str, None], Any]) -> None:
    """If the values are on the host: no length is negative, and there are enough tokens."""
    for name in ("prefix_lens", "extend_lens"):
        values = _on_host(get(name, None))
        if values and min(values) < 0:
            raise StepInputError(f"the batch's {name} is {min(values)} for a request", "Give 0 or more for each")
    added, tokens = _on_host(get("extend_lens", None)), get("input_ids", None)
    if added is not None and tokens is not None and hasattr(tokens, "__len__") and sum(added) > len(tokens):
        raise StepInputError(
            f"the batch's extend_lens add up to {sum(added)} tokens, and it has {len(tokens)} input_ids",
            "Give the ids of all tokens that the forward adds, request after request",
        )


def _on_host(values: Any) -> Sequence[int] | None:
    if type(values) is list and _WHOLE.issuperset(map(type, values)):
        return values
    plain = plain_numbers(values)
    if plain is not None:
        return plain
    if isinstance(values, torch.Tensor):
        return values.tolist() if values.device.type == "cpu" and values.dim() == 1 else None
    if isinstance(values, Sequence) and all(isinstance(value, int) for value in values):
        return list(values)
    return None


def _require_counts(real: Any) -> None:
    if real is None:
        return
    if not isinstance(real, torch.Tensor) or real.dtype != torch.int64 or tuple(real.shape) != (2,):
        what = f"{real.dtype} {list(real.shape)}" if isinstance(real, torch.Tensor) else repr(real)
        raise StepInputError(
            f"real_counts is {what}", "Give an int64 [2] on the device: how many requests and tokens are real"
        )
