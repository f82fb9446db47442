"""Settings: where they come from, who wins, and what a mistake is answered with."""

from __future__ import annotations

import pytest
import torch

import kvcanary_fx
from kvcanary_fx import CanaryConfig, InvalidSettingError, UnknownSettingError
from kvcanary_fx.config import asked_for, names, resolve
from kvcanary_fx.kernels.ring import BY_BUDGET


def test_defaults():
    config = CanaryConfig()
    assert (config.mode, config.inner, config.verify_every, config.planes) == ("raise", "inductor", 1, 1)


CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.default_budget
def test_a_gpu_has_a_budget_of_one_percent_and_a_cpu_none():
    config = CanaryConfig()
    assert (config.budget_on(GPU), config.verify_every_on(GPU)) == (0.01, BY_BUDGET)
    assert (config.budget_on(CPU), config.verify_every_on(CPU), config.verifies_after(CPU)) == (None, 1, True)
    assert not config.verifies_after(GPU)


@pytest.mark.parametrize(
    ("value", "share"),
    [
        ("1%", 0.01),
        ("0.5%", 0.005),
        ("3 %", 0.03),
        (" 3 % ", 0.03),
        ("0.01", 0.01),
        (0.01, 0.01),
        ("None", None),
        (None, None),
    ],
)
@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_ways_to_write_a_budget(value, share, device):
    for config in (CanaryConfig(budget=value), resolve(None, {"kvcanary.budget": value})[0]):
        assert config.budget_on(device) == pytest.approx(share) if share else config.budget_on(device) is None
        assert config.verify_every_on(device) == (BY_BUDGET if share else 1)
    if isinstance(value, str):
        assert CanaryConfig.from_env({"KVCANARY_BUDGET": value}) == CanaryConfig(budget=value)


@pytest.mark.default_budget
@pytest.mark.parametrize(("budget", "fraction"), [("auto", "1"), ("auto", "1/8"), ("1%", None), (None, None)], ids=str)
def test_the_nearer_one_of_a_budget_and_a_fixed_share_wins(budget, fraction, monkeypatch):
    asked = {"kvcanary.budget": budget} if fraction is None else {"kvcanary.verify_fraction": fraction}
    wanted = CanaryConfig(budget=budget, verify_fraction=fraction)
    for base in (None, CanaryConfig(budget="10%"), CanaryConfig(verify_fraction="1/64")):
        assert resolve(base, asked)[0].runtime_key() == wanted.runtime_key()
    for name, text in (("KVCANARY_BUDGET", "5%"), ("KVCANARY_VERIFY_FRACTION", "1/3")):
        monkeypatch.setenv(name, text)
        assert resolve(None, asked)[0].runtime_key() == wanted.runtime_key()
        monkeypatch.delenv(name)
    assert wanted.budget_on(GPU) == (0.01 if budget == "1%" else None)


@pytest.mark.parametrize("budget", ["1%", None, "none", 0.5])
def test_a_budget_and_a_fixed_share_in_one_place_are_refused(budget):
    with pytest.raises(
        InvalidSettingError, match=r"setting 'budget' in CanaryConfig .* verify_fraction='1/8' is given"
    ):
        CanaryConfig(budget=budget, verify_fraction="1/8")
    with pytest.raises(InvalidSettingError, match=r"'kvcanary.budget' in options .* kvcanary.verify_fraction='1/8'"):
        resolve(None, {"kvcanary.budget": budget, "kvcanary.verify_fraction": "1/8"})
    with pytest.raises(InvalidSettingError, match=r"'KVCANARY_BUDGET' in the environment .* KVCANARY_VERIFY_FRACTION"):
        CanaryConfig.from_env({"KVCANARY_BUDGET": str(budget), "KVCANARY_VERIFY_FRACTION": "1/8"})


