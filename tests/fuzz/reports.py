"""Reading what a session says: which cells a violation is about, and which caches are called unguarded."""

from __future__ import annotations

import re

import torch

from fuzz.containers import ATTRIBUTES, attribute_names, expression
from fuzz.oracle import Cell, Key
from fuzz.program import Program
from kvcanary_fx import Violation

#: Ways to write that hide along which axis.
HIDDEN = ("linear_put", "op_hidden_rows", "new_where", "new_of_an_op")


class Names:
    """What the halves of a program are called, and which cells lie in what a report names."""

    def __init__(self, program: Program, count: int):
        self.program = program
        self.count = count
        z = program.sizes
        self.keys = [(layer, half) for layer in range(z.layers) for half in range(2)]
        self.base = {key: self._base(*key) for key in self.keys}
        self._cells: dict[Cell, set[int]] = {}  # their elements in the tensor that holds them

    def _base(self, layer: int, half: int) -> str:
        """The tensor that holds a half."""
        program = self.program
        layer, place = 0 if program.one_tensor else layer, half if self.count == 2 else 0
        if program.compiled == "layers" and not program.loop and program.container not in ATTRIBUTES:
            return attribute_names(self.count, program.names)[place]  # an argument of the layer
        owned = program.container in ATTRIBUTES and not program.one_tensor and program.compiled != "layers"
        owner = f"layers.{layer}." if owned else ""
        return owner + _plain(expression(program.container, program.names, layer, place, self.count))

    def cells(self, violation: Violation, table: torch.Tensor) -> set[Cell]:
        """The cells that a report can mean by its layer, half, pool and slot."""
        program, z = self.program, self.program.sizes
        numbers = program.layout.slot_numbers
        module = re.match(r"layers\.(\d+)", _plain(violation.layer))
        by_module = module is not None and not program.loop and program.compiled != "layers"
        named = [
            cell
            for cell in self._named(violation.pool, table)
            if cell.half in self._labelled(violation.half)
            and not (by_module and module is not None and cell.layer != int(module.group(1)))
        ]
        alone = len({cell.row for cell in named}) == 1  # the name says which sequence
        return {
            cell
            for cell in named
            if violation.slot in numbers(table, z, cell.row, cell.position, program.rows)
            or violation.slot in self._guessed(cell, table)
            or (alone and program.layout.of.batch is not None and violation.slot == cell.position)
        }

    def _guessed(self, cell: Cell, table: torch.Tensor) -> set[int]:
        """The slots that a cell is taken for where nothing in a graph shows its axes: an op hides them, no attention is
        there.  The first axis counts slots, or of four the first two; of a cache that is returned whole, the first and
        the last but one.
        """
        program, z = self.program, self.program.sizes
        if not program.broken or program.idiom not in HIDDEN:
            return set()
        first = int(table[cell.row, cell.position]) if program.layout.of.pool else cell.row
        of_heads = {first * z.heads + head for head in range(z.heads)}
        return {"bsf": {first}, "bhsd": of_heads, "flat": of_heads}.get(program.layout.family, set())

    def _labelled(self, label: str) -> set[int]:
        """The halves that may be called K, V or KV.

        A latent is K and V, its rope part K, or V by its name.
        """
        if self.program.layout.latent:
            return {"K": {0, 1}, "V": {1}}.get(label, {0, 1} if self.program.broken else {0})
        return {0, 1} if label == "KV" or self.program.merged else {"KV".index(label)}

    def _named(self, pool: str, table: torch.Tensor) -> list[Cell]:
        """The cells of which a byte is in what ``pool`` names: a tensor, and an index of it."""
        if not self._cells:
            self._find_cells(table)
        found: list[Cell] = []
        for layer, half in self.keys:
            index = self._index(_plain(pool), layer, half)
            if index is not None:
                region = self._region(index, layer, half)
                mine = (
                    (cell, elements)
                    for cell, elements in self._cells.items()
                    if (cell.layer, cell.half) == (layer, half)
                )
                found += [cell for cell, elements in mine if elements & region]
        return found

    def _region(self, index: str, layer: int, half: int) -> set[int]:
        """The elements that an index takes of the tensor that holds a half; none if it has no such element."""
        try:
            taken = eval(f"tensor{index}", {"tensor": self._numbered[self._place(layer, half)]})
        except IndexError:  # a name that another tensor's begins with
            return set()
        return set(taken.flatten().tolist())

    def _index(self, pool: str, layer: int, half: int) -> str | None:
        """The index that ``pool`` has behind the name of the tensor that holds a half; None if it is another one's.

        A layer that is no graph with its model calls the tensor by the name of its own argument, which may end the
        name of the list that holds the model's.
        """
        argument = attribute_names(self.count, self.program.names)[half if self.count == 2 else 0]
        for end in sorted({len(pool), *(m.start() for m in re.finditer(r"\[", pool))}):
            if _same(pool[:end], self.base[layer, half]) or (pool[:end] == argument and not self.program.loop):
                return pool[end:]
        return None

    def _place(self, layer: int, half: int) -> tuple[int, int]:
        """Which tensor holds a half: of which list, and which of the list's."""
        return 0 if self.program.one_tensor else layer, half if self.count == 2 else 0

    def _find_cells(self, table: torch.Tensor) -> None:
        """Number the elements of each tensor, and look where the cells are."""
        z, layout = self.program.sizes, self.program.layout
        numbered = [[torch.arange(t.numel()).view(t.shape) for t in mine] for mine in layout.allocate(z, torch.float32)]
        self._numbered = {(n, m): tensor for n, mine in enumerate(numbered) for m, tensor in enumerate(mine)}
        for layer, half in self.keys:
            for row in range(z.batch):
                for position in range(z.length):
                    cell = layout.cell(layout.half(numbered, layer, half), table, z, row, position)
                    self._cells[Cell(layer, half, row, position)] = set(cell.flatten().tolist())

    def precise(self, violation: Violation, meant: set[Cell]) -> bool:
        """Whether a report says which layer and which half, as far as the graph shows it.

        KV is said of one half where no attention is in the graph that writes it, and of both where an op is given both
        in one tensor there.
        """
        program = self.program
        layers, halves = {cell.layer for cell in meant}, {cell.half for cell in meant}
        if len(layers) > 1 and (program.one_tensor or program.loop):
            return False  # else their tensors have one name, and a number tells them apart
        if program.merged:
            return True
        told = program.layout.latent or violation.half != "KV"
        hidden = program.broken != "" and (len(halves) == 1 or program.way.unit == "both")
        return (told and len(halves) == 1) or hidden

    def unguarded(self, summary: str) -> set[Key]:
        """The halves that a summary calls unguarded."""
        if "nothing is guarded" in summary:
            return set(self.keys)
        said = [_plain(name) for name in re.findall(r"^\s+(?:not|cannot)\s+(\S+):", summary, re.MULTILINE)]
        return {key for key in self.keys if any(_same(name, self.base[key]) for name in said)}


def _plain(name: str) -> str:
    """A name with keys of dicts as attributes, without a trailing number of its own."""
    name = re.sub(r" #\d+$", "", name.strip('"'))
    return re.sub(r"\['?([A-Za-z_]\w*)'?\]", r".\1", name)


def _same(said: str, name: str) -> bool:
    return said == name or said.endswith("." + name) or name.endswith("." + said)
