"""Scenes of :mod:`vllm_v2_run` that print a table: the proof, planted bugs, clean loads, launches.

All run on one engine, of either runner; each leaves it as it was.  A scene's ``ok`` says whether all rows are right.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import DeviceType
from vllm_rig import Rig, prompt


def proof(rig: Rig) -> dict[str, Any]:
    """Each half of each layer in vLLM's own cache; only as the first scene, while nothing is stored."""
    from kvcanary_fx.adapters.vllm import proof
    from kvcanary_fx.errors import SelfTestError

    began = time.perf_counter()
    try:
        proof.prove(rig.guard.groups, rig.guard.settings.session_config)
    except SelfTestError as error:
        return dict(ok=False, failed=str(error)[:400])
    found = rig.session.violations()
    return dict(ok=not found, seconds=round(time.perf_counter() - began, 3), alarms=[str(v.line()) for v in found[:3]])


# ---- bugs


def bugs(rig: Rig) -> dict[str, Any]:
    """Bugs of the scheduler and of the worker's block tables, one after the other: the checks that told them."""
    table = {}
    for plant, wanted in BUGS.items():
        _renew(rig)
        _donors(rig)
        before = len(rig.session.violations())
        told, error = set(), None
        try:
            with plant(rig):
                rig.add("A", prompt(50, 96) + prompt(9, 4), length=24)
                rig.add("B", prompt(60, 60), length=24)
                with contextlib.suppress(AssertionError):  # requests are left
                    rig.run(limit=30)
        except Exception as e:
            error = f"{type(e).__name__}: {str(e)[:200]}"
        for v in rig.session.violations()[before:]:
            told.add((v.check, v.why, str(v.request).rpartition("-")[0]))
        ok = error is None and any((check, why) in wanted for check, why, _request in told)
        table[plant.__name__.lstrip("_")] = dict(ok=ok, told=sorted(map(str, told))[:6], error=error)
    _renew(rig)
    return dict(ok=all(row["ok"] for row in table.values()), table=table)


