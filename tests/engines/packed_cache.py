"""A KV cache of 8 bits with a scale for each token and head, and a backend that writes to it, without vLLM."""

from __future__ import annotations

import torch


class PerTokenAndHead:
    """A backend that keeps K, its scale, V and its scale of each head and slot, and makes a view of the scales once."""

    def __init__(self, misplaced=False):
        self.scales, self._misplaced = None, misplaced

    def __call__(self, key, value, cache, slots):
        of_half = cache.shape[3] // 2
        if self.scales is None:
            self.scales = [cache[..., end - 4 : end] for end in (of_half, 2 * of_half)]
            for scale in self.scales:
                scale.fill_(1)
        pages, at = slots // cache.shape[2], slots % cache.shape[2]
        for half, given in enumerate((key, value)):
            most = given.float().abs().amax(-1, keepdim=True)
            stored = (given.float() / most * 127).round().to(torch.int8)
            begin = half * of_half
            cache[pages, :, at, begin : begin + of_half - 4] = stored
            self.scales[half][pages, :, (at + self._misplaced) % cache.shape[2]] = most.view(torch.int8).view(
                *most.shape[:2], 4
            )
