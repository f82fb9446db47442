"""Draws the pictures of the documents: ``python docs/pictures/draw.py`` writes the SVG files beside this script."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

INK, GREY, PAPER = "#1f2933", "#6b7785", "#ffffff"
FILLS = {
    "model": "#e8eef5",
    "canary": "#fdebc8",
    "slot": "#dcefe2",
    "free": "#f2f3f5",
    "bad": "#f9d9d6",
}
SANS = "font-family='Helvetica, Arial, sans-serif'"
MONO = "font-family='Menlo, Consolas, monospace'"


class Picture:
    """An SVG of boxes, arrows and text, in units of a pixel."""

    def __init__(self, width: int, height: int, title: str):
        self._head = (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' role='img'>\n"
            f"<title>{escape(title)}</title>\n"
            "<defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' "
            f"orient='auto'><path d='M0,0 L8,4 L0,8 z' fill='{GREY}'/></marker></defs>\n"
            f"<rect width='{width}' height='{height}' rx='8' fill='{PAPER}'/>\n"
        )
        self._parts: list[str] = []

    def box(self, x: int, y: int, w: int, h: int, text: str = "", fill: str = "model", mono: bool = False) -> None:
        """A box with lines of text in its middle."""
        self._parts.append(
            f"<rect x='{x}' y='{y}' width='{w}' height='{h}' rx='4' fill='{FILLS[fill]}' stroke='{GREY}'/>"
        )
        lines = text.split("\n") if text else []
        for i, line in enumerate(lines):
            self.text(x + w // 2, y + h // 2 + 5 + 17 * i - 17 * (len(lines) - 1) // 2, line, "middle", mono=mono)

    def text(self, x: int, y: int, text: str, anchor: str = "start", mono: bool = False, grey: bool = False) -> None:
        """A line of text; ``y`` is its base line."""
        face, colour = MONO if mono else SANS, GREY if grey else INK
        self._parts.append(
            f"<text x='{x}' y='{y}' {face} font-size='13' text-anchor='{anchor}' fill='{colour}'>{escape(text)}</text>"
        )

    def arrow(self, *points: tuple[int, int], dashed: bool = False) -> None:
        """An arrow through some points."""
        path = " ".join(f"{x},{y}" for x, y in points)
        dash = " stroke-dasharray='4 3'" if dashed else ""
        self._parts.append(
            f"<polyline points='{path}' fill='none' stroke='{GREY}' stroke-width='1.4'{dash} marker-end='url(#tip)'/>"
        )

    def svg(self) -> str:
        return self._head + "\n".join(self._parts) + "\n</svg>\n"


def graph() -> Picture:
    """The graph of one layer before and after the pass."""
    p = Picture(820, 330, "The graph of one attention layer, before and after the rewrite")
    p.text(30, 30, "what Dynamo traced")
    p.text(370, 30, "what is compiled")
    p.box(30, 80, 250, 30, "k_cache.index_copy_(2, pos, k)", mono=True)
    p.box(30, 170, 250, 30, "v_cache.index_copy_(2, pos, v)", mono=True)
    p.box(30, 265, 250, 30, "attention(q, k_cache, v_cache)", mono=True)
    p.arrow((155, 110), (155, 168))
    p.arrow((155, 200), (155, 263))
    p.arrow((292, 185), (350, 185))
    rows = [
        (46, "verify(k_cache)", "canary", "are the bytes, as they were recorded?"),
        (80, "k_cache.index_copy_(2, pos, k)", "model", ""),
        (114, "record(k_cache, k, pos)", "canary", "is k stored, and in its slots?"),
        (150, "verify(v_cache)", "canary", ""),
        (184, "v_cache.index_copy_(2, pos, v)", "model", ""),
        (218, "record(v_cache, v, pos)", "canary", ""),
        (265, "attention(q, k_cache, v_cache)", "model", ""),
    ]
    for y, text, fill, note in rows:
        p.box(370, y, 250, 28, text, fill, mono=True)
        if note:
            for i, line in enumerate(note.split(", ")):
                p.text(632, y + 12 + 15 * i, line, grey=True)
    p.arrow((495, 246), (495, 263))
    p.text(30, 318, "The ops run inside the compiled graph: under Inductor and in CUDA graphs.", grey=True)
    return p


def shadow() -> Picture:
    """Slots, halves and the shadow."""
    p = Picture(740, 350, "Slots of a pool, its halves, and the shadow beside them")
    slots, width, left = 6, 76, 190
    p.text(30, 40, "request table")
    p.text(30, 58, "of request a", grey=True)
    for i, slot in enumerate((2, 3, 5)):
        p.box(left + 76 + i * 76, 26, 60, 32, str(slot), "model", mono=True)
        p.arrow((left + 106 + i * 76, 58), (left + slot * width + 34, 88))
    for i in range(slots):
        p.text(left + i * width + 34, 106, f"slot {i}", "middle", grey=True)
    for row, name in enumerate(("layer 0, K", "layer 0, V", "layer 1, K", "layer 1, V")):
        y = 114 + row * 30
        p.text(30, y + 18, name)
        for i in range(slots):
            p.box(left + i * width, y, 68, 24, "bytes" if i in (2, 3, 5) else "", "slot" if i in (2, 3, 5) else "free")
    p.text(660, 178, "halves", grey=True)
    p.text(30, 264, "shadow")
    p.text(30, 282, "one digest per half,", grey=True)
    p.text(30, 298, "one entry per slot", grey=True)
    for i in range(slots):
        if i in (2, 3, 5):
            entry = f"digests\na, pos {(2, 3, 5).index(i)}\ntoken\nchain"
            p.box(left + i * width, 248, 68, 82, "", "canary")
            for line, text in enumerate(entry.split("\n")):
                p.text(left + i * width + 34, 267 + 17 * line, text, "middle")
        else:
            p.box(left + i * width, 248, 68, 82, "free", "free")
    return p


def life() -> Picture:
    """What happens to a slot, and what is reported."""
    p = Picture(860, 300, "The life of a slot, and the step at which each mistake is found")
    states = [
        (20, "free", "free", "read: owner", "the slot is free"),
        (235, "allocated\nto request a", "model", "read: poison", "nobody has written it"),
        (450, "written\nby a", "slot", "write by b: owner, index", "it is not b's"),
        (665, "shared\nby a and b", "slot", "write by a: owner", "b still reads it"),
    ]
    for x, text, fill, check, why in states:
        p.box(x, 90, 130, 50, text, fill)
        p.box(x, 212, 175, 46, "", "bad")
        p.text(x + 87, 231, check, "middle")
        p.text(x + 87, 249, why, "middle", grey=True)
        p.arrow((x + 30, 140), (x + 30, 210), dashed=True)
    for x, text in ((150, "allocate"), (365, "write"), (580, "share")):
        p.arrow((x, 115), (x + 83, 115))
        p.text(x + 40, 107, text, "middle", grey=True)
    p.arrow((730, 90), (730, 50), (85, 50), (85, 88))
    p.text(408, 42, "release: the bytes are compared a last time", "middle", grey=True)
    p.arrow((510, 140), (510, 160), (560, 160), (560, 142))
    p.text(496, 177, "read: bytes, owner,", grey=True)
    p.text(496, 193, "position, token", grey=True)
    p.text(20, 284, "Red: what is reported, and by which check, in the step in which it happens.", grey=True)
    return p


PICTURES = {"graph.svg": graph, "shadow.svg": shadow, "life.svg": life}


def main() -> None:
    for name, draw in PICTURES.items():
        Path(__file__).with_name(name).write_text(draw().svg())


if __name__ == "__main__":
    main()
