"""What vLLM's OffloadingConnector stores in the host's memory: when it comes back, it is compared with what was stored.

Each step's message tells the worker which blocks go to which chunks of that memory, and which come back from there
(``OffloadingConnectorMetadata``), so nothing of the connector is wrapped.  What is known of a block when it is stored,
who is in it and the digests of its bytes, is kept for its chunk, in the host's memory, too.  It is laid over the block
that the chunk is loaded into, and the first forward that reads it compares it all.

Stores that others may write, and those that change bytes, are not compared: what comes from there is taken as it is
(:mod:`.loaded`).
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from ...engine.guarded_pool import EnginePool
from ...engine.parked import ParkedShadows
from ...engine.transfer import ShadowSlice

log = logging.getLogger("kvcanary")

#: vLLM's way of off-loading whose memory nobody else writes; by its exact name, as its subclasses have further tiers.
OWN_MEMORY = "CPUOffloadingSpec"

#: Where a block's bytes are in a connector's store: the connector, the chunk, and which of its blocks.
Place: TypeAlias = "tuple[int, int, int]"

#: The guarded pool of the target that a block is in, with the tokens of a block.
PoolOf: TypeAlias = "Callable[[int], tuple[EnginePool, int] | None]"


class Arrived(NamedTuple):
    """A block that is loaded.

    Attributes:
        pool: the name of the one that it was stored from.
        shadow: of all that its job loads of that pool.
        page: which page of ``shadow`` it is.
    """

    pool: str
    shadow: ShadowSlice
    page: int


def shadow_of(slots: torch.Tensor, arrived: Mapping[int, Arrived], pool: EnginePool, page_size: int) -> ShadowSlice:
    """What was stored of slots (int64 ``[n]`` of the host) whose blocks one job has loaded."""
    blocks, of_each = (slots // page_size).unique_consecutive(return_inverse=True)
    first = [arrived[block] for block in blocks.tolist()]
    pages = torch.tensor([each.page for each in first], dtype=torch.int64)
    return first[0].shadow[pool.slot_tensor(pages[of_each] * page_size + slots % page_size)]


class Offloaded:
    """What the connectors of one worker have stored."""

    def __init__(self) -> None:
        # of the worker's connectors, in order: blocks of a chunk, or None, where what is loaded is taken as it is
        self._blocks_per_chunk: list[int | None] | None = None  # not asked yet
        self._parked: dict[str, ParkedShadows] = {}  # by the name of the pool
        self._pool_at: dict[Place, str] = {}  # what was stored there last is of this one
        self._later: list[tuple[int, Any]] = []  # jobs that store what the forward of the last step wrote
        self._coming: dict[str, dict[int, Arrived]] = {}  # by request and block

    def step(self, scheduled: Any, pool_of: PoolOf) -> None:
        """A step begins, before its message is applied.

        Args:
            scheduled: the ``SchedulerOutput``.
            pool_of: the guarded pool of the target that a block is in, with the tokens of a block.
        """
        self._lost(scheduled)
        metadata = getattr(scheduled, "kv_connector_metadata", None)
        if metadata is None:
            return
        if self._blocks_per_chunk is None:
            self._blocks_per_chunk = _blocks_per_chunk()
        parts = getattr(metadata, "metadata", None)  # of a MultiConnector
        later, self._later = self._later, []
        self._store(later, pool_of)
        for number, part in enumerate(parts if isinstance(parts, tuple) else [metadata]):
            if number < len(self._blocks_per_chunk) and self._blocks_per_chunk[number] is not None:
                self._take(number, part, scheduled, pool_of)

    def _take(self, number: int, metadata: Any, scheduled: Any, pool_of: PoolOf) -> None:
        """The message to one connector.  It stores what a forward wrote in the next step, and at once what has to be
        stored before the forward that comes."""
        at_once = metadata.jobs_to_flush or ()
        now: list[tuple[int, Any]] = []
        for name, job in metadata.store_jobs.items():
            flushed = name in at_once or job.req_id in scheduled.finished_req_ids
            (now if flushed else self._later).append((number, job))
        self._store(now, pool_of)
        for job in metadata.load_jobs.values():
            self._load(number, job)

    def _pairs(self, number: int, blocks: Any, chunks: Any) -> Iterator[tuple[int, Place]]:
        for block, (chunk, part) in pairs(blocks, chunks, self._per_chunk(number)):
            yield block, (number, chunk, part)

    def _per_chunk(self, number: int) -> int:
        known = None if self._blocks_per_chunk is None else self._blocks_per_chunk[number]
        assert known is not None
        return known

    def _store(self, jobs: Sequence[tuple[int, Any]], pool_of: PoolOf) -> None:
        """Jobs store blocks, in their order; what is known of a pool's is kept in one launch."""
        of_pool: dict[str, tuple[EnginePool, int, dict[Place, int]]] = {}
        for number, job in jobs:
            stored = list(self._pairs(number, job.src_spec, job.dst_spec))
            for chunk in {place[:2] for _, place in stored}:  # another one's by now, also what is not stored of it
                for part in range(self._per_chunk(number)):
                    self._pool_at.pop((*chunk, part), None)
            for block, place in stored:
                known = pool_of(block)
                if known is not None:
                    pool, page_size = known
                    self._pool_at[place] = pool.name
                    of_pool.setdefault(pool.name, (pool, page_size, {}))[2][place] = block
        for pool, page_size, block_at in of_pool.values():
            parked = self._parked.get(pool.name)
            if parked is None or parked.pool is not pool:  # a guard that was made anew
                parked = ParkedShadows(pool, page_size, _memory_beside(pool.declared.device))
                if self._parked.get(pool.name) is not None:
                    self._pool_at = {
                        at: name for at, name in self._pool_at.items() if name != pool.name or at in block_at
                    }
                self._parked[pool.name] = parked
            parked.put(list(block_at), list(block_at.values()))

    def _load(self, number: int, job: Any) -> None:
        """Read what was stored now: the chunks may be used again before the forward that reads the blocks."""
        of_pool: dict[str, tuple[list[Place], list[int]]] = {}
        for block, place in self._pairs(number, job.dst_spec, job.src_spec):
            name = self._pool_at.get(place)
            if name is not None:
                places, blocks = of_pool.setdefault(name, ([], []))
                places.append(place)
                blocks.append(block)
        coming = self._coming[job.req_id] = {}
        for name, (places, blocks) in of_pool.items():
            shadow = self._parked[name].get(places)
            coming.update({block: Arrived(name, shadow, page) for page, block in enumerate(blocks)})

    def arrived(self, request: str) -> dict[int, Arrived]:
        """What a request has got, by block; returned once."""
        return self._coming.pop(request, {})

    def _lost(self, scheduled: Any) -> None:
        """Requests have ended, or have given up their blocks."""
        for request in (*scheduled.finished_req_ids, *(scheduled.preempted_req_ids or ())):
            self._coming.pop(request, None)

    def all_gone(self) -> None:
        """The memory of all blocks is given back: nothing that was loaded is there any more."""
        self._coming.clear()
        self._later.clear()


