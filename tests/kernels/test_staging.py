"""Numbers that a launch reads in the host's memory are there as long as it may run."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
import torch

from kvcanary_fx.kernels import staging as module
from kvcanary_fx.kernels.staging import Staging


class Event:
    """Of a launch that is over when :attr:`over` says so."""

    over = False

    def record(self, stream):
        self.stream = stream

    def query(self):
        return self.over


@pytest.fixture
def staging(monkeypatch):
    """As on a GPU, of which there need not be one."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "over", False)
    monkeypatch.setattr(module, "lasting", lambda room, dtype, device, pin_memory: torch.empty(room, dtype=dtype))
    found = Staging(torch.device("cpu"))
    found._device, found._current = SimpleNamespace(type="cuda"), lambda: "the model's"
    return found


def lent(staging: Staging, *numbers: int) -> torch.Tensor:
    """What the launch finds that was lent some numbers."""
    given = array("q", numbers)
    there = staging.lend(given)
    staging.lent()
    given[0] = -1  # the host goes on
    return there


def test_what_was_lent_stays_until_the_launch_is_over(staging):
    first, second = lent(staging, 1, 2, 3), lent(staging, 4, 5, 6)
    assert first.tolist() == [1, 2, 3]
    assert second.tolist() == [4, 5, 6]
    Event.over = True
    third = lent(staging, 7, 8)
    assert third.data_ptr() == first.data_ptr(), "memory is used again"
    assert (second.tolist(), third.tolist()) == ([4, 5, 6], [7, 8])


def test_what_was_lent_and_not_launched_is_forgotten(staging):
    """An exception came in between."""
    staging.lend(array("q", [1, 2]))
    there = lent(staging, 3, 4)
    assert there.tolist() == [3, 4]
    assert len(staging._sent) == 1


def test_on_a_cpu_the_launch_reads_the_numbers_themselves():
    assert lent(Staging(torch.device("cpu")), 1, 2).tolist() == [-1, 2]
