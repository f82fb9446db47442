"""What a sanitizer of the cache must, may and must not report: plain torch over the bytes of cells.

Nothing here knows how the canary works.  What is legal follows docs/pools.md:

* What a forward of the guarded model writes is legal.  So is what a program does from outside and calls a prefill, a
  reset, a crop, a reordering or a new cache.
* A fault is a change of a cell's bytes by anything else.  It must be reported in the forward that reads the cell, if
  the cell is guarded: a guarded forward has written it, or it lay below what a guarded forward wrote in its row.
* A reported cell that holds again what it held before was put right, if something that PyTorch counts wrote to it.
* A fault cannot be told from a legal change, and may be reported or not, where something that PyTorch counts wrote to
  the cache since the last forward, and either the row's next write does not continue its last one, or the position
  has changed in K and V of every layer but the first, and so has every later one in its row.  The later ones are not
  asked where a graph of several layers does not show which slots it writes, nor in a pool; there a position that
  changed in K and V from some layer on has new tokens, too, beside another one.  Nor can it where a row holds what
  another one held, as after a reordering: a fault that undoes a legal-looking one leaves that in a row with another's
  tokens.
* Where slots were taken for the heads of a sequence, since nothing in a graph shows them, a row is one position.
* Where each graph holds one half, bytes in a slot that was empty look like a token's, too.
* To a graph of one layer, or of one half whose writes do not show their slots or that was compiled anew, new tokens
  that are no new prompt by their looks may be reported: at less than two positions of a row that it knows, or less
  than half of those from the first of them on.
* A cache that no guarded graph writes, because its writes break the graph, is written so in each forward, layer by
  layer: there K and V of the layer are enough.
"""

from __future__ import annotations

import dataclasses

import torch

