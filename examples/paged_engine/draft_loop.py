"""The inner forwards of an eagle draft: one for each token that it proposes in a row, over all branches."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from batching import Inputs
from config import EngineConfig
from faults import Faults

if TYPE_CHECKING:
    from draft import Head


@dataclasses.dataclass
class Loop:
    """What stays the same from forward to forward, each ``[branches]`` and longest branch first.

    What changes is computed on the device, so that nothing waits for it and the loop can be captured: :meth:`at` is a
    batch for the canary, its tensors made of those of the forward before.

    Attributes:
        rows: int64, of the request table.
        starts: int64, positions that are stored.
        spaces: int64, namespaces.
        owners: ids of the requests, or what the canary makes of them.
        reads: int64 ``[views, width]``, the slot of each position.
        history, history_lens: int64 ``[branches, longest]`` and ``[branches]``: the requests' own tokens, and how many;
            for the canary.
        steps: tokens that each branch proposes.
        real_counts: int64 ``[2]`` or None: how many requests and tokens of a forward are real, the rest being padding;
            a branch adds one token, so both are the number of branches.
    """

    config: EngineConfig
    rows: torch.Tensor
    starts: torch.Tensor
    spaces: torch.Tensor
    owners: list[str] | torch.Tensor
    reads: torch.Tensor
    history: torch.Tensor
    history_lens: torch.Tensor
    steps: list[int]
    real_counts: torch.Tensor | None = None

    def run(self, head: Head, first: torch.Tensor, hidden: torch.Tensor, faults: Faults) -> list[torch.Tensor]:
        """For each step the proposed tokens, int64 ``[active]``; nothing is read back from the device.

        Args:
            first: int64 ``[branches]``, the tokens of the first step.
            hidden: ``[branches]`` or ``[branches, dim]``, the states behind them.
        """
        said = [first]
        for index in range(1, max(self.steps)):
            n = sum(steps > index for steps in self.steps)
            batch = self.at(index, said[-1][:n])
            guesses, hidden = head.forward(index, batch, batch.inputs(), hidden[:n], faults)
            said.append(guesses[:n, 0])
        return said

    def at(self, index: int, ids: torch.Tensor) -> LoopBatch:
        """The forward that writes the ``index``-th proposed tokens, int64 ``[active]``."""
        n = len(ids)
        positions = self.starts[:n] + index - 1
        slots = self.reads[:n].gather(1, positions.unsqueeze(1)).squeeze(1)
        return LoopBatch(self, ids, slots, self.rows[:n], positions, self.owners[:n], self.spaces[:n])


@dataclasses.dataclass
class LoopBatch:
    """One inner forward; its fields are those of :class:`kvcanary_fx.Batch`, one token each, ``[active]``."""

    loop: Loop
    input_ids: torch.Tensor
    slots: torch.Tensor
    request_rows: torch.Tensor
    positions: torch.Tensor
    request_ids: list[str] | torch.Tensor
    namespaces: torch.Tensor

    def __post_init__(self) -> None:
        self.prefix_lens = self.positions
        self.real_counts = self.loop.real_counts

    @property
    def history(self) -> torch.Tensor:
        return self.loop.history[: len(self.slots)]

    @property
    def history_lens(self) -> torch.Tensor:
        return self.loop.history_lens[: len(self.slots)]

    def inputs(self) -> Inputs:
        """The model's inputs, padded like those of :class:`~batching.Plan`."""
        config, n = self.loop.config, len(self.slots)
        more = config.padded(n) - n

        def pad(values: torch.Tensor, value: int = 0) -> torch.Tensor:
            return torch.nn.functional.pad(values, (0, more), value=value)

        numbers = torch.arange(n, device=self.slots.device)
        return Inputs(
            pad(self.input_ids),
            pad(self.positions),
            pad(self.namespaces),
            pad(numbers, config.views - 1),
            [pad(self.slots)],
            [self.loop.reads],
        )


class LoopGraph:
    """A loop of so many steps over fixed tensors, with room for every branch: captured once, then replayed.

    The first call runs as it is, and compiles; on a CPU all do.  Branches of padding write to slot 0, and read row 0.

    Attributes:
        runs: calls so far.
        graph: None before the first call, and on a CPU.
    """

    def __init__(self, head: Head, config: EngineConfig, steps: int, faults: Faults):
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=config.device)

        n = config.views
        self.head, self.faults, self.first, self.hidden = (
            head,
            faults,
            zeros(n),
            head.hidden[:1].repeat_interleave(n, 0),
        )
        self.loop = Loop(
            config, zeros(n), zeros(n), zeros(n), zeros(n), zeros(n, config.width), zeros(n, config.width + 1),
            zeros(n), [steps] * n, zeros(2),
        )  # fmt: skip
        self.said: list[torch.Tensor] | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.runs = 0

    def __call__(self, loop: Loop, first: torch.Tensor, hidden: torch.Tensor) -> list[torch.Tensor]:
        """:meth:`Loop.run` for ``loop``, whose branches all have the same number of steps."""
        n, self.runs = len(first), self.runs + 1
        self._fill(loop, first, hidden)
        if self.graph is not None:
            self.graph.replay()
            said = self.said
        else:
            said = [tokens.clone() for tokens in self._run()]
            self._capture()
        assert said is not None
        return [tokens[:n] for tokens in said]

    def _fill(self, loop: Loop, first: torch.Tensor, hidden: torch.Tensor) -> None:
        own, session = self.loop, self.head.session
        given = {"rows": loop.rows, "starts": loop.starts, "spaces": loop.spaces, "reads": loop.reads}
        given |= {"history": loop.history, "history_lens": loop.history_lens}
        if session is not None:
            given["owners"] = session.owners(loop.owners)  # canary
        for name, values in given.items():
            target = getattr(own, name)
            target.zero_()
            target[tuple(slice(size) for size in values.shape)] = values
        for target, values in ((self.first, first), (self.hidden, hidden)):
            target.zero_()
            target[: len(values)] = values
        assert own.real_counts is not None
        own.real_counts.fill_(len(first))

    def _run(self) -> list[torch.Tensor]:
        return self.loop.run(self.head, self.first, self.hidden, self.faults)

    def _capture(self) -> None:
        if self.first.device.type != "cuda":
            return
        if self.head.session is not None:
            self.head.session.inputs.freeze()  # canary
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.said = self._run()
