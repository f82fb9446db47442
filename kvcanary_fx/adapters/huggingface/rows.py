"""The rows of requests: their block tables and their own tokens, as the device has them.

A request keeps its row from batch to batch, so that a step sends what is new: the token of the last one, and blocks
that were added.  Building all of it anew took 20 ms of a step of 32 requests of 4,096 tokens (one CPU core).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...engine.runs import Runs
from ...kernels.staging import lasting
from .groups import Group

#: Tokens of a row of the history at first.
COLUMNS = 1024


class _Row:
    """A row, and what the device has of it.

    Attributes:
        name: of the request that it belongs to, or did.
        prompt, output: its lists of tokens; another request, or the same one started anew, has other lists.
        tokens: how many of them the device has.
        blocks: of the request, by group, as they were when they were last sent; ``entries``: what was sent.
        batch: the last one that it was in.
    """

    __slots__ = ("batch", "blocks", "entries", "name", "number", "output", "prompt", "tokens")

    def __init__(self, number: int, groups: int):
        self.number, self.name, self.batch, self.tokens = number, "", 0, 0
        self.prompt: Sequence[int] | None = None
        self.output: Sequence[int] | None = None
        self.blocks: list[list[int]] = [[] for _ in range(groups)]
        self.entries: list[list[int]] = [[] for _ in range(groups)]

    def release(self) -> None:
        """The request is gone; its blocks stay on the device."""
        self.prompt = self.output = None


class RequestRows:
    """Gives each request of a batch a row of the groups' tables, and fills it.

    Attributes:
        history: int32 ``[rows, columns]``, the tokens of each row's request; another tensor once it has to grow.
    """

    def __init__(self, groups: Sequence[Group], requests: int):
        """
        Args:
            requests: rows of the tables, the most requests of a batch.
        """
        self._groups, device = groups, groups[0].table.device
        self._most, self._batch = requests, 0
        self._rows: dict[str, _Row] = {}
        self._free: list[_Row] = []
        self._made = 0
        self._runs = Runs(device)
        self._tokens: list[tuple[int, int, Sequence[int]]] = []  # to be sent: a row, the first column, what
        self.history = lasting(min(requests, 16), COLUMNS, dtype=torch.int32, device=device).zero_()

    def fill(self, states: Sequence[Any]) -> tuple[list[int], list[int]]:
        """The row of each request, and how many tokens it has; the device is sent what is new.

        Args:
            states: transformers' RequestStates of the batch, in order.
        """
        self._batch += 1
        rows, lengths = [], []
        for state in states:
            row = self._rows.get(state.request_id)
            if row is None:
                row = self._take(state.request_id, states)
            row.batch = self._batch
            prompt, output = state.initial_tokens, state.generated_tokens
            length = len(prompt) + len(output)
            if row.prompt is not prompt or row.output is not output or length < row.tokens:
                row.prompt, row.output, row.tokens = prompt, output, 0
            if length > row.tokens:
                self._add_tokens(row, prompt, output, length)
            self._fill_blocks(row)
            rows.append(row.number)
            lengths.append(length)
        self._send(max(lengths, default=0))
        if len(self._rows) > 2 * len(states) + 16:  # those of finished requests hold their tokens
            self._release({state.request_id for state in states})
        return rows, lengths

    def _take(self, name: str, states: Sequence[Any]) -> _Row:
        if not self._free and self._made < self._most:
            self._free.append(_Row(self._made, len(self._groups)))
            self._made += 1
        if not self._free:
            self._release({state.request_id for state in states})
        row = self._rows[name] = self._free.pop()
        row.name = name
        return row

    def _release(self, but: set[str]) -> None:
        """Take the rows of all requests but some."""
        for name in [name for name in self._rows if name not in but]:
            row = self._rows.pop(name)
            row.release()
            self._free.append(row)

    def _add_tokens(self, row: _Row, prompt: Sequence[int], output: Sequence[int], length: int) -> None:
        start = row.tokens & ~1
        new = output[start - len(prompt) :] if start >= len(prompt) else [*prompt[start:], *output]
        self._tokens.append((row.number, start, new if not len(new) % 2 else [*new, 0]))
        row.tokens = length

    def _fill_blocks(self, row: _Row) -> None:
        for at, group in enumerate(self._groups):
            blocks = group.allocator.block_table.get(row.name, ())
            if blocks == row.blocks[at] or (not blocks and not row.blocks[at]):
                continue
            before, entries = row.entries[at], group.entries(blocks)
            row.blocks[at], row.entries[at] = list(blocks), entries
            same = min(len(before), len(entries))
            if entries[:same] != before[:same]:
                same = next(i for i in range(same) if entries[i] != before[i])
            start = same & ~1
            changed = [*entries[start:], *[-1] * (len(before) - len(entries))]
            if changed:
                self._runs.add(group.rows, row.number, start, changed if not len(changed) % 2 else [*changed, -1])

    def _send(self, longest: int) -> None:
        if self._tokens:
            self._make_room(max(number for number, _, _ in self._tokens) + 1, longest + longest % 2)
            for number, start, tokens in self._tokens:
                self._runs.add(self.history, number, start, tokens)
            self._tokens.clear()
        self._runs.send()

    def _make_room(self, rows: int, columns: int) -> None:
        """Let the history have so many, twice as many if it has to grow."""
        old = self.history
        if rows <= old.shape[0] and columns <= old.shape[1]:
            return
        more = [n if n <= had else 1 << (n - 1).bit_length() for n, had in zip((rows, columns), old.shape, strict=True)]
        shape = max(more[0], old.shape[0]), max(more[1], old.shape[1])
        self.history = lasting(*shape, dtype=old.dtype, device=old.device).zero_()
        self.history[: old.shape[0], : old.shape[1]] = old
