"""The batch of cross-attention: what an encoder wrote for each request, which each of its forwards reads.

An encoder's output has no tokens.  A number for each feature (a sound, an image) and each place in it stands for them:
those of what the encoder was given, in its order, for what is written, and those of the request for what it is to read.
So another request's sound is told by its tokens, where it is written and where it is read.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from vllm.forward_context import get_forward_context

from .identity import encoded_numbers
from .pools import Group

#: The features of a request: of each its identifier, and how many positions the encoder makes of it.
_Heard: TypeAlias = tuple[tuple[str, int], ...]


def make_batch(runner: Any, scheduled: Any, groups: Sequence[Group], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of :class:`kvcanary_fx.Batch` for the cross-attention of a forward.

    vLLM writes all that a request has of the encoder in its first forward, and once more after a preemption.

    Args:
        scheduled: the ``SchedulerOutput`` of the step.
        groups: of cross-attention.
        fields: of the decoder's batch.
    """
    requests: list[str] = fields["request_ids"]
    heard = tuple(_heard(runner.requests[request].mm_features or ()) for request in requests)
    history, lengths = _history(heard, runner.device)
    begins = (runner.input_batch.num_computed_tokens_cpu[: len(requests)] == 0).tolist()
    added = [length if first else 0 for length, first in zip(lengths, begins, strict=True)]
    metadata = get_forward_context().attn_metadata
    slots = {f"slots_{group.number}": metadata[next(iter(group.layers))].slot_mapping for group in groups}
    tokens = _given(runner, scheduled)
    # as many as there are to be: what is missing is told as a wrong slot or token, and does not end the engine
    most = max(sum(added), *(given.shape[0] for given in slots.values()))
    batch = {
        "input_ids": _fitted(tokens, most, 0),
        "request_rows": fields["request_rows"],
        "prefix_lens": [length - new for length, new in zip(lengths, added, strict=True)],
        "extend_lens": added,
        "request_ids": requests,
        "history": history,
        "history_lens": lengths,
        **{name: _fitted(given, most, -1) for name, given in slots.items()},
    }
    if "namespaces" in fields:
        batch["namespaces"] = fields["namespaces"]
    return batch


def _heard(features: Sequence[Any]) -> _Heard:
    return tuple((feature.identifier, feature.mm_position.length) for feature in features)


def _given(runner: Any, scheduled: Any) -> torch.Tensor:
    """What the encoder was given in a step, one after the other: vLLM's order, which has to be that of the batch."""
    order = [
        feature
        for request, numbers in scheduled.scheduled_encoder_inputs.items()
        for feature in [runner.requests[request].mm_features[number] for number in numbers]
        if feature.data is not None  # as vLLM leaves it out
    ]
    return encoded_numbers(_heard(order))


@functools.lru_cache(maxsize=8)
def _history(heard: tuple[_Heard, ...], device: torch.device) -> tuple[torch.Tensor, list[int]]:
    """The numbers of each request, padded, and how many it has; kept, as the requests of most steps are the last's."""
    numbers = [encoded_numbers(each) for each in heard]
    rows = torch.nn.utils.rnn.pad_sequence(numbers, batch_first=True)
    return rows.to(device), [len(each) for each in numbers]


def _fitted(given: torch.Tensor, count: int, missing: int) -> torch.Tensor:
    """So many of the numbers given, filled up with ``missing``."""
    given = given[:count]
    if given.shape[0] == count:
        return given
    return torch.nn.functional.pad(given, (0, count - given.shape[0]), value=missing)
