"""Which model, with which KV tensors."""

from __future__ import annotations

from typing import Any

import attention
import draft_models
import llama
import opaque
import oracle
import torch
from batching import Inputs
from config import EngineConfig
from expected import Asked, expected_outputs
from kv_store import Group, make_group
from torch import nn
from workload import Request


def windows(config: EngineConfig) -> list[list[int | None]]:
    """For each layer of each group the tokens that it sees."""
    groups: list[list[int | None]] = [[None] * config.layers]
    return groups + [[config.window] * config.window_layers] if config.window else groups


def make_groups(config: EngineConfig) -> list[Group]:
    """The KV tensors of the target: the full group, then the sliding-window group if there is one."""
    groups = [make_group("kv", config.layers, config.pages * config.page, _row(config), config)]
    if config.window:
        slots = config.window_pages * config.page
        groups.append(make_group("window", config.window_layers, slots, _row(config), config, config.window))
    return groups


def make_model(config: EngineConfig, groups: list[Group]) -> nn.Module:
    """The target."""
    if config.model == "llama":
        return _llama(config, groups, config.seed)
    return oracle.Oracle(windows(config), config.width).to(config.device)


def make_draft_group(config: EngineConfig, offset: int) -> Group:
    """The KV tensors of a draft model: one layer, slots numbered like the target's."""
    name = "draft" if offset == 1 else f"draft{offset}"
    return make_group(name, 1, config.pages * config.page, _row(config), config)


def make_draft(config: EngineConfig, group: Group, offset: int, target: nn.Module) -> nn.Module:
    """A draft model; its slot of position p holds token p + ``offset``."""
    if isinstance(target, llama.Llama):
        torch.manual_seed(config.seed + offset)
        attend = _attention(config, group, group.names[0])
        return draft_models.DraftLlama(attend, target, config.topk).eval().to(config.device)
    kinds = windows(config), config.fp8, config.width, offset, config.topk
    return draft_models.DraftOracle(*kinds).to(config.device)


def hidden_states(config: EngineConfig) -> torch.Tensor:
    """Room for what the target hands to a draft, for each slot."""
    slots = config.pages * config.page
    if config.model == "llama":
        return torch.zeros(slots, llama.DIM, device=config.device)
    return torch.zeros(slots, dtype=torch.int64, device=config.device)


class CompiledModel:
    """A model under ``torch.compile``, which gets its KV as its build wants it."""

    def __init__(self, model: nn.Module, config: EngineConfig, groups: list[Group], backend: Any):
        # "eager" runs what was traced as it is: without a canary in it, Dynamo's time would buy nothing
        self.compiled = model if backend == "eager" else torch.compile(model, backend=backend, dynamic=True)
        self.model, self.visible, self.groups = model, config.build == "visible", groups

    def __call__(self, inputs: Inputs, *hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the model says to each token, int64 ``[n]`` (a draft: ``[n, topk]``), and its hidden states.

        Args:
            hidden: of a draft, the hidden states that it goes on from, ``[n]`` or ``[n, dim]``.
        """
        first = inputs.ids, inputs.positions, inputs.namespaces, *hidden
        if self.visible:
            pools = [group.layers for group in self.groups]
            return self.compiled(*first, inputs.request, inputs.slots, inputs.reads, pools)
        with opaque.forward_metadata(self.groups, inputs):
            return self.compiled(*first)


def expected(requests: list[Request], config: EngineConfig) -> list[list[int]]:
    """What an uncorrupted engine with the oracle says to each request."""
    asked = [Asked(r.prompt, r.new_tokens, r.namespace) for r in requests]
    return expected_outputs(asked, windows(config), config.fp8, config.device)


def expected_tokens(prompt: list[int], count: int, namespace: int, config: EngineConfig) -> list[int]:
    """The same for one request."""
    return expected([Request("", prompt, count, namespace)], config)[0]


def _row(config: EngineConfig) -> tuple[int, int]:
    return llama.ROW if config.model == "llama" else oracle.ROW


def _attention(config: EngineConfig, group: Group, name: str) -> nn.Module:
    if config.build == "visible":
        return attention.Visible(group.window)
    return opaque.make_attention(name, hoisted=config.build == "opaque_hoisted")


def _llama(config: EngineConfig, groups: list[Group], seed: int) -> nn.Module:
    attentions = [[_attention(config, group, name) for name in group.names] for group in groups]
    return llama.Llama(attentions, seed).eval().to(config.device)
