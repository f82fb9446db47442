"""Sections of BENCHMARKS.md: each is written by the command that measured it."""

from __future__ import annotations

import datetime
import platform
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

FILE = Path(__file__).parents[2] / "BENCHMARKS.md"


def environment(device: str) -> str:
    """The line that says when, on what and with which versions something was measured."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    try:
        import triton

        versions = f"torch {torch.__version__}, triton {triton.__version__}"
    except ImportError:
        versions = f"torch {torch.__version__}"
    return f"{datetime.date.today()}, {name}, {versions}, Python {platform.python_version()}"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


def write_section(key: str, text: str) -> None:
    """Replace the section ``key`` of BENCHMARKS.md, or append it."""
    old = FILE.read_text() if FILE.exists() else "# Benchmarks\n"
    begin, end = f"<!-- {key} -->", f"<!-- end of {key} -->"
    section = f"{begin}\n{text.strip()}\n{end}"
    if begin in old:
        new = re.sub(re.escape(begin) + ".*?" + re.escape(end), lambda _: section, old, flags=re.DOTALL)
    else:
        new = old.rstrip() + "\n\n" + section + "\n"
    FILE.write_text(new)


def more_tokens(mine: Sequence[float], off: Sequence[float]) -> float:
    """Tokens a second more, in per cent, by the seconds of each round: the median of the rounds' own ratios."""
    return 100 * (statistics.median(o / m for m, o in zip(mine, off, strict=True)) - 1)


def conclude(text: str, section: str | None, problems: Sequence[str]) -> int:
    """Print what was measured, and what makes it worthless; the exit status.

    Args:
        text: empty if nothing was measured.
        section: of BENCHMARKS.md, to be written; None: none.
    """
    if text:
        print("\n" + text)
        if section is not None:
            write_section(section, text)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0
