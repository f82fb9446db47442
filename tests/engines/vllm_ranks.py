"""An engine on two ranks, unguarded and guarded: one line of verdict.

    python tests/engines/vllm_ranks.py [stages]

Two ranks share each layer, or with ``stages`` each has half of the layers.  On a GPU machine it takes two GPUs.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile

import vllm_runs


def main() -> None:
    """Both engines, each in processes of its own."""
    scene = "spawned in two stages" if sys.argv[1:] == ["stages"] else "spawned on two ranks"
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    runs = [{"model": "llama", "scene": scene}]
    with tempfile.TemporaryDirectory() as directory:
        plain, guarded = (
            vllm_runs.results(pathlib.Path(directory), runs, mode, **environment)[0] for mode in (None, "raise")
        )
    same, counts = guarded["tokens"] == plain["tokens"], guarded["counts"]
    ok = same and not guarded["violations"] and counts["fingerprints_checked"] > 0
    print(json.dumps({scene: dict(ok=ok, same=same, violations=guarded["violations"], counts=counts)}), flush=True)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
