"""The draft's own layers under guard: a session of their own, and a bracket around each forward of a proposal.

vLLM drafts after it has sampled, outside of the step of the target model::

    propose(...)                                     # a step of the draft's session
        build_per_group_and_layer_attn_metadata(...)
        with set_forward_context(...): model(...)    # forward 0: the target's tokens, without those it rejected
        build_per_group_and_layer_attn_metadata(...)
        with set_forward_context(...): model(...)    # forwards 1, 2, ...: a guess of each request

The metadata that all layers share comes from the call in between: that of a layer differs from backend to backend.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.spec_decode import llm_base_proposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from ...engine.layers import LayerChecks
from ...engine.session import EngineSession
from . import ops, registry
from .batches import draft_batch, kernel_tables
from .patching import wrap, wrap_in_all
from .pools import Group

if TYPE_CHECKING:
    from .guard import Guard


class Drafts:
    """The draft's layers of one model runner.

    Attributes:
        session: theirs.
        groups: the KV cache groups that they are in.
        calls_in_graph, calls_outside: as those of the guard.
    """

    def __init__(self, session: EngineSession, groups: Sequence[Group]):
        self.session, self.groups = session, groups
        self.layers = LayerChecks(session)
        self.calls_in_graph = self.calls_outside = 0
        self._due: dict[str, torch.Tensor] = {}

    def expect(self, slots: Mapping[str, torch.Tensor], count: int) -> None:
        """The target model wrote ``count`` tokens; the draft is to write its KV of them.

        Args:
            slots: integer ``[padded tokens]``, by layer.
        """
        self._due = {g.name: slots[next(iter(g.layers))][:count] for g in self.groups}

    def written(self) -> None:
        """The draft has written what it was expected to."""
        self._due = {}

    def settle(self) -> None:
        """The step ends.  Where vLLM did not draft (it leaves that out while some request is too long for the draft)
        the draft will read slots that it never wrote: a worse guess, and no news."""
        due, self._due = self._due, {}
        for name, slots in due.items():
            self.session.pools[name].forget(slots)


@dataclasses.dataclass
class Proposal:
    """What is being proposed in this thread.

    Attributes:
        rejected: int32 ``[bs]``, drafts of the step before that the target rejected, which are in its batch; or None.
        batch: integer ``[n]``, tokens of the target's batch.
        following: integer ``[bs]``, the token of each request that follows those it has computed.
        common: the metadata of the forward that comes next, as vLLM's ``CommonAttentionMetadata``.
        forwards: how many there were.
        guesses: slots of guessed tokens, by pool.
    """

    guard: Guard
    drafts: Drafts
    drafter: Any
    requests: list[str]
    rejected: torch.Tensor | None
    batch: torch.Tensor
    following: torch.Tensor
    common: Any = None
    forwards: int = 0
    guesses: dict[str, list[torch.Tensor]] = dataclasses.field(default_factory=dict)

    def next_tokens(self, index: int) -> torch.Tensor:
        """The tokens at the positions of the forward that comes next, the ``index``-th; asked once for each."""
        given: torch.Tensor = self.drafter.input_ids[: self.common.num_actual_tokens]
        if not self.drafter.pass_hidden_states_to_model:
            return given
        if index == 0:
            return self.batch
        known, self.following = self.following, given.clone()  # an EAGLE head gets the next position's
        return known

    @contextlib.contextmanager
    def forward(self, metadata: Mapping[str, Any], slots: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Around one forward of the draft.

        Args:
            metadata, slots: by layer: what attention and the KV write get.

        Raises:
            KVCacheViolation: mode ``raise``, and a check failed.
        """
        drafts, index = self.drafts, self.forwards
        self.forwards += 1
        batch, rows = draft_batch(self, index, slots)
        forward, layers = drafts.session.forward(index, batch), drafts.layers.publish()
        with forward, layers, ops.one_forward(rows) as guarded:
            self._check_tables(metadata, rows)
            yield
        drafts.calls_in_graph += len(guarded.in_graph)
        drafts.calls_outside += len(guarded.outside)
        if index == 0:
            drafts.written()
            return
        for group in drafts.groups:  # cloned: vLLM fills the same buffer for the next forward
            guessed = slots[next(iter(group.layers))][: len(self.requests)].clone()
            self.guesses.setdefault(group.name, []).append(guessed)

    def _check_tables(self, metadata: Mapping[str, Any], rows: torch.Tensor | None) -> None:
        count = len(self.requests)
        for group in self.drafts.groups:
            given = kernel_tables(metadata[next(iter(group.layers))], self.common.seq_lens, count)
            if given is not None:
                pages, lengths = given
                if rows is not None and self.rejected is not None:  # the kernel runs over what was rejected as well
                    lengths = lengths - self.rejected
                self.drafts.session.check_reads(pages, lengths, pool=group.name, page_size=group.kernel_page_size)

    def end(self) -> None:
        """All was proposed.  The next step writes every guess anew, accepted or not, before anything reads it."""
        for name, guesses in self.guesses.items():
            self.drafts.session.pools[name].reject(torch.cat(guesses))


_PROPOSAL: contextvars.ContextVar[Proposal | None] = contextvars.ContextVar("kvcanary_vllm_proposal", default=None)


def hook() -> None:
    """Guard every draft of this process from here on."""
    wrap_in_all(SpecDecodeBaseProposer, "propose", _propose)
    wrap_in_all(SpecDecodeBaseProposer, "build_per_group_and_layer_attn_metadata", _build_metadata)
    wrap(llm_base_proposer, "set_forward_context", _set_forward_context)


def _propose(original: Callable[..., Any], drafter: Any, *args: Any, **kwargs: Any) -> Any:
    guard = registry.of_drafter(drafter)
    if guard is None or guard.drafts is None:
        return original(drafter, *args, **kwargs)
    given = inspect.signature(original).bind(drafter, *args, **kwargs).arguments
    rejected = given.get("num_rejected_tokens_gpu")
    with guard.proposing(drafter, rejected, given["target_token_ids"], given["next_token_ids"]) as proposal:
        token = _PROPOSAL.set(proposal)
        try:
            return original(drafter, *args, **kwargs)
        finally:
            _PROPOSAL.reset(token)


def _build_metadata(original: Callable[..., Any], drafter: Any, common: Any, *args: Any, **kwargs: Any) -> Any:
    proposal = _PROPOSAL.get()
    if proposal is not None:
        proposal.common = common
    return original(drafter, common, *args, **kwargs)


def _set_forward_context(original: Callable[..., Any], metadata: Any, *args: Any, **kwargs: Any) -> Any:
    context, proposal = original(metadata, *args, **kwargs), _PROPOSAL.get()
    return context if proposal is None else _both(context, proposal.forward(metadata, kwargs["slot_mapping"]))


@contextlib.contextmanager
def _both(context: Any, forward: Any) -> Iterator[None]:
    with context, forward:
        yield