def pairs(blocks: Any, chunks: Any, per_chunk: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Each block of a transfer with its chunk, and its place in it, as vLLM copies them.

    Args:
        blocks: a ``GPULoadStoreSpec``: of each group so many, and the number in its request of the first of them.
        chunks: a ``CPULoadStoreSpec``; a group's first and last one may be used in part.
        per_chunk: blocks of a chunk.
    """
    block = iter(blocks.block_ids)
    begin = 0
    for n, first in zip(blocks.group_sizes, blocks.block_indices, strict=True):
        if not n:
            continue
        skipped = first % per_chunk
        for i in range(skipped, skipped + n):
            yield int(next(block)), (int(chunks.block_ids[begin + i // per_chunk]), i % per_chunk)
        begin += -(-(skipped + n) // per_chunk)


def _blocks_per_chunk() -> list[int | None]:
    """Of each of the worker's connectors, in order."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return []
    connector: Any = get_kv_transfer_group()
    found = []
    for each in getattr(connector, "_connectors", None) or [connector]:  # a MultiConnector's
        found.append(chunk_of(each))
        said = "taken as it is" if found[-1] is None else "compared with what it stored"
        log.info("kvcanary.vllm what %s loads is %s", type(each).__name__, said)
    return found


def chunk_of(connector: Any) -> int | None:
    """Blocks that a connector stores together; None: what it loads is taken as it is."""
    spec = getattr(getattr(connector, "connector_worker", None), "spec", None)
    if type(spec).__name__ != OWN_MEMORY or not _messages_are_known():
        return None
    config, blocks = getattr(spec, "config", None), getattr(spec, "blocks_per_chunk", None)
    # with these, several ranks write one copy
    shared = getattr(spec, "replicated_layout", True) or getattr(config, "canonical_layout", True)
    return blocks if isinstance(blocks, int) and not shared else None


def _messages_are_known() -> bool:
    """Whether the connector's messages have what is read of them here: another vLLM's may have something else."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import common
        from vllm.v1.kv_offload.base import GPULoadStoreSpec

        message, job = (
            {field.name for field in dataclasses.fields(kind)}
            for kind in (common.OffloadingConnectorMetadata, common.TransferJob)
        )
        blocks = set(inspect.signature(GPULoadStoreSpec).parameters)
    except (ImportError, AttributeError, TypeError):
        return False
    return (
        message >= {"load_jobs", "store_jobs", "jobs_to_flush"}
        and job >= {"req_id", "src_spec", "dst_spec"}
        and blocks >= {"block_ids", "group_sizes", "block_indices"}
    )


def _memory_beside(device: torch.device) -> Callable[[int, int], torch.Tensor] | None:
    """Memory of the host that a device reads and writes as its own; None: there is none, or it is the host."""
    if device.type != "cuda":
        return None
    from vllm.utils.platform_utils import is_uva_available
    from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

    if not is_uva_available():
        return None
    pinned: list[torch.Tensor] = []

    def made(rows: int, columns: int) -> torch.Tensor:
        pinned.append(torch.zeros(rows, columns, dtype=torch.int32, pin_memory=True))
        view: torch.Tensor = get_accelerator_view_from_cpu_tensor(pinned[-1])
        return view

    return made
