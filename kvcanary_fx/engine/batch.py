"""A batch as the checks need it: in the step inputs, and as the plan of a forward."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..config import eager_inputs_without_copy
from ..errors import EngineError
from ..kernels.side_stream import capturing
from ..kernels.slots import checks as request_checks
from ..kernels.slots.space import RequestPlan
from ..kernels.staging import sent
from ..kernels.waiting import Waiting
from .arguments import integer_tensor
from .batch_arguments import is_plainly_right, require_batch, stored_in
from .batch_fields import fields_of
from .kv_pool import KVPool
from .request_ids import RequestIds
from .step_inputs import StepInputs
from .step_view import StepView

#: Plans of one memory that are kept: of each pool one, and one for each of the last histories by row.
HISTORIES = 64


def step_inputs(
    pools: Sequence[KVPool], max_requests: int | None, max_tokens: int | None, ids: RequestIds
) -> StepInputs:
    """The registry of what the checks need of a batch."""
    inputs = StepInputs(
        pools[0].device,
        max_requests=max_requests,
        max_tokens=max_tokens,
        no_copy=eager_inputs_without_copy(),
    )
    for name in ("request_rows", "prefix_lens", "extend_lens", "namespaces", "history_lens"):
        inputs.register(name, "batch", torch.int64)
    for name in dict.fromkeys(["input_ids", "positions", "parents", *(p.slots_from for p in pools)]):
        inputs.register(name, "tokens", torch.int64)

    def owners(batch: Any, filled: StepInputs) -> torch.Tensor | array[int] | list[int]:
        given = fields_of(batch)("request_ids", None)
        if type(given) is list:  # as in most steps: to ask whether it is a tensor takes longer
            return ids.packed(given)
        if isinstance(given, torch.Tensor):
            return given
        return ids.packed(given) if given is not None else [0] * filled.num_requests

    inputs.register("owners", "batch", torch.int64, compute=owners)
    # memory that the checks of a forward fill, at addresses that captured graphs can keep
    inputs.register_memory("request_ends", "batch", torch.int64)
    for place, pool in enumerate(pools):
        inputs.register_memory(_real_slots(place), "tokens", torch.int64, pad=-1)
        pool.layout.reserve(place, inputs)
    return inputs


def _real_slots(place: int) -> str:
    """Where the step inputs keep the real slots of the pool that was given in this place."""
    return f"real_slots_{place}"


def plan_of(pool: KVPool, place: int, view: StepView, inputs: StepInputs) -> RequestPlan:
    """The plan of the forward for the pool that was given in this place, out of the step inputs."""
    missing = [n for n in ("input_ids", "request_rows", "prefix_lens") if getattr(view, n) is None]
    if missing:
        raise EngineError(f"the batch has no {', '.join(missing)}: pool {pool.name!r} needs them (see Batch)")
    slots = getattr(view, pool.slots_from)
    if slots is None:
        raise EngineError(f"the batch has no {pool.slots_from!r}, where pool {pool.name!r} takes its slots from")
    extend = view.extend_lens if view.extend_lens is not None else torch.ones_like(view.prefix_lens)
    if pool.slot_map is not None and pool.slots_from == "slots":
        slots = request_checks.mapped(slots, pool.slot_map)
    plan = RequestPlan(
        counts=inputs.counts,
        rows=view.request_rows,
        prefix_lens=view.prefix_lens,
        extend_lens=extend,
        tokens=view.input_ids,
        slots=slots,
        positions=view.positions,
        owners=view.owners,
        namespaces=view.namespaces,
        table=pool.request_table,
        columns=pool.request_table.shape[1] * pool.table_page_size,
        page_size=pool.table_page_size,
        slot_map=pool.slot_map,
        history=_history(view),
        history_lens=view.history_lens,
        history_by_row=_by_row(view),
        parents=view.parents,
        ends=view.request_ends,
        real_slots=getattr(view, _real_slots(place)),
        ring=pool.layout.ring,
        padding_row=pool.padding_row,
        in_flight=bool(getattr(view, "in_flight", False)),
    )
    return pool.layout.narrowed(place, plan, view)


class Inputs:
    """The step inputs of all pools: those of the engine's batch, and those of batches that pools have of their own.

    Attributes:
        main: of the engine's batch.
        own: of the others, by the batch's field that they come from.
    """

    def __init__(
        self,
        pools: Sequence[KVPool],
        max_requests: int | None,
        max_tokens: int | None,
        ids: RequestIds,
    ):
        self._groups: dict[str | None, list[KVPool]] = {None: [p for p in pools if p.batch is None]}
        for pool in pools:
            if pool.batch is not None:
                self._groups.setdefault(pool.batch, []).append(pool)
        made = {
            field: step_inputs(group or pools[:1], max_requests, max_tokens, ids)
            for field, group in self._groups.items()
        }
        self.main = made.pop(None)
        # of each group of pools, with the memory that they are of, and the history
        self._last_plans: dict[tuple[str | None, bool], tuple[dict[Any, Any], Any, dict[str, RequestPlan]]] = {}
        self.own: dict[str, StepInputs] = {field: inputs for field, inputs in made.items() if field is not None}

    #: About how many tokens a batch has stored before.
    stored = staticmethod(stored_in)

    def fill(
        self,
        batch: Any,
        step: int,
        begin: Callable[[int, torch.device | None], None] | None = None,
        waiting: Waiting | None = None,
    ) -> dict[str | None, StepView]:
        """Take in a batch; the views of it, by the field that they come from.

        Args:
            begin: tells the devices that the step begins, but for one that the inputs told, or whose numbers wait.
            waiting: where numbers may wait until ``begin`` sends them.

        Raises:
            StepInputError: a batch that does not fit.
            EngineError: no field for a pool that takes its batch from there.
        """
        if not self._fill_again(self.main, batch, step, waiting):
            if begin is not None:
                begin(step, None)
            self._fill(None, self.main, batch)
        elif begin is not None:
            begin(step, None if self.main.clock is None else self.main.clock.device)
        views: dict[str | None, StepView] = {None: self.main.view()}
        if not self.own:
            return views
        for field, inputs in self.own.items():
            given = _sub_batch(self._groups[field][0], batch)
            if given is not None:
                if not self._fill_again(inputs, given, step):
                    self._fill(field, inputs, given)
                views[field] = inputs.view()
        return views

    def _fill_again(self, inputs: StepInputs, batch: Any, step: int, waiting: Waiting | None = None) -> bool:
        inputs.step = step
        return inputs.may_come_again and is_plainly_right(batch) and inputs.fill_again(batch, waiting)

    def _fill(self, field: str | None, inputs: StepInputs, batch: Any) -> None:
        require_batch(batch, [pool.slots_from for pool in self._groups[field]])
        inputs.fill_from(batch)

    def empty(self, requests: int, tokens: int) -> dict[str | None, StepView]:
        """Take in a batch without requests, at the addresses that every later batch has; its views, padded.

        From here on no buffer moves: a CUDA graph is captured over them.

        Raises:
            StepInputError: more requests or tokens than there is room for.
        """
        views: dict[str | None, StepView] = {}
        for field, inputs in [(None, self.main), *self.own.items()]:
            if not inputs.frozen or inputs.num_requests or inputs.num_tokens:
                nothing: dict[str, Any] = {name: [] for name in inputs.plain_slots}
                inputs.fill_from({**nothing, "parents": None, "request_ids": []})
                inputs.freeze()
            views[field] = inputs.view(requests, tokens)
        return views

    def plans(self, views: Mapping[str | None, StepView]) -> dict[str, RequestPlan]:
        """The plan of each pool by name; pools without a batch are left out.  Not to be written to: views of the same
        memory get the same."""
        if len(self._groups) == 1:
            return self._plans_of(None, self._groups[None], views[None])
        plans: dict[str, RequestPlan] = {}
        for field, group in self._groups.items():
            if field in views:
                plans |= self._plans_of(field, group, views[field])
        return plans

    def _plans_of(self, field: str | None, pools: Sequence[KVPool], view: StepView) -> dict[str, RequestPlan]:
        """The plan of each pool by name; all at once, if they are those of the last view of the same memory."""
        get, kept = view.of_batch, view.kept_plans
        in_flight, history = bool(get("in_flight", None)), get("history", None)
        memory, its_history, known = self._last_plans.get((field, in_flight), (None, None, {}))
        if kept is not None and kept is memory and history is its_history:
            return known
        inputs = self.main if field is None else self.own[field]
        plans = {pool.name: _kept_plan(pool, place, view, inputs) for place, pool in enumerate(pools)}
        fixed = _fixed_history(view)
        if (
            kept is not None
            and (history is None or fixed is history)
            and all(
                kept.get((pool.name, in_flight, _number_of(fixed))) is plans[pool.name]
                and plans[pool.name].slots is getattr(view, pool.slots_from)  # else the layout computes them each time
                for pool in pools
            )
        ):
            self._last_plans[field, in_flight] = kept, history, plans
        return plans


def _kept_plan(pool: KVPool, place: int, view: StepView, inputs: StepInputs) -> RequestPlan:
    """The plan of a forward for a pool; that of the last view of the same memory, with this step's history.

    Where a layout computes the plan from what the view holds, it does so each time, into the same memory: then only the
    launches are those of the last.
    """
    kept = view.kept_plans
    if kept is None or pool.slot_map is not None or view.extend_lens is None:
        return _there(pool, plan_of(pool, place, view, inputs))
    fixed = _fixed_history(view)
    form = pool.name, bool(getattr(view, "in_flight", False)), _number_of(fixed)
    known: RequestPlan | None = kept.get(form)
    if known is not None and known.slots is getattr(view, pool.slots_from):
        if fixed is not None:
            return known
        history = _history(view)
        return known if history is None else dataclasses.replace(known, history=history).with_launches_of(known)
    plan = plan_of(pool, place, view, inputs)
    if plan.reads is not None or plan.counts.device != pool.device:
        return _there(pool, plan)
    if known is not None:
        return plan.with_launches_of(known)
    if len(kept) >= HISTORIES:
        kept.clear()
    bare = plan if plan.history is fixed else dataclasses.replace(plan, history=None)
    kept[form] = bare
    bare.keep_launches()
    return plan.with_launches_of(bare)


def _there(pool: KVPool, plan: RequestPlan) -> RequestPlan:
    """The plan on the pool's device; the step inputs are on that of the first pool.

    Raises:
        EngineError: while a CUDA graph is captured, whose replays would see none of the copies.
    """
    if pool.device == plan.counts.device:
        return plan
    moved = plan.to(pool.device)
    if moved is not plan and capturing():
        raise EngineError(
            f"pool {pool.name!r} is on {pool.device} and the step inputs are not: a CUDA graph cannot be captured over "
            "both. Give each device a session of its own, install_canary(...) for its pools"
        )
    return moved


def _sub_batch(pool: KVPool, batch: object) -> object:
    """The pool's own batch out of the engine's; None where it has none this time.

    Raises:
        EngineError: the batch has no such field.
    """
    assert pool.batch is not None
    if isinstance(batch, dict):
        return batch.get(pool.batch)
    if not hasattr(batch, pool.batch):
        raise EngineError(
            f"the batch has no {pool.batch!r}, where pool {pool.name!r} takes its own batch from: give it a Batch, or "
            "None where the forward neither reads nor writes the pool"
        )
    return getattr(batch, pool.batch)


def _moved(values: Any, device: torch.device) -> torch.Tensor:
    """Values as a tensor of a device; copied from the host without waiting for the device."""
    return sent(values if isinstance(values, torch.Tensor) else torch.as_tensor(values, device="cpu"), device)


def _fixed_history(view: StepView) -> torch.Tensor | None:
    """The history, if it is a tensor of the device that the next steps may have, too: then plans keep it."""
    history, lens = view.of_batch("history", None), view.history_lens
    if not _by_row(view) or not isinstance(history, torch.Tensor) or lens is None or not view.num_requests:
        return None
    return history if history.device == lens.device and history.dim() == 2 else None


def _number_of(history: torch.Tensor | None) -> int:
    """A number of its own, as long as a plan keeps it."""
    return 0 if history is None else id(history)


def _by_row(view: StepView) -> bool:
    return bool(view.of_batch("history_by_row", None))


def _history(view: StepView) -> torch.Tensor | None:
    """The requests' own token ids, ``[bs, length]``: the batch's tensor as it is, since its length varies."""
    history = getattr(view, "history", None)
    if history is None or view.history_lens is None or not view.num_requests:
        return None
    try:
        given = _moved(history, view.history_lens.device)
    except (TypeError, ValueError, RuntimeError) as e:
        raise EngineError(
            f"history must be [bs, length], rows padded to one length, history_lens valid ones ({e})"
        ) from e
    integer_tensor(given, "the tokens of history")
    if given.dim() != 2 or (given.shape[0] != view.history_lens.shape[0] and not _by_row(view)):
        raise EngineError(f"history is {list(given.shape)}; it must be [bs, length] for {view.num_requests} requests")
    return given
