"""Triton's compiler where there is no GPU, and tests with it in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from triton.backends.compiler import GPUTarget


class NoDevice:
    """In the place of a GPU's driver: says what to compile for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def run_scenes(scenes: Path, at_least: int = 4) -> None:
    """Run the tests of a file in a process of its own: here the interpreter has taken the compiler's place.

    Args:
        at_least: so many of the first tests ran.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    script = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--noconftest"]
    done = subprocess.run([*script, str(scenes)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.startswith("." * at_least)
