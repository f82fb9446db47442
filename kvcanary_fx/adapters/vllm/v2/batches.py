"""A batch of Model Runner V2 as a batch of the canary: what is on the device stays there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..pools import Group


def make_batch(
    runner: Any,
    batch: Any,
    groups: Sequence[Group],
    rows: Sequence[int],
    namespaces: Mapping[str, int],
    in_flight: bool,
) -> dict[str, Any]:
    """The fields of :class:`kvcanary_fx.Batch` for a forward.

    Args:
        batch: vLLM's ``InputBatch``, prepared.
        rows: of each request in the tables of the pools.
        namespaces: by the request's id, if not 0.
        in_flight: another request writes some request's prefix in this forward.
    """
    requests, n = batch.req_ids, batch.num_tokens
    fields: dict[str, Any] = {
        "input_ids": batch.input_ids[:n],
        "request_rows": rows,
        # the device's count: the host's counts all drafts of the steps before as accepted
        "prefix_lens": runner.req_states.num_computed_tokens.gpu[batch.idx_mapping],
        "extend_lens": _added(runner, batch),
        "positions": batch.positions[:n],
        "request_ids": requests,
        "in_flight": in_flight,
        "namespaces": [namespaces.get(request, 0) for request in requests],  # always: else there are kernels for both
    }
    for group in groups:
        fields[f"slots_{group.number}"] = runner.block_tables.slot_mappings[group.number, :n]
    return fields


def _added(runner: Any, batch: Any) -> Any:
    if runner.adaptive_verification is not None and batch.num_draft_tokens:  # the device decides how many each gets
        return batch.query_start_loc[: batch.num_reqs + 1].diff()
    return batch.num_scheduled_tokens.tolist()


#: Lengths of a history are multiples of it: Triton compiles other kernels for those that are not.
ROUND = 16


def histories(requests: Sequence[str], prompts: Mapping[str, Sequence[int]]) -> tuple[torch.Tensor, list[int]]:
    """Token ids ``[bs, length]`` and how many of them are valid.

    Args:
        prompts: by the request's id, as the scheduler gave them; who is not there has none.
    """
    given = [prompts.get(request, ()) for request in requests]
    length = -(-max(len(tokens) for tokens in given) // ROUND) * ROUND
    history = torch.zeros(len(given), length, dtype=torch.int64)
    for row, tokens in enumerate(given):
        if tokens:
            history[row, : len(tokens)] = torch.tensor(tokens)
    return history, [len(tokens) for tokens in given]