def test_environment(monkeypatch):
    monkeypatch.setenv("KVCANARY_MODE", "log")
    monkeypatch.setenv("KVCANARY_CHECKS", "content, bounds")
    monkeypatch.setenv("KVCANARY_VERIFY_FRACTION", "1/64")
    monkeypatch.setenv("KVCANARY_DIGEST_BITS", "64")
    monkeypatch.setenv("KVCANARY_REWRITE_WRITES", "yes")
    config = CanaryConfig.from_env()
    assert (config.mode, config.checks, config.verify_every) == ("log", ("content", "bounds"), 64)
    assert (config.planes, config.rewrite_writes) == (2, True)


def test_options_win_over_the_environment_and_leave_the_rest(monkeypatch):
    monkeypatch.setenv("KVCANARY_MODE", "log")
    monkeypatch.setenv("KVCANARY_DIGEST_BITS", "64")
    config, rest = resolve(None, {"kvcanary.mode": "raise", "max_autotune": True})
    assert (config.mode, config.digest_bits, rest) == ("raise", 64, {"max_autotune": True})


def test_options_win_over_a_config():
    config, _ = resolve(CanaryConfig(mode="log", digest_bits=64), {"kvcanary.mode": "off"})
    assert (config.mode, config.digest_bits) == ("off", 64)


def test_typo_in_an_option_names_the_close_one_and_lists_all():
    with pytest.raises(UnknownSettingError) as caught:
        resolve(None, {"kvcanary.mod": "raise"})
    assert "unknown setting 'kvcanary.mod' in options (did you mean 'kvcanary.mode'?)" in str(caught.value)
    assert all(f"kvcanary.{n}" in str(caught.value) for n in names())


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("MOED", " (did you mean 'KVCANARY_MODE'?)"),
        ("HEALTH", ""),  # and not KVCANARY_LINT, which is as long
    ],
)
def test_typo_in_the_environment_names_the_variable(typo, meant):
    with pytest.raises(UnknownSettingError) as caught:
        CanaryConfig.from_env({f"KVCANARY_{typo}": "raise"})
    assert f"unknown setting 'KVCANARY_{typo}' in the environment{meant}. " in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", "loud"),
        ("inner", 3),
        ("inner", ""),
        ("inner", "kvcanary"),
        ("inner", kvcanary_fx.kvcanary_backend),
        ("inner", kvcanary_fx.CanaryBackend(CanaryConfig())),
        ("checks", "content"),
        ("checks", ()),
        ("checks", ("contents",)),
        ("verify_fraction", "2/3"),
        ("verify_fraction", 0.5),
        ("verify_fraction", "1/0"),
        ("verify_fraction", "-1/2"),
        ("verify_fraction", "1/100000000000000000000"),
        ("budget", "many"),
        ("budget", "%"),
        ("budget", ""),
        ("budget", 0),
        ("budget", 1),
        ("budget", "100%"),
        ("budget", "-1%"),
        ("budget", "nan"),
        ("budget", "1/64"),
        ("budget", True),
        ("budget", [0.01]),
        ("digest_bits", 16),
        ("digest_bits", True),
        ("digest_bits", 32.0),
        ("rewrite_writes", "yes"),
        ("lint", "strict"),
        ("ring_capacity", 0),
        ("ring_capacity", 1.5),
        ("ring_capacity", 10**30),
        ("dump", 1),
        ("dump", ""),
        ("dump", f"{__file__}/below"),
        ("on_violation", "print"),
    ],
)
def test_value_that_a_setting_cannot_have(name, value):
    with pytest.raises(InvalidSettingError, match=f"setting 'kvcanary.{name}' in options is "):
        resolve(None, {f"kvcanary.{name}": value})
    with pytest.raises(InvalidSettingError, match=f"setting '{name}' in CanaryConfig is "):
        CanaryConfig(**{name: value})


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("KVCANARY_DIGEST_BITS", "many"),
        ("KVCANARY_REWRITE_WRITES", "perhaps"),
        ("KVCANARY_RING_CAPACITY", "-3"),
        ("KVCANARY_CHECKS", ""),
        ("KVCANARY_CHECKS", " , "),
        ("KVCANARY_DUMP", ""),
        ("KVCANARY_INNER", "kvcanary"),
        ("KVCANARY_VERIFY_FRACTION", "1/100000000000000000000"),
        ("KVCANARY_BUDGET", "1"),
        ("KVCANARY_BUDGET", ""),
    ],
)
def test_value_of_a_variable_that_cannot_be_read(variable, text):
    with pytest.raises(InvalidSettingError, match=f"setting '{variable}' in the environment is '{text}'"):
        CanaryConfig.from_env({variable: text})


