"""Ops that run their implementation without torch's dispatcher, where it would do nothing else.

Between its compiled pieces vLLM calls attention and the write of K and V through the dispatcher, which takes 4 to 6 us
of each call on a CPU core whose caches other work has emptied.  A step with a long prompt makes both calls for each
layer, while the GPU waits.  Without the dispatcher it wins back a third of what the canary's own Python takes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch


class DirectOp(torch._ops.OpOverloadPacket[..., Any]):
    """An op whose calls with plain tensors go to a function.

    Its overloads, and calls whose first argument is something else, or has a name, or in a dispatch mode, as while vLLM
    compiles, go the usual way.  Nothing is differentiated, and the op has one implementation: that function.

    Attributes:
        body: the function.
    """

    body: Callable[..., Any]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is torch.Tensor and not torch._C._len_torch_dispatch_stack():
            return self.body(*args, **kwargs)
        return super().__call__(*args, **kwargs)


def call_directly(namespace: str, name: str, body: Callable[..., Any]) -> None:
    """From now on ``torch.ops.<namespace>.<name>`` is a :class:`DirectOp`.

    Call it before anybody has that op: code that was generated finds it by its name, as vLLM's does.

    Args:
        body: takes what the op takes, by the names of its schema.
    """
    ops = getattr(torch.ops, namespace)
    found = getattr(ops, name)
    direct = DirectOp.__new__(DirectOp)
    direct.__dict__.update(found.__dict__)
    direct.__dict__["body"] = body
    setattr(ops, name, direct)


@contextlib.contextmanager
def told_before(ops: Iterable[DirectOp], tell: Callable[[], None]) -> Iterator[None]:
    """Within it, ``tell`` is called before each direct call of one of the ops; other calls cost nothing more."""
    bodies = {op: op.body for op in ops}

    def telling(body: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(body)
        def told(*args: Any, **kwargs: Any) -> Any:
            tell()
            return body(*args, **kwargs)

        return told

    for op, body in bodies.items():
        op.body = telling(body)
    try:
        yield
    finally:
        for op, body in bodies.items():
            op.body = body
