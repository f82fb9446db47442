"""The command line: demo, explain, and what it answers to mistakes."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvcanary_fx import cli
from kvcanary_fx.__main__ import COMMANDS, main

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_demo_shows_same_tokens_and_the_report(capsys):
    assert main(["demo", "--inner", "eager", "--layers", "2", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "Same tokens: True" in out
    assert "4 halves guarded" in out
    assert "[content] the bytes of a slot changed" in out
    assert "layer model.layers.1.self_attn, half K, row 0, position 3" in out


def test_each_command_is_listed_with_the_first_line_of_its_help():
    for name, summary in COMMANDS.items():
        command = importlib.import_module(f"kvcanary_fx.cli.{name}")
        assert command.__doc__.splitlines()[0] == summary
        assert callable(command.run)
    modules = {path.stem for path in Path(cli.__path__[0]).glob("*.py") if "def add_arguments(" in path.read_text()}
    assert modules == set(COMMANDS)


@pytest.mark.parametrize("command", [["--help"], ["top", "--help"]])
def test_help_and_the_watch_over_a_server_come_without_torch(command):
    """Importing it takes seconds."""
    code = """
import atexit, sys
from kvcanary_fx.__main__ import main
atexit.register(lambda: print("torch" in sys.modules))
main(sys.argv[1:])
"""
    ran = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=False)
    assert ran.stdout.splitlines()[0].startswith("usage: kvcanary")
    assert ran.stdout.splitlines()[-1] == "False"


def test_demo_without_transformers_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["demo", "--inner", "eager"]) == 2
    assert "pip install 'kvcanary-fx[demo]'" in capsys.readouterr().err


def test_explain_prints_writes_and_the_rewritten_graph(capsys):
    assert main(["explain", f"{EXAMPLES}/plain_decoder.py:example"]) == 0
    out = capsys.readouterr().out
    assert "guarded  layers.2.V" in out
    assert "torch.ops.kvcanary.verify" in out
    assert "1 graph, 6 halves guarded" in out


def test_explain_without_the_graph_and_with_rewritten_writes(capsys):
    target = f"{EXAMPLES}/plain_decoder.py:example"
    assert main(["explain", target, "--no-graph"]) == 0
    assert "torch.ops" not in capsys.readouterr().out
    assert main(["explain", target, "--rewrite-writes"]) == 0
    assert "torch.ops.kvcanary.index_put_" in capsys.readouterr().out


SOURCE = """
import torch
from torch import nn

class Grow(nn.Module):
    def forward(self, keys, k):
        keys = torch.cat([keys, k], dim=1)
        return keys.sum(), keys

grow = Grow()
grow.example_inputs = {"keys": torch.zeros(1, 4, 8), "k": torch.zeros(1, 1, 8)}
mlp = nn.Linear(3, 3)

def stateless():
    return mlp, (torch.zeros(2, 3),)

def wrong():
    return mlp

def odd():
    return mlp, 5
"""


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(SOURCE)
    return path


def test_explain_says_why_nothing_is_guarded(source, capsys):
    assert main(["explain", f"{source}:grow"]) == 1
    out = capsys.readouterr().out
    assert "cannot   keys: rebuilt by cat each step" in out
    assert "StaticCache" in out
    assert main(["explain", f"{source}:stateless"]) == 1
    assert "writes no input" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("model.py", "it is not of the form FILE.py:NAME"),
        ("nothing.py:x", "there is no file nothing.py"),
        ("{}:missing", "the file defines no missing"),
        ("{}:mlp", "mlp has no attribute example_inputs"),
        ("{}:wrong", "wrong() did not return (model, inputs)"),
        ("{}:odd", "its inputs are a int, not a tuple or a dict"),
    ],
)
def test_explain_of_something_it_cannot_load(source, target, reason, capsys):
    assert main(["explain", target.format(source)]) == 2
    err = capsys.readouterr().err
    assert reason in err
    assert "Give FILE.py:NAME" in err


def test_help_of_each_command(capsys):
    for command in ("demo", "explain"):
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        assert "usage: kvcanary" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["demo", "doctor"])
@pytest.mark.parametrize(("variable", "value"), [("KVCANARY_MODE", "loud"), ("KVCANARY_BUDGET", "lots")])
def test_a_setting_that_cannot_be_is_refused(monkeypatch, capsys, command, variable, value):
    monkeypatch.setenv(variable, value)
    assert main([command]) == 2
    assert variable in capsys.readouterr().err


@pytest.mark.parametrize("command", ["demo", "doctor"])
@pytest.mark.parametrize("device", ["nosuch", "meta", pytest.param("cuda", marks=NO_CUDA)])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(command, device, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([command, "--device", device])
    assert "here there is cpu" in capsys.readouterr().err


@pytest.mark.parametrize("layers", ["0", "two"])
def test_demo_refuses_a_model_without_layers(layers, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["demo", "--layers", layers])
    assert "give 1 or more" in capsys.readouterr().err


def test_demo_says_that_it_has_settings_of_its_own(monkeypatch, capsys):
    monkeypatch.setenv("KVCANARY_BUDGET", "2%")
    assert main(["demo", "--inner", "eager", "--layers", "1", "--device", "cpu"]) == 0
    assert "whatever KVCANARY_BUDGET says" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["demo", "doctor"])
def test_a_backend_that_does_not_exist_is_refused_with_those_that_do(command, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([command, "--inner", "nosuch"])
    err = capsys.readouterr().err
    assert "no backend 'nosuch'" in err
    assert "inductor" in err
