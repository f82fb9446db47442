"""Settings: where they come from, who wins, and what a mistake is answered with."""

from __future__ import annotations

import pytest

from kvcanary_fx import CanaryConfig, InvalidSettingError, UnknownSettingError
from kvcanary_fx.config import names, resolve


def test_defaults():
    config = CanaryConfig()
    assert (config.mode, config.inner, config.verify_every, config.planes) == ("raise", "inductor", 1, 1)


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


def test_typo_in_the_environment_names_the_variable():
    with pytest.raises(UnknownSettingError) as caught:
        CanaryConfig.from_env({"KVCANARY_MOED": "raise"})
    assert "unknown setting 'KVCANARY_MOED' in the environment (did you mean 'KVCANARY_MODE'?)" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", "loud"),
        ("inner", 3),
        ("inner", ""),
        ("checks", "content"),
        ("checks", ("contents",)),
        ("verify_fraction", "2/3"),
        ("verify_fraction", 0.5),
        ("verify_fraction", "1/0"),
        ("digest_bits", 16),
        ("digest_bits", True),
        ("rewrite_writes", "yes"),
        ("lint", "strict"),
        ("ring_capacity", 0),
        ("ring_capacity", 1.5),
        ("dump", 1),
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
    [("KVCANARY_DIGEST_BITS", "many"), ("KVCANARY_REWRITE_WRITES", "perhaps"), ("KVCANARY_RING_CAPACITY", "-3")],
)
def test_value_of_a_variable_that_cannot_be_read(variable, text):
    with pytest.raises(InvalidSettingError, match=f"setting '{variable}' in the environment is '{text}'"):
        CanaryConfig.from_env({variable: text})


def test_other_variables_are_none_of_our_business():
    assert CanaryConfig.from_env({"PATH": "/bin", "KVCANARYISH": "1"}) == CanaryConfig()
