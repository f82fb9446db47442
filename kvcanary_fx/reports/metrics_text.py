"""What a server or a process says about its guard, in the text format of Prometheus."""

from __future__ import annotations

import dataclasses
import os
import re
from collections import defaultdict
from pathlib import Path

PREFIX = "kvcanary_"

_QUOTED = r'"(?:[^"\\]|\\.)*"'
_SAMPLE = re.compile(rf'({PREFIX}\w+)\s*(?:\{{((?:[^"}}]|{_QUOTED})*)\}})?\s+(\S+)(?:\s.*)?')
_LABEL = re.compile(rf"(\w+)\s*=\s*({_QUOTED})")
_ESCAPED = re.compile(r"\\(.)")


@dataclasses.dataclass(frozen=True)
class Reading:
    """The canary's metrics at one time.

    Attributes:
        counts: by the name of the metric, over all its labels.
        unguarded: why each KV cache group is not guarded, by name; empty if it is.
        violations: failed checks, by check; 0 for those that never failed.
        within: seconds in which each stored byte is compared, 0 if unknown.
    """

    counts: dict[str, float]
    unguarded: dict[str, str]
    violations: dict[str, float]
    within: float

    @property
    def healthy(self) -> bool:
        """Whether all is guarded and no check has failed."""
        return bool(self.unguarded) and not any(self.unguarded.values()) and not any(self.violations.values())


def file_of(folder: str | os.PathLike[str], pid: int) -> Path:
    """The file that a process with the setting ``status`` writes."""
    return Path(folder) / f"kvcanary-{pid}.prom"


def read(text: str) -> Reading | None:
    """The canary's metrics in the text format of Prometheus; None if it has none.

    Raises:
        ValueError: a line of them cannot be read; its text is the line.
    """
    samples = [_sample(line) for line in text.split("\n") if line.startswith(PREFIX)]
    if not samples:
        return None
    counts, violations = defaultdict[str, float](float), defaultdict[str, float](float)
    unguarded: dict[str, str] = {}
    within = 0.0
    for name, labels, value in samples:
        if name == f"{PREFIX}guarded":
            group = labels.get("group", "?")
            why = "" if value else labels.get("reason") or "no reason given"
            unguarded[group] = unguarded.get(group) or why
        elif name == f"{PREFIX}violations_total":
            violations[labels.get("check", "?")] += value
        elif name == f"{PREFIX}compared_within_seconds":
            within = max(within, value)
        else:
            counts[name] += value
    return Reading(dict(counts), unguarded, dict(violations), within)


def write(reading: Reading) -> str:
    """Metrics in the text format of Prometheus, as :func:`read` reads them."""
    lines = [f"{name} {value}" for name, value in sorted(reading.counts.items())]
    lines += [
        f"{PREFIX}guarded{{group={_quoted(group)},reason={_quoted(why)}}} {int(not why)}"
        for group, why in reading.unguarded.items()
    ]
    lines += [
        f"{PREFIX}violations_total{{check={_quoted(check)}}} {count}" for check, count in reading.violations.items()
    ]
    lines.append(f"{PREFIX}compared_within_seconds {reading.within}")
    return "\n".join(lines) + "\n"


def _sample(line: str) -> tuple[str, dict[str, str], float]:
    match = _SAMPLE.fullmatch(line.rstrip("\r"))
    if match is None:
        raise ValueError(line)
    try:
        value = float(match[3])
    except ValueError:
        raise ValueError(line) from None
    return match[1], {name: _unquoted(text) for name, text in _LABEL.findall(match[2] or "")}, value


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _unquoted(text: str) -> str:
    return _ESCAPED.sub(lambda m: "\n" if m[1] == "n" else m[1], text[1:-1])