def _donors(rig: Rig) -> None:
    """Fill the prefix cache."""
    rig.donors = {}
    for name, seed in (("donor", 50), ("other", 51)):
        rig.add(name, prompt(seed, 96), length=12)
        rig.run(lambda step, name=name: rig.donors.update({name: rig.pages(name)[0]}) if step == 6 else None)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, made: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, made(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _freed_while_read(rig: Rig) -> Any:
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    freed: list[Any] = []

    def made(original: Callable[..., Any]) -> Callable[..., Any]:
        def allocate(self: Any, request_id: str, *args: Any) -> Any:
            new, blocks = original(self, request_id, *args), self.req_to_blocks[request_id]
            if request_id.startswith("A-") and len(blocks) > 3 and not freed:
                freed.append(blocks[-2])
                self.block_pool.free_blocks(freed)
            return new

        return allocate

    return _replaced(FullAttentionManager, "allocate_new_blocks", made)


def _freed_twice(rig: Rig) -> Any:
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

    def made(original: Callable[..., Any]) -> Callable[..., Any]:
        def free(self: Any, request_id: str) -> None:
            blocks = list(self.req_to_blocks.get(request_id, []))
            original(self, request_id)
            if request_id.startswith("A-"):
                self.block_pool.free_blocks(blocks[-1:])

        return free

    return _replaced(SingleTypeKVCacheManager, "free", made)


def _another_prompts_block(rig: Rig) -> Any:
    from vllm.v1.core.block_pool import BlockPool

    def made(original: Callable[..., Any]) -> Callable[..., Any]:
        def find(self: Any, block_hash: Any, groups: Any) -> Any:
            found = original(self, block_hash, groups)
            if found and found[0].block_id == rig.donors["donor"][1]:
                return [self.blocks[rig.donors["other"][1]]]
            return found

        return find

    return _replaced(BlockPool, "get_cached_block", made)


def _slots_off_by_one(rig: Rig) -> Any:
    if _is_v2(rig):
        from vllm.v1.worker.gpu.block_table import BlockTables

        def made(original: Callable[..., Any]) -> Callable[..., Any]:
            def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
                given = original(self, *args, **kwargs)
                self.slot_mappings.add_((self.slot_mappings >= 0).to(self.slot_mappings.dtype))
                return given

            return compute

        return _replaced(BlockTables, "compute_slot_mappings", made)
    from vllm.v1.worker.block_table import BlockTable

    def made_v1(original: Callable[..., Any]) -> Callable[..., Any]:
        def compute(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            self.slot_mapping.gpu += 1

        return compute

    return _replaced(BlockTable, "compute_slot_mapping", made_v1)


def _stale_table(rig: Rig) -> Any:
    """The worker does not hear of the blocks that a running request gets."""
    if _is_v2(rig):
        from vllm.v1.worker.gpu.block_table import BlockTables

        def made(original: Callable[..., Any]) -> Callable[..., Any]:
            def append(self: Any, index: int, blocks: Any, overwrite: bool, *args: Any) -> None:
                if overwrite:
                    original(self, index, blocks, overwrite, *args)

            return append

        return _replaced(BlockTables, "append_block_ids", made)
    from vllm.v1.worker.block_table import BlockTable

    def made_v1(original: Callable[..., Any]) -> Callable[..., Any]:
        def append(self: Any, blocks: Any, row: int) -> None:
            if not self.num_blocks_per_row[row]:
                original(self, blocks, row)

        return append

    return _replaced(BlockTable, "append_row", made_v1)


#: What must be told of each.
BUGS: dict[Callable[[Rig], Any], set[tuple[str, str]]] = {
    _another_prompts_block: {("token", "WRONG_TOKEN")},
    _slots_off_by_one: {("index", "TABLE_DIFFERS")},
    _stale_table: {("index", "READ_DIFFERS"), ("index", "TABLE_DIFFERS"), ("bounds", "RESERVED_SLOT")},
    _freed_twice: {("owner", "FOREIGN_FREE"), ("owner", "DOUBLE_FREE")},
    _freed_while_read: {("owner", "FOREIGN_READ"), ("owner", "READ_AFTER_FREE")},
}


# ---- clean


def clean(rig: Rig) -> dict[str, Any]:
    """Random load for ``SECONDS_OF_LOAD`` (20) from ``SEED``: stairs of prefixes, turns, bursts, aborts, chunks.

    The requests are the same in each run, so their tokens can be compared with those of an unguarded run: both print
    a CRC of each request's.  Preemption needs an engine of few blocks: ``BLOCKS=24``.
    """
    seed, seconds = int(os.environ.get("SEED", "1")), float(os.environ.get("SECONDS_OF_LOAD", "20"))
    _renew(rig)
    rng, ended, number = random.Random(seed), time.monotonic() + seconds, 0
    before = len(_lines(rig)) if rig.guard is not None else 0
    turns = [prompt(200 + i, 20 + 9 * i) for i in range(4)]
    while time.monotonic() < ended:
        burst = rng.randint(1, 8)
        for _ in range(burst):
            turn = rng.randrange(4)
            stem = turns[turn][: rng.choice([16, 32, 48, len(turns[turn])])]
            rig.add(f"n{number}", stem + prompt(1000 + number, rng.randint(1, 60)), length=rng.randint(1, 24))
            number += 1
        turns[turn] = (turns[turn] + prompt(5000 + number, 24))[-150:]
        gone = rng.randint(3, 20)
        victim = f"n{number - 1}"

        def at(step: int, gone: int = gone, victim: str = victim) -> None:
            if step == gone and any(r.rpartition("-")[0] == victim for r in rig.scheduler.requests):
                rig.engine.abort_request([rig.internal(victim)], internal=True)

        rig.run(at, limit=2000)
    found: dict[str, Any] = dict(ok=True, seed=seed, requests=number, preempted=rig.preempted)
    if rig.guard is None:
        return found | dict(tokens=_crcs(rig))
    told = _lines(rig)[before:]
    return found | dict(
        ok=not told and not rig.session.uncovered, violations=told[:5], uncovered=rig.session.uncovered[:3],
        tokens=_crcs(rig),
    )  # fmt: skip


def _lines(rig: Rig) -> list[str]:
    """The violations so far, also of states."""
    return [str(v.line()) for session in rig.guard.sessions for v in session.violations()]


def _crcs(rig: Rig) -> dict[str, int]:
    """Of the tokens of the requests that ran to their ends."""
    return {
        name: zlib.crc32(str(tokens).encode()) for name, tokens in rig.tokens.items() if rig.finished[name] == "length"
    }


# ---- launches


def launches(rig: Rig) -> dict[str, Any]:
    """What a decode step launches, by name, with 1 request and with as many as fit: means over ``STEPS`` forwards.

    ``calls`` are the host's, a graph's replay is one; ``kernels`` are what ran on the device, those of a replayed graph
    too.  What is in a guarded run and not in an unguarded one is ours (``tests/benchmarks/vllm_launches.py``).  Without
    a GPU, ``calls`` are PyTorch's operators.
    """
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    most, table = rig.engine.vllm_config.scheduler_config.max_num_seqs, {}
    for requests in (1, most):
        _renew(rig)
        for i in range(requests):
            rig.add(f"l{i}", prompt(300 + i, 20), length=60)
        for _ in range(16):  # the prompts
            rig.engine.step()
        with _forwards_counted(rig) as forwards, profile(activities=[activity]) as profiled:
            for _ in range(STEPS):
                rig.engine.step()
            if on_gpu:
                torch.cuda.synchronize()
        running = len(rig.scheduler.running)
        calls: dict[str, float] = {}
        kernels: dict[str, float] = {}
        for event in profiled.key_averages():
            if event.device_type != DeviceType.CPU:
                kernels[event.key[:80]] = kernels.get(event.key[:80], 0) + event.count / len(forwards)
            elif not on_gpu or any(word in event.key for word in ("Launch", "Memcpy", "Memset")):
                calls[event.key] = event.count / len(forwards)
        table[str(requests)] = dict(running=running, forwards=len(forwards), calls=calls, kernels=kernels)
    _renew(rig)
    return dict(ok=all(row["running"] == int(requests) for requests, row in table.items()), table=table)


#: Forwards that are profiled.
STEPS = 16


def _forwards_counted(rig: Rig) -> Any:
    """One entry for each forward; asynchronous scheduling need not have one for each step of the engine."""
    forwards: list[None] = []

    def made(original: Callable[..., Any]) -> Callable[..., Any]:
        def execute(*args: Any, **kwargs: Any) -> Any:
            forwards.append(None)
            return original(*args, **kwargs)

        return execute

    @contextlib.contextmanager
    def counted() -> Iterator[list[None]]:
        with _replaced(rig.runner, "execute_model", made):
            yield forwards
        del rig.runner.execute_model  # the class has it

    return counted()


# ---- an engine as it was


def _is_v2(rig: Rig) -> bool:
    return ".worker.gpu." in type(rig.runner).__module__


def _renew(rig: Rig) -> None:
    """No request, no block in the prefix cache, nothing told; reference counts that a bug left are mended."""
    rig.engine.abort_request(list(rig.scheduler.requests), internal=True)
    for _ in range(3):
        rig.engine.step()
    pool = rig.scheduler.kv_cache_manager.block_pool
    for block in pool.blocks:
        if block.ref_cnt < 0:
            block.ref_cnt = 0
    rig.engine.reset_prefix_cache()
    if rig.guard is not None:
        rig.guard.reactions.take_verdict()
        rig.session.found.clear()
    rig.tokens.clear()
    rig.finished.clear()
    rig.preempted = 0


SCENES = {"proof": proof, "bugs": bugs, "clean": clean, "launches": launches}
