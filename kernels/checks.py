"""The table of checks and of reasons to fail: names, requirements, texts, and the check of each reason.

Settings, the order of a report, texts, the doctor's list, what an engine is asked for and the constants of the Triton
kernels come from here.  Imports nothing of ours, and no torch: settings are read from it.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple


class Check(enum.IntFlag):
    """One bit a check, as stored in a violation's record."""

    CONTENT = 1
    OPERAND = 2
    BOUNDS = 4
    POISON = 8
    CHAIN = 16
    INDEX = 32
    OWNER = 64
    NAMESPACE = 128
    TOKEN = 256
    DIGEST = 512


class Phase(enum.IntEnum):
    """When a violation was found: before the write, after it, in a sweep, or in an engine's allocator call."""

    PRE = 0
    POST = 1
    SWEEP = 2
    LIFE = 3


class Why(enum.IntEnum):
    """What exactly failed, as stored in a violation's record: a row of :data:`REASONS` each."""

    NONE = 0
    OUT_OF_RANGE = 1
    RESERVED_SLOT = 2
    PLANNED_TWICE = 3
    ROW_TOO_NARROW = 4
    NO_SUCH_ROW = 5
    READ_AFTER_FREE = 6
    FOREIGN_READ = 7
    WRITE_AFTER_FREE = 8
    OVERWRITE = 9
    WRITE_SHARED = 10
    DOUBLE_FREE = 11
    FOREIGN_FREE = 12
    DOUBLE_ALLOCATE = 13
    SHARE_AFTER_FREE = 14
    NEVER_WRITTEN = 15
    WRONG_POSITION = 16
    WRONG_PREDECESSOR = 17
    OTHER_NAMESPACE = 18
    WRONG_TOKEN = 19
    NOT_THE_PLANNED_SLOT = 20
    TABLE_DIFFERS = 21
    READ_DIFFERS = 22
    LENGTH_DIFFERS = 23
    DIGEST_DIFFERS = 24
    WRITTEN_BEFORE = 25
    REJECTED_TOKEN = 26
    READ_WHILE_WRITTEN = 27
    PADDING_WRITES = 28


class Shown(enum.Enum):
    """How a report shows what a check compared."""

    NUMBER = enum.auto()  # slots, positions, tokens
    HASH = enum.auto()  # digests and links of a chain, in hexadecimal
    OWNER = enum.auto()  # requests by their ids, or by their hash if the id is forgotten


class Text(NamedTuple):
    """One failure in words.  ``what`` may name ``{stored}`` and ``{found}`` as the check shows them, ``{value}`` and
    ``{hit}`` as plain numbers, and ``{detail}``."""

    what: str
    meaning: str
    remedy: str


@dataclasses.dataclass(frozen=True)
class Need:
    """What a check needs of an engine.

    Attributes:
        given: the batch's fields, or the call, without which it loses something.
        whole: without them the check does not run at all; else only the part that ``lost`` names.
        lost: what is not found.
    """

    given: tuple[str, ...]
    whole: bool
    lost: str


@dataclasses.dataclass(frozen=True)
class CheckRow:
    """A check.

    Attributes:
        reports: the bit that its violations have.
        place: among those of one step; causes come before consequences: a write out of bounds explains the content it
            destroyed.
        engine: it runs in an engine's session only.
        shows: how it shows its values, where no reason says so.
        needs: what it needs of an engine, besides slots.
    """

    reports: Check
    place: int
    engine: bool = False
    shows: Shown = Shown.NUMBER
    needs: tuple[Need, ...] = ()


class ReasonRow(NamedTuple):
    """A reason to fail: the check whose failure it is, and what is said about it."""

    check: Check
    what: str
    meaning: str
    remedy: str
    shows: Shown = Shown.NUMBER


#: By name, in the order of the documentation.
CHECKS: dict[str, CheckRow] = {
    "content": CheckRow(
        Check.CONTENT,
        place=8,
        shows=Shown.HASH,
    ),
    "operand": CheckRow(
        Check.OPERAND,
        place=3,
        shows=Shown.HASH,
    ),
    "bounds": CheckRow(
        Check.BOUNDS,
        place=0,
    ),
    "poison": CheckRow(
        Check.POISON,
        place=4,
        shows=Shown.HASH,
    ),
    "chain": CheckRow(
        Check.CHAIN,
        place=7,
        needs=(
            Need(("positions",), False, "the positions that the model gets are not compared with the prefix's length"),
        ),
    ),
    "index": CheckRow(
        Check.INDEX,
        place=1,
        engine=True,
        shows=Shown.HASH,
        needs=(Need(("session.check_reads",), False, "the page table of the attention kernel is not compared"),),
    ),
    "owner": CheckRow(
        Check.OWNER,
        place=2,
        engine=True,
        shows=Shown.OWNER,
        needs=(Need(("request_ids",), False, "a slot of another request is not told from one of one's own"),),
    ),
    "namespace": CheckRow(
        Check.NAMESPACE,
        place=5,
        engine=True,
        shows=Shown.HASH,
        needs=(Need(("namespaces",), True, "all requests count as of one namespace"),),
    ),
    "token": CheckRow(
        Check.TOKEN,
        place=6,
        engine=True,
        needs=(
            Need(
                ("history", "history_lens"), True, "tokens are not compared with the requests' own; rejected ones are"
            ),
        ),
    ),
    "digest": CheckRow(
        Check.DIGEST,
        place=9,
        engine=True,
        shows=Shown.HASH,
        needs=(Need(("session.compare_digests",), True, "no digests of ranks or transfers are compared"),),
    ),
    "sweep": CheckRow(
        Check.CONTENT,  # a schedule: it finds what the others find
        place=8,
        engine=True,
    ),
}

