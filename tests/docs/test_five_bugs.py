"""The page of five bugs shows what their reports and incidents say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE, SCRIPT = ROOT / "docs" / "five-bugs.md", ROOT / "docs" / "pictures" / "pages.py"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="not a checkout")


def script():
    spec = importlib.util.spec_from_file_location("pages", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sections() -> dict[str, str]:
    """What the page prints of each bug, by the number in the name of its picture."""
    parts = PAGE.read_text().split("\n## ")[1:]
    shown = ["\n".join(re.findall(r"^```\n(.*?)^```", part, re.M | re.S)) for part in parts]
    return dict(zip((re.search(r"page-(\w+)\.png", part)[1] for part in parts), shown, strict=True))


def test_all_five_are_there_with_small_pictures():
    assert tuple(sections()) == script().SHOWN
    sizes = [(SCRIPT.parent / f"page-{number}.png").stat().st_size for number in sections()]
    assert 0 < min(sizes) <= max(sizes) < 150_000


@pytest.mark.parametrize("number", sections() if PAGE.exists() else [])
def test_what_is_shown_is_what_is_said(number):
    text, page = script().told(number)
    assert sections()[number] == text + "\n"
    assert "Likeliest cause: " in page.partition("<h2>")[0]
    assert "<p>Owners: " in page or number == "C7"  # whose slots are all free
