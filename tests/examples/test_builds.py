"""The llama's builds: guarded alike, whole and split at attention; and a table that notices what is not guarded."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "examples" / "paged_engine"))

import builds
from config import BUILDS, EngineConfig
from serving import Served, serve
from workload import workload

from kvcanary_fx.passes import attention_ops

#: All builds are cheap without Inductor; under it the one that is furthest from what a graph shows.
INNERS = [("eager", BUILDS), pytest.param("inductor", BUILDS[-1:], marks=pytest.mark.slow)]


def lines(out: str) -> list[list[str]]:
    """The cells of the rows of the table."""
    return [[c.strip() for c in line.split("  ") if c.strip()] for line in out.splitlines() if " of 8 " in line]


@pytest.mark.parametrize(("inner", "chosen"), INNERS)
def test_every_build_is_guarded_whole_and_split(inner, chosen, capsys):
    assert builds.main(["--inners", inner, "--builds", *chosen]) == 0
    rows = lines(capsys.readouterr().out)
    assert [(row[0], row[2]) for row in rows] == [(b, graph) for b in chosen for graph in ("whole", "split")]
    assert {tuple(row[3:5] + row[6:8]) for row in rows} == {("True", "0", "8 of 8", "8 of 8")}
    pieces = {(row[0], row[2]): int(row[5]) for row in rows}
    assert {pieces[b, "whole"] for b in chosen} == {2}
    assert pieces["opaque_hoisted", "split"] == 6  # one more than the layers, of the target and of the draft
    assert pieces.get(("visible", "split"), 7) > 6


@pytest.mark.gpu
@pytest.mark.parametrize("inner", builds.INNERS)
def test_every_build_on_a_gpu(inner):
    assert builds.main(["--inners", inner, "--device", "cuda"]) == 0


def test_the_table_shows_an_attention_op_that_the_pass_does_not_know(capsys, monkeypatch):
    monkeypatch.setattr(attention_ops, "_REGISTERED", {})
    assert builds.main(["--builds", "opaque", "--inners", "eager"]) == 1
    assert [row[3:5] + row[6:8] for row in lines(capsys.readouterr().out)] == 2 * [["True", "0", "0 of 8", "0 of 8"]]


@pytest.mark.parametrize(("build", "split"), [("opaque", False), ("opaque_hoisted", True)])
@builds.one_thread()
def test_opaque_builds_with_everything_on(build, split):
    config = EngineConfig(
        model="llama", build=build, split=split, pages=40, offload=True, window=12, window_pages=36, draft=2, fp8=True
    )

    def served(config: EngineConfig, mode: str) -> Served:
        return serve(workload(6, 1, namespaces=3, abort_share=0.2), config, transfer=True, mode=mode)

    plain, guarded = served(dataclasses.replace(config, split=False), "off"), served(config, "raise")
    assert [r.output for r in plain.requests] == [r.output for r in guarded.requests]
    assert guarded.violations() == []
    assert guarded.counts()["slots checked: bytes"] > 0
    assert guarded.sessions[0].pools["kv"].halves[3].info.layer == "layers.0"  # K, V and two scales


def test_the_oracle_has_one_build():
    with pytest.raises(ValueError, match="the oracle has the first"):
        EngineConfig(build="opaque")
