from __future__ import annotations

import importlib.util
import os
import pathlib
import sys

import pytest

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
