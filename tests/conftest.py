"""Shared test set-up."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    # Triton's interpreter stands in for a GPU; the variable is read when a kernel is defined.
    os.environ["TRITON_INTERPRET"] = "1"

import pytest

for folder in ("kernels", "passes", "runtime", "bugs", "models", "pools", "fuzz"):
    sys.path.insert(0, str(Path(__file__).parent / folder))  # helpers next to the tests that use them

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """Every test starts with an empty Dynamo cache, no settings and no shared sessions."""
    from kvcanary_fx import backend

    for name in [n for n in os.environ if n.startswith("KVCANARY_")]:
        monkeypatch.delenv(name)
    torch._dynamo.reset()
    backend._SESSIONS.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param
