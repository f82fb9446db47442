"""vLLM's OffloadingConnector on a CPU: its own scheduler and worker, and copies by torch in the place of CUDA's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu import spec


class CopyingWorker(OffloadingWorker):
    """Copies whole pages between the KV caches and memory of the same size in chunks, in the order of the jobs.

    Attributes:
        host: int8 ``[chunks, blocks, bytes]`` for each tensor of the engine's.
        steps: a job is done when vLLM has asked so many times which are; 0: at once.
        ruin: done once, to the last chunk of what is loaded next: int8 ``[blocks, bytes]`` of the first tensor.
        shifted: chunks are loaded from their neighbours.
        stores, loads: of all workers, in blocks.
    """

    steps: ClassVar[int] = 0
    ruin: ClassVar[Callable[[torch.Tensor], None] | None] = None
    shifted: ClassVar[int] = 0
    stores: ClassVar[int] = 0
    loads: ClassVar[int] = 0

    def __init__(self, kv_caches: Any, per_chunk: int, chunks: int):
        self._per_chunk = per_chunk
        self._jobs: list[list[Any]] = []  # number, steps left, what is left to do
        self._device = [each.tensor for each in kv_caches.tensors]
        self.host = [t.new_zeros(chunks, per_chunk, t.shape[1]) for t in self._device]
        self._refs = kv_caches.group_data_refs

    def _copy(self, blocks: Any, chunks: Any, store: bool) -> int:
        """By vLLM's own arithmetic, ``compute_sub_block_ptrs``, without addresses."""
        at = begin = 0
        for refs, n, first in zip(self._refs, blocks.group_sizes, blocks.block_indices, strict=True):
            if not n:
                continue
            skip = first % self._per_chunk
            used = -(-(skip + n) // self._per_chunk)
            of_chunks = torch.as_tensor(chunks.block_ids[begin : begin + used]).repeat_interleave(self._per_chunk)
            parts = torch.arange(self._per_chunk).repeat(used)
            of_chunks, parts = of_chunks[skip : skip + n], parts[skip : skip + n]
            if not store:
                of_chunks = (of_chunks + self.shifted) % self.host[0].shape[0]
            pages = torch.as_tensor(blocks.block_ids[at : at + n])
            for ref in refs:
                device, host = self._device[ref.tensor_idx], self.host[ref.tensor_idx]
                if store:
                    host[of_chunks, parts] = device[pages]
                else:
                    device[pages] = host[of_chunks, parts]
            at, begin = at + n, begin + used
        return at

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, functools.partial(self._store, src_spec, dst_spec))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, functools.partial(self._load, src_spec, dst_spec))

    def _submit(self, job_id: int, copy: Callable[[], None]) -> bool:
        self._jobs.append([job_id, self.steps, copy])
        if not self.steps:
            self.wait({job_id})
        return True

    def _store(self, src_spec: Any, dst_spec: Any) -> None:
        CopyingWorker.stores += self._copy(src_spec, dst_spec, store=True)

    def _load(self, src_spec: Any, dst_spec: Any) -> None:
        if CopyingWorker.ruin is not None:
            CopyingWorker.ruin(self.host[0][int(src_spec.block_ids[-1])])
            CopyingWorker.ruin = None
        CopyingWorker.loads += self._copy(dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        for job in self._jobs:
            job[1] -= 1
        ended = [job for job in self._jobs if job[1] <= 0]
        self.wait({job[0] for job in ended})
        self._jobs = [job for job in self._jobs if job not in ended]
        return [TransferResult(job_id=job[0], success=True) for job in ended]

    def wait(self, job_ids: set[int]) -> None:
        """Do these, and those before them."""
        last = max((i for i, job in enumerate(self._jobs) if job[0] in job_ids), default=-1)
        for job in self._jobs[: last + 1]:
            job[2]()
            job[2] = _nothing

    def shutdown(self) -> None: ...


def _nothing() -> None: ...


class CPUOffloadingSpec(spec.CPUOffloadingSpec):
    """vLLM's own, which has a worker for GPUs alone."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        return CopyingWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)


#: The name that vLLM looks up here: what it knows by the class's own is its own.
OwnSpec = CPUOffloadingSpec


class SharedSpec(CPUOffloadingSpec):
    """Of a kind that the canary does not know."""


def config(name: str = "OwnSpec", **extra: Any) -> dict[str, Any]:
    """``kv_transfer_config`` of an engine."""
    given = {"spec_name": name, "spec_module_path": __name__, "cpu_bytes_to_use": 1 << 26}
    return dict(kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=given | extra)
