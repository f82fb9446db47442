"""What the setting ``privacy`` keeps out of an incident.

What is hidden is hashed with a number that is in no file, so that equal values of one incident stay equal and nothing
else can be told.  Log lines quote all of it and are left out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from collections.abc import Callable, Collection

from ...kernels.checks import Shown, how_shown
from ..past import PastEvent, SlotHistory
from ..violation import Violation
from .incident import Incident, PoolScene, Record, RequestScene, SlotScene

#: Checks whose values follow from token ids; and those whose values are digests of bytes.
_OF_TOKENS = ("token", "chain", "namespace", "digest")
_OF_BYTES = ("content", "operand", "poison", "digest", "index")


def hide(incident: Incident, private: Collection[str]) -> Incident:
    """The incident without what is private: any of ``tokens``, ``ids`` and ``bytes``."""
    if not private:
        return incident
    salt = secrets.token_bytes(16)

    def hashed(value: object) -> int:
        text = f"{type(value).__name__}:{value}".encode(errors="surrogatepass")
        return int.from_bytes(hashlib.blake2b(text, key=salt, digest_size=7).digest(), "little")

    mask = _Mask(private, hashed)
    return dataclasses.replace(
        incident,
        records=tuple(dataclasses.replace(r, violation=mask.violation(r)) for r in incident.records),
        pools=tuple(mask.pool(pool) for pool in incident.pools),
        log=(),
        hidden=tuple(private),
    )


class _Mask:
    """Hides the parts of one incident."""

    def __init__(self, private: Collection[str], hashed: Callable[[object], int]):
        self._private, self._hashed = private, hashed

    def _id(self, value: str | int | None) -> str | int | None:
        return value if value is None or "ids" not in self._private else f"id-{self._hashed(value):x}"

    def _token(self, value: int | None) -> int | None:
        return value if value is None or value < 0 or "tokens" not in self._private else self._hashed(value)

    def _tokens(self, values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._hashed(v) if "tokens" in self._private else v for v in values)

    def violation(self, record: Record) -> Violation:
        v = record.violation
        compared = (
            ("ids" in self._private and how_shown(v.check, v.why) is Shown.OWNER)
            or ("tokens" in self._private and v.check in _OF_TOKENS and v.why != "WRONG_POSITION")
            or ("bytes" in self._private and v.check in _OF_BYTES and how_shown(v.check, v.why) is Shown.HASH)
        )
        told = "tokens" in self._private and (v.why is not None or v.check in _OF_TOKENS)  # then it may be the token
        detail = self._hashed(v.detail) if told else v.detail
        return dataclasses.replace(
            v,
            stored=self._hashed(v.stored) if compared else v.stored,
            found=self._hashed(v.found) if compared else v.found,
            detail=0 if v.check == "poison" and "bytes" in self._private else detail,
            request=self._id(v.request),
            history=None if "ids" in self._private else v.history,
            owners=(self._id(v.owners[0]), self._id(v.owners[1])),
            token=self._token(v.token),
        )

    def pool(self, pool: PoolScene) -> PoolScene:
        halves = pool.halves
        if "bytes" in self._private:  # a digest of layer 0 follows from a token and its position
            halves = tuple(dataclasses.replace(h, rows=None, recorded=None) for h in halves)
        return dataclasses.replace(
            pool,
            halves=halves,
            near=tuple(self._slot(s) for s in pool.near),
            owner_names=tuple(name for name in map(self._id, pool.owner_names) if name is not None),
            batch=tuple(self._request(r) for r in pool.batch),
        )

    def _slot(self, slot: SlotScene) -> SlotScene:
        return dataclasses.replace(
            slot,
            owner=self._id(slot.owner),
            token=self._token(slot.token),
            past=self._past(slot.past) if slot.past is not None else None,
        )

    def _past(self, past: SlotHistory) -> SlotHistory:
        def event(happened: PastEvent) -> PastEvent:
            return dataclasses.replace(happened, request=self._id(happened.request))

        return dataclasses.replace(
            past,
            events=tuple(map(event, past.events)),
            written=event(past.written) if past.written is not None else None,
        )

    def _request(self, request: RequestScene) -> RequestScene:
        return dataclasses.replace(request, request=self._id(request.request), tokens=self._tokens(request.tokens))
