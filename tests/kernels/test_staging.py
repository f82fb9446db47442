"""Numbers that launches read in the host's memory are there as long as one may run."""

from __future__ import annotations

from array import array

import pytest
import torch

from kvcanary_fx.kernels import staging as module
from kvcanary_fx.kernels.staging import HostRing

ENTRIES = 6


class Event:
    """Notes in :attr:`log` which half of the ring a place in the stream is behind, and who waits for it."""

    log: list[tuple[str, Event]] = []

    def record(self, stream):
        self.log.append(("here", self))

    def synchronize(self):
        self.log.append(("wait", self))


@pytest.fixture
def ring(monkeypatch):
    """As on a GPU, of which there need not be one."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "log", [])
    monkeypatch.setattr(module, "CurrentStream", lambda device: lambda: "the model's")
    monkeypatch.setattr(
        module, "lasting", lambda *shape, dtype, device, pin_memory: torch.empty(*shape, dtype=dtype, device=device)
    )
    return HostRing(ENTRIES, 3, torch.device("cuda", 0))


def put(ring: HostRing, *numbers: int) -> torch.Tensor:
    given = array("q", numbers)
    there = ring.put(given)
    given[0] = -1  # the host goes on
    return there


def test_an_entry_stays_until_its_turn_comes_again(ring):
    entries = [put(ring, n, n + 1, n + 2) for n in range(ENTRIES)]
    assert [entry.tolist()[:3] for entry in entries] == [[n, n + 1, n + 2] for n in range(ENTRIES)]
    again = put(ring, 50, 51)
    assert again.data_ptr() == entries[0].data_ptr()
    assert again.tolist()[:3] == [50, 51, 2]
    assert all(entry.data_ptr() % 16 == entries[0].data_ptr() % 16 for entry in entries)


def test_the_host_waits_for_the_launches_that_read_the_half_that_it_writes_next(ring):
    """And only when it is half a ring ahead of what has begun."""
    marks = []
    for n in range(2 * ENTRIES):
        before = len(Event.log)
        put(ring, n)
        marks.append(Event.log[before:])
    first, second = ring._read
    assert [at for at, mark in enumerate(marks) if mark] == [0, 3, 6, 9]
    assert marks[6] == [("here", second), ("wait", first)]  # the first half was read before `first`, noted at 3
    assert marks[3] == [("here", first), ("wait", second)]
    assert marks[9] == marks[3]


def test_on_a_cpu_nothing_waits():
    ring = HostRing(2, 2, torch.device("cpu"))
    assert [put(ring, n).tolist()[0] for n in range(5)] == [0, 1, 2, 3, 4]
