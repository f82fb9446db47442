"""The five bugs of docs/five-bugs.md: ``PYTHONPATH=. python docs/pictures/pages.py`` plays them again.

Prints what the page shows of each, and writes the first screen of its incident's page beside this script, as Chromium
shows it (``--browser``).  Smaller where Pillow is at hand.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

#: By their numbers in tests/bugs.
SHOWN = ("C3", "C7", "E7", "J2", "H6")

WIDTH, HEIGHT = 1000, 720


def told(number: str) -> tuple[str, str]:
    """What is reported of a bug and what the first file of its incident says happened, and that file as a page."""
    import torch
    from test_real_bugs import BUGS

    from kvcanary_fx.reports.incidents import causes, file
    from kvcanary_fx.reports.incidents.page import page
    from kvcanary_fx.reports.incidents.story import story

    torch._dynamo.reset()
    bug = next(bug for bug in BUGS if bug.number == number)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, KVCANARY_INCIDENTS=folder):
        for session in bug.play(True).sessions:
            session.violations()
        written = sorted(Path(folder).iterdir(), key=lambda path: int(path.name.split("-")[3]))
        incident = file.load(written[0])
    lines = [incident.records[0].violation.explain(), "", causes.told(incident), *story(incident)]
    return "\n".join(lines), page(incident)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--browser", default="chromium")
    browser = parser.parse_args().browser
    sys.path[:0] = [str(ROOT / "tests" / "bugs"), str(ROOT / "tests" / "runtime")]
    logging.disable(logging.CRITICAL)
    for number in SHOWN:
        text, page = told(number)
        print(f"\n{number}\n\n{text}")
        picture = HERE / f"page-{number}.png"
        with tempfile.NamedTemporaryFile("w", suffix=".html") as shown:
            shown.write(page)
            shown.flush()
            command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
            command += [f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={picture}", f"file://{shown.name}"]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        _shrink(picture)


def _shrink(picture: Path) -> None:
    """To 64 colours, if it can be done."""
    try:
        from PIL import Image
    except ImportError:
        return
    Image.open(picture).convert("RGB").quantize(64).save(picture, optimize=True)


if __name__ == "__main__":
    main()
