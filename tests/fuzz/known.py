"""What is known not to hold yet.  To shrink to nothing: a line goes when its mend is in."""

from __future__ import annotations

from collections.abc import Callable

from fuzz.program import Program

_BY_ROW = ("row_loop", "row_index_copy", "rows_unbound", "head_loop", "heads_split")
_HIDDEN = ("op_hidden_pair", "op_hidden_rows", "op_hidden_both", "in_checkpoint", "in_cond", "in_region",
           "slice_foreach", "foreach_copy", "out_of_an_op", "added_onto_zeros", "boolean_mask",
           "linear_put")  # fmt: skip
_WHOLE = ("index_copy_back", "where_back", "where_setitem", "scatter_back", "slice_scatter_back", "cat_back",
          "one_hot_back", "masked_scatter", "zero_added_first", "functionalised_op")  # fmt: skip
_LEGAL = ("prompt", "reset", "crop", "crop_zero", "reorder", "prefill", "turns", "new_cache")

KNOWN: dict[str, Callable[[Program], bool]] = {
    "a loop over rows or heads, in one tensor or with a reset": lambda p: p.idiom in _BY_ROW,
    "writes that hide where: legal changes reported": lambda p: p.idiom in _HIDDEN,
    "written whole: a prompt over a longer one; nothing says where the next write goes": lambda p: (
        p.idiom in _WHOLE and any(e.what in ("prompt", "crop", "crop_zero") for e in p.events)
    ),
    "heads merged with sequences: each head is a row to what is legal": lambda p: p.idiom == "heads_merged",
    "a window that rolls, in a layer by itself": lambda p: p.way.rolls,
    "one layer: a legal rewrite that leaves a token's K and V as they were": lambda p: (
        p.sizes.layers == 1 and any(e.what in _LEGAL for e in p.events)
    ),
    "a layer to a graph: names, and one graph that reads what another one writes": lambda p: (
        bool(p.breaks) or p.compiled == "layers"
    ),
    "a new cache for each step": lambda p: p.way.unit == "new",
}


def known(program: Program) -> str | None:
    """Why a program may fail, or None."""
    return next((why for why, fits in KNOWN.items() if fits(program)), None)
