"""vLLM's load format ``filled``: random weights with which tokens depend on what the KV cache holds.

Dummy ones are so small that a token depends on the one before it alone.  On CPUs vLLM packs weights when it has loaded
them, so they cannot be changed later.  Whoever imports this can ask for the format.
"""

from __future__ import annotations

import torch
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm_v2_run import fill


@register_model_loader("filled")
class FilledModelLoader(DummyModelLoader):
    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        super().load_weights(model, model_config)
        fill(model, seed=0)
