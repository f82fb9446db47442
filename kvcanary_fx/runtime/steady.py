"""The fast path of a guarded call: the same tensors as in the last call, and nothing else has written to them.

Most calls of a decode loop take it.  A cache is then recognised by its tensor object, without a look at its storage,
and a few tight loops find everything that would require the slow path:

* another tensor: a weak reference shows it, even if a new tensor has an old one's id;
* a write from outside: PyTorch's count of in-place writes, which includes changes of shape, offset and storage
  (``resize_``, ``set_``);
* ``tensor.data = other``, which nothing counts: the address of its memory.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .bound_call import BoundCall

_IS, _ADDRESS = operator.is_, torch.Tensor.data_ptr
_VERSION: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


class SteadyCall:
    """A bound call, and the tensors that it was made with.

    Attributes:
        call: the bound call.
        counted: PyTorch counts the writes to the tensors; it counts none to inference tensors.
    """

    __slots__ = ("_addresses", "_references", "_storages", "_take", "_versions", "call", "counted")

    def __init__(self, call: BoundCall, arguments: Sequence[int], args: Sequence[Any]):
        """
        Args:
            arguments: numbers of those that are caches.
            args: the graph's, after a call.
        """
        self.call = call
        self._storages = [storage for storage, *_ in call.storages]
        first = [argument for _, argument, _ in call.storages]  # of each storage, in its order
        self._take = _taking([*first, *(a for a in arguments if a not in first)])
        tensors = self._take(args)
        self._references = [weakref.ref(t) for t in tensors]
        self._addresses = list(map(_ADDRESS, tensors))
        self.counted = not any(map(torch.Tensor.is_inference, tensors))
        self._versions = self._versions_of(tensors) if self.counted else []

    def fits(self, args: Sequence[Any]) -> bool:
        """Whether a call with ``args`` is this one, and nothing else has written to its caches since."""
        tensors = self._take(args)
        return (
            all(map(_IS, tensors, [reference() for reference in self._references]))
            and list(map(_ADDRESS, tensors)) == self._addresses
            and (not self.counted or self._as_we_left_it(self._versions_of(tensors)))
        )

    def remember(self, args: Sequence[Any]) -> None:
        """After the call: take its own writes as seen."""
        if self.counted:
            self._versions = versions = self._versions_of(self._take(args))
            for storage, version in zip(self._storages, versions, strict=True):
                storage.version = version

    def _versions_of(self, tensors: tuple[torch.Tensor, ...]) -> list[int]:
        """One for each storage."""
        return list(map(_VERSION, tensors[: len(self._storages)]))

    def _as_we_left_it(self, versions: list[int]) -> bool:
        if versions == self._versions:
            return True
        # another graph of ours was here
        return all(s.version == v and not s.suspects for s, v in zip(self._storages, versions, strict=True))


def _taking(arguments: Sequence[int]) -> Callable[[Sequence[Any]], tuple[torch.Tensor, ...]]:
    """A function that picks these arguments, as a tuple."""
    if len(arguments) == 1:
        only = arguments[0]
        return lambda args: (args[only],)
    return operator.itemgetter(*arguments)
