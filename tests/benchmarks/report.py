"""Sections of BENCHMARKS.md: each is written by the command that measured it."""

from __future__ import annotations

import datetime
import itertools
import math
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


def paired(ratios: Sequence[float]) -> str:
    """The median of the rounds' own ratios, in per cent, where it is with 95 % certainty, and their spread.

    The interval is that between order statistics (Conover, Practical Nonparametric Statistics): a host whose speed
    differs by a half from round to round is no normal distribution.  Fewer than six rounds have none.
    """
    found = sorted(100 * ratio for ratio in ratios)
    spread = f"rounds {found[0]:.1f} to {found[-1]:.1f}"
    n = len(found)
    tails = itertools.accumulate(math.comb(n, below) / 2**n for below in range(n))  # so many or fewer below the median
    outside = sum(tail <= 0.025 for tail in tails)
    if outside:
        spread = f"95 %: {found[outside - 1]:.1f} to {found[-outside]:.1f}; {spread}"
    return f"{statistics.median(found):.1f} % ({spread})"


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
