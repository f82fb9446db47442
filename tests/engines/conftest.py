from __future__ import annotations

import importlib.util
import os
import pathlib
import sys

import pytest
import torch

sys.path.insert(0, os.path.dirname(__file__))

import tiny_vllm


def _needs_vllm(module: str) -> bool:
    """Whether a test module imports vLLM.  The others of this folder need nothing but the package, or SGLang."""
    return module.startswith("test_vllm_") and module != "test_vllm_parts"


@pytest.fixture(scope="module", autouse=True)
def vllm_environment(request):
    """vLLM on a machine without a GPU, a network or a hub, guarded in mode log; only for the modules that need it."""
    if not _needs_vllm(request.module.__name__.rpartition(".")[2]):
        yield
        return
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vllm: `make test-engines`")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**tiny_vllm.ENVIRONMENT, "KVCANARY_MODE": "log"}.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(autouse=True)
def _fresh(vllm_environment):
    """In the place of the fixture that takes ``KVCANARY_`` variables away: engines are made within tests here."""


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> pathlib.Path:
    """Where configurations of models are written."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Call it for what a GPU runs, over CPU tensors; it skips where there is a GPU."""

    def take_it() -> None:
        from gpu_on_cpu import Graph, use_gpu_kernels

        from kvcanary_fx.adapters.vllm.v2.take_in import TakeIn
        from kvcanary_fx.engine import kept_calls  # noqa: F401  which a session imports when it has calls to send
        from kvcanary_fx.kernels import replay

        if torch.cuda.is_available():
            pytest.skip("the interpreter stands in for a missing GPU")
        use_gpu_kernels(monkeypatch.setattr)
        monkeypatch.setattr(TakeIn, "__call__", TakeIn.launch)
        monkeypatch.setattr(replay, "capture", lambda device, run: Graph(run))
        monkeypatch.setattr(replay, "ONE_BY_ONE", 1)

    return take_it
