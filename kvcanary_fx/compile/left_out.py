"""Caches of a module that its calls write, and that no graph of ours has.

Dynamo leaves code out of its graphs that it was told to (``torch.compiler.disable``), or cannot trace, and calls it as
it is.  As long as other layers are in graphs, a call has its checks, and nobody misses those of that layer.  So for a
few calls the counts of in-place writes are compared, before and after, of the tensors that a module calls its caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.utils._pytree as pytree
from torch import nn

from ..errors import first_of
from ..passes.names import has_kv_name, state_named
from ..runtime.session import CanarySession

#: The calls of a module that are looked at: not the first, which may be a prompt that is written elsewhere.
_LOOKED_AT = range(1, 4)


class LeftOut:
    """Looks at the first calls of a module."""

    def __init__(self, module: nn.Module, session: CanarySession, first: int = 0):
        """
        Args:
            first: how many calls of it were before this looks.
        """
        self._module, self._session, self._calls = module, session, first

    def begin(self) -> Callable[[], None] | None:
        """Call it before a call of the module; returns what to call after it, None if it is not looked at."""
        number, self._calls = self._calls, self._calls + 1
        if number not in _LOOKED_AT:
            return None
        before = [(name, tensor, tensor._version) for name, tensor in _caches(self._module)]

        def end() -> None:
            known, plans = self._session.registry.known, self._session.plans
            said = [name for plan in plans for name, _ in plan.unguarded]
            written = [name for name, tensor, version in before if tensor._version != version and known(tensor) is None]
            names = [name for name in dict.fromkeys(written) if not any(name in one for one in said)]
            if names and any(plan.guarded for plan in plans):
                self._session.lose_coverage(_text(type(self._module).__name__, names))

        return end


def _text(module: str, names: list[str]) -> str:
    return (
        f"{module} writes {first_of(names)} in code that is in no guarded graph, so that is not guarded. "
        "torch.compiler.disable keeps code out of graphs, as do a graph break in a loop or in a `with`, and an op that "
        "does not say what it writes (mutates_args): TORCH_LOGS=graph_breaks shows which"
    )


def _caches(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a module that are called like caches or states, and look like them, each by its name."""
    for path, part in module.named_modules():
        held = {**part._buffers, **{k: v for k, v in vars(part).items() if not k.startswith("_")}}
        for key, value in held.items():
            name = f"{path}.{key}" if path else key
            if has_kv_name(key) or state_named(key) is not None:
                for tensor in pytree.tree_leaves(value):
                    if _may_be_a_cache(tensor):
                        yield name, tensor


def _may_be_a_cache(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or value.is_inference():  # such a tensor has no count of writes
        return False
    return value.is_floating_point() and value.dim() >= 3
