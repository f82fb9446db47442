"""A model runner of SGLang and its pools, as an engine's session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from ...config import CanaryConfig
from ...engine.guarded_pool import EnginePool
from ...engine.kv_pool import KVPool
from ...engine.layers import EagerLayers
from ...engine.session import EngineSession
from ...install import install_canary
from ...kernels.slots.space import REFERENCE, Flag
from ..hooks import hook


def why_not(runner: Any) -> str | None:
    """Why a model runner cannot be guarded; None if it can.

    Args:
        runner: SGLang's ModelRunner, with its pools allocated.
    """
    args, pool = runner.server_args, runner.token_to_kv_pool
    reasons = {
        "SGLang's own kv-canary is on; SGLANG_KVCANARY_OWN=replace puts this one in its place": runner.canary_manager
        is not None,
        "the pools of a draft are not connected": runner.is_draft_worker,
        f"its pool is a {type(pool).__name__}, only MHATokenToKVPool is connected": type(pool).__name__
        != "MHATokenToKVPool"
        or getattr(pool, "kv_cache_layout", "nhd") != "nhd",
        "CUDA graphs replay without the checks: --disable-cuda-graph": not args.disable_cuda_graph,
        "compiled decoding goes around the checks: leave out --enable-torch-compile": args.enable_torch_compile,
        "the host runs ahead of the model: --disable-overlap-schedule": not args.disable_overlap_schedule,
        "KV that comes back from host memory is not followed: leave out --enable-hierarchical-cache": (
            args.enable_hierarchical_cache
        ),
        "KV that arrives from another instance is not followed": args.disaggregation_mode != "null",
        "speculative decoding is not connected": args.speculative_algorithm is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


class GuardedRunner:
    """A ModelRunner whose forwards are guarded.

    Attributes:
        session: guards its pool, ``kv``.
        running: the runner whose forward is running in this process.
    """

    running: ClassVar[GuardedRunner | None] = None

    def __init__(self, runner: Any, config: CanaryConfig, self_test: bool = False):
        pool, allocator = runner.token_to_kv_pool, runner.token_to_kv_pool_allocator
        #: Pages are handed out whole and freed by number, not by slot.
        self._by_slot = allocator.page_size == 1 and type(allocator).__name__ == "TokenToKVPoolAllocator"
        session = install_canary(
            KVPool(
                list(zip(pool.k_buffer, pool.v_buffer, strict=True)),
                runner.req_to_token_pool.req_to_token,
                layer_names=[layer_name(i) for i in pool.model_layer_ids],
                reserved=tuple(range(pool.page_size)),
                padding_row=padding_row(runner.req_to_token_pool),
                allocations=self._by_slot,
            ),
            config=config,
            stats_every=1000,
            self_test=self_test,
        )
        assert session is not None  # with mode="off" the plugin hooks nothing
        self.session: EngineSession = session
        self._layers = EagerLayers(session)
        self._received: torch.Tensor | None = None
        hook(runner, "forward", self._forward)
        hook(pool, "set_kv_buffer", self._write)
        if self._by_slot:
            watch_allocator(allocator, session.pool)
        session.mark_ready()

    def _forward(self, original: Callable[..., Any], forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """One forward of the model; batches without requests (idle ranks, warm-up) have nothing to check."""
        if forward_batch.rids is None or not forward_batch.batch_size or forward_batch.forward_mode.is_idle():
            return original(forward_batch, *args, **kwargs)
        before, GuardedRunner.running = GuardedRunner.running, self
        try:
            with self.session.step(describe(forward_batch)), self.session.forward():
                return original(forward_batch, *args, **kwargs)
        finally:
            GuardedRunner.running = before

    def _write(self, original: Callable[..., Any], layer: Any, loc_info: Any, *args: Any, **kwargs: Any) -> Any:
        """Keep the slots that a layer's write received."""
        self._received = getattr(loc_info, "loc", loc_info)
        return original(layer, loc_info, *args, **kwargs)

    def attention(
        self, layer: Any, key: torch.Tensor | None, value: torch.Tensor | None, run: Callable[[], Any]
    ) -> Any:
        """A layer's attention, between the check of what it reads and the check of what it wrote.

        Args:
            layer: SGLang's RadixAttention.
            key, value: ``[n, ...]``; None if the layer attends to what another layer wrote.
            run: the attention itself.
        """
        name = layer_name(layer.layer_id)
        self._received = None
        self._layers.verify(name)
        attended = run()
        if key is not None:
            self._layers.record(name, key, value, self._received)
        return attended


def padding_row(requests: Any) -> int | None:
    """The row of padded entries in a batch, from SGLang's ReqToTokenPool before it gives any row away; None if row 0 is
    handed out like any other."""
    return 0 if 0 not in requests.free_slots else None


def layer_name(number: int) -> str:
    return f"model.layers.{number}.self_attn"


def describe(forward_batch: Any) -> dict[str, Any]:
    """SGLang's ForwardBatch in a session's form."""
    rows, lengths = forward_batch.req_pool_indices, forward_batch.seq_lens
    extends = not forward_batch.forward_mode.is_decode()
    history = getattr(forward_batch, "kvcanary_history", None)
    batch = {
        "input_ids": forward_batch.input_ids,
        "positions": forward_batch.positions,
        "slots": forward_batch.out_cache_loc,
        "request_rows": rows,
        "prefix_lens": forward_batch.extend_prefix_lens if extends else lengths - 1,
        "extend_lens": forward_batch.extend_seq_lens if extends else torch.ones_like(lengths),
        "request_ids": forward_batch.rids,
    }
    if history is not None and len(history) == len(rows):
        width = max(map(len, history))
        batch["history"] = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in history])
        batch["history_lens"] = [len(tokens) for tokens in history]
    return batch


def watch_allocator(allocator: Any, pool: EnginePool) -> None:
    """Report to a pool which slots an allocator hands out and takes back.

    The allocator knows no requests: its slots may be any request's; the request table shows whose they are.
    """

    def alloc(original: Callable[..., Any], need_size: int) -> Any:
        slots = original(need_size)
        if slots is not None and slots.numel():
            pool.allocate(slots)
        return slots

    def free(original: Callable[..., Any], free_index: torch.Tensor) -> None:
        if allocator.free_group is None and free_index.numel():  # else it is called again when the group ends
            pool.release(free_index)
        original(free_index)

    def clear(original: Callable[..., Any]) -> None:
        flags = pool.space.flags[:-1]
        held = (flags >= REFERENCE) & ((flags & int(Flag.RESERVED)) == 0)
        pool.release(held.nonzero().squeeze(1))
        original()

    for wrapper in (alloc, free, clear):
        hook(allocator, wrapper.__name__, wrapper)
