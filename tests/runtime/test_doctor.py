"""The self-proof: every check reports its planted fault, and a check that does not work is named."""

from __future__ import annotations

import pytest
import torch
from toy import Toy

import kvcanary_fx
from kvcanary_fx import CanaryConfig, KVPool
from kvcanary_fx.errors import SelfTestError
from kvcanary_fx.kernels.content import cpu
from kvcanary_fx.kernels.slots import checks as request_checks
from kvcanary_fx.proof import doctor


def pool(dtype=torch.float32, paged=False) -> KVPool:
    shape = (4, 8, 2, 3) if paged else (32, 2, 3)
    return KVPool(
        [(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(2)],
        torch.zeros(2, 8, dtype=torch.int32),
        paged=paged,
    )


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_every_check_reports_its_fault(dtype, paged):
    findings = list(doctor.examine(pool(dtype, paged), CanaryConfig(inner="eager")))
    assert [f for f in findings if not f.ok] == []
    expected = {"silence", *doctor.FAULTS} - ({"poison"} if dtype is torch.uint8 else set())
    assert {f.check for f in findings} == expected


@pytest.mark.parametrize(
    ("module", "function", "checks"),
    [
        (cpu, "verify", {"content"}),
        # it also notes what is planned to be written, without which nothing is recorded that a sweep could compare
        (request_checks, "walk", {"bounds", "content", "owner", "namespace", "sweep"}),
        (request_checks, "check_writes", {"chain"}),
    ],
)
def test_a_check_that_does_nothing_refuses_to_start_by_name(monkeypatch, module, function, checks):
    monkeypatch.setattr(module, function, lambda *_, **__: None)
    toy = Toy()
    with pytest.raises(SelfTestError) as e:
        kvcanary_fx.install_canary(KVPool(toy.kv, toy.table), inner="eager", self_test=True)
    named = {line.split(":")[0].removeprefix("- ") for line in str(e.value).splitlines() if line.startswith("- ")}
    assert named == checks


def test_a_check_that_always_speaks_refuses_to_start(monkeypatch):
    monkeypatch.setattr(cpu, "poisoned_words", lambda words, layout: torch.ones_like(words, dtype=torch.bool))
    toy = Toy()
    with pytest.raises(SelfTestError, match="silence: planted nothing, reported poison"):
        kvcanary_fx.install_canary(KVPool(toy.kv, toy.table), inner="eager", self_test=True)


def test_what_the_self_test_plants_reaches_nobody(caplog):
    """vLLM's adapter took it for damage in a version outside the tested range, and emptied the prefix cache."""
    toy, told = Toy(), []
    session = kvcanary_fx.install_canary(
        KVPool(toy.kv, toy.table), inner="eager", self_test=True, on_violation=told.append
    )
    assert session is not None
    assert (told, session.violations(), session.stats().violations) == ([], [], 0)
    assert "kvcanary.violation" not in caplog.text


def test_self_test_leaves_the_real_pools_alone():
    toy = Toy()
    before = [t.clone() for pair in toy.kv for t in pair]
    assert kvcanary_fx.install_canary(KVPool(toy.kv, toy.table), inner="eager", self_test=True) is not None
    assert all(torch.equal(a, b) for a, b in zip(before, (t for pair in toy.kv for t in pair), strict=True))


def test_command_prints_each_check(capsys):
    from kvcanary_fx.__main__ import main

    assert main(["doctor", "--inner", "eager", "--device", "cpu", "--layers", "1"]) == 0
    out = capsys.readouterr().out
    assert "ok   owner      planted a slot released while its request reads it: reported owner" in out
    assert "examinations passed" in out
