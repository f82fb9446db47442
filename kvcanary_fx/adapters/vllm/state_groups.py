"""Pools from vLLM's KV cache groups of running states: Mamba, short convolutions, linear attention.

A request has one block of such a group, in which a layer keeps all of its states: the last taps of a convolution, the
state of an SSM.  Each step rewrites them, so a slot of the pool is a block.  With a prefix cache
(``mamba_cache_mode=align``) a request begins a block whenever its tokens fill one, with a copy of its state, and the
cache keeps the state that the tokens before have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.kv_cache_interface import MambaSpec

from ...engine.kv_pool import KVPool
from .pools import group_name, note_unguarded, spec_of_a_layer

#: What the states of a layer are called in reports, by their number, as for the models of Hugging Face.
_NAMES = {1: ("state",), 2: ("conv", "state")}

#: What reasons call such groups.
KIND = "MambaSpec"


@dataclasses.dataclass(frozen=True)
class StateGroup:
    """A KV cache group whose states are guarded.

    Attributes:
        number: of the group, in vLLM's order.
        layers: the states of each layer, ``[blocks, ...]``, by the layer's name.
        names: of a layer's states.
        tokens: after how many a request's state goes on in another block; 0: never.
    """

    number: int
    layers: Mapping[str, tuple[torch.Tensor, ...]]
    names: tuple[str, ...]
    tokens: int = 0

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


#: Why the states of a spec cannot be guarded, or a group of them, as text; None if they can.
Refusal: TypeAlias = "Callable[[Any, MambaSpec], str | None]"


def state_groups(
    runner: Any,
    unguarded: dict[str, str],
    refusal: Refusal,
    refusal_of_a_state: Callable[[torch.Tensor], str | None] = lambda state: None,
) -> list[StateGroup]:
    """The groups of states that can be guarded; the others are logged, with the reason.

    Args:
        unguarded: gets the reasons of the others, by name.
        refusal: of the kind of runner, given it.
        refusal_of_a_state: why a state ``[blocks, ...]`` cannot be guarded.
    """
    found: list[StateGroup] = []
    for number, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        spec = _spec_of(group)
        if spec is None:
            continue
        why = _why_unguarded(runner, spec) or refusal(runner, spec)
        made = why or _group(runner, number, group.layer_names, spec, refusal_of_a_state)
        if isinstance(made, str):
            note_unguarded(number, False, group.layer_names[0], made, unguarded)
        else:
            found.append(made)
    return found


def note_alone(groups: Sequence[StateGroup], unguarded: dict[str, str]) -> None:
    """Nothing else of the model is guarded: log that these are not, and keep the reason."""
    note_failed(groups, "states are guarded beside attention alone", unguarded)


def note_failed(groups: Sequence[StateGroup], why: str, unguarded: dict[str, str]) -> None:
    """Log that groups which could be guarded are not, and keep the reason."""
    for group in groups:
        note_unguarded(group.number, False, min(group.layers), f"{KIND}: {why}", unguarded)


def _spec_of(group: Any) -> MambaSpec | None:
    """What a group of states is made of; None for any other group."""
    spec = spec_of_a_layer(group.kv_cache_spec)
    return spec if isinstance(spec, MambaSpec) else None


def _why_unguarded(runner: Any, spec: MambaSpec) -> str | None:
    """Why the states of a group cannot be guarded, with either runner; None if they can.

    Each reason is a way in which a request has several states, or gets one that no forward of its own has written.
    """
    config = runner.vllm_config
    if spec.num_speculative_blocks or config.speculative_config is not None:
        return f"{KIND} with drafts is not supported by this adapter: a request then has a state for each drafted token"
    if config.cache_config.use_replayssm:
        return f"{KIND} with use_replayssm is not supported by this adapter: states are written every few steps only"
    if config.kv_transfer_config is not None:
        return f"{KIND} with a KV connector is not supported by this adapter: it may load states"
    if spec.mamba_cache_mode == "none" and spec.block_size < runner.max_model_len:
        return f"{KIND} with blocks of {spec.block_size} tokens is not supported by this adapter: a request has several"
    return None


def why_not_by_the_first(budget: float | None) -> Refusal:
    """What keeps the first runner's guard from states.

    Args:
        budget: how much longer a step may take, as a fraction; None: as long as it takes.
    """

    def refusal(runner: Any, spec: MambaSpec) -> str | None:
        if spec.mamba_cache_mode != "none":
            return (
                f"{KIND} with mamba_cache_mode={spec.mamba_cache_mode} is not supported by this adapter with Model "
                "Runner V1: the prefix cache keeps states, and steps copy them to other blocks; "
                "--no-enable-prefix-caching has one state a request"
            )
        if budget is not None:
            return (
                f"{KIND} under a budget ({budget:.1%}) with Model Runner V1: it compares the states of all requests in "
                "each step or none, whatever that takes: KVCANARY_BUDGET=none guards them"
            )
        return None

    return refusal


def _group(
    runner: Any,
    number: int,
    names: Sequence[str],
    spec: MambaSpec,
    refusal_of_a_state: Callable[[torch.Tensor], str | None],
) -> StateGroup | str:
    """The group; or why it cannot be guarded, as text."""
    known = runner.compilation_config.static_forward_context
    layers: dict[str, tuple[torch.Tensor, ...]] = {}
    for name in names:
        layer = known[name]
        states = layer.kv_cache if isinstance(layer, MambaBase) else None
        if not isinstance(states, tuple | list) or not all(isinstance(s, torch.Tensor) and s.numel() for s in states):
            return f"layer {name}: {type(layer).__name__} keeps its states in a way that this adapter does not know"
        refused = next(filter(None, map(refusal_of_a_state, states)), None)
        if refused is not None:
            return f"layer {name}: {refused}"
        layers[name] = tuple(states)
    tokens = spec.block_size if spec.mamba_cache_mode != "none" else 0
    return StateGroup(number, layers, _names_of([known[name] for name in layers]), tokens)


def _names_of(layers: Sequence[MambaBase]) -> tuple[str, ...]:
    """What the states of a group's layers are called; none: by their numbers."""
    if all(layer.mamba_type.name.endswith("SHORT_CONV") for layer in layers):
        return ("conv",)
    (count, *others) = {len(layer.kv_cache) for layer in layers}
    return () if others else _NAMES.get(count, ())
