"""Prints the table of pool shapes by check after the tests."""

from __future__ import annotations

COLUMNS = (
    "content", "operand", "index", "bounds", "owner", "reuse", "chain", "token", "namespace", "poison", "sweep",
)  # fmt: skip


def pytest_terminal_summary(terminalreporter):
    rows = [
        value
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        for key, value in getattr(report, "user_properties", [])
        if key == "shape"
    ]
    if not rows:
        return
    terminalreporter.section("pool shapes by check: guarded")
    width = max(len(name) for name, _ in rows)
    terminalreporter.line(" " * width + "  " + " ".join(f"{c:9s}" for c in COLUMNS))
    for name, cells in rows:
        shown = (cells.get(column, "-") for column in COLUMNS)
        terminalreporter.line(f"{name:{width}s}  " + " ".join(f"{cell:9s}" for cell in shown))
    terminalreporter.line("guarded: the planted fault was reported by this check, in this pool; -: does not apply")
