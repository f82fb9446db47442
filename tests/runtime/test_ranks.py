"""A budget in the ranks of one model: they take one share, that of the slowest."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from test_pace import Graph

from kvcanary_fx.runtime import ranks, shared_file
from kvcanary_fx.runtime.ranks import Ranks

PRICES = 0.7, 5.6  # of comparing all bytes, for each rank: alone they take 1/128 and 1/1024


def _rank(number: int, folder: Path) -> None:
    """One rank over a made-up clock; writes what share its device was told at the end of each part, and the last line
    of its summary."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=number, world_size=2)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_file, "_folder", lambda: folder)
        graph = Graph(patch, price=PRICES[number])
        for price in (PRICES[number], 0.7):
            graph.price = price
            graph.run(2000)
            dist.barrier()  # both have settled
            graph.run(1)
            seen.append((graph.every, graph.pace.describe()[-1]))
            dist.barrier()
    (folder / f"{number}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork, else it takes 10 s to import torch twice")
def test_two_processes_of_one_model_take_the_share_of_the_slower_one(tmp_path):
    children = []
    for number in range(2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _rank(number, tmp_path)
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(code)
        children.append(child)
    deadline, left = time.monotonic() + 60, set(children)
    while left and time.monotonic() < deadline:
        left -= {child for child in left if os.waitpid(child, os.WNOHANG)[0]}
        time.sleep(0.02)
    for child in left:
        os.kill(child, 9)
    assert not left
    fast, slow = (json.loads((tmp_path / f"{n}.json").read_text()) for n in range(2))
    assert [every for every, _ in fast] == [every for every, _ in slow] == [1024, 128]
    assert fast[0][1] == "that is what rank 1 needs; this one would take 1/128"


def test_a_rank_that_ends_holds_up_nobody_and_the_last_removes_the_file(tmp_path):
    path = tmp_path / "kvcanary"
    mine, other = Ranks(path, 0, 2), Ranks(path, 1, 2)
    mine.tell(0.01, 64)
    assert not mine.changed()
    other.tell(0.01, 512)
    assert mine.changed()
    assert (mine.largest, mine.slowest) == (512, 1)
    assert not mine.changed()
    del other
    assert mine.changed()
    assert mine.largest == 1
    assert path.exists()
    del mine
    assert not path.exists()


def test_ranks_with_another_budget_do_not_count(tmp_path):
    mine, other = (Ranks(tmp_path / "kvcanary", rank, 2) for rank in range(2))
    mine.tell(0.01, 64)
    other.tell(0.1, 512)
    assert mine.changed()
    assert mine.largest == 1


def test_a_torch_whose_store_cannot_be_reached_leaves_each_rank_to_itself(monkeypatch, caplog):
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.delattr(dist.distributed_c10d, "_get_default_store")
    with caplog.at_level("INFO", "kvcanary"):
        assert ranks.join(0) is None
    assert "kvcanary.budget each rank keeps to it by itself" in caplog.text


def test_a_process_without_others_keeps_to_its_budget_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_file, "_folder", lambda: tmp_path)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        graph = Graph(monkeypatch)
        graph.run(2000)
    finally:
        dist.destroy_process_group()
    assert graph.every == 128
    assert not list(tmp_path.glob("kvcanary*"))
