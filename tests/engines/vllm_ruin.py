"""An extension of vLLM's workers that damages their KV cache."""

from __future__ import annotations

from typing import Any


class Ruin:
    """Mixed into the worker's class by vLLM."""

    model_runner: Any

    def ruin(self) -> None:
        """Change all pages, so that what attention reads there changes tokens."""
        for layer in self.model_runner.compilation_config.static_forward_context.values():
            layer.kv_cache.mul_(-1e5)
