"""The tutorial: its lines are the script's, and what it shows is what the script and the command line print."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from kvcanary_fx.__main__ import main as kvcanary

ROOT = Path(__file__).parents[2]
PAGE, SCRIPT = ROOT / "docs" / "tutorial.md", ROOT / "examples" / "use_after_free.py"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="not a checkout")


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("use_after_free", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    torch._dynamo.reset()
    return module


def commands_shown() -> list[tuple[str, list[str]]]:
    """Each command of the page, with the lines that it is said to print."""
    blocks = re.findall(r"^```\n(\$ .*?)```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    shown = [part.splitlines() for block in blocks for part in block.removeprefix("$ ").split("\n$ ")]
    return [(lines[0], [line for line in lines[1:] if line != "..."]) for lines in shown]


def test_code_shown_is_the_script(script):
    lines = {re.sub(r"\s+# canary$", "", line).strip() for line in SCRIPT.read_text().splitlines()}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert [line for block in blocks for line in block.splitlines() if line.strip() and line.strip() not in lines] == []


def test_commands_print_what_the_page_shows(script, tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.chdir(tmp_path)
    for command, shown in commands_shown():
        torch._dynamo.reset()
        caplog.clear()
        words = [str(next(tmp_path.glob(w))) if "*" in w else w for w in command.split()]
        if words[0] == "kvcanary":
            kvcanary(words[1:])
        else:
            script.main(words[2:])
        printed = capsys.readouterr()
        lines = [*printed.out.splitlines(), *printed.err.splitlines(), *caplog.messages]
        patterns = [re.escape(line).replace(re.escape("..."), ".*") for line in shown]
        missing = [p for p in patterns if not any(re.fullmatch(p, line) for line in lines)]
        assert missing == [], f"{command} printed\n" + "\n".join(lines)
    assert (tmp_path / "incident.html").stat().st_size > 0
