"""An extension of vLLM's workers that damages their KV cache, at a moment that is said before."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import vllm_filled  # noqa: F401  whose load format the worker is asked for
from tiny_vllm import client_name

#: Of the block that is ruined.
SLOT = 3


class Ruin:
    """Mixed into the worker's class by vLLM; a server's ``/collective_rpc`` calls its methods.

    Requests are known by what the client called them (``X-Request-Id``).
    """

    model_runner: Any

    def ruin(self) -> None:
        """Change all pages, so that what attention reads there changes tokens."""
        for layer in self.model_runner.compilation_config.static_forward_context.values():
            layer.kv_cache.mul_(-1e5)

    def follow_requests(self) -> dict[str, Any]:
        """Follow requests from now on.

        Returns:
            What vLLM chose by itself.
        """
        runner = self.model_runner
        self._trap = Trap(runner)
        manager = getattr(runner, "cudagraph_manager", None)
        return dict(
            runner=type(runner).__module__,
            graphs=runner.vllm_config.compilation_config.cudagraph_mode.name,
            asynchronous=runner.vllm_config.scheduler_config.async_scheduling,
            captured=len(getattr(manager, "graphs", ())),
        )

    def arm_ruin(self, given: str) -> None:
        """Set the trap.

        Args:
            given: the arguments of :meth:`Trap.arm`, as JSON: the server passes on texts only.
        """
        self._trap.arm(**json.loads(given))

    def ruin_block(self, of: str, place: str) -> dict[str, Any]:
        """Ruin a slot of a request at once, also if that has ended."""
        return self._trap.ruin(of, int(place))

    def planted_ruin(self) -> dict[str, Any]:
        """What the trap did; empty before."""
        return self._trap.planted


class Trap:
    """Ruins a slot of a request right before a forward.

    Attributes:
        planted: what it did: in which ``block``, at which ``time`` (of the monotonic clock, which all processes share),
            and which requests had the block, ``readers``.
    """

    def __init__(self, runner: Any):
        self._runner = runner
        self._tables: dict[str, list[int]] = {}
        self._decoding: dict[str, int] = {}
        self._ended: set[str] = set()
        self._armed: dict[str, Any] | None = None
        self.planted: dict[str, Any] = {}
        original: Callable[..., Any] = runner.execute_model

        def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            self._before(scheduled)
            return original(scheduled, *args, **kwargs)

        runner.execute_model = execute_model

    def arm(self, of: str, place: int, decoding: list[str], ended: list[str], steps: int) -> None:
        """Wait for a step.

        Args:
            of, place: whose block, and which of its blocks.
            decoding: all of these must have decoded for ``steps`` steps.
            ended: these must have ended.
        """
        self.planted = {}
        self._armed = dict(of=of, place=place, decoding=decoding, ended=ended, steps=steps)

    def ruin(self, of: str, place: int) -> dict[str, Any]:
        """Change a slot of a block in all layers, so that what attention reads there changes tokens."""
        from kvcanary_fx.adapters.vllm import registry

        block = self._tables[of][place]
        guard = registry.of_runner(self._runner)
        (group,) = guard.groups
        for halves in group.layers.values():
            for half in halves:
                half[block, SLOT].mul_(-1e3)
        readers = [name for name, blocks in self._tables.items() if block in blocks and name not in self._ended]
        self.planted = dict(block=block, time=time.monotonic(), readers=sorted(readers))
        return self.planted

    def _before(self, scheduled: Any) -> None:
        self._ended |= {client_name(request) for request in scheduled.finished_req_ids}
        new = {client_name(request.req_id): request for request in scheduled.scheduled_new_reqs}
        for name, request in new.items():
            self._tables[name] = list(request.block_ids[0])
        for request, tokens in scheduled.num_scheduled_tokens.items():
            name = client_name(request)
            if name not in new and tokens == 1:
                self._decoding[name] = self._decoding.get(name, 0) + 1
        wanted = self._armed
        if wanted is None or not self._ended.issuperset(wanted["ended"]):
            return
        running = {client_name(request) for request in scheduled.num_scheduled_tokens}
        if running.issuperset(wanted["decoding"]) and all(
            self._decoding.get(name, 0) >= wanted["steps"] for name in wanted["decoding"]
        ):
            self._armed = None
            self.ruin(wanted["of"], wanted["place"])
