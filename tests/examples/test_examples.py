"""Every example runs, and says ok."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path

import pytest

from kvcanary_fx.proof import tiny

transformers = pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"
INNER = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@functools.cache  # an example may define an op, once
def load(name: str):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("arch", sorted(tiny.ARCHITECTURES))
def test_hf_generate(arch, inner, capsys):
    assert load("hf_generate").main(["--arch", arch, "--inner", inner, "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "tokens equal True, violations 0, guarded 4 of 4 halves" in out
    assert out.count(": found") == 4


@pytest.mark.parametrize(("arch", "halves"), [("jamba", 4), ("whisper", 8), ("deepseek_v32", 6)])
def test_hf_generate_where_the_cache_is_more_than_keys_and_values(arch, halves, capsys):
    if not hasattr(transformers, tiny.OTHERS[arch][0]):
        pytest.skip(f"transformers {transformers.__version__} has no {arch}")
    assert load("hf_generate").main(["--arch", arch, "--inner", "eager", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert f"tokens equal True, violations 0, guarded {halves} of {halves} halves" in out
    assert out.count(": found") == halves


def test_hf_paged(capsys):
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
        pytest.skip(f"transformers {transformers.__version__} has no such paged cache")
    assert load("hf_paged").main(["--arch", "gemma3", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "tokens equal True, violations 0" in out
    assert out.count(": found") == 5


@pytest.mark.parametrize("inner", INNER)
def test_plain_decoder(inner, capsys):
    assert load("plain_decoder").main(["--inner", inner, "--device", "cpu"]) == 0
    assert capsys.readouterr().out.count(": found") == 12


@pytest.mark.parametrize("inner", INNER)
def test_misdirected_writes(inner, capsys):
    assert load("misdirected_writes").main(["--inner", inner, "--device", "cpu"]) == 0
    assert capsys.readouterr().out.count("reported by") == 6


def test_every_example_is_tested_and_has_a_main():
    names = {p.stem for p in EXAMPLES.glob("*.py")}
    assert names == {"hf_generate", "hf_paged", "plain_decoder", "misdirected_writes", "use_after_free"}
    assert all(callable(load(name).main) for name in names)
