"""A small engine over groups of layers of any shape, and the faults that are done to it by hand."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from forms import FP8, PAGE
from groups import WIDTH, Group, Work
from torch import nn

import kvcanary_fx
from kvcanary_fx import Batch, Violation

Slots = dict[str, list[int]]


def values(rows: torch.Tensor, half: torch.Tensor, lead: int) -> torch.Tensor:
    """Rows of a half's type and shape, made of the tokens' features ``[n, 8]``."""
    shape = half.shape[lead:]
    count = shape.numel()
    wide = rows.repeat(1, -(-count // rows.shape[1]))[:, :count].reshape(-1, *shape)
    if half.dtype == torch.uint8:
        return (wide * 100).abs().to(torch.uint8)
    return wide.to(half.dtype)


class Layer(nn.Module):
    """Writes the halves of one layer and reads them."""

    def __init__(self, group: Group, kernel: bool, reader: bool):
        super().__init__()
        self.halves, self.lead, self.kernel, self.reader = group.form.halves, 1 + group.form.paged, kernel, reader

    def forward(self, tensors, x, slots, taken, reads, shift):
        for number, half in enumerate(self.halves(tensors)):
            if slots is not None and not self.reader:
                rows = values(x[taken] + number, half, self.lead)
                self._write(half, rows, slots, shift)
            read = half[reads // PAGE, reads % PAGE] if self.lead == 2 else half[reads]
            x = x + 0.01 * read.to(torch.float32).mean()
        return x

    def _write(self, half, rows, slots, shift) -> None:
        if self.kernel:
            torch.ops.pool_forms.store(half, rows, slots, shift)
        elif self.lead == 2:
            half[slots // PAGE, slots % PAGE] = rows
        else:
            half[slots] = rows


class Model(nn.Module):
    """The layers of all groups, each under the name that its pool gives it."""

    def __init__(self, groups: Sequence[Group], kernel: bool):
        nn.Module.__init__(self)
        for group in groups:
            seen: list[Any] = []
            layers = nn.ModuleList()
            for tensors in group.kv:
                layers.append(Layer(group, kernel, reader=any(tensors is s for s in seen)))
                seen.append(tensors)
            setattr(self, group.name, layers)

    def forward(self, kv, x, slots, taken, reads, shift):
        for name, layers in kv.items():
            for number, tensors in enumerate(layers):
                layer = getattr(self, name)[number]
                x = layer(tensors, x, slots[name], taken[name], reads[name], shift)
        return x


class Rig:
    """A session over groups, and requests A, B, ... with rows 1, 2, ..."""

    def __init__(self, groups: Sequence[Group], kernel: bool = False, **settings: Any):
        self.groups = list(groups)
        self.device = self.groups[0].table.device
        settings = {"inner": "eager", "mode": "log", **settings}
        session = kvcanary_fx.install_canary(*[g.pool() for g in self.groups], **settings)
        assert session is not None
        self.session, self.stored = session, {}
        for group in self.groups:
            group.guard = session.pools[group.name]
        session.mark_ready()
        # Dynamo keeps what it compiled with the code object, and gives up after a few models over one
        forward = types.FunctionType(Model.forward.__code__.replace(), globals())
        own = type("OwnModel", (Model,), {"forward": forward})
        self.model = torch.compile(own(self.groups, kernel), backend=session.backend, dynamic=False)

    def reset(self) -> None:
        """Back to empty pools and nothing reported, with the graphs compiled so far."""
        self.stored.clear()
        for group in self.groups:
            group.reset()
        self.session.mark_ready()

    def history(self, request: str) -> list[int]:
        return [(7 * ord(request) + 3 * p) % 50 + 1 for p in range(40)]

    def row(self, request: str) -> int:
        return ord(request) - ord("A") + 1

    def run(
        self,
        request: str,
        count: int = 1,
        received: Callable[[str, list[int]], list[int]] | None = None,
        shift: int = 0,
        poison: bool = False,
        late: Callable[[], None] | None = None,
        **plan: Any,
    ) -> None:
        """The next tokens of a request.

        Args:
            received: from a group and its slots to what the model's write gets instead.
            shift: how far from them the store kernel really writes.
            poison: the rows hold a NaN.
            late: what happens after the batch was planned.
            plan: fields of the batch that are not what they should be.
        """
        start, row, tokens = self.stored.get(request, 0), self.row(request), self.history(request)
        work = {g.name: g.plan(request, row, start, count) for g in self.groups}
        batch = self._batch(request, work, start, count) | plan
        if isinstance(batch.get("encoder"), Batch) and "encoder" not in plan:
            batch["encoder"] = dataclasses.replace(batch["encoder"], **plan)
        x = torch.randn(max(count, 8), 8, generator=torch.Generator().manual_seed(100 * row + start))
        x = (torch.full_like(x, torch.nan) if poison else x).to(self.device)
        slots = {n: w.written for n, w in work.items()}
        if received is not None:
            slots = {n: None if s is None else received(n, s) for n, s in slots.items()}
        if late is not None:
            late()
        kv = {g.name: g.kv for g in self.groups}
        taken = {n: self._tensor(w.taken) for n, w in work.items()}
        # of one length in all forwards: Dynamo compiles for each, and after eight of them runs without the canary
        reads = {n: self._tensor((w.reads + w.reads[:1] * WIDTH)[:WIDTH]) for n, w in work.items()}
        given = {n: None if s is None else self._tensor(s) for n, s in slots.items()}
        with self.session.step(batch), self.session.forward(), torch.no_grad():
            self.model(kv, x, given, taken, reads, self._tensor(shift))
        self.stored[request] = start + count
        for group in self.groups:
            group.after(request, row, start + count)
        assert len(tokens) >= start + count

    def _tensor(self, numbers: list[int] | int) -> torch.Tensor:
        return torch.tensor(numbers, device=self.device)

    def _batch(self, request: str, work: dict[str, Work], start: int, count: int) -> dict[str, Any]:
        tokens, row = self.history(request), self.row(request)
        batch: dict[str, Any] = {
            "input_ids": tokens[start : start + count],
            "positions": list(range(start, start + count)),
            "slots": [0] * count,
            "request_rows": [row],
            "prefix_lens": [start],
            "extend_lens": [count],
            "request_ids": [request],
            "history": torch.tensor([tokens]),
            "history_lens": [len(tokens)],
        }
        for group in self.groups:
            sub = group.sub_batch(work[group.name], row, request)
            if sub is not None:
                batch["encoder"] = sub
            elif work[group.name].planned and not hasattr(group, "map"):
                batch[group.field] = work[group.name].planned
        return batch

    def finish(self, request: str) -> None:
        total = self.stored.pop(request)
        for group in self.groups:
            group.finish(request, self.row(request), total)

    def live(self, group: Group, request: str = "A") -> int:
        return group.live(self.row(request), self.stored[request])

    def flip(self, group: Group, layer: int, half: int, slot: int) -> None:
        """Change one bit of the last byte of a slot's row."""
        view = group.bytes_of[layer][half]
        row = view[slot // PAGE, slot % PAGE] if group.form.paged else view[slot]
        raw = row.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        raw.view(-1)[-1] ^= 1 if row.dtype != FP8 else 2
        row.copy_(raw.view(row.dtype).view(row.shape))

    def found(self) -> list[Violation]:
        return self.session.violations()
