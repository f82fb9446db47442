"""Prints the table of the documented bugs after the tests."""

from __future__ import annotations


def pytest_terminal_summary(terminalreporter):
    rows = [
        (*value, report.outcome)
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        for key, value in getattr(report, "user_properties", [])
        if key == "bug"
    ]
    if not rows:
        return
    terminalreporter.section("documented bugs")
    caught = sum(check != "-" and found != "-" for _, _, check, found, _ in rows)
    for number, source, check, found, outcome in sorted(rows, key=lambda r: (r[0][0], int(r[0][1:]))):
        told = "out of reach" if check == "-" else f"caught by {found}" if found != "-" else "MISSED"
        failed = "" if outcome == "passed" else "  FAILED"
        terminalreporter.line(f"{number:4s} {source:50s} {check:10s} {told}{failed}")
    beyond = sum(check == "-" for _, _, check, _, _ in rows)
    terminalreporter.line(f"{len(rows)} entries: {caught} caught, {beyond} out of reach")
