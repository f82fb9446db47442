"""Every Triton kernel compiles for a GPU, also where there is none; see compile_kernels.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU compiles what it runs")
def test_every_kernel_compiles(tmp_path):
    """In a process of its own: here the interpreter has taken the compiler's place."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    helpers = [str(Path(__file__).parents[1] / folder) for folder in ("runtime", "bugs")]
    if "PYTHONPATH" in environment:  # of a checkout that is not the installed one
        helpers.append(environment["PYTHONPATH"])
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(helpers)}
    script = [sys.executable, str(Path(__file__).with_name("compile_kernels.py")), "--first-whole"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "never launched: none" in done.stdout
