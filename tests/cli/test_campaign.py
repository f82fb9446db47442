"""The campaign: its table, its JSON, its exit status, and what it says without a laboratory."""

from __future__ import annotations

import dataclasses
import json

import pytest

from kvcanary_fx.__main__ import main
from kvcanary_fx.cli import campaign
from kvcanary_fx.cli.campaign import Tally
from kvcanary_fx.proof.perturb import Strike


def test_table_and_json(capsys, tmp_path):
    path = tmp_path / "counts.json"
    classes = ["used_bytes", "double_free"]
    assert main(["campaign", "--per-class", "3", "--classes", ",".join(classes), "--json", str(path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:4] == ["class", "injected", "mattered", "same"]
    assert [line[:2] for line in lines[1:]] == [["used_bytes", "3"], ["double_free", "3"], ["all", "6"]]
    told = json.loads(path.read_text())
    assert (told["per_class"], told["failed"]) == (3, False)
    assert [c["name"] for c in told["classes"]] == classes
    for counts in told["classes"]:
        assert counts["same"] + counts["later"] + counts["missed"] + counts["harmless"] == counts["injected"] == 3
        assert counts["missed"] == counts["alarms"] == 0


def test_an_interrupted_campaign_keeps_the_classes_that_are_done(monkeypatch, tmp_path, capsys):
    def two_then_interrupt(lab, tally, wanted, seed):
        if tally.name == "scale":
            raise KeyboardInterrupt
        tally.injected = wanted

    monkeypatch.setattr(campaign, "_campaign", two_then_interrupt)
    path = tmp_path / "counts.json"
    with pytest.raises(KeyboardInterrupt):
        main(["campaign", "--per-class", "3", "--classes", "operand,nan,scale", "--json", str(path)])
    assert [c["name"] for c in json.loads(path.read_text())["classes"]] == ["operand", "nan"]
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]] == [["operand", "3"], ["nan", "3"]]


def test_without_a_laboratory_the_error_names_the_remedy(tmp_path, capsys):
    assert main(["campaign", "--lab", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert f"no laboratory at {tmp_path}" in err
    assert "--lab path/to/examples/paged_engine" in err


def test_wrong_arguments_name_the_remedy(capsys):
    assert main(["campaign", "--classes", "used_bytes,gamma_rays"]) == 2
    assert "--classes gamma_rays: no such class. They are: table_entry, used_bytes" in capsys.readouterr().err
    assert main(["campaign", "--per-class", "0"]) == 2
    assert "give 1 or more injections" in capsys.readouterr().err


def test_a_budget_and_a_fixed_share_are_refused_together(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["campaign", "--budget", "5%", "--verify-fraction", "1/2"])
    assert "--verify-fraction: not allowed with argument --budget" in capsys.readouterr().err


def test_help_explains_the_columns(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["campaign", "--help"])
    out = capsys.readouterr().out
    assert all(f"\n  {column} " in out for column in campaign._HEADINGS)


@dataclasses.dataclass
class Violation:
    text: str = "kvcanary.violation"

    def line(self) -> str:
        return self.text


@dataclasses.dataclass
class Trial:
    """What the laboratory says of a run."""

    strike: Strike | None = dataclasses.field(default_factory=lambda: Strike("nan", "a NaN", step=2))
    mattered: bool = False
    visible: bool = False
    reports: list = dataclasses.field(default_factory=list)


SAME, LATER, FALSE = (2, Violation(), True), (4, Violation(), True), (4, Violation(), False)


@pytest.mark.parametrize(
    ("trial", "column", "failed"),
    [
        (Trial(mattered=True, reports=[SAME, LATER]), "same", False),
        (Trial(reports=[LATER]), "later", False),
        (Trial(mattered=True), "missed", True),
        (Trial(visible=True), "missed", True),
        (Trial(), "harmless", False),
        (Trial(visible=True, reports=[FALSE]), "missed", True),
        (Trial(None, reports=[FALSE]), "alarms", True),
    ],
)
def test_what_a_run_counts_as(trial, column, failed):
    tally = Tally("nan", sampled=False)
    tally.add(Trial(reports=[SAME]), 0)
    before = getattr(tally, column)
    tally.add(trial, 1)
    assert getattr(tally, column) == before + 1
    assert tally.failed == failed
    assert len(tally.details) == (column == "missed") + (FALSE in trial.reports)


def test_a_sampled_class_may_miss():
    tally = Tally("used_bytes", sampled=True)
    tally.add(Trial(mattered=True), 0)
    assert (tally.missed, tally.failed) == (1, False)
    assert Tally("used_bytes", sampled=True).failed  # nothing injected
