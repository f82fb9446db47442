"""Run the checks that failed again, on the bytes and slots in the file of an incident.

The exit status is 1 if one fails again, 0 if none does, 3 if none could be run.
"""

from __future__ import annotations

import argparse

from ..reports.incidents import file
from ..reports.incidents.replay import Outcome, replay
from ..reports.untrusted import one_line

#: Checks that are listed one by one.
LISTED = 50

_SAID = {True: "fails again", False: "passes now", None: "cannot be run"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="written on a violation (KVCANARY_INCIDENTS) or by session.snapshot(path)")


def run(args: argparse.Namespace) -> int:
    outcomes = replay(file.load(args.file))
    for outcome in outcomes[:LISTED]:
        print(_line(outcome))
    again = sum(outcome.fails is True for outcome in outcomes)
    ran = sum(outcome.fails is not None for outcome in outcomes)
    print(f"{again} of {len(outcomes)} checks fail again, {ran - again} pass now, {len(outcomes) - ran} cannot be run")
    return 1 if again else 0 if ran else 3


def _line(outcome: Outcome) -> str:
    violation = outcome.record.violation
    what = violation.check if violation.why is None else f"{violation.check} ({violation.why.lower()})"
    return one_line(f"{_SAID[outcome.fails]}: {what}, {violation.where()}: {outcome.why}")