@pytest.mark.parametrize("key", ["kvcanry.mode", "KVCanary.mode", "kv_canary.mode", "mode", "verify_fraction"])
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_option_that_would_go_to_the_inner_backend_by_mistake_is_refused(key, inner):
    with pytest.raises(UnknownSettingError, match=rf"unknown setting '{key}' in options.*kvcanary\.mode"):
        resolve(CanaryConfig(inner=inner), {key: "log"})


@pytest.mark.parametrize("key", ["triton.cudagraphs", "max_autotune", "cpp.threads"])
def test_options_of_the_inner_backend_stay_its_own(key):
    assert resolve(None, {key: True})[1] == {key: True}


@pytest.mark.parametrize("options", [["kvcanary.mode"], "kvcanary.mode=log", 3])
def test_options_that_are_no_dict(options):
    with pytest.raises(InvalidSettingError, match=r"setting 'options' in torch.compile is .* must be a dict"):
        resolve(None, options)


@pytest.mark.parametrize(
    "give",
    [
        lambda config: kvcanary_fx.CanaryBackend(config),
        lambda config: kvcanary_fx.session(config),
        lambda config: kvcanary_fx.install_canary(config=config),
        lambda config: resolve(config, None),
    ],
    ids=["CanaryBackend", "session", "install_canary", "resolve"],
)
@pytest.mark.parametrize("config", ["log", {"mode": "log"}, CanaryConfig, 0])
def test_config_that_is_none(give, config):
    with pytest.raises(InvalidSettingError, match=r"setting 'config' in .* must be a CanaryConfig"):
        give(config)


def test_directory_of_a_dump_is_a_path_of_any_kind(tmp_path):
    assert CanaryConfig(dump=tmp_path / "new" / "deep").dump == str(tmp_path / "new" / "deep")
    assert not (tmp_path / "new").exists()


def test_plugin_of_an_engine_is_asked_for_by_the_mode_alone(caplog):
    assert [asked_for({"KVCANARY_MODE": mode}) for mode in ("raise", "log", "off", "")] == [True, True, False, False]
    assert not asked_for({})
    assert not asked_for({"KVCANARY_MODE": "off", "KVCANARY_CHECKS": "content"})
    assert caplog.records == []


@pytest.mark.parametrize("variable", ["KVCANARY_VERIFY_FRACTION", "KVCANARY_VLLM_ABORT"])
def test_settings_without_the_mode_are_told_to_guard_nothing(variable, caplog):
    assert not asked_for({variable: "1"})
    assert [r.message for r in caplog.records] == [
        f"kvcanary.off {variable} is set, and KVCANARY_MODE is not: nothing is guarded"
    ]


@pytest.mark.parametrize("variable", ["KVCANARY_MOD", "KVCANARY_MDOE", "KVCANARY_VLM_ABORT"])
def test_misspelt_mode_does_not_run_unguarded(variable):
    with pytest.raises(UnknownSettingError, match=f"unknown setting '{variable}' in the environment"):
        asked_for({variable: "raise"})


def test_other_variables_are_none_of_our_business():
    assert CanaryConfig.from_env({"PATH": "/bin", "KVCANARYISH": "1"}) == CanaryConfig()
