"""The layers of a draft under Model Runner V2: layers of the target's pools, that run later.

::

    execute_model        what the step reads is compared in the draft's layers, too
      target               each layer records what it wrote
    sample_tokens
      propose
        prefill              the draft's layers record: the same tokens in the same slots as the target's
        decode, decode, ...  guesses: nothing is recorded
      the slots of rejected drafts are marked, and their bytes in the draft's layers forgotten

The runner proposes after each step, and the first forward of a proposal writes the slots that the target wrote: owners,
positions, tokens and tables are those of the step.  Guesses go to the slots behind, which the next step writes again
before it reads them, accepted or not; a guess that hits another slot is reported when that is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from ....engine.layers import LayerChecks
from ....engine.session import EngineSession
from ....kernels.context import ForwardContext, forward_context, get_forward_context
from ....kernels.side_stream import capturing
from .. import ops
from ..pools import Group, own_layers
from .rejected import Marked, Rejected


def why_unguarded(speculator: Any) -> str | None:
    """Why the layers of a draft cannot be guarded; None if they can.

    Other speculators run through several layers in turn, draft in parallel, or write other tokens than the target.
    """
    if type(speculator) in (EagleSpeculator, MTPSpeculator, StandaloneARSpeculator):
        return None
    return f"drafts of {getattr(speculator, 'method', type(speculator).__name__)} are not supported by this adapter"


class Drafting:
    """What the guard of a runner does about drafts, if there are any.

    Attributes:
        layers: how many layers of a draft are guarded.
        expected: whether the runner has drafts to verify, or proposes some.
    """

    def __init__(self, runner: Any, groups: Sequence[Group]):
        self.layers = sum(len(group.drafted) for group in groups)
        self.expected = bool(runner.num_speculative_steps) or getattr(runner, "speculator", None) is not None
        self._runner, self._groups, self._own = runner, groups, own_layers(groups, drafted=True)
        self._verifies = False  # the running step has drafts
        self._verified: tuple[torch.Tensor, torch.Tensor] | None = None  # what became of them
        self._context: ForwardContext | None = None  # what the target's ops found in this step
        self._seen: int | None = None  # layers in the running proposal; None: a graph of all of it is replayed
        self._in_graphs = self.layers  # in the graph that has the fewest

    def mark_in(self, session: EngineSession) -> None:
        """A session was made: its slots are those to mark."""
        if not self._runner.num_speculative_steps:
            return
        self._rejected = Rejected(
            [_marked(session, group) for group in self._groups], self._runner.num_speculative_steps
        )
        nobody = torch.zeros(2, dtype=torch.int32, device=self._runner.device)
        self._rejected.mark(nobody, nobody[:1])  # no kernel is compiled while a client waits

    def begin(self, drafted: int) -> None:
        """The target is about to run, in the context of its ops.

        Args:
            drafted: tokens of the batch that are drafts.
        """
        self._verifies, self._verified = drafted > 0, None
        if self.layers:
            self._context, self._seen = dataclasses.replace(get_forward_context(), held=None), None

    def verified(self, starts: torch.Tensor, rejected: torch.Tensor) -> None:
        """The drafts of the step were verified.

        Args:
            starts: integer ``[> bs]``, where each request's tokens begin in the batch; it stays until :meth:`end`.
            rejected: integer ``[bs]``, how many of its last tokens were rejected.
        """
        if self._verifies:
            self._verified = starts, rejected

    @contextlib.contextmanager
    def captured(self, checks: LayerChecks, tokens: int, whole: bool) -> Iterator[None]:
        """Around the first forward of a proposal with dummy requests, in a capture or before one.

        Args:
            whole: if anything is captured, it is all of the forward, and not pieces of it.
        """
        requests = min(self._runner.max_num_reqs, tokens)
        with checks.captured(requests, tokens, beside=False), ops.one_forward(own=self._own) as guarded:
            yield
        if whole and capturing():
            self._in_graphs = min(self._in_graphs, _count(guarded))

    @contextlib.contextmanager
    def forward(self, rows: torch.Tensor | None = None) -> Iterator[None]:
        """Around the first forward of a proposal, if no graph has all of it.

        Args:
            rows: int64 ``[n]``, the rows of the target's tokens in the draft's batch; None: the first ones, in order.
        """
        if self._context is None:
            yield
            return
        with forward_context(self._context), ops.one_forward(rows, own=self._own) as guarded:
            yield
        self._seen = _count(guarded)

    def end(self) -> str | None:
        """The proposal has ended, if there is one; what was not guarded of it, as text."""
        verified, self._verified = self._verified, None
        if verified is not None:
            self._rejected.mark(*verified)
        seen, ran = self._in_graphs if self._seen is None else self._seen, self._context is not None
        self._context = None
        if ran and seen < self.layers:
            return f"only {seen} of {self.layers} layers of a draft were checked"
        return None


def _marked(session: EngineSession, group: Group) -> Marked:
    """A pool of a session whose slots are marked."""
    pool, slots = session.pools[group.name], session.inputs.buffer(f"slots_{group.number}")
    assert slots is not None  # room was reserved for the largest batch
    of_draft = [half.buffers.digest for half in pool.halves if half.info.layer in group.drafted]
    return Marked(pool.space, slots, [plane for digest in of_draft for plane in digest])


def _count(guarded: ops.Guarded) -> int:
    return len(guarded.in_graph) + len(guarded.outside)


def rows_of_the_target(batch: Any) -> torch.Tensor:
    """The rows of the target's tokens in the batch of a draft model: it has one token more of each request.

    Args:
        batch: vLLM's ``InputBatch`` of the target.

    Returns:
        int64 ``[n]``, without waiting for the device.
    """
    token = torch.arange(batch.num_tokens, device=batch.query_start_loc.device)
    ends = batch.query_start_loc[1 : batch.num_reqs + 1].to(torch.int64).contiguous()
    return token + torch.searchsorted(ends, token, right=True)
