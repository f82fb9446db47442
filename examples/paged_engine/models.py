"""Which model, with which KV tensors."""

from __future__ import annotations

from typing import Any

import attention
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


def make_draft_group(config: EngineConfig) -> Group:
    """The draft's KV tensors: one layer, slots numbered like the target's."""
    return make_group("draft", 1, config.pages * config.page, _row(config), config)


def make_draft(config: EngineConfig, group: Group) -> nn.Module:
    """The draft model."""
    if config.model == "llama":
        return _llama(config, [group], config.seed + 1)
    return oracle.DraftOracle(windows(config), config.fp8, config.width).to(config.device)


class CompiledModel:
    """A model under ``torch.compile``, which gets its KV as its build wants it."""

    def __init__(self, model: nn.Module, config: EngineConfig, groups: list[Group], backend: Any):
        self.compiled = torch.compile(model, backend=backend, dynamic=True)
        self.visible, self.groups = config.build == "visible", groups

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        """int64 ``[n]``: what the model says to each token."""
        if self.visible:
            return self.compiled(*inputs.args(), [group.layers for group in self.groups])
        with opaque.forward_metadata(self.groups, inputs):
            return self.compiled(inputs.ids, inputs.positions, inputs.namespaces)


def expected(requests: list[Request], config: EngineConfig) -> list[list[int]]:
    """What an uncorrupted engine with the oracle says to each request."""
    asked = [Asked(r.prompt, r.new_tokens, r.namespace) for r in requests]
    return expected_outputs(asked, windows(config), config.fp8, config.device)


def expected_tokens(prompt: list[int], count: int, namespace: int, config: EngineConfig) -> list[int]:
    """The same for one request."""
    return expected([Request("", prompt, count, namespace)], config)[0]


def _row(config: EngineConfig) -> tuple[int, int]:
    return llama.ROW if config.model == "llama" else oracle.ROW


def _llama(config: EngineConfig, groups: list[Group], seed: int) -> nn.Module:
    def layer(group: Group, name: str) -> nn.Module:
        if config.build == "visible":
            return attention.Visible(group.window)
        return opaque.make_attention(name, hoisted=config.build == "opaque_hoisted")

    attentions = [[layer(group, name) for name in group.names] for group in groups]
    return llama.Llama(attentions, seed).eval().to(config.device)
