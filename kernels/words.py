"""The numbers of the shadow and of the ring as Triton kernels take them, all derived: none is written by hand.

``CHECK_BOUNDS``, ``WHY_OVERWRITE``, ``RING_SLOT``, ...: the member of an enum, after its prefix in :data:`_ENUMS`.
``REASON_OVERWRITE`` is a reason with the check that it belongs to, which the table of checks says.
"""

from __future__ import annotations

import enum

import triton.language as tl

from . import buffers, checks, ring
from .content import digest
from .slots import chain, events, past, space

_ENUMS: dict[str, type[enum.IntEnum] | type[enum.IntFlag]] = {
    "CHECK": checks.Check,
    "WHY": checks.Why,
    "PHASE": checks.Phase,
    "RING": ring.Ring,
    "WORD": ring.Word,
    "GATE": buffers.Gate,
    "COUNT": buffers.Count,
    "ROW": buffers.RowState,
    "FLAG": space.Flag,
    "COLUMN": space.Column,
    "SPACE": space.SpaceCount,
    "EVENT": events.Event,
    "CALL": events.EventRow,
    "PAST": past.Past,
    "TOLD": past.Told,
    "KIND": past.Kind,
}

RING_COLUMNS: tl.constexpr = tl.constexpr(len(ring.Ring))
ROW_COLUMNS: tl.constexpr = tl.constexpr(len(buffers.RowState))
PAST_HEAD: tl.constexpr = tl.constexpr(past.HEAD)
PAST_TOLD: tl.constexpr = tl.constexpr(past.TOLD)
PAST_FORWARD_UNIT: tl.constexpr = tl.constexpr(past.FORWARD_UNIT)
PAST_STACK_UNIT: tl.constexpr = tl.constexpr(past.STACK_UNIT)
PAST_FORWARDS: tl.constexpr = tl.constexpr(past.FORWARDS)
CALL_KINDS: tl.constexpr = tl.constexpr(events.STACK_UNIT)
CALL_COLUMNS: tl.constexpr = tl.constexpr(len(events.EventRow))
UNKNOWN: tl.constexpr = tl.constexpr(ring.UNKNOWN)
NOWHERE_WRITTEN: tl.constexpr = tl.constexpr(buffers.NOT_WRITTEN)
REASONS_BELOW: tl.constexpr = tl.constexpr(1 << 16)
REFERENCE: tl.constexpr = tl.constexpr(space.REFERENCE)
ZERO_STANDS_FOR: tl.constexpr = tl.constexpr(digest.as_int32(digest.ZERO_STANDS_FOR))

#: A slot's entry as int32, and as int64: there the chain and the owner lie.
SPACE_COLUMNS: tl.constexpr = tl.constexpr(space.COLUMNS)
SPACE_WIDE: tl.constexpr = tl.constexpr(space.COLUMNS // 2)
WIDE_CHAIN: tl.constexpr = tl.constexpr(int(space.Column.CHAIN) // 2)
WIDE_OWNER: tl.constexpr = tl.constexpr(int(space.Column.OWNER) // 2)

MIX_A: tl.constexpr = tl.constexpr(chain.mix_constants()[0])
MIX_B: tl.constexpr = tl.constexpr(chain.mix_constants()[1])
MIX_C: tl.constexpr = tl.constexpr(chain.mix_constants()[2])
SEED: tl.constexpr = tl.constexpr(chain.SEED)


def __getattr__(name: str) -> tl.constexpr:
    prefix, _, member = name.partition("_")
    try:
        if prefix == "REASON":
            why = checks.Why[member]
            return tl.constexpr(int(checks.REASONS[why].check) * REASONS_BELOW.value + int(why))
        return tl.constexpr(int(_ENUMS[prefix][member]))
    except KeyError:
        raise AttributeError(f"{name} is no member of an enum that kernels know") from None
