"""Reading what a session says: which cells a violation is about, and which caches are called unguarded."""

from __future__ import annotations

import re

import torch

from fuzz.containers import ATTRIBUTES, attribute_names, expression
from fuzz.oracle import Cell, Key
from fuzz.program import Program
from kvcanary_fx import Violation


class Names:
    """What the halves of a program are called."""

    def __init__(self, program: Program, count: int):
        self.program = program
        self.count = count
        z = program.sizes
        self.keys = [(layer, half) for layer in range(z.layers) for half in range(2)]
        self.base = {key: self._base(*key) for key in self.keys}
        self.full = {key: self._full(*key) for key in self.keys}

    def _base(self, layer: int, half: int) -> str:
        """The tensor that holds a half."""
        program = self.program
        layer, place = 0 if program.one_tensor else layer, half if self.count == 2 else 0
        if program.compiled == "layers" and not program.loop and program.container not in ATTRIBUTES:
            return attribute_names(self.count, program.names)[place]  # an argument of the layer
        owned = program.container in ATTRIBUTES and not program.one_tensor and program.compiled != "layers"
        owner = f"layers.{layer}." if owned else ""
        return owner + _plain(expression(program.container, program.names, layer, place, self.count))

    def _full(self, layer: int, half: int) -> str:
        """The same with the indices that pick the half, where they are constants."""
        index = {
            "layers": f".{layer}",
            "kv0": f".{half}",
            "kv1": f".{half}",
            "layers_kv": f".{layer}.{half}",
            "kv_layers": f".{half}.{layer}",
        }
        return self.base[layer, half] + index.get(self.program.layout.packing, "")

    def halves_meant(self, violation: Violation) -> set[Key]:
        """The halves that a report can mean by what it calls the layer, the half and the pool."""
        program, meant = self.program, set(self.keys)
        if violation.half in ("K", "V") and not program.merged:
            meant = {key for key in meant if "KV"[key[1]] == violation.half}
        pool = _plain(violation.pool)
        module = re.search(r"(?:^|\.)layers\.(\d+)", _plain(violation.layer))
        if module is not None and not program.loop and program.compiled != "layers":
            meant = {key for key in meant if key[0] == int(module.group(1))}
        by_name = {key for key in self.keys if _same(pool, self.full[key])}
        shorter = [pool, *(pool[: m.start()] for m in reversed([*re.finditer(r"\.\d+(?=\.|$)", pool)]))]
        for said in shorter:  # without the indices that pick the half
            by_name = by_name or {key for key in self.keys if _same(said, self.base[key])}
        return meant & by_name if by_name else meant

    def precise(self, meant: set[Key]) -> bool:
        """Whether a report says which layer and which half."""
        layers, halves = {layer for layer, _ in meant}, {half for _, half in meant}
        # each layer is then a model to itself, or its module is lost at the break: numbers tell them apart
        alone = self.program.compiled == "layers" or self.program.breaks != ""
        return (len(layers) == 1 or alone) and (len(halves) == 1 or self.program.merged)

    def unguarded(self, summary: str) -> set[Key]:
        """The halves that a summary calls unguarded."""
        if "nothing is guarded" in summary:
            return set(self.keys)
        said = [_plain(name) for name in re.findall(r"^\s+(?:not|cannot)\s+(\S+):", summary, re.MULTILINE)]
        return {key for key in self.keys if any(_same(name, self.base[key]) for name in said)}


def _plain(name: str) -> str:
    """A name with its parts separated by dots, without a trailing number of its own."""
    name = re.sub(r" #\d+$", "", name.strip('"'))
    return re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", name)


def _same(said: str, name: str) -> bool:
    return said == name or said.endswith("." + name) or name.endswith("." + said)


def cells_meant(violation: Violation, names: Names, table: torch.Tensor) -> set[Cell]:
    """The cells that a report can mean."""
    program = names.program
    z = program.sizes
    numbers = program.layout.slot_numbers
    return {
        Cell(layer, half, row, position)
        for layer, half in names.halves_meant(violation)
        for row in range(z.batch)
        for position in range(z.length)
        if violation.slot in numbers(table, z, row, position, program.rows)
    }
