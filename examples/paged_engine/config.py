"""What an engine is made of: sizes, and the features that are on."""

from __future__ import annotations

import dataclasses
from typing import Any

#: How attention finds its KV.
BUILDS = ("visible", "opaque", "opaque_hoisted")

#: Kinds of drafts.
DRAFTS = ("eagle", "mtp")


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Settings of an :class:`~engine.Engine`.

    Attributes:
        model: ``oracle`` or ``llama``.
        page: slots of a page.
        pages: pages of the pool; page 0 is reserved, it takes the padding of batches.
        width: positions that a request can have.
        max_running: requests that hold a row of the request table at once.
        token_budget: tokens of one forward.
        chunk: tokens of one request's prefill in one forward.
        prefix_cache: keep the pages of prompts and finished requests for later ones.
        offload: a retracted request's KV goes to the host and comes back; else it is computed again.
        window: tokens that the layers of the sliding-window group see; None for no such group.
        window_pages: pages of that group, which has an index space of its own.
        draft: tokens that the draft proposes in a row in each step, 0 for no draft.
        draft_model: ``eagle``, one layer that runs once for each of them; ``mtp``, a layer for each, with its own pool.
        topk: rows of tokens that an eagle draft proposes side by side: a tree, for more than one.
        draft_varies: how many are proposed goes from 1 to ``draft``, and down again, step after step.
        capture: the inner forwards of an eagle draft run in one CUDA graph, where all its branches are equally long; on
            a CPU they run over the tensors that a graph would have.
        fp8: K and V in float8 with a scale for each slot.
        layers, window_layers: layers of the two groups.
        seed: of the weights.
        inner: the backend that compiles the model, guarded or not.
        device: where the model and the KV are.
        build: how the llama's attention finds its KV: ``visible``, its tensors are inputs of the graph; ``opaque``, one
            op looks them up by the layer's name, a string in the graph; ``opaque_hoisted``, the name is an input.
        split: the graph is cut at attention, and the pieces between are compiled one by one.
    """

    model: str = "oracle"
    page: int = 4
    pages: int = 64
    width: int = 96
    max_running: int = 8
    token_budget: int = 32
    chunk: int = 12
    prefix_cache: bool = True
    offload: bool = False
    window: int | None = None
    window_pages: int = 48
    draft: int = 0
    draft_model: str = "eagle"
    topk: int = 1
    draft_varies: bool = False
    capture: bool = False
    fp8: bool = False
    layers: int = 2
    window_layers: int = 1
    seed: int = 0
    inner: Any = "eager"
    device: str = "cpu"
    build: str = "visible"
    split: bool = False

    def __post_init__(self) -> None:
        if self.build not in BUILDS or (self.build != "visible" and self.model != "llama"):
            raise ValueError(
                f"build={self.build!r}, model={self.model!r}: builds are {BUILDS}; the oracle has the first"
            )
        if self.draft_model not in DRAFTS or self.topk < 1 or (self.topk > 1 and self.draft_model != "eagle"):
            raise ValueError(
                f"draft_model={self.draft_model!r}, topk={self.topk}: drafts are {DRAFTS}; only the first makes trees"
            )
        if self.pages <= self.columns:
            raise ValueError(f"pages={self.pages}: the longest request needs {self.columns}, and page 0 is reserved")
        needed = -(-((self.window or 0) + self.token_budget) // self.page) + 2
        if self.window and self.window_pages <= needed:
            raise ValueError(f"window_pages={self.window_pages}: one request alone can need {needed}, besides page 0")

    @property
    def columns(self) -> int:
        """Pages in a row of the request table."""
        return self.width // self.page

    @property
    def ahead(self) -> int:
        """Tokens that can be proposed for one request at once."""
        return self.draft * self.topk

    @property
    def views(self) -> int:
        """Block tables of a forward: one for each request, and for each further branch of a tree."""
        return self.max_running * self.topk

    @property
    def offsets(self) -> range:
        """Of the draft's pools: how much later a slot's token is than its position."""
        return range(1, 1 + (self.draft if self.draft_model == "mtp" else 1) if self.draft else 1)

    def padded(self, tokens: int) -> int:
        """The size to which a batch of ``tokens`` is padded, so that few shapes are compiled."""
        size = self.max_running
        while size < tokens:
            size *= 2
        return size
