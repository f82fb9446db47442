"""Memory that `install_canary` takes on the device, for the pools of the models of `forward.py`.

    python tests/benchmarks/shadow_memory.py [--device cuda] [--slots 65536] [--write]

On a GPU it is what PyTorch's allocator counts before and after; on a CPU, the storages of the tensors that are new.
"""

from __future__ import annotations

import argparse
import gc
import math

import report
import torch
from decode_models import GQA, MLA, Shape

import kvcanary_fx
from kvcanary_fx import KVPool
from kvcanary_fx.config import CanaryConfig
from kvcanary_fx.kernels.ring import Ring
from kvcanary_fx.kernels.slots.past import HEAD, TOLD
from kvcanary_fx.kernels.slots.space import COLUMNS

#: Bytes a slot that do not depend on the model: who is in it (a block of columns), which token was planned for it,
#: its place in the list of slots to read, two stamps of writes, and what it went through.
SLOT_BYTES = 4 * COLUMNS + 8 + 4 + 2 * 8 + 4 * (HEAD + TOLD * CanaryConfig().slot_history)

FORMULA = f"{SLOT_BYTES} + digest_bits / 8 x tensors"


def formula_bytes(shape: Shape, digest_bits: int) -> int:
    """Bytes of shadow a slot."""
    return SLOT_BYTES + digest_bits // 8 * shape.tensors


def ring_bytes() -> int:
    """Bytes of the ring of violations, whatever the pool's size."""
    return (CanaryConfig().ring_capacity + 1) * len(Ring) * 8


def held(device: torch.device) -> int:
    """Bytes of device memory that tensors hold."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    # by type: fake tensors have no memory, and isinstance() would ask lazy modules for their class and import them
    tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.device.type == "cpu"]
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def taken(shape: Shape, slots: int, digest_bits: int, device: torch.device) -> int:
    """Bytes that the session of one pool allocates."""
    pool = KVPool(shape.pools(slots, device), torch.zeros(8, 4096, dtype=torch.int32, device=device))
    kvcanary_fx.install_canary(pool, digest_bits=digest_bits)  # what is made once for all sessions is there from here
    before = held(device)
    session = kvcanary_fx.install_canary(pool, digest_bits=digest_bits)
    after = held(device)
    assert session is not None
    return after - before


def rows(slots: int, device: torch.device) -> list[list[str]]:
    made = []
    for shape, digest_bits in ((s, bits) for s in (GQA, MLA) for bits in (32, 64)):
        measured, each = taken(shape, slots, digest_bits, device), formula_bytes(shape, digest_bits)
        pool = shape.layers * sum(shape.row_bytes)  # bytes of KV a slot
        made.append(
            [
                f"{shape.name}, {shape.tensors} tensors",
                str(digest_bits),
                f"{pool * slots / 2**20:,.1f} MiB",
                f"{measured / 2**20:,.2f} MiB",
                f"{(each * slots + ring_bytes()) / 2**20:,.2f} MiB",
                f"{each} of {pool:,} bytes",
                f"{100 * each / pool:.2f} %",
            ]
        )
        print("  ".join(made[-1]), flush=True)
    return made


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--slots", type=int, help="default: 65,536 on a GPU (8 GiB of KV), 2,048 on a CPU")
    parser.add_argument("--write", action="store_true", help="update the section in BENCHMARKS.md")
    args = parser.parse_args(arguments)
    slots = args.slots or (65536 if args.device == "cuda" else 2048)
    table = rows(slots, torch.device(args.device))
    header = ["pool", "digest bits", "KV", "shadow measured", "by the formula", "a slot", "share of the pool"]
    text = (
        f"## Memory of the shadow\n\n{report.environment(args.device)}. What `install_canary` allocates on the device "
        f"for pools of {slots:,} slots of the 8B-shaped GQA model (32 layers, K and V of 2,048 bytes a slot) and of "
        f"the MLA-shaped one (27 layers, a latent of 1,152 bytes). A slot takes {FORMULA} bytes; besides, there is a "
        f"ring of violations of {math.ceil(ring_bytes() / 1e6)} MB. The share is that of a slot. Command: "
        f"`python tests/benchmarks/shadow_memory.py --write`\n\n{report.table(header, table)}"
    )
    print("\n" + text)
    if args.write:
        report.write_section(f"shadow memory {args.device}", text)


if __name__ == "__main__":
    main()
