"""How often the first cause that an incident names is right, over the documented bugs and the campaign's classes::

    PYTHONPATH=. python tests/bugs/measure_causes.py           # the half that no rule was made on: sums alone
    PYTHONPATH=. python tests/bugs/measure_causes.py --rules   # the other half, each of them

Each bug is played with ``KVCANARY_INCIDENTS``, and the first file that it leaves is asked; of each class, the first 20
injections that leave one.  ``unknown`` counts as wrong.  What is named for each of the first half is not printed: no
rule is to be made on it.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from kvcanary_fx.reports.incidents import file
from kvcanary_fx.reports.incidents.causes import likely
from kvcanary_fx.reports.incidents.folder import IncidentFolder
from kvcanary_fx.reports.incidents.incident import Incident

HERE = Path(__file__).parent
LAB = HERE.parents[1] / "examples" / "paged_engine"

#: Injections of a class, and the most runs that are tried for them.
INJECTIONS, RUNS = 20, 200

#: Files that a run may leave.
MOST_FILES = 20


def played(rules: bool) -> Iterator[tuple[str, str, Incident | None]]:
    """Each bug of a half: its number, its cause, and the first incident of its faulty play."""
    from causes import CAUSES, for_rules
    from test_real_bugs import BUGS

    chosen = [bug for bug in BUGS if bug.number in CAUSES and for_rules(bug.number) == rules]
    for bug in sorted(chosen, key=lambda b: (b.number[0], int(b.number[1:]))):
        torch._dynamo.reset()
        with tempfile.TemporaryDirectory() as folder:
            os.environ["KVCANARY_INCIDENTS"] = folder
            for session in bug.play(True).sessions:
                session.violations()
            yield bug.number, CAUSES[bug.number], _first(folder)


def injected(rules: bool) -> Iterator[tuple[str, str, Incident | None]]:
    """The injections of each class of a half: its name, its cause, and the first incident."""
    from causes import CLASSES, class_for_rules
    from planted import PLANTS
    from trials import Lab

    lab = Lab()
    for name in sorted(n for n in CLASSES if class_for_rules(n) == rules):
        engines = lab._engines_for(PLANTS[name](0))
        left = INJECTIONS
        for seed in range(RUNS):
            with tempfile.TemporaryDirectory() as folder:
                for engine in engines:  # a session writes one file for each kind: let each run begin anew
                    engine.session._alarm._folder = IncidentFolder(folder, MOST_FILES)
                trial = lab.trial(name, seed)
                incident = _first(folder)
            if trial.strike is not None and incident is not None:
                left -= 1
                yield name, CLASSES[name], incident
            if not left:
                break
    lab.close()


def _first(folder: str) -> Incident | None:
    written = sorted(Path(folder).iterdir(), key=lambda path: int(path.name.split("-")[3]))
    return file.load(written[0]) if written else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", action="store_true", help="the half on which rules were made")
    rules = parser.parse_args().rules
    sys.path[:0] = [str(HERE), str(HERE.parent / "runtime"), str(LAB)]
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    for part, cases in (("documented bugs", played(rules)), ("injections", injected(rules))):
        count: Counter[str] = Counter()
        for name, cause, incident in cases:
            names = likely(incident) if incident is not None else ["unknown"]
            count["all"] += 1
            count["right"] += names[0] == cause
            count["second"] += names[0] != cause and cause in names
            if rules:
                print(f"{'ok  ' if names[0] == cause else 'FAIL'} {name:13s} {cause:15s} named {', '.join(names)}")
        share = count["right"] / max(count["all"], 1)
        print(f"{part}: {count['right']} of {count['all']} right ({share:.0%}), {count['second']} among the others")


if __name__ == "__main__":
    main()
