"""An incident as one page of HTML that loads nothing: the story first, then the pool, the bytes, what surrounds them.

Everything in a file may come from a client, so all text is escaped, and the page forbids scripts and loading.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from ..untrusted import one_line
from ..violation import ALL_LAYERS
from . import causes, pool_map, tables
from .incident import HalfScene, Incident, PoolScene, Record
from .story import bit_name, story
from .time_line import Mark, TimeLine, time_line

#: Slots side by side in the map, pixels of one, owners that are named, rows whose bytes are shown, and bytes of each.
ACROSS, CELL, OWNERS, ROWS, BYTES = 64, 13, 12, 5, 1_024

#: Characters of an id in the time line; the whole one is shown when it is pointed at.
NAME = 12

_FILL = {
    "empty": "#e8eaed",
    "written": "#9cc3e6",
    "free": "#ffffff",
    "shared": "#b5a1e0",
    "reserved": "#c9b458",
    "rejected": "#e0a1c6",
}
_DAMAGED = "#d93025"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #202124 }
h1 { font-size: 1.3rem } h2 { font-size: 1.05rem; margin-top: 2rem }
.story { border-left: 4px solid #d93025; padding: .3rem 1rem; background: #fdf3f2 }
table { border-collapse: collapse; font-size: 13px } td, th { padding: .1rem .7rem .1rem 0; text-align: left }
pre, .hex { font: 12px/1.5 ui-monospace, monospace; overflow-x: auto; white-space: pre }
pre { white-space: pre-wrap; overflow-wrap: anywhere } h3 { font-size: .95rem }
.was { background: #ceead6 } .now { background: #fad2cf } .key { padding: 0 .4rem; border: 1px solid #ccc }
.time td, .time th { vertical-align: top; border-left: 1px solid #ddd; padding: .2rem .5rem; white-space: nowrap }
.time .key { display: block; line-height: 1.3; margin: .2rem 0 }
.wide { overflow-x: auto } svg text { font: 11px system-ui, sans-serif }
"""


def page(incident: Incident) -> str:
    """The page."""
    title = one_line(incident.title)
    body = "\n".join(_body(incident))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style></head><body>\n<h1>{_text(title)}</h1>\n{body}\n"
        "</body></html>\n"
    )


def _body(incident: Incident) -> Iterator[str]:
    cause = causes.told(incident)
    first = f"<p><b>{_text(cause)}</b></p>" if cause else ""
    yield f'<div class="story">{first}{"".join(f"<p>{_text(p)}</p>" for p in story(incident, events=False))}</div>'
    if incident.hidden:
        yield f"<p>Left out or hashed: {_text(', '.join(incident.hidden))}.</p>"
    for number, pool in enumerate(incident.pools):
        if pool.near or len(incident.pools) == 1:
            yield f"<h2>Pool {_text(pool.name)}</h2>"
            yield from _pool(incident, number)
    shown = [r for r in incident.records if r.evidence is not None][:ROWS]
    rows = [line for record in shown for line in _row(incident, record)]
    yield from ["<h2>Bytes</h2>", *rows] if rows else []
    yield "<h2>Reported</h2>"
    yield from (f"<pre>{_lines(r.violation.explain().splitlines())}</pre>" for r in incident.records[:ROWS])
    for title, lines in (
        ("Missing", incident.missing),
        ("Lost coverage", incident.coverage),
        ("Settings", _pairs(incident.settings)),
        ("System", _pairs(incident.system)),
        ("Graphs", incident.graphs),
        ("Log", incident.log),
        ("Records", [r.violation.line() for r in incident.records]),
    ):
        if lines:
            yield f"<details><summary>{title}</summary><pre>{_lines(lines)}</pre></details>"


def _pool(incident: Incident, number: int) -> Iterator[str]:
    pool = incident.pools[number]
    line = time_line(incident, number)
    if line is not None:
        yield _time_line(pool, line)
    yield f"<p>{pool.slots} slots, {len(pool.halves)} tensors. {_key()}</p>"
    for window in pool_map.windows(incident, number, min(ACROSS, pool.slots)):
        yield f'<div class="wide">{_map(pool, window)}</div>{_owners(pool, window)}'
    yield _table(tables.SLOT_HEAD, tables.slot_rows(pool))
    for title, lines in tables.histories(incident, number):
        yield f"<p>{_text(title)}</p><pre>{_lines(lines)}</pre>"
    if pool.batch:
        yield f"<p>The batch:</p>{_table(tables.BATCH_HEAD, tables.batch_rows(pool))}"


def _time_line(pool: PoolScene, line: TimeLine) -> str:
    """Steps from left to right; what happened in the colour of who is named, what was reported in that of damage."""
    rows = (
        f"<tr><td>{_text(which)}</td>{''.join(f'<td>{_marks(pool, cell)}</td>' for cell in cells)}</tr>"
        for which, cells in line.rows
    )
    head = "".join(f"<th>{_text(step)}</th>" for step in line.head)
    return f'<div class="wide"><table class="time"><tr>{head}</tr>{"".join(rows)}</table></div>'


def _marks(pool: PoolScene, cell: Iterable[Mark]) -> str:
    shown = []
    for mark in cell:
        who = "" if mark.request is None else one_line(mark.request)
        short = f"{who[:NAME]}..." if len(who) > NAME + 3 else who
        fill = f"{_DAMAGED}; color: #fff" if mark.damage else _colour(pool, mark.request)
        told = _text(mark.text) + (f"<br>{_text(short)}" if short else "")
        shown.append(f'<span class="key" style="background:{fill}" title="{_text(who)}">{told}</span>')
    return "".join(shown)


