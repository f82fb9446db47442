"""Show the file of an incident: what happened, which slots were damaged, and what surrounds them."""

from __future__ import annotations

import argparse
import os
import shutil
import sys

from ..errors import IncidentError
from ..reports.incidents import file
from ..reports.incidents.page import page
from ..reports.incidents.terminal import Terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="written on a violation (KVCANARY_INCIDENTS) or by session.snapshot(path)")
    parser.add_argument("--html", metavar="OUT", help="write one page of HTML to OUT instead, which loads nothing")


def run(args: argparse.Namespace) -> int:
    incident = file.load(args.file)
    if args.html is not None:
        try:
            _write(args.html, page(incident))
        except OSError as e:
            raise IncidentError(
                args.html, f"the page cannot be written ({e.strerror or e})", "Give a path in a writable directory"
            ) from e
        print(f"written to {args.html}")
        return 0
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    sys.stdout.write(Terminal(shutil.get_terminal_size().columns, colour).render(incident))
    return 0


def _write(path: str, text: str) -> None:
    """Write a page that its owner alone can read: it shows what the incident's file holds."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as out:
        out.write(text)
