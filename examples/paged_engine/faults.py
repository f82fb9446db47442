"""Where faults can be planted: a subclass overrides what it needs, and the engine is none the wiser.

The engine calls these at the places their names say.  What a method returns is what the engine goes on with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batching import Inputs, Plan, Work
    from draft import Head
    from engine import Engine
    from offload import SavedKV
    from workload import Request


class Faults:
    """No fault at all."""

    def before_step(self, engine: Engine) -> None:
        """A step begins; nothing is planned yet."""

    def after_plan(self, engine: Engine, plan: Plan) -> None:
        """The batch is planned; its fields may be changed before anybody sees them."""

    def before_forward(self, engine: Engine, plan: Plan) -> None:
        """The step has begun and its inputs were handed to the canary; the model has not run."""

    def after_forward(self, engine: Engine, plan: Plan) -> None:
        """The model wrote its K and V; the tokens are not accepted yet."""

    def before_draft(self, engine: Engine, plan: Plan) -> None:
        """The target's tokens are accepted; the draft has not caught up yet."""

    def on_reads(self, engine: Engine, plan: Plan) -> None:
        """The block tables for attention are built (``plan.reads``), the model has not got them yet."""

    def on_match(self, engine: Engine, request: Request, pages: list[int]) -> list[int]:
        """The prefix cache found ``pages`` for a request."""
        return pages

    def on_release(self, pages: list[int]) -> list[int]:
        """A request lets go of ``pages``."""
        return pages

    def on_evict(self, pages: list[int]) -> list[int]:
        """The prefix cache lets go of ``pages``."""
        return pages

    def on_offload(self, engine: Engine, saved: SavedKV) -> None:
        """A request's KV has arrived in host memory."""

    def on_load(self, engine: Engine, request: Request, saved: SavedKV) -> bool:
        """Host KV is about to be copied back; False: the copy is lost."""
        return True

    def on_loaded(self, engine: Engine, request: Request) -> None:
        """Host KV was copied back into the pool."""

    def on_transfer(self, raw: bytearray) -> bytearray:
        """The bytes of a request on their way from the prefill to the decode instance."""
        return raw

    def on_catch_up(self, work: list[Work]) -> list[Work]:
        """An eagle draft is about to catch up with what the target accepted."""
        return work

    def on_draft(self, head: Head, index: int, batch: Any, inputs: Inputs) -> None:
        """A forward of the draft is planned; the canary and the model have not got ``batch`` and ``inputs`` yet."""

    def on_accept(self, request: Request, accepted: int) -> int:
        """A verification accepted so many proposed tokens."""
        return accepted
