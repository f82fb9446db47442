"""How often the first cause that an incident names is right, over the documented bugs::

    PYTHONPATH=. python tests/bugs/measure_causes.py           # the half that no rule was made on
    PYTHONPATH=. python tests/bugs/measure_causes.py --rules   # the other half

Each bug is played with ``KVCANARY_INCIDENTS``, and the first file that it leaves is asked.  ``unknown`` counts as
wrong.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from kvcanary_fx.reports.incidents import file
from kvcanary_fx.reports.incidents.causes import likely

HERE = Path(__file__).parent


def guessed(bug) -> list[str]:
    """The causes that the first file of a faulty play names."""
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KVCANARY_INCIDENTS"] = folder
        for session in bug.play(True).sessions:
            session.violations()
        written = sorted(Path(folder).iterdir(), key=lambda path: int(path.name.split("-")[3]))
        return likely(file.load(written[0])) if written else ["unknown"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", action="store_true", help="the half on which rules were made")
    rules = parser.parse_args().rules
    sys.path[:0] = [str(HERE), str(HERE.parent / "runtime")]
    from causes import CAUSES, for_rules
    from test_real_bugs import BUGS

    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    chosen = [bug for bug in BUGS if bug.number in CAUSES and for_rules(bug.number) == rules]
    right = second = 0
    for bug in sorted(chosen, key=lambda b: (b.number[0], int(b.number[1:]))):
        names, cause = guessed(bug), CAUSES[bug.number]
        right += names[0] == cause
        second += names[0] != cause and cause in names
        print(f"{'ok  ' if names[0] == cause else 'FAIL'} {bug.number:4s} {cause:15s} named {', '.join(names)}")
    print(f"{right} of {len(chosen)} right ({right / len(chosen):.0%}), {second} more among the other names")


if __name__ == "__main__":
    main()
