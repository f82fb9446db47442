"""Guards the draft's own layers: they have their own session, and a bracket around each forward of a proposal.

vLLM drafts after sampling, outside the step of the target model::

    propose(...)                                     # a step of the draft's session
        build_per_group_and_layer_attn_metadata(...)
        with set_forward_context(...): model(...)    # forward 0: the target's tokens, without those it rejected
        build_per_group_and_layer_attn_metadata(...)
        with set_forward_context(...): model(...)    # forwards 1, 2, ...: a guess of each request

The metadata that all layers share comes from the call in between: a layer's own metadata depends on the backend.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ...engine.layers import LayerChecks
from ...engine.session import EngineSession
from . import ops
from .batches import tables_of
from .pools import Group, own_layers


class Drafts:
    """The draft's layers of one model runner.

    Attributes:
        session: of these layers.
        groups: the KV cache groups that they are in.
        calls_in_graph, calls_outside: as in the guard.
    """

    def __init__(self, session: EngineSession, groups: Sequence[Group]):
        self.session, self.groups = session, groups
        self.layers = LayerChecks(session)
        self.calls_in_graph = self.calls_outside = 0
        self._due: dict[str, torch.Tensor] = {}

    def expect(self, slots: Mapping[str, torch.Tensor], count: int) -> None:
        """The target model wrote ``count`` tokens; the draft must write their KV in its own layers.

        Args:
            slots: integer ``[padded tokens]``, by layer.
        """
        self._due = {g.name: slots[next(iter(g.layers))][:count] for g in self.groups}

    def written(self) -> None:
        """The draft has written what it was expected to."""
        self._due = {}

    def settle(self) -> None:
        """The step ends.  If vLLM did not draft (it skips that while some request is too long for the draft)
        the draft will read slots that it never wrote: a worse guess, and no violation."""
        due, self._due = self._due, {}
        for name, slots in due.items():
            self.session.pools[name].forget(slots)


@dataclasses.dataclass
class Proposal:
    """The running proposal in this thread.

    Attributes:
        namespaces: by the request's id, if not 0.
        in_flight: another request wrote some request's prefix in the target's forward.
        rejected: int32 ``[bs]``, drafts of the previous step that the target rejected, which are in its batch; or None.
        batch: integer ``[n]``, tokens of the target's batch.
        following: integer ``[bs]``, each request's next token after those it has computed.
        common: the metadata of the next forward, as vLLM's ``CommonAttentionMetadata``.
        forwards: how many there were so far.
        guesses: slots of guessed tokens, by pool.
    """

    drafts: Drafts
    drafter: Any
    requests: list[str]
    rejected: torch.Tensor | None
    batch: torch.Tensor
    following: torch.Tensor
    namespaces: Mapping[str, int]
    in_flight: bool
    common: Any = None
    forwards: int = 0
    guesses: dict[str, list[torch.Tensor]] = dataclasses.field(default_factory=dict)

    def next_tokens(self, index: int) -> torch.Tensor:
        """The tokens at the positions of the next forward, the ``index``-th; called once for each."""
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
            metadata, slots: by layer: the inputs of attention and of the KV write.

        Raises:
            KVCacheViolation: mode ``raise``, and a check failed.
        """
        drafts, index = self.drafts, self.forwards
        self.forwards += 1
        batch, rows = draft_batch(self, index, slots)
        forward, layers = drafts.session.forward(index, batch), drafts.layers.publish()
        with forward, layers, ops.one_forward(rows, own=own_layers(drafts.groups)) as guarded:
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
            given = tables_of(group, metadata, self.common.seq_lens, count)
            if given is not None:
                pages, lengths = given
                if rows is not None and self.rejected is not None:  # the kernel also runs over rejected tokens
                    lengths = lengths - self.rejected
                self.drafts.session.check_reads(pages, lengths, pool=group.name, page_size=group.kernel_page_size)

    def end(self) -> None:
        """The proposal ends.  The next step writes every guess again, accepted or not, before anything reads it."""
        for name, guesses in self.guesses.items():
            self.drafts.session.pools[name].reject(torch.cat(guesses))


def draft_batch(
    proposal: Proposal, index: int, slots: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """The fields of a forward of a draft, and the rows of its tokens in the model's inputs.

    A slot is identified by the token of its position, also if an EAGLE head got the next one: that token is in the
    block's hash.  With the next token, a clean run reported the last slot of a cached block, which another request
    had filled with its own next token.  So there is no ``token_offset``; and no ``history``, which would lack the
    guessed tokens.

    Args:
        proposal: its ``common`` metadata is the forward's.
        index: of the forward.
        slots: integer ``[padded tokens]``, by layer.

    Returns:
        The fields; int64 ``[n]``, None if rows and tokens agree.
    """
    common, drafter, count = proposal.common, proposal.drafter, len(proposal.requests)
    n = common.num_actual_tokens
    added = common.query_start_loc[1 : count + 1] - common.query_start_loc[:count]
    prefix, rows = common.seq_lens[:count] - added, None
    if index == 0 and proposal.rejected is not None:
        added = added - proposal.rejected
        rows = _real_first(common.query_start_loc[:count], added, n)

    def taken(given: torch.Tensor) -> torch.Tensor:
        return given[:n] if rows is None else given[:n][rows]

    fields: dict[str, Any] = {
        "input_ids": taken(proposal.next_tokens(index)),
        "request_rows": torch.arange(count),
        "prefix_lens": prefix,
        "extend_lens": added,
        "positions": None if drafter.uses_mrope else taken(drafter.positions),
        "request_ids": proposal.requests,
        "in_flight": index == 0 and proposal.in_flight,
    }
    if any(request in proposal.namespaces for request in proposal.requests):
        fields["namespaces"] = [proposal.namespaces.get(request, 0) for request in proposal.requests]
    for group in proposal.drafts.groups:
        fields[f"slots_{group.number}"] = taken(slots[next(iter(group.layers))])
    return fields, rows


def _real_first(starts: torch.Tensor, added: torch.Tensor, n: int) -> torch.Tensor:
    """The order that puts each request's first tokens in front, and all rejected tokens at the end.

    Does not wait for the device.  An EAGLE head writes rejected tokens all the same, a draft model does not; both
    write those slots again before they read them.

    Args:
        starts: integer ``[bs]``, each request's first token.
        added: integer ``[bs]``, how many of its tokens are real.

    Returns:
        int64 ``[n]``.
    """
    token = torch.arange(n, device=starts.device)
    request = torch.searchsorted(starts.to(torch.int64).contiguous(), token, right=True) - 1
    behind = token - starts[request] >= added[request]
    return torch.argsort(behind.to(torch.int8), stable=True)
