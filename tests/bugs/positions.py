"""Bugs of tokens and positions (A)."""

from __future__ import annotations

from cases import Outcome, bug
from toy import Toy


@bug("A10", "Blaizzy/mlx-vlm#1983", check="chain")
def position_ids_without_the_cache_offset(faulty: bool) -> Outcome:
    """All decode tokens get position 0."""
    toy = Toy()
    toy.add("r", [5, 6, 7, 8, 9])
    toy.run({"r": [1, 2, 3]})
    toy.run({"r": [4]}, **({"positions": [0]} if faulty else {}))
    return Outcome((toy.session,), slot=4, request="r")
