"""The option ``--device``: where a command runs its models."""

from __future__ import annotations

import argparse

import torch


def add_device(parser: argparse.ArgumentParser) -> None:
    """Let a command take ``--device``."""
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=_device, default=best, help=f"cpu, or cuda (default here: {best})")


def _device(name: str) -> str:
    try:
        known = torch.device(name).type in ("cpu", "cuda")
        torch.zeros((), device=name)
    except (RuntimeError, AssertionError):  # a PyTorch without CUDA asserts
        known = False
    if not known:
        here = "cpu and cuda" if torch.cuda.is_available() else "cpu"
        raise argparse.ArgumentTypeError(f"no device {name!r} that can be guarded; here there is {here}")
    return name
