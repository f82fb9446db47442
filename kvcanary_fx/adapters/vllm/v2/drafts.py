"""The layers of a draft under Model Runner V2: layers of the target's pools, that run later.

::

    execute_model        what the step reads is compared in the draft's layers, too
      target               each layer records what it wrote
    sample_tokens
      postprocess_sampled  the slots of rejected drafts are marked
      propose
        prefill              the draft's layers record: the same tokens in the same slots as the target's
        decode, decode, ...  guesses: nothing is recorded

The runner proposes after each step, and the first forward of a proposal writes the slots that the target wrote: owners,
positions, tokens and tables are those of the step.  Guesses go to the slots behind, which the next step writes again
before it reads them, accepted or not; a guess that hits another slot is reported when that is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from ....engine.layers import LayerChecks
from ....kernels.context import ForwardContext, forward_context
from ....kernels.side_stream import capturing
from .. import ops


def why_unguarded(speculator: Any) -> str | None:
    """Why the layers of a draft cannot be guarded; None if they can.

    Other speculators run through several layers in turn, draft in parallel, or write other tokens than the target.
    """
    if type(speculator) in (EagleSpeculator, MTPSpeculator, StandaloneARSpeculator):
        return None
    return f"drafts of {getattr(speculator, 'method', type(speculator).__name__)} are not supported by this adapter"


class DraftLayers:
    """Those of one runner.

    Attributes:
        count: how many there are.
        missed: in the last proposal so many layers recorded, and not all; None if all did.
    """

    def __init__(self, count: int, max_requests: int):
        self.count, self._max_requests = count, max_requests
        self.missed: int | None = None
        self._context: ForwardContext | None = None  # what the target's ops found in this step
        self._seen: int | None = None  # in the running proposal; None: a graph of all of it is replayed
        self._in_graphs = count  # in the graph that has the fewest

    def begin(self, context: ForwardContext) -> None:
        """The target is about to run.

        Args:
            context: what the ops of its layers find.
        """
        self._context, self._seen, self.missed = context, None, None

    def end(self) -> None:
        """The proposal has ended."""
        seen = self._in_graphs if self._seen is None else self._seen
        self.missed = seen if self._context is not None and seen < self.count else None
        self._context = None

    @contextlib.contextmanager
    def captured(self, checks: LayerChecks, tokens: int, whole: bool) -> Iterator[None]:
        """Around the first forward of a proposal with dummy requests, in a capture or before one.

        Args:
            whole: if anything is captured, it is all of the forward, and not pieces of it.
        """
        requests = min(self._max_requests, tokens)
        with checks.captured(requests, tokens, beside=False), ops.one_forward() as guarded:
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
        with forward_context(self._context), ops.one_forward(rows) as guarded:
            yield
        self._seen = _count(guarded)


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
