"""Our place in a step: the calls that vLLM makes of its KV connector before and after each forward."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu.kv_connector import KVConnector

from .guard import GuardV2


class Bracket:
    """The runner's own connector, with the guard's calls after its first and before its last.

    No connector of ours is configured: one would change the cache manager, or the graphs.  Each function that is called
    in a step is one more that the host does not have in its caches, about 3 us of a step of 1.5 ms (1B, H200).  So a
    connector that does nothing is not called, nor are we where the guard itself can be; :attr:`post_forward` is the
    runner's own.

    Args:
        inner: what the runner had; usually one that does nothing.
    """

    def __init__(self, inner: Any, guard: GuardV2):
        self._inner, self._guard = inner, guard
        self._idle = type(inner) is KVConnector
        self.post_forward = inner.post_forward
        if self._idle and type(self) is Bracket:
            self.pre_forward = guard.before_model  # type: ignore[method-assign]

    def pre_forward(self, scheduler_output: Any, input_batch: Any = None, attn_metadata: Any = None) -> None:
        """Before the model."""
        if not self._idle:
            self._inner.pre_forward(scheduler_output, input_batch, attn_metadata)
        self._guard.before_model(scheduler_output, input_batch, attn_metadata)

    def finish_forward(self) -> None:
        """After the model."""
        if self._guard.open is not None:
            self._guard.after_model()
        if not self._idle:
            self._inner.finish_forward()

    def set_disabled(self, disabled: bool) -> None:
        """Around dummy forwards."""
        self._guard.disable(disabled)
        self._inner.set_disabled(disabled)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
