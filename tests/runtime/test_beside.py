"""Readers of a session's buffers in threads of their own: one stream of each device for all of them."""

from __future__ import annotations

import contextlib
import types

import torch

from kvcanary_fx.runtime import beside

GPUS = torch.device("cuda", 0), torch.device("cuda", 1)


def controls(*devices):
    return types.SimpleNamespace(by_device=dict.fromkeys(devices))


def test_all_readers_of_a_process_share_the_stream_of_a_device(monkeypatch):
    """Each kernel of a process takes longer once it has used many."""
    made, used = [], []

    @contextlib.contextmanager
    def stream(which):
        used.append(which)
        yield

    monkeypatch.setattr(beside, "_STREAMS", {})
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    for devices in (GPUS[:1], GPUS[:1], GPUS, GPUS[1:], (torch.device("cpu"),)):
        with beside.streams_beside([controls(*devices), controls(*devices)]):
            pass
    assert made == list(GPUS)
    assert sorted(used) == ["stream of cuda:0"] * 3 + ["stream of cuda:1"] * 2
