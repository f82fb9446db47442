"""Distinguishes the KV of equal token ids: adapters, salts, images, prompts of embeddings and what an encoder heard."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ...kernels.content.cpu import digest_words

#: Ids of real tokens stay below it, so a number for something else cannot be mistaken for one.
_NO_TOKEN, _BITS = 1 << 30, 29


def hashed(bits: int, *parts: object) -> int:
    """A positive hash of ``parts`` with ``bits`` bits, the same in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") & ((1 << bits) - 1)) or 1


def namespace(lora_request: Any, cache_salt: str | None) -> int:
    """The namespace of a request: of its adapter's name and path and its salt, not of vLLM's own cache key."""
    if lora_request is None and not cache_salt:
        return 0
    lora = None if lora_request is None else (lora_request.lora_name, lora_request.lora_path)
    return hashed(62, "namespace", lora, cache_salt)


def mark_features(tokens: torch.Tensor, first: int, features: Sequence[Any]) -> None:
    """Replace, in place, what stands for no tokens: the placeholders of an image by numbers for it and the place in it,
    and those of embeddings by numbers for their bytes.

    All images have the same placeholder token, so without this the prefix of another image would look right.  A
    namespace does not work: two requests with different images may share the text before them.

    Args:
        tokens: integer ``[n]``, a request's tokens from position ``first`` on.
        features: of the request, as :func:`features_of` gives them.
    """
    for feature in features:
        if isinstance(feature, Embedded):
            feature.mark(tokens, first)
            continue
        begin, length = feature.mm_position.offset, feature.mm_position.length
        start, stop = max(begin, first), min(begin + length, first + tokens.shape[0])
        if start < stop:
            numbers = torch.arange(start - begin, stop - begin, device=tokens.device)
            tokens[start - first : stop - first] = (_number(feature.identifier) + numbers).to(tokens.dtype)


def encoded_numbers(features: Sequence[tuple[str, int]]) -> torch.Tensor:
    """Numbers for what an encoder makes of a request's features, int64 ``[positions]``: one for each position of it.

    Args:
        features: of each the identifier, and how many positions it has.
    """
    parts = [torch.arange(length) + _number(identifier) for identifier, length in features]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def _number(identifier: str) -> int:
    """A number for the first place of an image or a sound; those of the next places follow it."""
    return _NO_TOKEN + hashed(_BITS, "image", identifier)


class _Span(NamedTuple):
    """Where a feature is in its prompt, as vLLM's ``PlaceholderRange`` says it."""

    offset: int
    length: int


@dataclasses.dataclass(frozen=True)
class Embedded:
    """A prompt of embeddings, in whole or in part: vLLM has no token for them, and takes up prefixes by their bytes.

    Attributes:
        mm_position: all of the prompt.
        numbers: int32 ``[tokens]``, one for the bytes of each embedding.
        embedded: bool ``[tokens]``, the positions without a token.
    """

    mm_position: _Span
    numbers: torch.Tensor
    embedded: torch.Tensor

    @classmethod
    def of(cls, embeds: torch.Tensor, is_token: Sequence[bool] | None) -> Embedded:
        """
        Args:
            embeds: ``[tokens, hidden]``, on the host.
            is_token: of each position, whether it has a token; None: none has.
        """
        raw = embeds.detach().contiguous().view(torch.uint8).view(embeds.shape[0], -1)
        words = torch.nn.functional.pad(raw, (0, -raw.shape[1] % 4)).view(torch.int32)
        numbers = _NO_TOKEN + (digest_words(words, (1, 1), 1)[0] & ((1 << _BITS) - 1))
        embedded = torch.ones(embeds.shape[0], dtype=torch.bool)
        if is_token is not None:
            embedded = ~torch.tensor(is_token, dtype=torch.bool)
        return cls(_Span(0, embeds.shape[0]), numbers, embedded)

    def mark(self, tokens: torch.Tensor, first: int) -> None:
        """Replace, in place, what stands for embeddings in tokens from position ``first`` on."""
        stop = min(first + tokens.shape[0], self.mm_position.length)
        if first < stop:
            given, mine = (t[first:stop].to(tokens.device) for t in (self.numbers, self.embedded))
            there = tokens[: stop - first]
            there.copy_(torch.where(mine, given.to(tokens.dtype), there))


_EMBEDDED = WeakTensorKeyDictionary()  # of each prompt: its bytes are looked at once


def features_of(request: Any) -> list[Any]:
    """What stands for no tokens in a request's prompt: vLLM's ``MultiModalFeatureSpec``, and its embeddings.

    Args:
        request: vLLM's ``NewRequestData``, or what a runner keeps of it.
    """
    found, embeds = list(request.mm_features or ()), getattr(request, "prompt_embeds", None)
    if embeds is not None:
        known = _EMBEDDED.get(embeds)
        if known is None:
            known = _EMBEDDED[embeds] = Embedded.of(embeds.cpu(), getattr(request, "prompt_is_token_ids", None))
        found.append(known)
    return found
