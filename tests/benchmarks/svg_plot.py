"""A plain plot of lines over logarithmic axes, as SVG text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 80, 190, 40, 60  # margins; the names of the lines stand in the right one
COLOURS = ("#1f6fb4", "#d1661c", "#3a8f3a", "#8a4fb0")


def plot(
    title: str,
    x_label: str,
    y_label: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    x_text: Callable[[float], str] = "{:g}".format,
) -> str:
    """An SVG of points above 0, joined line by line.

    Args:
        lines: ``(x, y)`` by the name of the line; every x of the first line is marked on the axis.
    """
    points = [p for line in lines.values() for p in line]
    x_span = [math.log10(f(x for x, _ in points)) for f in (min, max)]
    decades = [f(math.log10(g(y for _, y in points))) for f, g in ((math.floor, min), (math.ceil, max))]
    bottom, top = decades[0], max(decades[1], decades[0] + 1)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - x_span[0]) / ((x_span[1] - x_span[0]) or 1)
        up = (math.log10(y) - bottom) / (top - bottom)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    def text(x: float, y: float, words: str, anchor: str = "middle", more: str = "") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{words}</text>'

    right, floor, middle = WIDTH - RIGHT, HEIGHT - BOTTOM, (HEIGHT + TOP - BOTTOM) / 2
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 22, title, "start", ' font-size="15"'),
        text((LEFT + right) / 2, HEIGHT - 14, x_label),
        text(20, middle, y_label, "middle", f' transform="rotate(-90 20 {middle:.1f})"'),
    ]
    for exponent in range(bottom, top + 1):
        y = at(points[0][0], 10.0**exponent)[1]
        out.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#ccc"/>')
        out.append(text(LEFT - 8, y + 4, f"{10.0**exponent:g}", "end"))
    for x in (at(x, 10.0**bottom)[0] for x, _ in next(iter(lines.values()))):
        out.append(f'<path d="M{x:.1f} {TOP}V{floor}" stroke="#eee"/>')
    out += [text(at(x, 10.0**bottom)[0], floor + 18, x_text(x)) for x, _ in next(iter(lines.values()))]
    for number, ((name, line), colour) in enumerate(zip(lines.items(), COLOURS, strict=False)):
        places = [at(*p) for p in line]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        out.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        out.append(text(right + 14, TOP + 12 + 20 * number, name, "start", f' fill="{colour}"'))
    return "\n".join([*out, "</svg>", ""])
