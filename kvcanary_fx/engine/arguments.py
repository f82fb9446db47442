"""Checks of arguments from engines: whole numbers, and integers as a tensor or a sequence; else an error names them.

Only types, shapes and dtypes are checked: values may be on a device, and nothing here waits for one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..errors import EngineError
from ..kernels.staging import sent

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def is_whole(value: Any, least: int | None = None) -> bool:
    """Whether ``value`` is a whole number, at least ``least``; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def require_whole(what: str, value: Any, least: int, unit: str) -> None:
    """
    Raises:
        EngineError: ``value`` is no whole number, or less than ``least``.
    """
    if not is_whole(value, least):
        raise EngineError(f"{what} is {value!r}: give a whole number of {unit}, at least {least}")


def unfit_tensor(value: Any) -> str | None:
    """What keeps a tensor from being read by a kernel, as text; None if nothing does."""
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}, not a tensor"
    if value.layout != torch.strided:
        return f"{value.layout}, which has no strides: give a dense tensor"
    if value.device.type == "meta":
        return "on the meta device, where nothing is stored: give the tensor that holds the data"
    return None


def integer_tensor(value: Any, what: str) -> torch.Tensor:
    """A tensor of integers as it is.

    Raises:
        EngineError: it is none.
    """
    why = unfit_tensor(value)
    if why is None and value.dtype not in _INTEGERS:
        why = f"{value.dtype}"
    if why is not None:
        raise EngineError(f"{what} are integers, and were given as {why}")
    tensor: torch.Tensor = value
    return tensor


def integers(values: Any, what: str) -> torch.Tensor:
    """Integers given as a tensor, which stays where it is, or as a sequence, which becomes int64 ``[n]`` on the host.

    Args:
        what: the name of the argument, in the plural.

    Raises:
        EngineError: they are something else, such as floats, whose fraction would be lost.
    """
    if isinstance(values, torch.Tensor):
        return integer_tensor(values, what)
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise EngineError(f"{what} are integers, and were given as {values!r}: give a tensor or a sequence")
    listed = list(values)
    if not listed:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    try:
        made = torch.tensor(listed, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as e:
        raise EngineError(f"{what} are integers, and were given as a sequence of something else ({e})") from e
    return integer_tensor(made, what).to(torch.int64)


def integers_on(device: torch.device, values: Any, what: str) -> torch.Tensor:
    """:func:`integers` as int64 on a device, sent there without waiting for it.

    Raises:
        EngineError: they are none.
    """
    return sent(integers(values, what).to(torch.int64), device)
