"""Shared test set-up."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

# Dynamo collects garbage after each compile, a few percent of the time; it is collected often enough (see below).
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

import torch

if not torch.cuda.is_available():
    # Triton's interpreter stands in for a GPU; the variable is read when a kernel is defined.
    os.environ["TRITON_INTERPRET"] = "1"
# A worker each has a core: a pool of compile workers beside it imports torch once more for each of them.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Whether g++ takes the processor's vector instructions: it does.  Inductor would compile for 7 s to see it.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
if (_gold := shutil.which("ld.gold")) and shutil.which("g++") == "/usr/bin/g++" and "COMPILER_PATH" not in os.environ:
    # g++ looks for ld here first.  The default one takes a third of the time of each of Inductor's kernels, most of it
    # over the symbols of libtorch; gold half of that.  Workers inherit the variable, and the folder outlives them.
    # Where gcc has a prefix of its own, gold has been seen not to find its libstdc++.
    _linker = tempfile.TemporaryDirectory(prefix="gold-", ignore_cleanup_errors=True)
    (Path(_linker.name) / "ld").symlink_to(_gold)
    os.environ["COMPILER_PATH"] = _linker.name

import pytest

for folder in ("kernels", "passes", "runtime", "bugs", "models", "pools"):
    sys.path.insert(0, str(Path(__file__).parent / folder))  # helpers next to the tests that use them

if "TORCH_TRACE" not in os.environ:
    # PyTorch renders every graph, guard and tensor for its structured trace as soon as that has a handler, and pytest
    # gives its own to every logger that does not propagate.
    _trace = logging.getLogger("torch.__trace")
    _trace.handlers.clear()
    _trace.addHandler = lambda handler: None

# Dynamo flushes the processor's caches for 40 ms a compile, to log how long the guards take.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
# For a trace log that is off it takes every source file that it meets apart, to name the function of each line.
torch._dynamo.symbolic_convert.get_funcname = lambda *_: None
# It extracts and renders the stack of each side effect, for a log that is off.
if hasattr(torch._dynamo.config, "side_effect_replay_policy"):
    torch._dynamo.config.side_effect_replay_policy = "silent"

if os.environ.get("TRITON_INTERPRET") == "1":
    import quick_interpreter

    quick_interpreter.install()

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish():
    """What is imported by now stays: no collection needs to look at it.  Dynamo allocates millions of objects that
    live for one compile, and with the default threshold a tenth of the time was the collector's."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, request):
    """Every test starts with an empty Dynamo cache (but see ``keeps_compiled``), no settings, no shared sessions and a
    log that says all: examples lower its level, as the processes do that they are written for.

    On a GPU everything is compared in each step, as on a CPU: what a test plants is to be found in the next one.
    """
    from kvcanary_fx import config
    from kvcanary_fx.compile import backend

    if "default_budget" not in request.keywords:
        monkeypatch.setattr(config, "GPU_BUDGET", None)
    for name in [n for n in os.environ if n.startswith("KVCANARY_")]:
        monkeypatch.delenv(name)
    keeps = "keeps_compiled" in request.fixturenames
    if not keeps:
        torch._dynamo.reset()
    backend._SESSIONS.clear()
    torch.manual_seed(0)
    level, disabled = logging.getLogger("kvcanary").level, logging.root.manager.disable
    yield
    logging.getLogger("kvcanary").setLevel(level)
    logging.disable(disabled)
    if not keeps:
        torch._dynamo.reset()


@pytest.fixture
def keeps_compiled():
    """A test that asks for this leaves what Dynamo compiled to the next: for a model that several tests run."""


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture
def on_device(device):
    """Tensors are made on the device of the test.  On a CPU they are anyway; ``torch.device`` would have Dynamo trace
    the Python behind it for each call of torch, up to two thirds of a compile."""
    with contextlib.nullcontext() if device == "cpu" else torch.device(device):
        yield
