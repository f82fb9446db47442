"""Show the file of an incident: what happened, which slots were damaged, and what surrounds them."""

from __future__ import annotations

import argparse
import os
import shutil
import sys

from ..reports.incidents import file
from ..reports.incidents.terminal import Terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="written on a violation (KVCANARY_INCIDENTS) or by session.snapshot(path)")


def run(args: argparse.Namespace) -> int:
    incident = file.load(args.file)
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    sys.stdout.write(Terminal(shutil.get_terminal_size().columns, colour).render(incident))
    return 0
