"""Images and embeddings in the prompts of running requests: which steps have some of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..identity import features_of, mark_features


class Images:
    """What each request has in the place of tokens, as :func:`.features_of` gives it, from the scheduler's messages."""

    def __init__(self, encoder_decoder: bool):
        """
        Args:
            encoder_decoder: the model's images stand in the encoder's input, among no tokens of the cache.
        """
        self._none = encoder_decoder
        self._of: dict[str, Sequence[Any]] = {}

    @property
    def any(self) -> bool:
        """Whether a running request has any."""
        return bool(self._of)

    def take(self, scheduled: Any) -> None:
        """Apply a ``SchedulerOutput``; a request that was preempted comes again as a new one."""
        if self._of:
            for request in (*scheduled.finished_req_ids, *(scheduled.preempted_req_ids or ())):
                self._of.pop(request, None)
        for new in scheduled.scheduled_new_reqs:
            features = () if self._none else features_of(new)
            if features:
                self._of[new.req_id] = features

    def within(self, batch: Any) -> bool:
        """Whether a batch computes tokens of images.

        Args:
            batch: vLLM's ``InputBatch``, prepared.
        """
        return self.any and any(
            feature.mm_position.offset < first + added
            and first < feature.mm_position.offset + feature.mm_position.length
            for request, first, added in _spans(batch)
            for feature in self._of.get(request, ())
        )

    def marked(self, batch: Any, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens of a batch with numbers for images and embeddings in the place of their placeholders.

        Args:
            tokens: integer ``[n]``; not changed.
        """
        tokens, start = tokens.clone(), 0
        for request, first, added in _spans(batch):
            mark_features(tokens[start : start + added], first, self._of.get(request, ()))
            start += added
        return tokens

    def mark_prompts(self, requests: Sequence[str], prompts: torch.Tensor) -> None:
        """The same of whole prompts, in place.

        Args:
            prompts: int64 ``[bs, length]``.
        """
        for request, prompt in zip(requests, prompts, strict=True):
            self.mark_prompt(request, prompt)

    def mark_prompt(self, request: str, prompt: torch.Tensor) -> None:
        """The same of one, int64 ``[length]``."""
        mark_features(prompt, 0, self._of.get(request, ()))


def _spans(batch: Any) -> list[tuple[str, int, int]]:
    """Each request of a batch with the place of its first token and how many there are: exact in its prompt, where
    images are."""
    firsts, added = batch.num_computed_tokens_np.tolist(), batch.num_scheduled_tokens.tolist()
    return list(zip(batch.req_ids, firsts, added, strict=True))
