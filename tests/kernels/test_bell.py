"""Who writes a row of the ring tells the host, which then need not copy the counters in each step."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from scenes import ALL_CHECKS, random_scene

from kvcanary_fx.kernels.checks import Check, Phase
from kvcanary_fx.kernels.content import gpu
from kvcanary_fx.kernels.ring import Control, Word, append
from kvcanary_fx.runtime.binding import Controls
from kvcanary_fx.runtime.readback import Poll
from kvcanary_fx.runtime.rows import take_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def with_bell(control: Control) -> Control:
    """As a GPU's has one."""
    if control.bell is None:
        control.bell = torch.zeros(2, dtype=torch.int64, pin_memory=DEVICE.type == "cuda")
        control.words[Word.BELL] = control.bell.data_ptr()
    return control


def by_torch(control: Control, bad: bool) -> None:
    """A check that fails, or not."""
    mask = torch.tensor([False, bad], device=control.words.device)
    append(control, mask, half=1, check=int(Check.BOUNDS), phase=0, slot=7, stored=1, found=2)


def by_triton():
    """A control, and such a check with a kernel."""
    scene = random_scene(3).to(DEVICE)
    site = dataclasses.replace(scene.site, checks=ALL_CHECKS)

    def check(control: Control, bad: bool) -> None:
        given = torch.tensor([0, 100 if bad else 0], device=DEVICE)
        gpu.check_plan(site, torch.where(given == 0, 0, -1), given, 0, Phase.PRE)

    return site.control, check


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("writer", ["torch", "triton"])
def test_a_row_rings_until_the_ring_is_read(writer):
    control, check = by_triton() if writer == "triton" else (Control.allocate(4, DEVICE), by_torch)
    with_bell(control)
    take_rows(control)
    for _ in range(2):
        check(control, False)
        synchronize()
        assert not control.rang()
        assert take_rows(control) == ([], 0)
        check(control, True)
        synchronize()
        assert control.rang()
        assert take_rows(control)[1] == 1
        assert not control.rang()


def test_what_one_writer_has_not_written_does_not_silence_another():
    control = with_bell(Control.allocate(4, DEVICE))
    control.bell[0] = 1  # a kernel of another stream, whose row the torch code does not see yet
    by_torch(control, False)
    synchronize()
    assert control.rang()


def test_the_host_looks_without_asking_the_device():
    controls = Controls(4)
    control = with_bell(controls(torch.device("cpu")))
    control.words = None  # would be a copy from the device
    poll = Poll(controls)
    assert not poll.news()
    control.bell[1] = 1
    assert poll.news()


def test_a_device_that_is_used_later_is_heard_too():
    controls = Controls(4)
    poll = Poll(controls)
    assert not poll.news()
    control = with_bell(controls(torch.device("cpu")))
    assert not poll.news()
    control.bell[0] = 1
    assert poll.news()
    control.hush()
    assert not poll.news()


@pytest.mark.gpu
def test_a_gpu_s_bell_is_in_memory_of_the_host():
    control = Control.allocate(4, torch.device("cuda"))
    assert control.bell is not None
    assert control.bell.is_pinned()
    assert int(control.words[Word.BELL]) == control.bell.data_ptr()
