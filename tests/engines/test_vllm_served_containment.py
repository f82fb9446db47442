"""Damage in a server's KV cache, and what its clients, its log and its metrics say, with each outcome."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from vllm_served_containment import SCENES, SERVERS


@pytest.mark.parametrize("server", SERVERS)
def test_no_client_gets_a_token_that_was_computed_from_damage(server, tmp_path):
    """Nor under a budget after the time that is said; with ``log`` they do, or the scenes would show nothing."""
    script = os.path.join(os.path.dirname(__file__), "vllm_served_containment.py")
    command = [sys.executable, script, "--logs", os.fspath(tmp_path), "--servers", server]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVCANARY_")}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING")  # the server's engine has a process of its own
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    wrong = [row for row in rows if not row.get("ok", True)]
    assert not wrong, json.dumps(wrong, indent=1)
    assert [row["scene"] for row in rows if "scene" in row] == ["start", *SCENES], done.stderr[-3000:]
    assert done.returncode == 0
