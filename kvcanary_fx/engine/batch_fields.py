"""The batch of a forward, as an engine gives it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .request_ids import RequestId


@dataclasses.dataclass
class Batch:
    """One forward as an engine plans it.  Any object or mapping with these fields works.

    Attributes:
        input_ids: integer ``[n]``, the tokens to add, request by request.  Their low 32 bits are kept and compared, as
            those of ``history``.
        slots: integer ``[n]``, where they go.
        request_rows: integer ``[bs]``, each request's row in the request table.
        prefix_lens: integer ``[bs]``, tokens that are in the pool already.
        extend_lens: integer ``[bs]``, tokens to add; None for one each.
        positions: integer ``[n]`` or None.
        request_ids: strings or ints, ``bs`` of them, or None; or what :meth:`EngineSession.owners` makes of them.
        namespaces: integer ``[bs]`` or None; 0 is the default namespace.
        history: integer ``[bs, length]`` or None, the requests' own token ids, for the token check.
        history_lens: integer ``[bs]``, how many of them are valid.
        history_by_row: the rows of ``history`` are those of the request table, ``[requests, length]``.  Where it is one
            tensor of the device in all steps, nothing is copied.
        in_flight: the prefix of some request has slots that another one writes in this forward, as in engines that list
            a page in their prefix cache before it is computed.  Each layer must write all of its tokens
            before attention reads any.  Before the forward call ``pool.hand_over(slots)``, to nobody, and
            ``pool.share(slots, reader)`` when it has ended: while it runs, no shared slot may be written.
        parents: integer ``[n]`` or None: the added tokens of a request are a tree, and each follows the one with this
            number among them, an earlier one, or the prefix, -1.  Their slots are in the request's row one after the
            other; their position is the prefix's length plus their depth.
        real_counts: int64 ``[2]`` on the device, how many requests and tokens of the batch are real, the first ones;
            None: all.  For a loop of forwards that is captured once, and replayed for fewer requests.

    A pool may take its slots from another field (``KVPool.slots_from``), or its whole batch
    (``KVPool.batch``).
    """

    input_ids: Any
    slots: Any
    request_rows: Any
    prefix_lens: Any
    extend_lens: Any = None
    positions: Any = None
    request_ids: Sequence[RequestId] | torch.Tensor | None = None
    namespaces: Any = None
    history: Any = None
    history_lens: Any = None
    history_by_row: bool = False
    parents: Any = None
    real_counts: torch.Tensor | None = None
    in_flight: bool = False


def fields_of(batch: Any) -> Callable[[str, None], Any]:
    """Gets the fields of a batch, which may be any object or mapping, by name; the second argument, None, where it has
    none.

    A step asks for some thirty: those of a :class:`Batch` are all its own, and a dict is asked in half the time that an
    attribute takes.
    """
    kind = type(batch)
    if kind is Batch:
        fields: Callable[[str, None], Any] = batch.__dict__.get
        return fields
    if kind is dict or isinstance(batch, Mapping):
        get: Callable[[str, None], Any] = batch.get
        return get
    return functools.partial(getattr, batch)
