"""Distinguishes the KV of equal token ids: adapters, salts and images."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch


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


def mark_images(tokens: torch.Tensor, first: int, features: Sequence[Any]) -> None:
    """Replace, in place, the placeholder tokens of images by numbers for the image and the place in it.

    All images have the same placeholder token, so without this the prefix of another image would look right.  A
    namespace does not work: two requests with different images may share the text before them.

    Args:
        tokens: integer ``[n]``, a request's tokens from position ``first`` on.
        features: vLLM's ``MultiModalFeatureSpec`` of the request.
    """
    for feature in features:
        begin, length = feature.mm_position.offset, feature.mm_position.length
        start, stop = max(begin, first), min(begin + length, first + tokens.shape[0])
        if start < stop:
            # ids of real tokens stay below 2**30, so an image's number cannot be mistaken for one
            base = (1 << 30) + hashed(29, "image", feature.identifier)
            numbers = torch.arange(start - begin, stop - begin, device=tokens.device)
            tokens[start - first : stop - first] = (base + numbers).to(tokens.dtype)
