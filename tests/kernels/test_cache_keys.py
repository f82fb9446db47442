"""A kernel has one key in Triton's cache, whatever the process has used before."""

from __future__ import annotations

import json
import os
import subprocess
import sys

KEYS = """
import json, sys
from kvcanary_fx.kernels import triton_handed
from kvcanary_fx.kernels.cache_keys import settle_key
from kvcanary_fx.kernels.content import triton_write, triton_write_layers
from kvcanary_fx.kernels.slots import triton_life

def key(kernel):
    settle_key(kernel)
    return kernel.cache_key

kernels = {
    name: value
    for module in (triton_handed, triton_write, triton_write_layers, triton_life)
    for name, value in vars(module).items()
    if name.endswith("_kernel")
}
print(json.dumps({name: key(kernels[name]) for name in sorted(kernels, reverse=sys.argv[1] == "backwards")}))
"""


def keys(order: str) -> dict[str, str]:
    """Of kernels, in a process in which Triton's compiler is not replaced by its interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", KEYS, order]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_keys_do_not_depend_on_what_was_used_before():
    one, other = keys("forwards"), keys("backwards")
    assert len(one) > 5
    assert len(set(one.values())) == len(one)
    assert one == other