#: What is said where no reason is given: by the name of the check, or of a kind of its failures.
TEXTS_OF_CHECKS: dict[str, Text] = {
    "content": Text(
        "the bytes of a slot changed since they were written (digest {stored}, now {found})",
        "something else wrote to the slot between two steps: a freed block still in use, a stray copy or off-load, "
        "a kernel with a wrong stride, a flipped bit",
        "what ran since the last step? If the write was legal, tell the canary: session.forget(cache)",
    ),
    "engine content": Text(
        "the bytes of a slot changed since they were written (digest {stored}, now {found})",
        "something else wrote to the slot between two steps: a freed block still in use, a stray copy or off-load, "
        "a kernel with a wrong stride, a flipped bit",
        "what ran since the step that wrote it? Loads and copies that are meant to be: pool.import_ or pool.adopt",
    ),
    "transfer": Text(
        "the bytes of a transferred slot are not those that its shadow came with (digest {stored}, now {found})",
        "a copy that was cut short, mixed up blocks or had not ended when the slot was read, or a layout that differs",
        "compare the bytes on both ends, and wait for the copy before the step that reads them",
    ),
    "content post": Text(
        "the bytes of a slot changed while the forward that reads it ran (digest {stored}, now {found})",
        "a write of this very forward that went astray (a padded or stale slot number, a kernel's wrong stride), or a "
        "copy, an off-load, another stream beside it",
        "compare the slots that each layer writes with the plan; what it has computed so far may be wrong already",
    ),
    "content life": Text(
        "the bytes of a slot had changed when it was released (digest {stored}, now {found})",
        "something wrote to the slot after it was read for the last time: the request's last output may be wrong or "
        "not, the next victim's will be",
        "what ran since the request's last step? If the write was legal, tell the canary: pool.forget(slots)",
    ),
    "operand": Text(
        "the slot read back is not what the write was given (operand {stored}, read back {found})",
        "the write went to another slot, used a wrong stride, or changed the values on the way",
        "compare the write kernel's index and stride arithmetic with the pool's real layout",
    ),
    "wrapped": Text(
        "index {value} is out of range and wrapped to slot {hit}",
        "a padding value used as an index: -1 counts from the end in Python",
        "mask padded tokens before the write, or point them at a reserved slot",
    ),
    "lost": Text(
        "index {value} is out of range",
        "a sequence longer than the cache, or a stale or foreign slot table",
        "check the cache's length and where the index comes from; on a GPU such a write faults or corrupts",
    ),
    "twice": Text(
        "two tokens of one step were written to the same slot",
        "a slot handed out twice, or padding that shares a real token's slot",
        "check the allocator, and what slot padded tokens get",
    ),
    "poison": Text(
        "NaN or Inf was written (word {detail} of the row is {found})",
        "an overflow in the layer before, a fully masked row, or uninitialised memory in a padded token",
        "look at the layer's input; clear the slot before it is read: 0 * NaN is NaN even under a mask",
    ),
    "index": Text(
        "an op of the graph changed a slot that no token of this step goes to (digest {stored}, now {found})",
        "a custom op that writes a slot too many, the slot beside, or padding outside of the reserved slots",
        "compare the slots that the op writes with the batch's; declare where it pads: KVPool(reserved=...)",
    ),
    "chain": Text(
        "the token's position is {found} where its predecessor's asks for {stored}",
        "position ids and cache position ran apart: a position bumped twice, or built without the cache's offset",
        "compare the model's position_ids with the slots it writes",
    ),
}

