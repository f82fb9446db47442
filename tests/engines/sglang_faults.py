"""A plugin of SGLang for the tests: plants faults in the model runner of the scheduler's process.

``SGLANG_FAULTS`` has them as JSON, by the number of the decode step: ``{"5": ["flip", layer, "K"], "9": ["free"]}``.
Each strikes position 3 of the first request of the batch; ``["padding"]`` gives that request the padding's row.  Prints
a line ``PLANTED`` for each, and ``STATS`` after each forward of a guarded runner.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch

POSITION = 3


class Faults:
    def __init__(self) -> None:
        self.todo = {int(step): fault for step, fault in json.loads(os.environ.get("SGLANG_FAULTS", "{}")).items()}
        self.steps = 0

    def forward(self, original: Any, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if forward_batch.forward_mode.is_decode():
            self.steps += 1
            if self.steps in self.todo:
                self.plant(self.todo[self.steps], runner, forward_batch)
        out = original(runner, forward_batch, *args, **kwargs)
        guard = getattr(runner, "kvcanary", None)
        if guard is not None:
            print("STATS", guard.session.stats().line(), flush=True)
        return out

    def plant(self, fault: list[Any], runner: Any, forward_batch: Any) -> None:
        kind, *where = fault
        row = runner.req_to_token_pool.req_to_token[int(forward_batch.req_pool_indices[0])]
        slot = row[POSITION : POSITION + 1].to(torch.int64)
        pool = runner.token_to_kv_pool
        if kind == "flip":
            layer, half = where
            buffer = (pool.k_buffer if half == "K" else pool.v_buffer)[layer]
            buffer[int(slot)].view(torch.uint8).view(-1)[5] ^= 1
        elif kind == "free":
            runner.token_to_kv_pool_allocator.free(slot)
        elif kind == "padding":
            forward_batch.req_pool_indices[0] = 0
        else:
            row[POSITION] = row[POSITION + 1]
        print("PLANTED", json.dumps([*fault, int(slot), forward_batch.rids[0]]), flush=True)


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    HookRegistry.register(f"{runner}._forward_raw", Faults().forward, HookType.AROUND)
