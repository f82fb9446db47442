"""The rows of `forward.py`, and its sections of BENCHMARKS.md."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex

import report

HEADER = [
    "forward", "configuration", "time (10 % to 90 %)", "slowest graph", "overhead",
    "identities checked", "digests checked", "recorded", "violations",
]  # fmt: skip

#: The title of each mode's section, and how its forwards run.
HOW = {
    "manual": ("A whole forward", "compiled with Inductor and captured in a CUDA graph with the checks inside"),
    "reduce-overhead": (
        'A whole forward under `mode="reduce-overhead"`',
        "compiled with Inductor and its own CUDA graphs, called from Python with all hooks",
    ),
    "eager": ("A whole forward, op by op", "called op by op from Python with all hooks"),
    "zero-configuration": (
        "A whole forward with nothing set up",
        'attention by PyTorch over plain tensors `[requests, heads, length, dim]`, `mode="reduce-overhead"`, and on '
        "top of it `kvcanary_fx.protect(model, mode=...)`, called from Python; each configuration has its own cache",
    ),
}

#: What of each configuration's name needs words.
MEANS = {
    True: "`identity`: all checks but content and operand; `recorded`: all but content; `content 1/64` and `content`: "
    "all, with that share of the stored bytes compared in each forward. ",
    False: "`default`: with the default settings, on a GPU a budget of 1 %; `content`: all stored bytes are compared "
    "in each forward, or 1/64 of them. `raise` also waits for the device after it, as `off, waited for` does without "
    "the canary. Who is in a slot nobody says. ",
}


@dataclasses.dataclass
class Row:
    """One configuration of one forward; times in milliseconds, of its fastest graph; counts for each forward."""

    case: str
    mode: str
    configuration: str
    median: float
    low: float
    high: float
    slowest: float  # median of the slowest of its graphs
    graphs: int
    overhead: float | None = None  # of the medians, in percent of "off"
    rounds: int = 0
    build_seconds: float = 0.0
    counts: dict[str, float] | None = None
    problems: list[str] = dataclasses.field(default_factory=list)

    @property
    def key(self) -> tuple[str, ...]:
        return self.case, self.mode, self.configuration

    def cells(self) -> list[str]:
        counts = self.counts or {}
        numbers = [counts.get(name) for name in ("identities", "digests", "recorded")]
        return [
            self.case,
            self.configuration,
            f"{self.median:.3f} ms ({self.low:.3f} to {self.high:.3f})",
            f"{self.slowest:.3f} ms" if self.graphs > 1 else "",
            "" if self.overhead is None else f"{self.overhead:+.2f} %",
            *("" if number is None else f"{number:,.0f}" for number in numbers),
            "; ".join(self.problems) or ("0" if counts else ""),
        ]


class Results:
    """The rows so far, in a file as soon as there are new ones; those of an earlier run like this one are kept."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.environment = args, report.environment(args.device)
        self.rows: dict[tuple[str, ...], Row] = {}
        self.other = not any(turn.usual for turn in args.turns)  # forwards that only --only runs: sections of their own
        if args.json and args.json.exists():
            old = json.loads(args.json.read_text())
            if old["environment"] == self.environment:
                self.add([Row(**row) for row in old["rows"]])

    def add(self, rows: list[Row]) -> None:
        self.rows.update({row.key: row for row in rows})
        if self.args.json:
            made = {"environment": self.environment, "rows": [dataclasses.asdict(row) for row in self.rows.values()]}
            self.args.json.write_text(json.dumps(made, indent=1))
        if self.args.write:
            for mode in self.modes():
                kind = "forward" if mode == "manual" else f"forward {mode}"
                sizes = "other sizes " if self.other else ""
                report.write_section(f"{kind} {sizes}{self.args.device}", self.text(mode))

    def modes(self) -> list[str]:
        """Each makes a section."""
        return list(dict.fromkeys(row.mode for row in self.rows.values()))

    def text(self, mode: str) -> str:
        rows = [row for row in self.rows.values() if row.mode == mode]
        rounds, graphs = sorted({row.rounds for row in rows}), max(row.graphs for row in rows)
        captured = f"A decode is captured in {graphs} graphs, of which the fastest counts. " if graphs > 1 else ""
        placement = f" --placement {' '.join(self.args.placement)}" if self.args.placement else ""
        (title, how), engine = HOW[mode], mode != "zero-configuration"
        model = "8B-shaped GQA model (32 layers, 8 KV heads of 128)"
        if any(row.case.startswith("mla") for row in rows):
            model += " and MLA-shaped one (27 layers, latent 512 + 64)"
        opaque = "attention in one opaque op, " if engine else ""
        only = f" --only {mode}" if mode in ("reduce-overhead", "zero-configuration") else ""
        if self.other:
            title, only = f"{title}, other sizes", f" --only {shlex.join(self.args.only)}"
        replay = ""
        if mode == "manual":
            replay = "The time is that of a graph's replay, without what an engine copies to its inputs before. "
        return (
            f"## {title}\n\n{self.environment}. {model}, bf16, random weights, {opaque}{how}. "
            "`64 x 4096`: 64 requests, one token added to 4,095 stored. Configurations take "
            f"turns, median of {' or '.join(map(str, rounds))} rounds of two forwards. {captured}"
            f"{MEANS[engine]}{replay}Counts are those of the sessions, for each forward, and are "
            "compared with what the batch makes them. Command: "
            f"`python tests/benchmarks/forward.py{only}{placement} --write`\n\n"
            f"{report.table(HEADER, [row.cells() for row in rows])}"
        )
