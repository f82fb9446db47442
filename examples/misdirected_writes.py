"""Writes that go wrong, each caught in the step it happens, with the name of the check that caught it.

    python examples/misdirected_writes.py

One layer of an engine writes K and V through a custom op, as engines do.  Each run makes one mistake: the
op writes next to the slot it was told, uses a wrong stride, or is handed an index out of range, a slot
twice, or a NaN.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import kvcanary_fx

HEADS, DIM, SLOTS, TOKENS = 2, 16, 24, 3

#: What the next call of the store op does wrong: nothing, "slot" or "stride".
FAULT = ""


@torch.library.custom_op("example::store_kv", mutates_args=("k_cache", "v_cache"))
def store_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write each token's K and V to its slot: the write kernel of an engine, with bugs to switch on."""
    where = slot_mapping.clone()
    if FAULT == "slot":
        where[1] += 1
    if FAULT == "stride":  # as if K and V were interleaved in one tensor
        where *= 2
    k_cache[where], v_cache[where] = k, v


@store_kv.register_fake
def _(k, v, k_cache, v_cache, slot_mapping):  # type: ignore[no-untyped-def]
    return None


class Attention(nn.Module):
    """One layer with a pool of [slots, HEADS, DIM]; ``op`` says whether it writes by op or by index."""

    def __init__(self, op: bool):
        super().__init__()
        torch.manual_seed(0)
        self.op = op
        self.qkv = nn.Linear(HEADS * DIM, 3 * HEADS * DIM)
        self.register_buffer("k_cache", torch.zeros(SLOTS, HEADS, DIM))
        self.register_buffer("v_cache", torch.zeros(SLOTS, HEADS, DIM))

    def forward(self, x: torch.Tensor, slot_mapping: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(-1, 3, HEADS, DIM).unbind(1)
        if self.op:
            torch.ops.example.store_kv(k, v, self.k_cache, self.v_cache, slot_mapping)
        else:
            self.k_cache[slot_mapping] = k
            self.v_cache[slot_mapping] = v
        keys, values = (t.transpose(0, 1) for t in (self.k_cache, self.v_cache))
        return F.scaled_dot_product_attention(q.transpose(0, 1), keys, values)


@dataclass
class Mistake:
    """A mistake and the check that has to name it."""

    what: str
    check: str
    slot: int
    op: bool = False
    fault: str = ""
    slots: tuple[int, ...] = (7, 8, 9)
    edit: Callable[[torch.Tensor], None] | None = None


def _nan(x: torch.Tensor) -> None:
    x[1, 0] = float("nan")


MISTAKES = [
    Mistake("written to the wrong slot", "operand", 8, op=True, fault="slot"),
    Mistake("written with a wrong stride", "operand", 7, op=True, fault="stride"),
    Mistake("index -1", "bounds", SLOTS - 1, slots=(7, 8, -1)),
    Mistake(f"index {SLOTS} of {SLOTS} slots", "bounds", -1, slots=(7, SLOTS, 9)),
    Mistake("two tokens to one slot", "bounds", 8, slots=(7, 8, 8)),
    Mistake("NaN written", "poison", 8, edit=_nan),
]


def run(mistake: Mistake, inner: str, device: str) -> tuple[bool, str]:
    """Two clean steps, then the mistake; whether it was reported as it should be, and the report."""
    global FAULT
    torch._dynamo.reset()
    model = kvcanary_fx.protect(Attention(mistake.op).to(device), mode="raise", inner=inner)
    x = torch.randn(TOKENS, HEADS * DIM, device=device)
    with torch.no_grad():
        for first in (1, 4):
            model(x, torch.arange(first, first + TOKENS, device=device))
        FAULT = mistake.fault
        if mistake.edit is not None:
            mistake.edit(x)
        try:
            model(x, torch.tensor(mistake.slots, device=device))
        except kvcanary_fx.KVCacheViolation as e:
            v = e.violations[0]
            found = v.check == mistake.check and v.slot == mistake.slot and v.step == 3
            return found, v.explain()
        finally:
            FAULT = ""
    return False, "nothing was reported"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inner", default="eager", help="backend that compiles the guarded graph")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", help="run the mistakes whose name contains this text")
    args = parser.parse_args(argv)
    ok = True
    for mistake in MISTAKES:
        if args.only and args.only not in mistake.what:
            continue
        found, text = run(mistake, args.inner, args.device)
        ok &= found
        print(f"{mistake.what}: {'reported by ' + mistake.check if found else 'NOT AS EXPECTED'}\n{text}\n", flush=True)
    print("ok" if ok else "FAILED")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