Key = tuple[int, int]
Cells = dict[Key, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Cell:
    layer: int
    half: int
    row: int
    position: int


class Oracle:
    """Keeps what was last legally written.

    Attributes:
        rows: sequences are rows of the cache, so that a prefill outside is told by where the next write begins.
        later_asked: a position holds new tokens only if the later ones of its row have changed as well.
        unwritten: no guarded graph writes the cache.
        guessed: slots are heads of sequences, each with all of its positions.
        alone: each graph holds one half.
        one_layer: each graph holds one layer, or one half: whose writes do not show their slots, or which no graph
            of this compilation has held before.
    """

    def __init__(self, cells: Cells, rows: bool, merged: bool, written_whole: bool, later_asked: bool):
        self.truth = {key: bytes_.clone() for key, bytes_ in cells.items()}
        self.seen = {key: bytes_.clone() for key, bytes_ in cells.items()}
        shape = next(iter(cells.values())).shape[:2]
        self.guarded = torch.zeros(shape, dtype=torch.bool)
        self.rows, self.merged, self.written_whole = rows, merged, written_whole
        self.later_asked = later_asked
        self.counted = self.unwritten = self.guessed = self.alone = self.one_layer = False
        self._legal_looking = {key: torch.zeros(shape, dtype=torch.bool) for key in cells}
        self._reported = {key: torch.zeros(shape, dtype=torch.bool) for key in cells}
        self._unhurt = {key: bytes_.clone() for key, bytes_ in cells.items()}  # before what was reported
        self.ended = -1  # where the last guarded write ended, -1 before the first

    def legal(self, cells: Cells, counted: bool) -> None:
        """Something outside changed the cache legally."""
        self.truth = {key: bytes_.clone() for key, bytes_ in cells.items()}
        self.counted |= counted

    def forget(self) -> None:
        """The cache goes on in tensors that no guarded forward returned."""
        self.guarded[:] = False

    def before(self, cells: Cells, start: int, first_layer: int = 0) -> tuple[set[Cell], set[Cell]]:
        """The cells that the coming forward must report, and those that it may report.

        Args:
            start: the first position that it writes.
            first_layer: layers before this one have run.
        """
        bad = {key: (now != self.truth[key]).any(-1) for key, now in cells.items()}
        read = torch.zeros_like(self.guarded)
        read[:, : None if self.written_whole else start] = True
        right = self._put_right(cells)
        self._legal_looking = {key: legal | right[key] for key, legal in self._excused(cells, start).items()}
        must = {key: read & self.guarded & ~legal for key, legal in self._legal_looking.items()}
        told = _cells({key: mask & must[key] for key, mask in bad.items() if key[0] >= first_layer})
        return told, _cells(bad) | self._doubtful(cells)

    def _put_right(self, cells: Cells) -> Cells:
        """bool ``[B, S]`` by half: reported cells that hold again what they held before the report."""
        same = {key: (now == self._unhurt[key]).all(-1) for key, now in cells.items()}
        return {key: self._reported[key] & same[key] & self.counted for key in cells}

    def _doubtful(self, cells: Cells) -> set[Cell]:
        """The cells that a legal change has left looking like no new prompt to a graph of one layer."""
        doubtful: set[Cell] = set()
        for layer in {layer for layer, _ in cells} if self.one_layer and self.counted else ():
            keys = [key for key in cells if key[0] == layer]
            changed = torch.stack([(cells[key] != self.seen[key]).any(-1) for key in keys])
            filled = torch.stack([(cells[key] != 0).any(-1) for key in keys])
            held = self.guarded & torch.stack([(self.seen[key] != 0).any(-1) for key in keys]).any(0)
            again, some = (changed.all(0) & held).sum(1), changed.any(0)
            later = (held | some) & (some.to(torch.int64).cumsum(1) > 0)
            few = ((again < 2) | (2 * again < later.sum(1))).unsqueeze(1)
            doubtful |= _cells({key: mask & few for key, mask in zip(keys, changed & filled, strict=True)})
        return doubtful

    def _excused(self, cells: Cells, start: int) -> Cells:
        """bool ``[B, S]`` by half: changes here cannot be told from legal ones."""
        if not self.counted and not self.unwritten:
            return dict.fromkeys(cells, torch.zeros_like(self.guarded))
        if self.rows and not self.written_whole and start != self.ended:
            return dict.fromkeys(cells, torch.ones_like(self.guarded))
        layers = {layer for layer, _ in cells}
        wanted = [key for key in cells if len(layers) == 1 or key[0] > min(layers)]
        changed = {key: (cells[key] != self.seen[key]).any(-1) for key in cells}
        if self.guessed:
            changed = {key: found.any(1, keepdim=True).expand_as(found) for key, found in changed.items()}
        if self.merged:  # one fingerprint for both
            changed = {(layer, half): changed[layer, 0] | changed[layer, 1] for layer, half in changed}
        if self.unwritten:
            return {(layer, half): changed[layer, 0] & changed[layer, 1] for layer, half in cells}
        new = self._rewritten(changed, wanted) | self._moved(cells, start)
        if self.alone:
            return {key: new | (changed[key] & (self.seen[key] == 0).all(-1)) for key in cells}
        return dict.fromkeys(cells, new)

    def _rewritten(self, changed: Cells, wanted: list[Key]) -> torch.Tensor:
        """bool ``[B, S]``: positions that hold new tokens, as far as one can tell."""
        legal = torch.ones_like(self.guarded)
        for key in wanted:
            legal &= changed[key]
        if self.later_asked:
            end = self.guarded.shape[1] if self.written_whole else max(self.ended, 0)
            later = legal.clone()
            later[:, end:] = True
            closed = later.flip(1).to(torch.int64).cumprod(1).flip(1).to(torch.bool)
            legal &= closed
        if not self.rows and bool(legal.any()):
            legal = legal | self._rounded(changed)
        return legal

    def _rounded(self, changed: Cells) -> torch.Tensor:
        """bool ``[B, S]``: positions that changed in both halves of every layer from some layer on."""
        from_here = torch.ones_like(self.guarded)
        rounded = torch.zeros_like(self.guarded)
        for layer in sorted({layer for layer, _ in changed}, reverse=True):
            from_here = from_here & changed[layer, 0] & changed[layer, 1]
            rounded |= from_here
        return rounded

    def _moved(self, cells: Cells, start: int) -> torch.Tensor:
        """bool ``[B, S]``: rows that hold in every half, below the next write, what one other row held."""
        moved = torch.zeros_like(self.guarded)
        if not self.rows or self.written_whole:
            return moved
        now, before = (torch.cat([t[key][:, :start].flatten(1) for key in cells], 1) for t in (cells, self.seen))
        same = (now.unsqueeze(1) == before).all(-1)
        moved[same.fill_diagonal_(False).any(1)] = True
        return moved

    def written(self, half: Key, start: int, count: int) -> set[Cell]:
        """The cells of a half that a forward was to write."""
        there = torch.zeros_like(self.guarded)
        there[:, start : start + count] = True
        return _cells({half: there})

    def after(self, cells: Cells, start: int, count: int, reported: set[Cell], checked: Cells | None = None) -> None:
        """A guarded forward has run.

        Args:
            checked: what the checks saw, if an op of the forward may have hit reported cells once more.
        """
        told = {key: torch.zeros_like(self.guarded) for key in cells}
        for cell in reported:
            told[cell.layer, cell.half][cell.row, cell.position] = True
        written = torch.zeros_like(self.guarded)
        written[:, start : start + count] = True
        if self.written_whole:
            written[:] = True
        for key, now in cells.items():
            hurt = (told[key] & ~written).unsqueeze(-1)
            self._unhurt[key] = torch.where(hurt, self.truth[key], self._unhurt[key])
            self._reported[key] = (self._reported[key] | told[key]) & ~written
            self.truth[key] = torch.where(hurt, now if checked is None else checked[key], self.truth[key])
            settled = written | self._legal_looking[key]
            self.truth[key] = torch.where(settled.unsqueeze(-1), now, self.truth[key])
        self.guarded |= written
        if self.rows:
            self.guarded[:, :start] = True
        self.seen = {key: bytes_.clone() for key, bytes_ in cells.items()}
        self.ended, self.counted = start + count, False


def _cells(masks: dict[Key, torch.Tensor]) -> set[Cell]:
    return {Cell(layer, half, *at) for (layer, half), mask in masks.items() for at in mask.nonzero().tolist()}
