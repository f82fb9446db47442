"""What a model runner is about to run, as a batch of the canary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context

from .identity import mark_images
from .pools import Group

if TYPE_CHECKING:
    from .drafts import Proposal


def make_batch(
    runner: Any,
    scheduled: Any,
    groups: Sequence[Group],
    input_ids: torch.Tensor | None,
    positions: torch.Tensor | None,
    namespaces: Mapping[str, int],
    in_flight: bool,
) -> dict[str, Any]:
    """The fields of :class:`kvcanary_fx.Batch` for a forward.

    Args:
        runner: the model runner, its inputs prepared.
        scheduled: the ``SchedulerOutput`` of the step.
        input_ids, positions: what the model is given, ``[padded tokens]``; None or of another shape for models that
            take embeddings or several positions a token.
        namespaces: by the request's id, where it is not 0.
        in_flight: some request's prefix is written by another one in this forward.
    """
    batch, n = runner.input_batch, scheduled.total_num_scheduled_tokens
    requests = list(batch.req_ids[: batch.num_reqs])
    added = [scheduled.num_scheduled_tokens[request] for request in requests]
    # The device's: the host's count takes all drafts for accepted while it runs ahead of the device.
    prefix = runner.num_computed_tokens[: len(requests)]
    tokens = (runner.input_ids.gpu if input_ids is None else input_ids)[:n]
    history = batch.token_ids_cpu_tensor[: len(requests), : runner.max_model_len]
    features = {i: runner.requests[r].mm_features for i, r in enumerate(requests) if runner.requests[r].mm_features}
    if features:
        tokens, history = tokens.clone(), history.clone()
        _mark(tokens, history, features, added, prefix.tolist())
    fields: dict[str, Any] = {
        "input_ids": tokens,
        "request_rows": torch.arange(len(requests)),
        "prefix_lens": prefix,
        "extend_lens": added,
        "positions": positions[:n] if positions is not None and positions.dim() == 1 else None,
        "request_ids": requests,
        "history": history,
        "history_lens": known_tokens(runner, len(requests)),
        "in_flight": in_flight,
    }
    if any(request in namespaces for request in requests):
        fields["namespaces"] = [namespaces.get(request, 0) for request in requests]
    slots = get_forward_context().slot_mapping
    for group in groups:
        fields[f"slots_{group.number}"] = slots[next(iter(group.layers))][:n]
    return fields


def draft_batch(
    proposal: Proposal, index: int, slots: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """The fields of a forward of a draft, and the rows of its tokens in what the model is given.

    A slot goes by the token of its position also where an EAGLE head was given the next one: that is what a block's
    hash stands for.  By the next token, a clean run reported the last slot of a cached block, which another request
    had filled with a next token of its own.  So there is no ``token_offset``; and no ``history``, which would have no
    token of a guess.

    Args:
        proposal: its ``common`` metadata is that of the forward.
        index: of the forward.
        slots: integer ``[padded tokens]``, by layer.

    Returns:
        The fields; int64 ``[n]``, None where rows and tokens agree.
    """
    common, drafter, count = proposal.common, proposal.drafter, len(proposal.requests)
    guard, n = proposal.guard, common.num_actual_tokens
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
        "in_flight": index == 0 and guard.in_flight,
    }
    if any(request in guard.namespaces for request in proposal.requests):
        fields["namespaces"] = [guard.namespaces.get(request, 0) for request in proposal.requests]
    for group in proposal.drafts.groups:
        fields[f"slots_{group.number}"] = taken(slots[next(iter(group.layers))])
    return fields, rows


def _real_first(starts: torch.Tensor, added: torch.Tensor, n: int) -> torch.Tensor:
    """The order that puts each request's first tokens in front, and what the target rejected of it behind all.

    Without waiting for the device.  An EAGLE head writes what was rejected all the same, a draft model does not; both
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


def known_tokens(runner: Any, count: int) -> torch.Tensor:
    """How many of each request's token ids the worker knows: int64 ``[count]``.

    With asynchronous scheduling sampled tokens stay on the device, and their places on the host hold nothing.
    """
    batch = runner.input_batch
    known = batch.num_prompt_tokens_cpu_tensor if runner.use_async_scheduling else batch.num_tokens_no_spec_cpu_tensor
    return torch.as_tensor(known[:count], dtype=torch.int64).clone()


def _mark(
    tokens: torch.Tensor,
    history: torch.Tensor,
    features: Mapping[int, Sequence[Any]],
    added: Sequence[int],
    prefix: Sequence[int],
) -> None:
    ends = torch.tensor(added).cumsum(0).tolist()
    for i, images in features.items():
        mark_images(tokens[ends[i] - added[i] : ends[i]], prefix[i], images)
        mark_images(history[i], 0, images)


def kernel_tables(metadata: Any, lengths: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The block table and the lengths that a layer's attention kernel gets, for the ``count`` requests of the batch.

    Args:
        metadata: of the layer; MLA keeps its requests in two parts, those that decode first.
        lengths: integer ``[requests]``, the runner's, for metadata that has none.

    Returns:
        None where the metadata shows no table of all requests.
    """
    table = getattr(metadata, "block_table", None)
    if table is not None:
        seen = getattr(metadata, "seq_lens", None)
        return table[:count], (lengths if seen is None else seen)[:count]
    parts = [getattr(getattr(metadata, part, None), "block_table", None) for part in ("decode", "prefill")]
    tables = [part for part in parts if part is not None]
    if not tables or sum(len(t) for t in tables) < count:
        return None
    return torch.cat(tables)[:count], lengths[:count]
