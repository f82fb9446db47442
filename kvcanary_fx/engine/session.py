"""The session of a serving engine: its steps and forwards.  How an engine connects: :mod:`kvcanary_fx.install`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..config import CanaryConfig
from ..errors import EngineError, SessionStateError
from ..kernels.side_stream import capturing
from ..runtime.session import CanarySession
from .batch import Inputs
from .forward import Schedule, check_indices, check_reads
from .guarded_pool import EnginePool, Pools, find_rivals
from .hooks import EngineHooks
from .kv_pool import KVPool, Slots
from .observers.all import Observers
from .observers.stats import EngineStats
from .observers.windows import WindowReport
from .request_ids import RequestId, RequestIds, require_ids
from .steps import Steps

if TYPE_CHECKING:
    from ..compile.backend import CanaryBackend


class EngineSession(CanarySession):
    """Guards the pools of an engine: bytes, identity and ownership of every slot.

    Attributes:
        pools: the pools by name.
        inputs: the persistent buffers of a step's inputs, shared by captured and eager forwards.
        own_inputs: the same for pools with their own batches, by the batch's field.
        observers: they inspect the pools between steps; ``sweep``, ``health``, ``windows`` and ``given`` are theirs.
    """

    def __init__(
        self,
        pools: Sequence[KVPool],
        config: CanaryConfig,
        max_requests: int | None = None,
        max_tokens: int | None = None,
        schedule: Schedule | None = None,
    ):
        config = _placed(config, pools)
        super().__init__(config)
        if not pools:
            raise EngineError("install_canary needs at least one KVPool")
        names = [p.name for p in pools]
        if len(set(names)) < len(names):
            raise EngineError(f"two pools share a name: {names}. Give each KVPool a name of its own")
        if len({p.token_offset for p in pools}) > 1:
            raise EngineError(
                "the pools have different token_offset: a draft's forwards are not the target's, so a draft pool goes "
                "into a session of its own, install_canary(KVPool(..., token_offset=1))"
            )
        self._keep_to_budget(p.device for p in pools)
        self.ids = RequestIds()
        self.pools = Pools((p.name, EnginePool(p, self.registry, self.controls, config, self.ids)) for p in pools)
        find_rivals(list(self.pools.values()))
        inputs = Inputs(pools, max_requests, max_tokens, self.ids)
        self.inputs, self.own_inputs = inputs.main, inputs.own
        self.schedule = schedule or Schedule()
        self.observers = seen = Observers(self)
        self.sweep, self.health, self.windows, self.given = seen.sweep, seen.health, seen.windows, seen.given
        self._stepping = Steps(self.pools, inputs, self.controls, config, seen, self._look, self.drain)
        self.hooks = EngineHooks(self._stepping, self.pools, self.registry, self.ids, seen)

    @functools.cached_property
    def backend(self) -> CanaryBackend:
        """For ``torch.compile(model, backend=session.backend)``."""
        from ..compile.backend import CanaryBackend  # and all passes: engines that compile by themselves need none

        return CanaryBackend(self.config, self)

    @property
    def steps(self) -> int:
        """Steps of the engine that ended without an error."""
        return self._stepping.done

    @property
    def begun(self) -> int:
        """Steps that began; reports carry their number."""
        return self._stepping.begun

    @property
    def pool(self) -> EnginePool:
        """The only pool.

        Raises:
            EngineError: there are several; take one from ``pools``.
        """
        if len(self.pools) > 1:
            raise EngineError(f"the session has the pools {list(self.pools)}: say which, session.pools[name]")
        return next(iter(self.pools.values()))

    def mark_ready(self) -> None:
        """End the warm-up: forget what capture and dummy batches wrote and read; checks count from here."""
        self._stepping.require_open()
        self.drain()
        for pool in self.pools.values():
            pool.space.forget_identity()
            pool.space.count_steps_anew()
            pool.digests.zero_()
            pool.space.counters.zero_()
            pool.content.counts.zero_()
            pool.scales.adopt()
        self.observers.reset()
        self._alarm.clear()
        self._stepping.mark_ready()
        self.follow()

    def close(self) -> None:
        """End the session: read what is left on the devices; later steps are an error.

        Raises:
            SessionStateError: it is closed already, or a step is running.
        """
        self._stepping.close()

    def step(self, batch: Any = None) -> contextlib.AbstractContextManager[EngineSession]:
        """One outer step of the engine: fills the step inputs; sweeps, drains and reports at the end.

        Raises:
            SessionStateError: a step is already running, or the session is closed.
            StepInputError: the batch does not fit.
            KVCacheViolation: mode ``raise``, and a check failed.
        """
        inner = self._stepping.step(batch, self)
        if self.pace is None or not self._stepping.ready:
            return inner
        return self.pace.step(inner, *self.weight, Inputs.stored(batch))

    @functools.cached_property
    def weight(self) -> tuple[torch.device, int]:
        """The device of the pools, and about how many of our ops a step launches there."""
        pools = [p.declared for p in self.pools.values()]
        return pools[0].device, 2 * sum(len(p.layers) + 1 for p in pools)

    def forward(self, index: int = 0, batch: Any = None) -> contextlib.AbstractContextManager[None]:
        """One forward of the model: checks what it is about to read and write, records what it wrote.

        Nested calls with the same index belong to the outermost one.

        Args:
            index: 0 is the target's; a draft with several forwards counts them.  Violations carry it.
            batch: what this forward reads and writes, if it differs from the step's batch.

        Raises:
            SessionStateError: no step is running, or another forward is.
            KVCacheViolation: mode ``raise``, and a check failed.
        """
        inner = self._stepping.forward(index, batch)
        return inner if self.pace is None else self.pace.forward(inner)

    def flush(self) -> None:
        """Send the allocators' calls so far to the devices, see :meth:`EnginePool.flush`.

        Every step, forward and read of violations does it by itself.  Call it before a CUDA graph is captured, before
        one is replayed that has forwards in it, if an allocator was called since the step began, and before the bytes
        of slots that were just released are rewritten outside a forward.

        Raises:
            EngineError: a CUDA graph is being captured, and there is something to send.
        """
        self._stepping.flush()

    def _look(self) -> None:
        """In raise mode, raise the violations found so far."""
        if self.config.mode == "raise" and not capturing():
            self.drain()
            self._raise_new()

    def check_reads(
        self, pages: torch.Tensor, lengths: torch.Tensor, pool: str | None = None, page_size: int | None = None
    ) -> None:
        """Compare the page table that the attention kernel gets with the request table.

        Args:
            pages: integer ``[bs, columns]``, pages of ``page_size`` slots.
            lengths: integer ``[bs]``, positions that the kernel reads.
            page_size: None for the pool's own ``table_page_size``; 1 where ``pages`` are slots.

        Raises:
            SessionStateError: no forward is running.
            EngineError: fewer rows than the forward has requests, or a pool of rings or states.
        """
        running = self._stepping.running
        if running is None:
            raise SessionStateError("check_reads() outside forward(): it compares with the plan of the running forward")
        self._stepping.join()
        self.given.called("check_reads")
        check_reads(self.pool if pool is None else self.pools[pool], running, pages, lengths, page_size)

    def check_indices(
        self, index: torch.Tensor, longest: int, pool: str | None = None, unit: int = 1, stride: int = 1
    ) -> None:
        """Compare the rows of memory that are gathered for attention with the request table.

        Args:
            index: integer ``[n]`` on the pool's device: the rows of all positions of each request, request by request,
                with those of the tokens that this forward adds.
            longest: positions of the longest request.
            unit, stride: slots of a page, and rows of memory from page to page: the first ``unit`` of them are its
                slots.  1 where the index names slots.

        Raises:
            SessionStateError: no forward is running.
            EngineError: the index is not as described, or a pool of rings or states.
        """
        running = self._stepping.running
        if running is None:
            raise SessionStateError("check_indices() outside forward(): it compares with the plan of the running one")
        self._stepping.join()
        self.given.called("check_reads")
        check_indices(self.pool if pool is None else self.pools[pool], running, index, longest, unit, stride)

    @property
    def flag(self) -> torch.Tensor:
        """int64 ``[2]`` on the device of the first pool: violations ever, violations read.

        They differ while violations wait to be read, so an engine can copy them along with the sampled tokens and
        ask for :meth:`violations` only then.
        """
        self.flush()
        return self.controls(next(iter(self.pools.values())).declared.device).flag

    def owners(self, request_ids: Sequence[RequestId]) -> torch.Tensor:
        """Request ids for a batch with ids on the device: int64 ``[bs]`` on the first pool's device.

        A captured loop of forwards reads the tensor at each replay; refill it with the ids of the next requests.  What
        the allocators did for them is sent to the devices, too (:meth:`flush`), as a replay sends nothing: a page that
        was handed out since the step began was reported as free.

        Raises:
            EngineError: ``request_ids`` is no sequence of ids, or as of :meth:`flush`.
        """
        device = next(iter(self.pools.values())).declared.device
        require_ids(request_ids)
        self.flush()
        return torch.tensor(self.ids.hashes(request_ids), dtype=torch.int64, device=device)

    def stats(self, drain: bool = True) -> EngineStats:
        """Counts since the session is ready.

        Args:
            drain: as in :meth:`.CanarySession.stats`; without it, the slots that hold a token are not counted.
        """
        counts = self.observers.stats(super().stats(drain), slots=drain)
        if self.pace is None:
            return dataclasses.replace(counts, compared_every=self.config.verify_every)
        return dataclasses.replace(counts, compared_every=self.pace.every, compared_within=self.pace.within)

    def window_report(self) -> WindowReport:
        """How the groups of a hybrid model differ, so far; waits for the devices."""
        return self.windows.report()

    def summary(self) -> str:
        """What is protected, what is off and why, and the counts so far, as text."""
        pools = "".join(f"\n  {pool.describe()}" for pool in self.pools.values())
        first, _, rest = super().summary().partition("\n")
        return f"{first}{pools}\n{rest}"

    # ---- digests

    def digest(self, slots: Slots, pool: str | None = None, what: str = "identity") -> int:
        """64-bit digest of slots, to compare between ranks or the two ends of a transfer.

        Args:
            what: ``identity`` (tokens, positions, chain: equal on all ranks) or ``content`` (bytes: equal where
                ranks hold copies of the same heads).
        """
        if what not in ("identity", "content"):
            raise EngineError(f"digest(what={what!r}): it is 'identity' or 'content'")
        shadow = (self.pool if pool is None else self.pools[pool]).export(slots)
        return shadow.identity_digest() if what == "identity" else shadow.content_digest()

    def compare_digests(
        self, mine: int, theirs: int, request: RequestId | None = None, pool: str | None = None
    ) -> bool:
        """Report a violation of the digest check if two digests differ; returns whether they agree.

        Raises:
            KVCacheViolation: mode ``raise``, and they differ.
        """
        chosen = self.pool if pool is None else self.pools[pool]
        self.sweep.report_digest(chosen, mine, theirs, self.ids.hash(request))
        self.given.called("compare_digests")
        self._look()
        return mine == theirs


def _placed(config: CanaryConfig, pools: Sequence[KVPool]) -> CanaryConfig:
    """What ``placement="auto"`` is for these pools.

    Measured (H200, captured decodes, everything recorded): of 64 x 4,096 MLA, whose many small products take longer
    beside a branch, a step took +0.51 to 0.61 % inline and +0.93 to 1.07 beside the model, of 1 x 4,096 +0.98 and
    +0.27; of 64 and 1 x 4,096 GQA +0.32 and +0.39 inline, and +0.20 and -0.04 beside it.
    """
    if config.placement != "auto":
        return config
    latents = all(len(halves) == 1 for pool in pools for halves in pool.tensors)
    return dataclasses.replace(config, placement="inline" if latents else "side")
