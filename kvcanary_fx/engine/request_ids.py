"""Request ids: any string or int, 64 bits on the device, the original kept on the host for reports."""

from __future__ import annotations

import hashlib
import numbers
from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

from ..errors import EngineError, RequestIdError
from ..kernels.slots.past import low_half

RequestId = str | int

_ID_TYPES = frozenset((str, int))

#: Ids remembered for reports; the oldest are forgotten first.
KEPT = 1 << 20


def require_ids(requests: Any) -> None:
    """Refuse anything but a list of ids, such as a string, whose letters would be taken for ids.

    Raises:
        EngineError: ``requests`` is no sequence.
    """
    if isinstance(requests, str | bytes) or not isinstance(requests, Sequence):
        raise EngineError(f"request_ids is {requests!r}: give a list with an id, a string or an int, for each request")


class RequestIds:
    """Turns ids into hashes and back.  Hash 0 stands for "nobody in particular".

    Attributes:
        known: the hashes of ids that were seen, and of None; never replaced.
    """

    def __init__(self) -> None:
        self._ids: OrderedDict[int, RequestId] = OrderedDict()
        self.known: dict[RequestId | None, int] = {None: 0}
        self._last: list[RequestId | None] | None = None
        self._last_hashes: list[int] = []  # never written to
        self._packed: tuple[list[int], array[int]] = [], array("q")  # of which hashes

    def hash(self, request: RequestId | None) -> int:
        """The signed 64-bit hash of an id, the same in every process; 0 for None.

        Raises:
            RequestIdError: the id is neither a string nor an int.
        """
        if request is None:
            return 0
        if not isinstance(request, str | int):
            if not isinstance(request, numbers.Integral):
                raise RequestIdError(request)
            request = int(request)  # of NumPy
        known = self.known.get(request)
        if known is None:
            # json.loads gives lone surrogates, which UTF-8 has no bytes for
            text = f"{type(request).__name__}:{request}".encode(errors="surrogatepass")
            digest = hashlib.blake2b(text, digest_size=8).digest()
            known = int.from_bytes(digest, "little", signed=True) or 1
            self.known[request], self._ids[known] = known, request
            if len(self._ids) > KEPT:
                self.known.pop(self._ids.popitem(last=False)[1], None)
        return known

    def hashes(self, requests: Sequence[RequestId | None]) -> list[int]:
        """The hash of each id."""
        if requests == self._last:  # most of a step's requests were in the step before
            return self._last_hashes
        hashes = self._hashes_of(requests)
        if type(requests) is list:
            self._last, self._last_hashes = list(requests), hashes
        return hashes

    def packed(self, requests: Sequence[RequestId | None]) -> array[int]:
        """The hash of each id, as an array that is not to be written to."""
        hashes = self.hashes(requests)
        if hashes is not self._packed[0]:
            self._packed = hashes, array("q", hashes)
        return self._packed[1]

    def _hashes_of(self, requests: Sequence[RequestId | None]) -> list[int]:
        if _ID_TYPES.issuperset(map(type, requests)):
            known = [self.known.get(r) for r in requests]  # type: ignore[arg-type]
            if None not in known:
                return known  # type: ignore[return-value]
        return [self.hash(r) for r in requests]

    def names_of(self, halves: Collection[int]) -> dict[int, RequestId]:
        """The ids behind lower halves of hashes, as a slot's history has them; in hexadecimal what was forgotten.

        Looks through all ids: for a report.
        """
        found: dict[int, RequestId] = {half: f"{half & (2**32 - 1):#x}" for half in halves}
        for hashed, request in list(self._ids.items()):
            if (half := low_half(hashed)) in found:
                found[half] = request
        return found

    def name(self, hashed: int) -> RequestId | None:
        """The id behind a hash, if it was seen; its hash in hexadecimal if it was forgotten; None for 0."""
        if hashed == 0:
            return None
        return self._ids.get(hashed, f"{hashed & (2**64 - 1):#x}")
