"""Plant one fault per check on scratch pools, and show which checks report theirs.

Pools of several layouts and types are made on the device, written by a compiled model, and damaged in every way
that a check is for.  A check that stays silent, or one that speaks without a fault, does not work on this machine.
First of all, an environment with a setting that cannot be, or in which vLLM would not load the canary, is told.
"""

from __future__ import annotations

import argparse

import torch

from ..adapters.vllm.settings import left_out
from ..config import CanaryConfig
from ..engine.kv_pool import KVPool
from ..proof.doctor import examine
from .device import add_device
from .inner import add_inner

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_inner(parser, "model")
    add_device(parser)
    parser.add_argument("--layers", type=int, default=2, help="layers of the scratch pools (default: 2)")


def run(args: argparse.Namespace) -> int:
    CanaryConfig.from_env()  # refuses invalid settings
    why = left_out()
    if why is not None:
        print(f"  FAIL {why}")
        return 1
    failed = examined = 0
    for dtype in DTYPES:
        for paged in (False, True):
            layout = "[pages, page_size, H, D]" if paged else "[slots, H, D]"
            print(f"{str(dtype).removeprefix('torch.')} {layout} on {args.device}, {args.inner}", flush=True)
            for finding in examine(_pool(args.layers, dtype, paged, args.device), CanaryConfig(inner=args.inner)):
                examined += 1
                failed += not finding.ok
                told = ", ".join(finding.told) or "nothing"
                mark = "ok  " if finding.ok else "FAIL"
                print(f"  {mark} {finding.check:10s} planted {finding.fault}: reported {told}")
    print(f"{examined - failed} of {examined} examinations passed")
    return 1 if failed else 0


def _pool(layers: int, dtype: torch.dtype, paged: bool, device: str) -> KVPool:
    shape = (4, 8, 2, 16) if paged else (32, 2, 16)
    made = [tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)) for _ in range(layers)]
    return KVPool(made, torch.zeros(2, 8, dtype=torch.int32, device=device), paged=paged)
