"""Readers of a session's buffers in threads of their own: one stream of each device for all of them."""

from __future__ import annotations

import contextlib
import types

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from toy import Toy

from kvcanary_fx.kernels import side_stream
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

    monkeypatch.setattr(side_stream, "_BESIDE", {})
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    for devices in (GPUS[:1], GPUS[:1], GPUS, GPUS[1:], (torch.device("cpu"),)):
        with beside.streams_beside([controls(*devices), controls(*devices)]):
            pass
    assert made == list(GPUS)
    assert sorted(used) == ["stream of cuda:0"] * 3 + ["stream of cuda:1"] * 2


class Launched(TorchDispatchMode):
    """Notes what is computed; views and copies to the host are not."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not func.is_view and name not in ("_local_scalar_dense", "_to_copy", "detach"):
            self.ops.append(name)
        return func(*args, **(kwargs or {}))


def test_a_reader_beside_a_model_computes_nothing_on_the_device():
    """Seven kernels of a reader every two seconds made all steps of a served 8B 3 % longer (H200)."""
    toy = Toy()
    toy.add("A", [5, 6, 7])
    toy.run({"A": [3, 4, 5]})
    with Launched() as launched:
        counts = toy.session.stats(drain=False)
    assert launched.ops == []
    assert counts.slots is None
    assert "slots" not in counts.flat()
    with Launched() as launched:
        every = toy.session.stats()
    assert "sum" in launched.ops
    assert every.slots == 3
    assert {**counts.flat(), "slots": 3.0} == every.flat()