def _map(pool: PoolScene, window: pool_map.Window) -> str:
    """Slots from left to right, tensors from top to bottom; the last row has a colour for each owner."""
    names = [half.name for half in pool.halves]
    margin = 8 * max(len(name) for name in [*names, "owner"])
    width, height = margin + CELL * len(window.states) + 40, CELL * (len(names) + 1) + 24
    cells = []
    for i, (state, owner) in enumerate(zip(window.states, window.owners, strict=True)):
        slot, x = window.first + i, margin + CELL * i
        hurt, who = window.damaged.get(slot, ()), "" if owner is None else f", {one_line(owner)}"
        for y, name in enumerate(names):
            bad = ALL_LAYERS in hurt or name in hurt
            told = f"slot {slot}, {state}{who}; {name}{', damaged' if bad else ''}"
            cells.append(_cell(x, CELL * y, _DAMAGED if bad else _FILL.get(state, "#fff"), told))
        cells.append(_cell(x, CELL * len(names) + 4, _colour(pool, owner), f"slot {slot}{who}"))
    labels = [f'<text x="0" y="{CELL * y + 10}">{_text(name)}</text>' for y, name in enumerate([*names, "owner"])]
    ends = ((window.first, margin), (window.first + len(window.states) - 1, margin + CELL * (len(window.states) - 1)))
    labels += [f'<text x="{x}" y="{height - 2}">{slot}</text>' for slot, x in ends]
    return f'<svg width="{width}" height="{height}">{"".join(labels)}{"".join(cells)}</svg>'


def _cell(x: int, y: int, fill: str, told: str) -> str:
    side = CELL - 1
    return (
        f'<rect x="{x}" y="{y}" width="{side}" height="{side}" fill="{fill}" stroke="#bdc1c6">'
        f"<title>{_text(told)}</title></rect>"
    )


def _colour(pool: PoolScene, owner: str | int | None) -> str:
    """A colour of an owner's own, the same wherever the pool is drawn; those that were named one after the other differ
    most."""
    if owner is None or owner not in pool.owner_names:
        return "#ffffff"
    return f"hsl({pool.owner_names.index(owner) * 137.5 % 360:.0f}, 60%, 75%)"


def _owners(pool: PoolScene, window: pool_map.Window) -> str:
    """The colours of those who own slots of a window."""
    known = [owner for owner in dict.fromkeys(window.owners) if owner is not None][:OWNERS]
    keys = (f'<span class="key" style="background:{_colour(pool, o)}">{_text(str(o))}</span>' for o in known)
    return f"<p>Owners: {' '.join(keys)}</p>" if known else ""


def _key() -> str:
    keys = [*_FILL.items(), ("damaged", _DAMAGED)]
    return " ".join(f'<span class="key" style="background:{fill}">{state}</span>' for state, fill in keys)


def _row(incident: Incident, record: Record) -> Iterator[str]:
    """The bytes of a damaged row, 16 a line, beside what is known of those that were written."""
    half, seen = incident.half(record.half), record.evidence
    place = None if record.pool is None else incident.pools[record.pool].place(record.slot)
    if half is None or half.rows is None or place is None or seen is None:
        return
    now = half.rows[place].tolist()
    was, whence = _written(incident, half, record, now)
    differ = {i for i, (a, b) in enumerate(zip(was, now, strict=True)) if a != b} if was else set()
    yield f"<h3>{_text(half.name)}, slot {record.violation.slot}</h3><p>{_text(whence)}</p>"
    if seen.bit is not None:
        yield f"<p>{_text(bit_name(half, seen.bit))}: {_text(_value(half, was, seen.bit, now))}</p>"
    yield '<div class="hex">'
    first = min(differ, default=0) // 16 * 16 if len(now) > BYTES else 0
    for start in range(first, min(first + BYTES, len(now)), 16):
        line = range(start, min(start + 16, len(now)))
        if was:
            yield f"{start:6d}  {_hex(was, line, differ, 'was')}   {_hex(now, line, differ, 'now')}"
        else:
            yield f"{start:6d}  {_hex(now, line, differ, 'now')}"
    yield "</div>"


def _written(incident: Incident, half: HalfScene, record: Record, now: list[int]) -> tuple[list[int], str]:
    """The bytes that were written, as far as they can be had, and how they are known."""
    seen, pool = record.evidence, incident.pools[record.pool or 0]
    assert seen is not None
    if seen.bit is not None:
        was = list(now)
        was[seen.bit // 8] ^= 1 << seen.bit % 8
        return was, "Left what was written (the one flip of a bit that gives its digest), right what is there."
    place = pool.place(seen.moved_to[0]) if seen.moved_to else None
    if place is not None and half.rows is not None:
        return half.rows[place].tolist(), f"Left what was written here and is in slot {seen.moved_to[0]} now."
    return [], "What was written is not known; this is what is there."


def _value(half: HalfScene, was: list[int], bit: int, now: list[int]) -> str:
    """The element before and after."""
    dtype = getattr(torch, half.dtype)
    element = bit // 8 // dtype.itemsize
    span = slice(element * dtype.itemsize, (element + 1) * dtype.itemsize)
    both = (torch.tensor(row[span], dtype=torch.uint8, device="cpu") for row in (was, now))
    before, after = (float(element.view(dtype).float()) for element in both)
    return f"{before:g} was written, {after:g} is there"


def _hex(row: list[int], places: Iterable[int], differ: set[int], mark: str) -> str:
    return " ".join(f'<b class="{mark}">{row[i]:02x}</b>' if i in differ else f"{row[i]:02x}" for i in places)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{"".join(f"<th>{name}</th>" for name in head)}</tr>{cells}</table></div>'


def _pairs(values: Mapping[str, object]) -> list[str]:
    return [f"{name}: {value}" for name, value in values.items()]


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(map(_text, lines))


def _text(value: str) -> str:
    return html.escape(one_line(value))
