"""What is known not to hold yet.  To shrink to nothing: a line goes when its mend is in."""

from __future__ import annotations

from collections.abc import Callable

from program import Program

_WHOLE = ("index_copy_back", "where_back", "where_setitem", "scatter_back", "slice_scatter_back", "cat_back",
          "one_hot_back", "masked_scatter", "rolled", "rolled_by_cat", "rolled_in_place", "zero_added_first",
          "functionalised_op")  # fmt: skip
_BY_ROW = ("row_loop", "row_index_copy", "rows_unbound", "head_loop", "heads_split")
_HIDDEN = ("op_hidden_pair", "op_hidden_rows", "op_hidden_both", "in_checkpoint", "in_cond", "in_region",
           "slice_foreach", "foreach_copy", "out_of_an_op", "added_onto_zeros", "linear_put")  # fmt: skip
_LEGAL = ("prompt", "reset", "crop", "crop_zero", "reorder", "prefill")

KNOWN: dict[str, Callable[[Program], bool]] = {
    "K and V written at once into one tensor: the axis of K and V is taken for rows": lambda p: p.way.unit == "both",
    "a write with a mask breaks the graph, and changes every slot": lambda p: p.idiom == "boolean_mask",
    "a loop over rows or heads: rows become K and V, heads rows": lambda p: p.idiom in _BY_ROW,
    "written whole: slots on axes 0 and 2, whatever the layout; a reset": lambda p: p.idiom in _WHOLE,
    "writes that hide where: axes guessed, prefixes not adopted": lambda p: p.idiom in _HIDDEN,
    "one layer: a legal rewrite that leaves a token's K and V as they were": lambda p: (
        p.sizes.layers == 1 and any(e.what in _LEGAL for e in p.events)
    ),
    "a layer to a graph: layers of other graphs are not asked": lambda p: bool(p.breaks) or p.compiled == "layers",
    "K and V side by side: V is checked before it is known where it goes": lambda p: p.layout.packing == "joint",
    "layers in one tensor, no module to tell them apart": lambda p: p.loop and p.layout.packing != "pair",
}


def known(program: Program) -> str | None:
    """Why a program may fail, or None."""
    return next((why for why, fits in KNOWN.items() if fits(program)), None)
