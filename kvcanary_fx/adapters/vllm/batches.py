"""A model runner's next forward as a batch of the canary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.forward_context import get_forward_context

from . import encoder
from .identity import features_of, mark_features
from .pools import ENCODER, Group


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
        input_ids, positions: the model's inputs, ``[padded tokens]``; None or another shape for models that
            take embeddings or several positions a token.
        namespaces: by the request's id, if not 0.
        in_flight: another request writes some request's prefix in this forward.
    """
    batch, n = runner.input_batch, scheduled.total_num_scheduled_tokens
    requests = list(batch.req_ids[: batch.num_reqs])
    added = [scheduled.num_scheduled_tokens[request] for request in requests]
    # The device's counts: the host, which runs ahead of the device, counts all drafts as accepted.
    prefix = runner.num_computed_tokens[: len(requests)]
    tokens = (runner.input_ids.gpu if input_ids is None else input_ids)[:n]
    history = batch.token_ids_cpu_tensor[: len(requests), : runner.max_model_len]
    features = {i: found for i, r in enumerate(requests) if (found := features_of(runner.requests[r]))}
    if runner.model_config.is_encoder_decoder:  # whose features stand in the encoder's input, among no tokens of these
        features = {}
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
        if not group.cross:
            fields[f"slots_{group.number}"] = slots[next(iter(group.layers))][:n]
    crossed = [group for group in groups if group.cross]
    if crossed:
        fields[ENCODER] = encoder.make_batch(runner, scheduled, crossed, fields)
    return fields


def known_tokens(runner: Any, count: int) -> torch.Tensor:
    """The number of token ids of each request that the worker knows: int64 ``[count]``.

    With asynchronous scheduling sampled tokens stay on the device, and their places on the host are not filled.
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
        mark_features(tokens[ends[i] - added[i] : ends[i]], prefix[i], images)
        mark_features(history[i], 0, images)


def mark_prompt(runner: Any, request: str, prompt: torch.Tensor) -> None:
    """Replace, in place, what stands for no tokens in a request's prompt, as in a forward's ``history``.

    Args:
        prompt: int64 ``[n]``, from position 0 on.
    """
    if not runner.model_config.is_encoder_decoder:
        mark_features(prompt, 0, features_of(runner.requests[request]))


def tables_of(
    group: Group, metadata: Mapping[str, Any], lengths: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """:func:`kernel_tables` of a layer of a group that gets the runner's table; None if there is none.

    Args:
        metadata: by the layer's name.
    """
    layer = group.layer_with_table
    return None if layer is None else kernel_tables(metadata[layer], lengths, count)


def kernel_tables(metadata: Any, lengths: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The block table and lengths that a layer's attention kernel gets, for the ``count`` requests of the batch.

    Args:
        metadata: of the layer; MLA keeps requests in two parts, decodes first.
        lengths: integer ``[requests]``, the runner's, for metadata that has none.

    Returns:
        None if the metadata has no table of all requests.
    """
    table = getattr(metadata, "block_table", None)
    if table is not None:
        seen = getattr(metadata, "seq_lens", None)
        return table[:count], (lengths if seen is None else seen)[:count]
    parts = [getattr(getattr(metadata, part, None), "block_table", None) for part in ("decode", "prefill")]
    tables = [part for part in parts if part is not None]
    if not tables or sum(len(t) for t in tables) < count:
        return None
    return (tables[0] if len(tables) == 1 else torch.cat(tables))[:count], lengths[:count]
