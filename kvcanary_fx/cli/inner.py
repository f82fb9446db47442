"""The option ``--inner``: the backend that compiles a guarded graph."""

from __future__ import annotations

import argparse

import torch._dynamo


def add_inner(parser: argparse.ArgumentParser, what: str) -> None:
    """Let a command take ``--inner``.

    Args:
        what: is compiled.
    """
    said = f"backend that compiles the {what} (default: inductor)"
    parser.add_argument("--inner", default="inductor", type=_backend, help=said)


def _backend(name: str) -> str:
    known = torch._dynamo.list_backends(exclude_tags=())
    if name not in known:
        raise argparse.ArgumentTypeError(f"no backend {name!r}; torch.compile knows {', '.join(sorted(known))}")
    return name
