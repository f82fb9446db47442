"""What drafts guess with: the hidden state of the target, or of the draft before, and the token that followed it.

The slot of position p holds token p + offset.  ``hidden`` at that slot is what the target, or the layer before, made of
the tokens up to p + offset - 1; what a model returns beside its guesses is the same one token later.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from kv_store import KV
from llama import DIM, Llama
from oracle import decode, digits, next_token, powers, store, sum_seen, weight, weights_of
from torch import nn
from workload import BOS

#: Number of the draft's layer, for its bytes: none of the target's.
LAYER = 7


class DraftOracle(nn.Module):
    """Guesses the oracle's next token from its hidden state, and is wrong one time in four.

    When it is wrong hangs on all bytes of its own pool that it sees.  Of several guesses the last one is then right.
    """

    def __init__(self, windows: list[list[int | None]], fp8: bool, width: int, offset: int, topk: int):
        super().__init__()
        self.windows, self.fp8, self.offset, self.topk = windows, fp8, offset, topk
        self.register_buffer("powers", powers(width + offset))
        self.register_buffer("digits", digits())

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        namespaces: torch.Tensor,
        hidden: torch.Tensor,
        request: torch.Tensor,
        slots: list[torch.Tensor],
        reads: list[torch.Tensor],
        pools: list[KV],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 ``[n, topk]`` and ``[n]``: guesses of what follows each token, and the hidden states behind them.

        Args:
            positions: int64 ``[n]``, of the slots.
            hidden: int64 ``[n]``.
        """
        (pool,) = pools[0]
        store(pool, slots[0], ids, positions, namespaces, LAYER, self.digits)
        own = weight([t[reads[0]].flatten(2) for t in pool], LAYER) * self.powers[: reads[0].shape[1]]
        doubt = sum_seen(own, request, positions, None)
        place = positions + self.offset
        for window, added in weights_of(ids, place, namespaces, self.windows, self.fp8).items():
            hidden = hidden + added * self.powers[place]
            if window is not None:
                hidden = hidden - self._left(pool[0], reads[0][request], positions - window, namespaces, window)
        guess = next_token(hidden)
        wrong = (((guess ^ doubt) & 3) == 0).to(torch.int64).unsqueeze(1)
        count = max(2, self.topk)
        others = (torch.arange(count, device=ids.device) + wrong) % count
        return guess.unsqueeze(1) + others[:, : self.topk], hidden

    def _left(
        self, k: torch.Tensor, reads: torch.Tensor, where: torch.Tensor, namespaces: torch.Tensor, window: int
    ) -> torch.Tensor:
        """What the tokens at the slots of positions ``where`` added, which leave the window; 0 before the first."""
        slots = reads.gather(1, where.clamp(min=0).unsqueeze(1))
        token = torch.where(where >= 0, decode(k[slots].flatten(2).float())[:, 0], BOS)
        place = where + self.offset
        added = weights_of(token, place.clamp(min=0), namespaces, self.windows, self.fp8)[window]
        return torch.where(place >= 0, added * self.powers[place.clamp(min=0)], 0)


class DraftLlama(nn.Module):
    """One layer over the target's hidden state and the next token; embedding and head are the target's.

    Args:
        layer_attention: its attention.
        target: its last layer's weights are what the draft was "trained" to, so that it is often right.
    """

    def __init__(self, layer_attention: nn.Module, target: Llama, topk: int):
        super().__init__()
        self.topk, self.embed, self.norm, self.head = topk, target.embed, target.norm, target.head
        self.layer = copy.deepcopy(target.layers[-1])
        self.layer.attention = layer_attention
        self.join = nn.Linear(2 * DIM, DIM, bias=False)
        with torch.no_grad():
            self.join.weight.copy_(torch.cat((torch.eye(DIM), 0.01 * torch.eye(DIM)), 1))

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        namespaces: torch.Tensor,
        hidden: torch.Tensor,
        *kv: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 ``[n, topk]`` and float32 ``[n, DIM]``; arguments like the oracle's, hidden states ``[n, DIM]``."""
        x = self.join(torch.cat((F.embedding(ids, self.embed), hidden), -1))
        place = Llama.places(self, positions, *kv)[0] if kv else None
        x = self.layer(x, positions, namespaces, place)
        return self.head(self.norm(x)).topk(self.topk).indices, x