REASONS: dict[Why, ReasonRow] = {
    Why.OUT_OF_RANGE: ReasonRow(
        Check.BOUNDS,
        "slot {value} is out of range",
        "a stale or foreign slot number: another pool's index space, a page number taken for a slot, padding",
        "look at who put it into the request table or the plan, and at the pool's size",
    ),
    Why.RESERVED_SLOT: ReasonRow(
        Check.BOUNDS,
        "slot {value} is reserved for padding, and a real token points at it",
        "a table row that was never filled, a slot_map whose entry was cleared while the window still reads it, or a "
        "padded index used for a real token",
        "check how the row was filled, when the map's entries are cleared, and where the padded batch ends",
    ),
    Why.PLANNED_TWICE: ReasonRow(
        Check.BOUNDS,
        "two tokens of one step are to go to slot {value}",
        "a slot handed out twice, or a plan built from an old free list",
        "check the allocator, and what is freed while a batch is being put together",
    ),
    Why.ROW_TOO_NARROW: ReasonRow(
        Check.BOUNDS,
        "{found} positions are needed, the row of the request table, or of the kernel's page table, has {stored}",
        "a row sized without the speculative or per-page reserve: what does not fit lands in the next row",
        "size the request table for prefix, extend and every reserve, rounded up to pages",
    ),
    Why.NO_SUCH_ROW: ReasonRow(
        Check.BOUNDS,
        "row {found} of the request table does not exist, there are {stored}",
        "a request's row was taken after it was given back, or padding was counted as a request",
        "check the row's life and the real batch size",
    ),
    Why.READ_AFTER_FREE: ReasonRow(
        Check.OWNER,
        "attention is about to read a slot that is free",
        "the slot was released while this request's row still names it: an abort, an eviction, a stale page table",
        "find who released it (phase life), and clear or refill the row before the next step",
        Shown.OWNER,
    ),
    Why.FOREIGN_READ: ReasonRow(
        Check.OWNER,
        "attention is about to read a slot that belongs to another request ({found})",
        "freed and given to somebody else while this row still names it, or a row filled from another request's",
        "if the slot is shared on purpose, say so: pool.share(slots, owner)",
        Shown.OWNER,
    ),
    Why.WRITE_AFTER_FREE: ReasonRow(
        Check.OWNER,
        "a token is about to be written to a slot that is free",
        "the slot was released while the batch was in flight",
        "release only after the step that writes it has ended",
        Shown.OWNER,
    ),
    Why.OVERWRITE: ReasonRow(
        Check.OWNER,
        "a token is about to be written over a slot that belongs to another request ({found})",
        "a slot handed out twice, or written after its release by the one who had it before",
        "check the order of release and allocate against the batches in flight",
        Shown.OWNER,
    ),
    Why.WRITE_SHARED: ReasonRow(
        Check.OWNER,
        "a token is about to be written to a slot that several requests share",
        "a suffix that starts inside the shared prefix: no copy on write, or a prefix length off by a page",
        "start the suffix in a page of its own",
        Shown.OWNER,
    ),
    Why.DOUBLE_FREE: ReasonRow(
        Check.OWNER,
        "a slot was released that is free already",
        "two owners of one page, or a partly freed page freed again as a whole",
        "find the first release in the log; ranges that overlap by a page are the usual suspects",
        Shown.OWNER,
    ),
    Why.FOREIGN_FREE: ReasonRow(
        Check.OWNER,
        "a slot was released by one who does not own it (owner {stored}, released by {found})",
        "a shared or cached slot taken for the request's own, such as after a prefix was matched again",
        "release only what the request allocated; the cache releases the rest",
        Shown.OWNER,
    ),
    Why.DOUBLE_ALLOCATE: ReasonRow(
        Check.OWNER,
        "a slot was handed out that is in use (owner {stored}, given to {found})",
        "a slot twice in the free list, the trace of an earlier double free",
        "look for double_free before this, and at how evicted pages get back into the free list",
        Shown.OWNER,
    ),
    Why.SHARE_AFTER_FREE: ReasonRow(
        Check.OWNER,
        "a slot was shared that is free",
        "a prefix cache still lists a page that was evicted",
        "remove the page from the cache before it is released",
        Shown.OWNER,
    ),
    Why.NEVER_WRITTEN: ReasonRow(
        Check.POISON,
        "attention is about to read a slot that nobody wrote since it was allocated",
        "a gap between the cached prefix and the first new token, a load that did not arrive, a rank that did not load "
        "or a layer that did not write",
        "compare prefix length with what was really stored; after a load call pool.adopt or pool.import_, and "
        "pool.forget for what something that is not guarded writes",
        Shown.HASH,
    ),
    Why.WRONG_POSITION: ReasonRow(
        Check.CHAIN,
        "position {found} where position {stored} belongs",
        "positions bumped twice, built without the cache's offset, or a row shifted by a page",
        "compare the position ids with prefix length plus place in the extend",
    ),
    Why.WRONG_PREDECESSOR: ReasonRow(
        Check.CHAIN,
        "the token in the slot followed another prefix (chain {found}, this request's is {stored})",
        "a page of another request with the same place, a hash collision, a transfer that brought an old page",
        "compare the page's tokens with the request's; identify pages by content, not by a hash alone",
        Shown.HASH,
    ),
    Why.OTHER_NAMESPACE: ReasonRow(
        Check.NAMESPACE,
        "the prefix belongs to another namespace (chain {found}, this request's begins with {stored})",
        "a prefix cache whose key leaves out the adapter, the image or the salt",
        "put what makes the request's KV different into the cache's key",
        Shown.HASH,
    ),
    Why.WRONG_TOKEN: ReasonRow(
        Check.TOKEN,
        "the slot holds token {found}, the request's own history has {stored}",
        "another request's KV, a draft token that was not rolled back, a chunk boundary off by one",
        "compare what was written at this position with what was sampled",
    ),
    Why.NOT_THE_PLANNED_SLOT: ReasonRow(
        Check.INDEX,
        "the write received slot {found}, planned was {stored}",
        "a mapping between index spaces applied twice or not at all, or a plan baked into a captured graph",
        "compare the tensor that the write reads with the one that the runtime fills",
    ),
    Why.TABLE_DIFFERS: ReasonRow(
        Check.INDEX,
        "the request table has slot {found} where slot {stored} is about to be written",
        "the row was not filled before the step, or was recycled while it is in flight",
        "write the new slots to the row before the forward, and free rows only after it",
    ),
    Why.READ_DIFFERS: ReasonRow(
        Check.INDEX,
        "the kernel's page table has slot {found} where the request table has {stored}",
        "stale tail columns, a plan of an earlier step, raw block numbers after a swap",
        "rebuild the kernel's page table from the request table in each step, replays included",
    ),
    Why.LENGTH_DIFFERS: ReasonRow(
        Check.INDEX,
        "the kernel will read {found} positions, the request has {stored}",
        "a length of an earlier step, or padding taken for a token",
        "fill the lengths that the kernel reads in each step, replays included",
    ),
    Why.DIGEST_DIFFERS: ReasonRow(
        Check.DIGEST,
        "the fingerprints of the same tokens differ (here {stored}, there {found})",
        "a transfer that lost or mixed bytes, ranks that evict or load differently",
        "compare the layouts on both ends, and whether both waited for the transfer",
        Shown.HASH,
    ),
    Why.WRITTEN_BEFORE: ReasonRow(
        Check.OWNER,
        "a token is about to be written over a slot that is written once",
        "cross-attention's K and V computed again for a request that has them, or written with the decoder's slots",
        "write them in the request's first forward only; after that, reads need no slots",
        Shown.OWNER,
    ),
    Why.REJECTED_TOKEN: ReasonRow(
        Check.TOKEN,
        "attention is about to read token {found}, which was drafted and then rejected",
        "a prefix length that counts rejected tokens, an accepted length off by one, a draft that did not catch up",
        "compare the prefix length with what the verification accepted; write the position again before it is read",
    ),
    Why.READ_WHILE_WRITTEN: ReasonRow(
        Check.INDEX,
        "attention is about to read a slot that another request of the same forward writes ({found})",
        "a slot handed out twice, a row that still names a slot after it was given on, a prefix listed before it is "
        "computed",
        "if the prefix is meant, and each layer writes all tokens before attention reads any, say "
        "Batch.in_flight=True; else let the reader wait for the next forward",
        Shown.OWNER,
    ),
    Why.PADDING_WRITES: ReasonRow(
        Check.BOUNDS,
        "a token of the row that means padding is about to be written to slot {value}, which is not reserved",
        "a real request that was given the padding's row, or padding with a stale slot number",
        "keep KVPool(padding_row=...) out of the rows that requests get; send padding to a reserved slot, "
        "KVPool(reserved=...), or to -1",
    ),
}

#: The texts of both, by name.
TEXTS: dict[str, Text] = TEXTS_OF_CHECKS | {
    why.name: Text(row.what, row.meaning, row.remedy) for why, row in REASONS.items()
}


def bits_of(names: tuple[str, ...]) -> Check:
    """The checks of these names as bits; a sweep is a schedule and has none."""
    bits = Check(0)
    for name in names:
        if name != "sweep":
            bits |= CHECKS[name].reports
    return bits


def check_and_reason(failure: Why | Check) -> tuple[Check, Why]:
    """The check of a reason, with the reason; a check without reasons has ``Why.NONE``."""
    return (failure, Why.NONE) if isinstance(failure, Check) else (REASONS[failure].check, failure)


def how_shown(check: str, why: str | None) -> Shown:
    """How a violation's values are shown."""
    if why is not None:
        return REASONS[Why[why]].shows
    return CHECKS[check].shows if check in CHECKS else Shown.NUMBER
