"""SGLang's canary as its plain torch reference, over the pool of a :class:`scheduled_engine.Engine`.

As SGLang's server runs it: a plan, verify and write before the model (head) and behind it (tail), for K and for V, and
sweeps of the prefix cache.  Its strictest settings: all bytes hashed, of all layers where the server takes the first
one's, and tokens and positions of what is written and read compared with the requests' own.
"""

from __future__ import annotations

from typing import Any

import torch
from scheduled_engine import DIM, LAYERS, ROWS, SLOTS, WIDTH, WINDOW, Forward, Guarded


class Reference:
    def __init__(self, peer: Any, guarded: Guarded):
        self.peer, self.guarded = peer, guarded
        self.tokens = torch.zeros(ROWS, WIDTH, dtype=torch.int32)
        self.index, self.ring = torch.zeros(1, dtype=torch.int32), torch.zeros(64, peer.consts.VIOLATION_FIELDS).long()
        heads, tails = [], []
        for half in range(2):
            sources = [self._source(guarded.kv[layer][half]) for layer in range(LAYERS)]
            heads.append(self._context())
            tails.append(self._context(*sources))
        self.heads, self.tails = heads, tails
        self._plans: tuple[Any, Any] | None = None

    def _source(self, tensor: torch.Tensor) -> Any:
        width = 4 * DIM
        rows = tensor.view(SLOTS, -1).view(torch.uint8)
        return self.peer.verify.RealKvSource(tensor=rows, page_size=1, num_bytes_per_token=width, read_bytes=width)

    def _context(self, *sources: Any) -> Any:
        modes = self.peer.consts.RealKvHashMode
        return self.peer.verify.VerifyOrWriteContext(
            canary_buf=torch.zeros(SLOTS, self.peer.verify.CANARY_SLOT_BYTES, dtype=torch.uint8),
            kernel_kind=self.peer.verify.CanaryLaunchTag.HEAD_K_FULL,
            violation_ring=self.ring,
            violation_write_index=self.index,
            slot_run_counter=torch.zeros(1, dtype=torch.int64),
            kernel_run_counter=torch.zeros(1, dtype=torch.int64),
            real_kv_sources=sources,
            real_kv_hash_mode=modes.ALL if sources else modes.NONE,
            enable_chain_position_assert=torch.ones(1, dtype=torch.int32),
        )

    def reset(self) -> None:
        self.index.zero_()
        self.tokens.zero_()
        for context in (*self.heads, *self.tails):
            context.canary_buf.zero_()

    @property
    def found(self) -> int:
        """Violations so far."""
        return int(self.index)

    def reasons(self) -> str:
        """The first violation's reasons."""
        bits = int(self.ring[0, self.peer.consts.VIOLATION_FIELD_FAIL_REASON_BITS])
        return str(self.peer.consts.FailReason(bits))

    def head(self, forward: Forward) -> None:
        self._plans = self._plan(forward)
        for context in self.heads:
            self._launch(context, forward)

    def tail(self, forward: Forward) -> None:
        for context in self.tails:
            self._launch(context, forward)

    def _plan(self, forward: Forward) -> tuple[Any, Any]:
        capacity = ROWS * WIDTH
        verify = self.peer.verify.VerifyPlan.allocate(verify_capacity=capacity, device=torch.device("cpu"))
        write = self.peer.write.WritePlan.allocate(write_req_capacity=len(forward.rows), device=torch.device("cpu"))
        for row, history in zip(forward.rows, forward.histories, strict=True):
            self.tokens[row, : len(history)] = torch.tensor(history, dtype=torch.int32)
        windowed = self.guarded.windowed
        self.peer.plan.launch_canary_plan_kernels(
            verify_plan_out=verify,
            write_plan_out=write,
            req_pool_indices=torch.tensor(forward.rows),
            prefix_lens=torch.tensor(forward.prefix_lens),
            extend_seq_lens=torch.tensor(forward.extend_lens),
            req_to_token=self.guarded.table,
            swa_window_size=WINDOW if windowed else 0,
            full_to_swa_index_mapping=self.guarded.map,
            verify_capacity=capacity,
            req_to_verify_expected_tokens=self.tokens,
            req_to_verify_expected_tokens_valid_lens=torch.tensor([len(h) for h in forward.histories]),
            kv_token_id_vs_position_offset=0,
        )
        return verify, write

    def _launch(self, context: Any, forward: Forward) -> None:
        assert self._plans is not None
        verify, write = self._plans
        self.peer.verify.launch_canary_verify_kernel(context=context, plan=verify, check_verify_expected_token=True)
        expected = [torch.tensor(values) for values in forward.expected]
        where = torch.tensor(forward.entries)
        self.peer.write.launch_canary_write_kernel(
            context=context,
            plan=write,
            input_ids=torch.tensor(forward.input_ids),
            positions=torch.tensor(forward.positions),
            out_cache_loc=where if self.guarded.map is None else self.guarded.map[where],
            enable_write_input_assert=True,
            expected_input_tokens=expected[0],
            expected_input_positions=expected[1],
        )

    def sweep(self, listed: list[tuple[int, int, int]]) -> None:
        """Slot, position and the slot before of each token that the prefix cache lists."""
        if not listed:
            return
        plan = self.peer.verify.VerifyPlan.allocate(verify_capacity=len(listed), device=torch.device("cpu"))
        slots, positions, before = (torch.tensor(values) for values in zip(*listed, strict=True))
        plan.verify_slot_indices.copy_(slots)
        plan.verify_expected_positions.copy_(positions)
        plan.verify_prev_slot_indices.copy_(before)
        plan.verify_num_valid.fill_(len(listed))
        plan.enable.fill_(1)
        for context in self.tails:
            self.peer.verify.launch_canary_verify_kernel(context=context, plan=plan, check_verify_expected_token=False)
