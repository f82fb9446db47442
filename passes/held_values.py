"""What layers wrote, held until the last of them has written: how much that is, and whether it stays as it was."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from .dynamo_contract import fake_values
from .early_values import written_by

#: Bytes that are held until they were compared, of all layers: 256 tokens of an 8B model.
HELD = 32 << 20


def can_hold(values: Iterable[Any]) -> bool:
    """Whether so much may be held: not where a size is unknown, as the graph may serve long prompts as well."""
    total = 0
    for value in fake_values(list(values)):
        if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
            return False
        total += math.prod(value.shape) * value.element_size()
    return total <= HELD


def stay_written(graph: fx.Graph, given: Mapping[fx.Node, Iterable[fx.Node]]) -> bool:
    """Whether all that some nodes are given is, behind the last of them, what it was at each.

    Args:
        given: by the node.
    """
    waiting = {node: storages(tensors) for node, tensors in given.items()}
    kept: set[int] = set()  # storages of the nodes so far
    for node in graph.nodes:
        kept |= waiting.pop(node, set())
        if not waiting:
            return True
        written = written_by(node) if kept else []
        if written is None or not kept.isdisjoint(storages(written)):
            return False
    return True


def storages(nodes: Iterable[fx.Node]) -> set[int]:
    """The memory that tensors lie in, of Dynamo's example values."""
    values = [value for value in fake_values(list(nodes)) if isinstance(value, torch.Tensor)]
    return {value.untyped_storage()._cdata for value in values}
