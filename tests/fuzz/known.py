"""What is known not to hold yet.  To shrink to nothing: a line goes when its mend is in."""

from __future__ import annotations

from collections.abc import Callable

from fuzz.program import Program
from fuzz.reports import HIDDEN
from fuzz.write_idioms import UNSHOWN

_LEGAL = ("prompt", "reset", "crop", "crop_zero", "reorder", "prefill", "turns", "new_cache")


def _has(program: Program, *what: str) -> bool:
    return any(event.what in what for event in program.events)


def _graphs_of_one_layer(program: Program) -> bool:
    return program.sizes.layers == 1 or bool(program.breaks) or program.compiled == "layers"


KNOWN: dict[str, Callable[[Program], bool]] = {
    "a break between K and V: a graph that has one half of a layer is told too little of legal changes": lambda p: (
        p.breaks == "between" and _has(p, *_LEGAL)
    ),
    "a latent of all layers in one tensor, in graphs of one layer that do not show its slots": lambda p: (
        p.layout.latent and p.one_tensor and p.sizes.layers > 1 and _graphs_of_one_layer(p) and p.idiom in UNSHOWN
    ),
    "no attention in the graph, K and V written at once to a tensor called keys": lambda p: (
        bool(p.breaks) and p.container == "layered" and p.way.unit == "both"
    ),
    "no attention in the graph, an op hides the slots: two sequences are taken for K and V": lambda p: (
        bool(p.breaks) and p.idiom in HIDDEN and p.sizes.batch == 2
    ),
}


def known(program: Program) -> str | None:
    """Why a program may fail, or None."""
    return next((why for why, fits in KNOWN.items() if fits(program)), None)
