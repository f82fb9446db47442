"""The scene ``models`` of :mod:`vllm_v2_run` for many models, guarded and not, each engine in a process of its own.

    python tests/engines/vllm_families.py [NAME ...] [--jobs 6] [--seconds 300] [--logs DIRECTORY]

By default vLLM's runner of this machine (the second one on a GPU) with its own graphs, and all bytes compared.  A line
for each model as it ends: whether it was silent under a mixed load, found a flip in each half, and gave the tokens of
the unguarded engine.  The guarded engines run first; those that do not begin within ``--seconds`` are named.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tiny_families
import vllm_v2_models


def run(name: str, mode: str | None, args: argparse.Namespace) -> dict[str, Any] | str:
    """What an engine's scene found, or why there is nothing."""
    if time.monotonic() > args.until:
        return "not begun in time"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVCANARY_")}
    environment |= {"MODEL": name, **({"KVCANARY_MODE": mode, "KVCANARY_BUDGET": "none"} if mode else {})}
    log = Path(args.logs) / f"{name}-{mode or 'plain'}.log"
    script = Path(__file__).with_name("vllm_v2_run.py")
    with tempfile.TemporaryDirectory() as directory, log.open("w") as out:
        command = [sys.executable, str(script), directory, "models"]
        try:
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, stderr=out, text=True, timeout=args.limit, check=False
            )
        except subprocess.TimeoutExpired:
            return f"not done after {args.limit:.0f} s"
    out_lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    found = [line["models"] for line in out_lines if "models" in line]
    if found:
        return dict(found[0], facts=out_lines[0])
    errors = [line for line in log.read_text().splitlines() if "Error" in line]
    return f"rc {done.returncode}: {errors[-1][:200] if errors else ''}"


def told(name: str, guarded: dict[str, Any] | str, plain: dict[str, Any] | str) -> dict[str, Any]:
    """A model's line."""
    if isinstance(guarded, str):
        return dict(model=name, ok=False, why=guarded, plain=plain if isinstance(plain, str) else "runs")
    flips = guarded["flips"]
    line = dict(
        model=name,
        ok=guarded["ok"],
        graphs=guarded["facts"]["graphs"],
        groups=guarded["groups"],
        violations=guarded["violations"],
        uncovered=guarded["uncovered"],
        flips=f"{sum(row['ok'] for row in flips.values())} of {len(flips)}",
        same=plain if isinstance(plain, str) else guarded["tokens"] == plain["tokens"],
    )
    return line if guarded["ok"] else line | dict(missed=[row for row in flips.values() if not row["ok"]][:2])


def main() -> int:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"default: {' '.join(tiny_families.FAMILIES)}")
    parser.add_argument("--jobs", type=int, default=1, help="engines at once")
    parser.add_argument("--seconds", type=float, default=3600, help="no engine begins after that")
    parser.add_argument("--limit", type=float, default=300, help="seconds that an engine may take")
    parser.add_argument("--logs", default=tempfile.gettempdir(), help="directory of the engines' logs")
    parser.add_argument("--guarded-only", action="store_true", help="no unguarded engine, so no comparison of tokens")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(vllm_v2_models.MODELS))
    if unknown:
        parser.error(f"no such model: {', '.join(unknown)}; there are {', '.join(vllm_v2_models.MODELS)}")
    args.until = time.monotonic() + args.seconds
    Path(args.logs).mkdir(parents=True, exist_ok=True)
    names, right = args.names or list(tiny_families.FAMILIES), True
    with ThreadPoolExecutor(args.jobs) as pool:
        guarded = {name: pool.submit(run, name, "log", args) for name in names}
        plain = {} if args.guarded_only else {name: pool.submit(run, name, None, args) for name in names}
        for name in names:
            line = told(name, guarded[name].result(), plain[name].result() if plain else "not run")
            right = right and bool(line["ok"]) and line.get("same") is not False
            print(json.dumps(line), flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
