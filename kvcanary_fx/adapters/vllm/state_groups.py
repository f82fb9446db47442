"""Pools from vLLM's KV cache groups of running states: Mamba, short convolutions, linear attention.

A request has one block of such a group, in which a layer keeps all of its states: the last taps of a convolution, the
state of an SSM.  Each step rewrites them, so a slot of the pool is a block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.kv_cache_interface import MambaSpec

from ...engine.kv_pool import KVPool
from .pools import group_name, note_unguarded, spec_of_a_layer

#: What the states of a layer are called in reports, by their number, as for the models of Hugging Face.
_NAMES = {1: ("state",), 2: ("conv", "state")}


@dataclasses.dataclass(frozen=True)
class StateGroup:
    """A KV cache group whose states are guarded.

    Attributes:
        number: of the group, in vLLM's order.
        layers: the states of each layer, ``[blocks, ...]``, by the layer's name.
        names: of a layer's states.
    """

    number: int
    layers: Mapping[str, tuple[torch.Tensor, ...]]
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        return group_name(self.number, draft=False)

    def pool(self, table: torch.Tensor, allocations: bool) -> KVPool:
        """The pool of this group, whose request table begins with the blocks of ``table``'s first column."""
        return KVPool(
            list(self.layers.values()),
            table[:, :1],
            name=self.name,
            layer_names=list(self.layers),
            half_names=self.names,
            state=True,
            reserved=(0,),  # vLLM's null block
            allocations=allocations,
        )


def layers_of_states(runner: Any) -> frozenset[str]:
    """The layers of all groups of states, guarded or not."""
    groups = runner.kv_cache_config.kv_cache_groups
    return frozenset(name for group in groups if _spec_of(group) is not None for name in group.layer_names)


def state_groups(runner: Any, unguarded: dict[str, str], budget: float | None = None) -> list[StateGroup]:
    """The groups of states that can be guarded; the others are logged, with the reason.

    Args:
        unguarded: gets the reasons of the others, by name.
        budget: how much longer a step may take, as a fraction; None: as long as it takes.
    """
    found = []
    for number, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        spec = _spec_of(group)
        if spec is None:
            continue
        made = _why_unguarded(runner, spec, budget) or _group(runner, number, group.layer_names)
        if isinstance(made, str):
            note_unguarded(number, False, group.layer_names[0], made, unguarded)
        else:
            found.append(made)
    return found


def _spec_of(group: Any) -> MambaSpec | None:
    """What a group of states is made of; None for any other group."""
    spec = spec_of_a_layer(group.kv_cache_spec)
    return spec if isinstance(spec, MambaSpec) else None


def _why_unguarded(runner: Any, spec: MambaSpec, budget: float | None) -> str | None:
    """Why the states of a group cannot be guarded, as text; None if they can.

    Each reason but the last is a way in which a request has several states, or gets one that no forward of its own has
    written.
    """
    config, kind = runner.vllm_config, "MambaSpec"
    if spec.mamba_cache_mode != "none":
        return (
            f"{kind} with mamba_cache_mode={spec.mamba_cache_mode} is not supported by this adapter: the prefix cache "
            "keeps states, and steps copy them to other blocks; --no-enable-prefix-caching has one state a request"
        )
    if spec.num_speculative_blocks or config.speculative_config is not None:
        return f"{kind} with drafts is not supported by this adapter: a request then has a state for each drafted token"
    if config.cache_config.use_replayssm:
        return f"{kind} with use_replayssm is not supported by this adapter: states are written every few steps only"
    if config.kv_transfer_config is not None:
        return f"{kind} with a KV connector is not supported by this adapter: it may load states"
    if spec.block_size < runner.max_model_len:
        return f"{kind} with blocks of {spec.block_size} tokens is not supported by this adapter: a request has several"
    if budget is not None:
        return (
            f"{kind} under a budget ({budget:.1%}): a step replaces its states, so they are compared in full or not at "
            "all, whatever that takes: KVCANARY_BUDGET=none guards them"
        )
    return None


def _group(runner: Any, number: int, names: Sequence[str]) -> StateGroup | str:
    """The group; or why it cannot be guarded, as text."""
    known = runner.compilation_config.static_forward_context
    layers: dict[str, tuple[torch.Tensor, ...]] = {}
    for name in names:
        layer = known[name]
        states = layer.kv_cache if isinstance(layer, MambaBase) else None
        if not isinstance(states, tuple | list) or not all(isinstance(s, torch.Tensor) and s.numel() for s in states):
            return f"layer {name}: {type(layer).__name__} keeps its states in a way that this adapter does not know"
        layers[name] = tuple(states)
    return StateGroup(number, layers, _names_of([known[name] for name in layers]))


def _names_of(layers: Sequence[MambaBase]) -> tuple[str, ...]:
    """What the states of a group's layers are called; none: by their numbers."""
    if all(layer.mamba_type.name.endswith("SHORT_CONV") for layer in layers):
        return ("conv",)
    (count, *others) = {len(layer.kv_cache) for layer in layers}
    return () if others else _NAMES.get(count, ())
