"""From a prefill to a decode instance: the KV of a request as bytes on a wire, its shadow beside it."""

from __future__ import annotations

import torch
from engine import Engine
from offload import Part, SavedKV


def pack(saved: SavedKV) -> bytearray:
    """All bytes of a request's KV, group after group, tensor after tensor."""
    raw = bytearray()
    for part in saved.parts.values():
        for rows in part.rows:
            raw += rows.numpy().tobytes()
    return raw


def unpack(saved: SavedKV, raw: bytearray) -> SavedKV:
    """The same KV with the bytes that arrived; shapes and shadows are those of ``saved``."""
    flat, at, parts = torch.frombuffer(raw, dtype=torch.uint8), 0, {}
    for name, part in saved.parts.items():
        rows = []
        for sent in part.rows:
            rows.append(flat[at : at + sent.numel()].view(sent.shape).clone())
            at += sent.numel()
        parts[name] = Part(part.start, rows, part.shadow)
    return SavedKV(saved.length, parts)


def move(prefill: Engine, decode: Engine) -> int:
    """Hand everything that ``prefill`` has finished to ``decode``; how many requests that were."""
    sent, prefill.sent = prefill.sent, []
    for request, saved in sent:
        request.saved = unpack(saved, prefill.faults.on_transfer(pack(saved)))
        decode.add(request)
    return len(sent)
