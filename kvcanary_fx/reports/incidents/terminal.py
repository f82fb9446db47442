"""An incident as text for a terminal: the story, the pool, the bytes, and what surrounds them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..untrusted import one_line
from ..violation import ALL_LAYERS
from . import causes, pool_map, tables
from .incident import HalfScene, Incident, PoolScene, Record
from .story import story

#: Records explained in full, log lines, and bytes of a row shown in one line.
EXPLAINED, LOG_LINES, BYTES = 3, 20, 16

_COLOURS = {"title": "1", "damage": "1;31", "free": "2", "shared": "36", "reserved": "33", "rejected": "35"}


class Terminal:
    """Renders an incident in so many columns."""

    def __init__(self, width: int, colour: bool):
        self._width, self._colour = max(width, 40), colour

    def render(self, incident: Incident) -> str:
        """The text."""
        return "\n".join(self._lines(incident)) + "\n"

    def _lines(self, incident: Incident) -> Iterator[str]:
        yield self._paint("title", self._cut(incident.title))
        if incident.hidden:
            yield from self._wrap(f"Left out or hashed: {', '.join(incident.hidden)}.")
        told = [causes.told(incident), *story(incident)]
        yield from self._section("What happened", (line for p in told if p for line in self._wrap(p)))
        yield from self._section("Reported", self._reported(incident))
        for number, pool in enumerate(incident.pools):
            if pool.near or len(incident.pools) == 1:
                yield from self._section(f"Pool {pool.name}", self._pool(incident, number))
        yield from self._section("Bytes", self._bytes(incident))
        yield from self._section("Missing", (line for m in incident.missing for line in self._wrap(m)))
        yield from self._section("Lost coverage", (x for c in incident.coverage for x in self._wrap(c)))
        yield from self._section("Graphs", map(self._cut, incident.graphs))
        yield from self._section("Settings", self._table(incident.settings))
        yield from self._section("System", self._table(incident.system))
        yield from self._section("Log", map(self._cut, incident.log[-LOG_LINES:]))

    def _section(self, title: str, lines: Iterable[str]) -> Iterator[str]:
        shown = list(lines)
        if shown:
            yield ""
            yield self._paint("title", self._cut(title))
            yield from shown

    def _reported(self, incident: Incident) -> Iterator[str]:
        for record in incident.records[:EXPLAINED]:
            for line in record.violation.explain().split("\n"):
                yield from self._wrap(line.strip(), indent=2 if line.startswith(" ") else 0)
        more = incident.total - min(len(incident.records), EXPLAINED)
        if more > 0:
            yield f"... and {more} more"

    def _pool(self, incident: Incident, number: int) -> Iterator[str]:
        pool = incident.pools[number]
        names = [one_line(half.name) for half in pool.halves]
        margin = min(max(len(name) for name in [*names, "slots"]), self._width // 3)
        yield self._cut(f"{pool.slots} slots, {len(names)} tensors")
        for window in pool_map.windows(incident, number, min(self._width - margin - 2, pool.slots)):
            last = window.first + len(window.states) - 1
            yield self._cut(f"{'slots':{margin}}  {window.first} to {last}")
            yield f"{'':{margin}}  " + "".join(
                self._slot(state, ALL_LAYERS in window.damaged.get(window.first + i, ()))
                for i, state in enumerate(window.states)
            )
            for name in window.tensors:
                marks = (name in window.damaged.get(window.first + i, ()) for i in range(len(window.states)))
                row = "".join(self._paint("damage", pool_map.DAMAGED) if hit else " " for hit in marks)
                yield f"{one_line(name)[-margin:]:{margin}}  {row}".rstrip()
        key = ", ".join(f"{mark} {state}" for state, mark in pool_map.MARKS.items())
        yield from self._wrap(f"({key}, {pool_map.DAMAGED} damaged)")
        yield from self._columns(tables.SLOT_HEAD, list(tables.slot_rows(pool)))
        for title, lines in tables.histories(incident, number):
            yield self._cut(title)
            yield from (part for line in lines for part in self._wrap(line.strip(), 4 if line.startswith(" ") else 2))
        yield from self._columns(tables.BATCH_HEAD, list(tables.batch_rows(pool)))

    def _slot(self, state: str, damaged: bool) -> str:
        if damaged:
            return self._paint("damage", pool_map.DAMAGED)
        return self._paint(state, pool_map.MARKS.get(state, "?"))

    def _bytes(self, incident: Incident) -> Iterator[str]:
        shown = [r for r in incident.records if r.evidence is not None][:EXPLAINED]
        for record in shown:
            half = incident.half(record.half)
            if half is not None and half.rows is not None and record.pool is not None:
                yield from self._row(incident.pools[record.pool], half, record)

    def _row(self, pool: PoolScene, half: HalfScene, record: Record) -> Iterator[str]:
        """The bytes around what changed; of the flipped bit also what was written."""
        place, seen = pool.place(record.slot), record.evidence
        if place is None or half.rows is None or seen is None:
            return
        row = half.rows[place].tolist()
        at = 0 if seen.bit is None else seen.bit // 8
        shown = BYTES if self._width >= 60 else BYTES // 2
        first = at - at % shown
        now = row[first : first + shown]
        yield self._cut(f"{half.name}, slot {record.violation.slot}, bytes {first} to {first + len(now) - 1}")
        hot = at - first if seen.bit is not None else None
        if seen.bit is not None:
            was = list(now)
            was[at - first] ^= 1 << seen.bit % 8
            yield "  written  " + self._hex(was, hot)
        yield "  now      " + self._hex(now, hot)

    def _hex(self, row: Sequence[int], hot: int | None) -> str:
        return " ".join(self._paint("damage", f"{b:02x}") if i == hot else f"{b:02x}" for i, b in enumerate(row))

    def _table(self, values: Mapping[str, object]) -> Iterator[str]:
        for name, value in values.items():
            if value not in (None, "", [], {}):
                yield self._cut(f"  {name}: {value}")

    def _columns(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
        shown = [head, *rows] if rows else []
        widths = [min(max(map(len, column)), 24) for column in zip(*shown, strict=True)]
        for row in shown:
            yield self._cut("  " + "  ".join(f"{cell[:w]:{w}}" for cell, w in zip(row, widths, strict=True)).rstrip())

    def _wrap(self, text: str, indent: int = 0) -> list[str]:
        space = " " * indent
        return textwrap.wrap(one_line(text), self._width, initial_indent=space, subsequent_indent=space + "  ") or [""]

    def _cut(self, text: str) -> str:
        text = one_line(text)
        return text if len(text) <= self._width else text[: self._width - 3] + "..."

    def _paint(self, what: str, text: str) -> str:
        return f"\x1b[{_COLOURS[what]}m{text}\x1b[0m" if self._colour and what in _COLOURS else text
