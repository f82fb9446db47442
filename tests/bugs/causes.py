"""The cause of each documented bug, as its source tells it, and of each class of faults that the campaign plants.

Written down before the rules that guess them.

The causes:

* ``stale table``: a table, map, plan or length is that of another step, or names slots that were given on.
* ``early free``: a slot was given back while a forward still used it.
* ``double free``: slots were released twice, or by somebody who does not own them.
* ``torn transfer``: a copy between pools, hosts or engines was cut short, mixed up, unordered, or lost an end.
* ``wrong slot``: an index of another space, a wrong stride, a mapping applied wrongly.
* ``too narrow``: a row, a buffer or a pool is smaller than what is put into it.
* ``wrong position``: positions, lengths or where a window begins are off, by a token, a page or an offset.
* ``wrong prefix``: a prefix cache serves or lists slots that do not hold that prefix: its key, a hash, an old entry.
* ``shared write``: a request writes to a slot that it shares.
* ``wrong token``: what was stored is not the request's own token.
* ``padding``: padding reads or writes real slots, or leaves NaN where they are read.
* ``uncleared``: a slot still holds what its last tenant left.
* ``wrong rank``: ranks disagree.
* ``bit flip``: one bit changed.
* ``lost write``: a write that did not happen: the slot still holds what it held.
* ``bad value``: the model itself computed NaN or Inf.

Rules may be made on the bugs for which :func:`for_rules`, and on the classes for which :func:`class_for_rules` is true;
how often they are right is measured on the others.
"""

from __future__ import annotations

import hashlib

#: By the number of the bug.  Three bugs are out of reach of any check of the storage: A9, I2, J4.
CAUSES = {
    "A1": "wrong position",
    "A2": "wrong token",
    "A6": "wrong position",
    "A7": "wrong position",
    "A10": "wrong position",
    "B1": "wrong slot",
    "B2": "wrong slot",
    "B5": "wrong slot",
    "B8": "stale table",
    "B9": "too narrow",
    "B10": "too narrow",
    "B11": "stale table",
    "B12": "too narrow",
    "B14": "stale table",
    "B15": "shared write",
    "C1": "early free",
    "C3": "early free",
    "C5": "stale table",
    "C6": "double free",
    "C7": "double free",
    "C8": "double free",
    "C9": "stale table",
    "C11": "wrong prefix",
    "C14": "wrong prefix",
    "D2": "torn transfer",
    "D3": "torn transfer",
    "D5": "torn transfer",
    "D6": "torn transfer",
    "D7": "torn transfer",
    "D9": "torn transfer",
    "D11": "torn transfer",
    "D13": "torn transfer",
    "D14": "torn transfer",
    "D17": "torn transfer",
    "D18": "torn transfer",
    "E1": "wrong prefix",
    "E4": "wrong prefix",
    "E5": "wrong prefix",
    "E6": "wrong prefix",
    "E7": "wrong prefix",
    "F1": "wrong token",
    "F2": "wrong prefix",
    "G1": "wrong position",
    "G2": "wrong position",
    "G3": "wrong position",
    "G4": "stale table",
    "H1": "padding",
    "H2": "padding",
    "H4": "padding",
    "H6": "padding",
    "H8": "padding",
    "H11": "uncleared",
    "H12": "padding",
    "I1": "wrong slot",
    "I5": "too narrow",
    "J2": "torn transfer",
    "K1": "wrong rank",
    "K4": "wrong rank",
    "K5": "wrong rank",
    "L1": "bit flip",
    "L3": "stale table",
}

#: By the class of :data:`kvcanary_fx.proof.perturb.CLASSES`: what its text says that it does.
CLASSES = {
    "double_free": "double free",
    "early_free": "early free",
    "idle_bytes": "bit flip",
    "late_bytes": "bit flip",
    "late_write": "early free",  # a write was under way when the slot was given on
    "lost_transfer": "torn transfer",
    "nan": "bad value",
    "operand": "wrong slot",
    "rank_skew": "wrong rank",
    "scale": "bit flip",
    "skipped_write": "lost write",
    "slot_index": "wrong slot",
    "stale_length": "wrong position",  # the length is off by a token, and positions and slots follow it
    "swapped_tokens": "wrong token",
    "table_entry": "stale table",
    "used_bytes": "bit flip",
}


def class_for_rules(name: str) -> bool:
    """Whether rules may be made on a class: every second one in the order of the alphabet, the first included."""
    return sorted(CLASSES).index(name) % 2 == 0


def for_rules(bug: str) -> bool:
    """Whether rules may be made on a bug; drawn by the hash of its number."""
    return hashlib.blake2b(bug.encode(), digest_size=1).digest()[0] % 2 == 0
