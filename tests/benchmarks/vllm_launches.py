"""What the guard launches in a decode step of vLLM, named one by one, from a profiler.

    python tests/benchmarks/vllm_launches.py [--layers 4 16] [--logs DIRECTORY]

Engines with few and with many layers, unguarded and guarded, all at once, in processes of their own
(``tests/engines/vllm_v2_run.py``, scene ``launches``), with 1 request and with 16.  A row of the table is something
that a guarded step has more of than an unguarded one, for each of the four.  What the host launches must be the same in
all of them; the exit status is 1 if it is not.  The settings of the guard are the environment's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import report

SCRIPT = Path(__file__).parents[1] / "engines" / "vllm_v2_run.py"

Table = dict[str, Any]


def profiled(layers: list[int], logs: Path, patience: float) -> dict[tuple[int, bool], Table]:
    """The tables of the scene, by layers and whether the engine is guarded."""
    running = {}
    for count in layers:
        for guarded in (False, True):
            environment = {k: v for k, v in os.environ.items() if guarded or not k.startswith("KVCANARY_")}
            environment["LAYERS"] = str(count)
            environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
            if guarded:
                environment.setdefault("KVCANARY_MODE", "log")
            log = logs / f"launches-{count}-{'guarded' if guarded else 'plain'}.log"
            command = [sys.executable, os.fspath(SCRIPT), tempfile.mkdtemp(), "launches"]
            with log.open("w") as out:
                process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
            running[count, guarded] = process, log
    began = time.monotonic()
    while any(process.poll() is None for process, _ in running.values()):
        if time.monotonic() - began > patience:
            for process, _ in running.values():
                process.kill()
            sys.exit(f"not done after {patience:.0f} s: {[str(log) for _, log in running.values()]}")
        time.sleep(8)
        print(f"  {time.monotonic() - began:.0f} s", flush=True)
    return {key: _table(process.returncode, log) for key, (process, log) in running.items()}


def _table(status: int, log: Path) -> Table:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith('{"launches"')]
    if status or not lines:
        sys.exit(f"{log}, status {status}:\n{log.read_text(errors='replace')[-3000:]}")
    found: Table = json.loads(lines[-1])["launches"]["table"]
    return found


def more(plain: dict[str, float], guarded: dict[str, float]) -> dict[str, float]:
    """What ``guarded`` has more of."""
    found = {name: count - plain.get(name, 0) for name, count in guarded.items()}
    return {name: count for name, count in found.items() if count > 0.01}


def compare(tables: dict[tuple[int, bool], Table], layers: list[int]) -> tuple[list[str], list[list[str]], list[float]]:
    """Header and rows, and how many launches of the host each column has more."""
    columns: dict[str, dict[str, dict[str, float]]] = {}
    for count in layers:
        plain, guarded = tables[count, False], tables[count, True]
        for requests in plain:
            columns[f"{count} layers, {requests} requests"] = {
                what: more(plain[requests][what], guarded[requests][what]) for what in ("calls", "kernels")
            }
    rows = []
    for what, title in (("calls", "the host"), ("kernels", "the device")):
        names = sorted({name for column in columns.values() for name in column[what]})
        found = [[column[what].get(name, 0.0) for column in columns.values()] for name in names]
        rows += [[title, f"`{name}`", *map(_number, row)] for name, row in zip(names, found, strict=True)]
        rows.append([title, "all", *(_number(sum(column[what].values())) for column in columns.values())])
    return ["", "", *columns], rows, [sum(column["calls"].values()) for column in columns.values()]


def _number(count: float) -> str:
    return f"{count:.2f}".rstrip("0").rstrip(".")


def main() -> None:
    """Profile all, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs=2, default=[4, 16])
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()), help="directory of the engines' logs")
    parser.add_argument("--patience", type=float, default=300, help="seconds that all may take")
    args = parser.parse_args()
    header, rows, calls = compare(profiled(args.layers, args.logs, args.patience), args.layers)
    print(report.table(header, rows))
    if max(calls) - min(calls) > 0.5:  # copies to the host are made in some steps only
        sys.exit(f"what the host launches depends on layers or requests: {calls}")


if __name__ == "__main__":
    main()
