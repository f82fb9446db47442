"""What `sglang_peer.py` runs: SGLang's canary and ours over one scene, proved, and timed inside CUDA graphs.

Same slots, tokens and bytes for both: one layer's K of 2,048 bytes a slot.  Before and after anything is timed both
must look at every slot and find the pool clean, and in the end find a flipped bit.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any

import report
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined

import sglang_kernels

import kernels
from kvcanary_fx.kernels.buffers import Count
from kvcanary_fx.kernels.content import gpu
from kvcanary_fx.kernels.slots.space import SpaceCount
from kvcanary_fx.kernels.writes.layout import SlotLayout

#: ``(requests, stored, added)`` of each, as in `kernels.py`.
DECODES, PREFILLS = ((1, 4096, 1), (64, 4096, 1), (256, 4096, 1)), ((1, 0, 4096), (64, 0, 4096))
TINY_DECODES, TINY_PREFILLS = ((2, 24, 1),), ((2, 0, 12),)

#: A call that takes longer is captured once and replayed a few times: SGLang's record of a long prefill is 85 ms.
SLOW = 5_000.0

Call = Callable[[], None]


class Theirs:
    """SGLang's canary over a scene: a shadow of 32 bytes a slot, filled by its own kernel.

    Attributes:
        identity, content: what its kernels take together: the shadow, counters, and the bytes to hash, if any.
    """

    def __init__(self, peer: Any, scene: kernels.Scene, view: torch.Tensor):
        self.peer, self.scene, self.device = peer, scene, view.device
        padding = torch.zeros_like(scene.table[:1])  # row 0 is nobody's there
        self.table = torch.cat([padding, scene.table])
        self.tokens = torch.cat([padding, scene.history.to(torch.int32)])
        self.rows = torch.arange(1, scene.requests + 1, device=self.device)
        self.token_lens = torch.full_like(self.rows, self.tokens.shape[1])
        stored = scene.table.shape[1] - scene.extend
        self.entries = scene.requests * stored
        rows = view.view(view.shape[0], -1).view(torch.uint8)
        width = rows.shape[1]
        source = peer.verify.RealKvSource(tensor=rows, page_size=1, num_bytes_per_token=width, read_bytes=width)
        self.identity, self.content = self._context(), self._context(source)
        for context in (self.identity, self.content):
            if stored:
                plans = self._plan(0, stored)
                self._write(context, plans, slice(0, stored))
        self.verify_plan, self.write_plan = self._plan(stored, scene.extend)
        self.added = slice(stored, stored + scene.extend)
        self._inputs = self._token_inputs(self.added)

    def _context(self, *sources: Any) -> Any:
        consts, slots = self.peer.consts, self.scene.space.slots

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=self.device)

        modes = consts.RealKvHashMode
        return self.peer.verify.VerifyOrWriteContext(
            canary_buf=zeros(slots, self.peer.verify.CANARY_SLOT_BYTES, dtype=torch.uint8),
            kernel_kind=self.peer.verify.CanaryLaunchTag.HEAD_K_FULL,
            violation_ring=zeros(256, consts.VIOLATION_FIELDS),
            violation_write_index=zeros(1, dtype=torch.int32),
            slot_run_counter=zeros(1),
            kernel_run_counter=zeros(1),
            real_kv_sources=sources,
            real_kv_hash_mode=modes.ALL if sources else modes.NONE,
            enable_chain_position_assert=torch.ones(1, dtype=torch.int32, device=self.device),
        )

    def _plan(self, prefix: int, extend: int) -> tuple[Any, Any]:
        verify = self.peer.verify.VerifyPlan.allocate(verify_capacity=max(1, self.entries), device=self.device)
        write = self.peer.write.WritePlan.allocate(write_req_capacity=self.scene.requests, device=self.device)
        self._prefix, self._extend = (
            torch.full((self.scene.requests,), n, dtype=torch.int64, device=self.device) for n in (prefix, extend)
        )
        self._fill(verify, write)
        return verify, write

    def _fill(self, verify: Any, write: Any) -> None:
        self.peer.plan.launch_canary_plan_kernels(
            verify_plan_out=verify,
            write_plan_out=write,
            req_pool_indices=self.rows,
            prefix_lens=self._prefix,
            extend_seq_lens=self._extend,
            req_to_token=self.table,
            swa_window_size=0,
            full_to_swa_index_mapping=None,
            verify_capacity=verify.verify_slot_indices.shape[0],
            req_to_verify_expected_tokens=self.tokens,
            req_to_verify_expected_tokens_valid_lens=self.token_lens,
            kv_token_id_vs_position_offset=0,
        )

    def _token_inputs(self, tokens: slice) -> dict[str, torch.Tensor]:
        scene = self.scene
        where = torch.arange(tokens.start, tokens.stop, device=self.device)
        return dict(
            input_ids=scene.history[:, tokens].flatten().contiguous(),
            positions=where.repeat(scene.requests),
            out_cache_loc=scene.table[:, tokens].flatten().long(),
        )

    def _write(self, context: Any, plans: tuple[Any, Any], tokens: slice) -> None:
        self._launch_write(context, plans[1], self._token_inputs(tokens))

    def _launch_write(self, context: Any, plan: Any, inputs: dict[str, torch.Tensor]) -> None:
        self.peer.write.launch_canary_write_kernel(
            context=context,
            plan=plan,
            **inputs,
            enable_write_input_assert=False,
            expected_input_tokens=None,
            expected_input_positions=None,
        )

    def plan(self) -> None:
        self._fill(self.verify_plan, self.write_plan)

    def verify(self, context: Any) -> None:
        self.peer.verify.launch_canary_verify_kernel(
            context=context, plan=self.verify_plan, check_verify_expected_token=True
        )

    def record(self, context: Any) -> None:
        self._launch_write(context, self.write_plan, self._inputs)

    def found(self) -> int:
        return sum(int(context.violation_write_index) for context in (self.identity, self.content))


@dataclasses.dataclass
class Pair:
    """What both do for the same end."""

    name: str
    theirs: Call
    ours: Call


class Arena:
    """One scene and both canaries over it."""

    def __init__(self, peer: Any, requests: int, stored: int, added: int):
        self.scene, self.stored = kernels.Scene(requests, stored, added), stored
        self.name = f"{requests} x {stored} + {added}"
        self.view = torch.randn(self.scene.space.slots, 8, 128, device=kernels.DEVICE).bfloat16()
        layout = SlotLayout(tuple(self.view.shape), (0,), self.view.dtype)
        self.site = kernels.site_of(self.scene, self.view, layout)
        self.theirs = Theirs(peer, self.scene, self.view)

    def _verify(self) -> None:
        gpu.verify(self.site, self.view, None)

    def _record(self) -> None:
        self.scene.store()
        gpu.record(self.site, self.view, self.scene.now.slots, None, 1)

    def _both(self) -> None:
        self.scene.before()
        self._verify()

    def pairs(self) -> list[Pair]:
        """Of a decode its checks and its record, of a prefill its record."""
        theirs, scene = self.theirs, self.scene

        def planned(context: Any) -> Call:
            def run() -> None:
                theirs.plan()
                theirs.verify(context)

            return run

        records = [
            Pair("record, identity", lambda: theirs.record(theirs.identity), scene.store),
            Pair("record, identity and content", lambda: theirs.record(theirs.content), self._record),
        ]
        if not self.stored:
            return records
        return [
            Pair("identity check", planned(theirs.identity), scene.before),
            Pair("content check", lambda: theirs.verify(theirs.content), self._verify),
            Pair("identity and content check", planned(theirs.content), self._both),
            *records,
        ]

    def looked_at(self) -> tuple[int, int, int, int]:
        """Slots whose identity was checked by theirs and ours, and whose content was."""
        theirs = [int(context.slot_run_counter) for context in (self.theirs.identity, self.theirs.content)]
        ours = int(self.scene.space.counters[SpaceCount.CHECKED]), int(self.site.counters[Count.CHECKED])
        return theirs[0], ours[0], theirs[1], ours[1]

    def prove_clean(self) -> None:
        """Stop unless both look at every stored slot and find nothing.

        Raises:
            AssertionError: one does not.
        """
        for check, at in (("identity check", 0), ("content check", 2)):
            for pair in (p for p in self.pairs() if p.name == check):
                before, entries = self.looked_at()[at : at + 2], self.theirs.entries
                pair.theirs()
                pair.ours()
                counts = [b - a for a, b in zip(before, self.looked_at()[at : at + 2], strict=True)]
                assert counts == [entries, entries], f"{check}: SGLang looked at {counts[0]}, we at {counts[1]} slots"
        assert (self.theirs.found(), self.found()) == (0, 0), "a clean pool is not clean"

    def prove_flip(self) -> None:
        """Stop unless both find a flipped bit, once.  The last thing done: ours then takes the slot as it is.

        Raises:
            AssertionError: one does not.
        """
        if self.stored:
            slot = int(self.scene.table[-1, self.stored // 2])
            self.view.view(torch.int16)[slot, 3, 5] ^= 1 << 7
            self.theirs.verify(self.theirs.content)
            self._both()
            assert (self.theirs.found(), self.found()) == (1, 1), "a flipped bit was not found, or more than it"

    def found(self) -> int:
        return int(self.scene.space.control.words[0])


def timed(call: Call) -> float:
    """Microseconds of a call inside a CUDA graph."""
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    if start.elapsed_time(end) * 1e3 > SLOW:
        return kernels.microseconds(call, calls=1, replays=5)[0]
    return kernels.microseconds(call)[0]


def rows_of(arena: Arena) -> list[list[str]]:
    rows = []
    for pair in arena.pairs():
        theirs, ours = timed(pair.theirs), timed(pair.ours)
        rows.append([pair.name, arena.name, f"{theirs:,.1f} us", f"{ours:,.1f} us", f"{theirs / ours:.1f} x"])
        print("  ".join(rows[-1]), flush=True)
    return rows


def untimed(arena: Arena) -> list[list[str]]:
    for pair in arena.pairs():
        pair.theirs()
        pair.ours()
        print(f"{pair.name}  {arena.name}  ran, nothing timed", flush=True)
    return []


def section(peer: Any, rows: list[list[str]]) -> str:
    header = ["kernels", "requests x stored + added", "SGLang's", "ours", "SGLang's / ours"]
    return (
        f"## Beside SGLang's own canary\n\n{report.environment('cuda')}, SGLang {peer.version}. Same slots, scattered "
        "one by one, same tokens, one layer's K of 2,048 bytes a slot, each in a CUDA graph, in the same run. "
        "Identity check: SGLang's plan and verify kernels with the requests' own token ids, our walk and check_writes "
        "(bounds, owners, namespaces and indices with it). Content check: SGLang's verify with the hash of all bytes, "
        "which checks the identity planned before along with it; ours alone. Record: SGLang's write; our store, and "
        "with content our record. SGLang hashes the content of one layer; a model has as many as it has. "
        "Command: `PYTHONPATH=DIRECTORY python tests/benchmarks/sglang_peer.py --write`, where DIRECTORY has sglang\n\n"
        f"{report.table(header, rows)}"
    )


def compare(tiny: bool, write: bool) -> int:
    """Run both; the exit status.

    Raises:
        PeerMissingError: SGLang's kernels cannot be loaded.
    """
    if not torch.cuda.is_available():
        if not tiny:
            print("sglang_peer: needs a GPU; --tiny runs both canaries without one, and times nothing", file=sys.stderr)
            return 1
        kernels.DEVICE = torch.device("cpu")
    peer, rows = sglang_kernels.load(), []
    for sizes in (TINY_DECODES + TINY_PREFILLS) if tiny else (DECODES + PREFILLS):
        arena = Arena(peer, *sizes)
        arena.prove_clean()
        rows += untimed(arena) if tiny else rows_of(arena)
        arena.prove_clean()
        arena.prove_flip()
    if not tiny:
        print("\n" + section(peer, rows))
        if write:
            report.write_section("sglang cuda", section(peer, rows))
    return 0
