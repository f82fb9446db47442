"""Which model, with which KV tensors."""

from __future__ import annotations

import llama
import oracle
from config import EngineConfig
from kv_store import Group, make_group
from torch import nn


def windows(config: EngineConfig) -> list[list[int | None]]:
    """For each layer of each group the tokens that it sees."""
    groups: list[list[int | None]] = [[None] * config.layers]
    return groups + [[config.window] * config.window_layers] if config.window else groups


def make_groups(config: EngineConfig) -> list[Group]:
    """The KV tensors of the target: the full group, then the sliding-window group if there is one."""
    row = llama.ROW if config.model == "llama" else oracle.ROW
    groups = [make_group("kv", config.layers, config.pages * config.page, row, config.fp8)]
    if config.window:
        slots = config.window_pages * config.page
        groups.append(make_group("window", config.window_layers, slots, row, config.fp8, config.window))
    return groups


def make_model(config: EngineConfig) -> nn.Module:
    """The target."""
    if config.model == "llama":
        return llama.Llama(windows(config), config.seed).eval()
    return oracle.Oracle(windows(config), config.width)


def make_draft_group(config: EngineConfig) -> Group:
    """The draft's KV tensors: one layer, slots numbered like the target's."""
    row = llama.ROW if config.model == "llama" else oracle.ROW
    return make_group("draft", 1, config.pages * config.page, row, config.fp8)


def make_draft(config: EngineConfig) -> nn.Module:
    """The draft model."""
    if config.model == "llama":
        return llama.Llama([[None]], config.seed + 1).eval()
    return oracle.DraftOracle(windows(config), config.fp8)


def expected_tokens(prompt: list[int], count: int, namespace: int, config: EngineConfig) -> list[int]:
    """What an uncorrupted engine with the oracle produces."""
    return oracle.expected_tokens(prompt, count, namespace, windows(config), config)
