"""What users set with ``torch.device(...)`` or ``torch.set_default_device`` decides nothing about the canary's memory.

``meta`` stands for a GPU here: whatever landed there by mistake could not be computed with.
"""

from __future__ import annotations

import pytest
import torch
from toy import Toy

from kvcanary_fx import CanaryConfig
from kvcanary_fx.proof import doctor
from kvcanary_fx.reports.incidents import file
from kvcanary_fx.reports.incidents.page import page


@pytest.fixture
def toy():
    made = Toy(device="cpu", health_every=1, sweep_every=1)
    made.add("a", [5, 6, 7, 8])
    made.run({"a": [1, 2]})
    return made


def test_a_step_and_the_life_of_slots(toy):
    toy.take("a", [3])
    batch, x = toy.plan({"a": [3]}), torch.ones(1, 4)
    slots, reads = torch.tensor([3]), torch.tensor([1, 2])
    with torch.device("meta"):
        with toy.session.step(batch), toy.session.forward(), torch.no_grad():
            toy.model(toy.kv, x, slots, reads)
        toy.pool.allocate([5, 6], owner="b")
        toy.pool.import_(toy.pool.export([1, 2]), [5, 6])
        for half in (half for layer in toy.kv for half in layer):
            half[5:7] = half[1:3]
        assert toy.session.owners(["a"]).device.type == "cpu"
        assert toy.found() == []
        assert toy.session.stats().recorded == 2 * 2 * 3
        toy.kv[0][0].view(torch.int32)[2, 0, 1] ^= 1
        toy.session.sweep.run()
        assert [(v.check, v.slot) for v in toy.found()] == [("content", 2)]


def test_the_file_of_an_incident(toy, tmp_path):
    toy.kv[0][0].view(torch.int32)[2, 0, 1] ^= 1
    with torch.device("meta"):
        toy.session.sweep.run()
        toy.session.snapshot(tmp_path / "one.zip")
        incident = file.load(tmp_path / "one.zip")
        assert "bit 0 of element 1" in page(incident)
    assert incident.missing == ()
    assert [record.evidence.bit for record in incident.records] == [32]


def test_the_self_proof(toy):
    with torch.device("meta"):
        findings = list(doctor.examine(toy.pool.declared, CanaryConfig(inner="eager")))
    assert findings
    assert [f for f in findings if not f.ok] == []
