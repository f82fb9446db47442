"""The registry of pools: which storage has which halves, and the shadow of each.

A pool is known by its storage, not by the tensor object or the graph: two compiled graphs that touch the
same cache share its shadow, and a new cache in an old graph gets its own.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Collection, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import CaptureError, EngineError
from ..kernels.buffers import HalfBuffers, IdentityBuffers
from ..kernels.content.digest import seeds
from ..kernels.writes.layout import SlotLayout
from ..passes.graph_plan import SitePlan
from ..reports.violation import HalfInfo
from .pool_half import Place, PoolHalf
from .recut import carry_over

_HALF_NUMBERS = {"K": 0, "V": 1}


def _of_layer(halves: list[PoolHalf], site: SitePlan) -> list[PoolHalf]:
    """Those of the halves whose declared layer is the one that a graph's site is in: by its path, else its number."""
    path = site.layer + "."
    by_path = [h for h in halves if path.startswith(h.info.layer + ".") or h.info.layer.startswith(path)]
    if by_path or site.number is None:
        return by_path
    numbers = [[part for part in h.info.layer.split(".") if part.isdigit()][-1:] for h in halves]
    return [h for h, number in zip(halves, numbers, strict=True) if number == [str(site.number)]]


def seeds_of(site: SitePlan, number: int) -> tuple[int, int]:
    """What the digests of a half begin with, by the number of its layer."""
    return seeds(number, _HALF_NUMBERS.get(site.label, 2))


def _called_like_pool(site: SitePlan) -> bool:
    """Whether the layer is named not by a module's path but by the common part of its pools' names."""
    common = "/" in site.layer or ":" in site.layer or site.pool == site.layer
    return common or site.pool.startswith((f"{site.layer}.", f"{site.layer}["))


def _numbered(name: str, twins: int) -> str:
    """``k``, ``k #2``, ``k #3``: caches that the code calls alike."""
    return name if twins == 0 else f"{name} #{twins + 1}"


def _declared_otherwise(half: PoolHalf, place: Place, site: SitePlan) -> str:
    mine, theirs = half.place.layout, place.layout
    return (
        f"layer {site.layer!r} writes {site.pool} as {theirs.slots} slots of {theirs.row_bytes} bytes, and pool "
        f"{half.info.pool!r} declares these bytes as {half.info.half} of {half.info.layer}, {mine.slots} slots of "
        f"{mine.row_bytes} bytes: give KVPool the tensors, or the views of them, that the model writes"
    )


def _hint(number: int | torch.SymInt) -> int:
    """What a size is in the call that is being compiled; -1 where that is not known."""
    if isinstance(number, int):
        return number
    return number.node.hint if number.node.hint is not None else -1


@dataclasses.dataclass(frozen=True)
class ReturnedSite:
    """A cache that a graph returns, as its bound calls have it.

    Attributes:
        number: of the layer.
    """

    plan: SitePlan
    place: Place
    number: int


@dataclasses.dataclass(eq=False)
class Line:
    """The working halves of one cache that goes from call to call, see :mod:`.returned`.

    Attributes:
        key: identifies what the calls of a graph return.
        halves: those of a call, in the order of the graph's sites.
    """

    key: object
    halves: tuple[PoolHalf, ...]


@dataclasses.dataclass
class Shadow:
    """What is known of a half of a tensor that a graph returned: a copy of the working shadow's memory.

    Attributes:
        line, half: the working halves of the call that returned it, and the one of this tensor.
        memory: its digests and rows, and the identity of its slots as far as known.
    """

    line: Line
    half: PoolHalf
    memory: list[torch.Tensor]


@dataclasses.dataclass(eq=False)
class Storage:
    """One storage with halves in it."""

    reference: StorageWeakRef
    halves: dict[Place, PoolHalf] = dataclasses.field(default_factory=dict)
    declared: list[PoolHalf] = dataclasses.field(default_factory=list)  # by an engine
    aliases: dict[tuple[Place, int], PoolHalf] = dataclasses.field(default_factory=dict)  # of those, by id
    shadows: dict[object, Shadow] = dataclasses.field(default_factory=dict)  # see returned.py
    watched: bool = False  # a graph reads what others record in it
    shared: bool = False  # another session has halves of the same bytes, and nobody was told yet
    version: int | None = None  # of the pool tensor after our last call; None before, or if it keeps none
    suspects: set[int] = dataclasses.field(default_factory=set)  # ids of halves not checked since something else wrote


class PoolRegistry:
    """All storages and halves of one session.

    Args:
        planes: of a digest.
        unseen: it belongs to no session: other registries do not see its halves, and it does not look for theirs.
    """

    _all: weakref.WeakSet[PoolRegistry] = weakref.WeakSet()  # of the process
    _all_lock = threading.Lock()

    def __init__(self, planes: int, unseen: bool = False):
        self._planes, self._unseen = planes, unseen
        self._storages: dict[int, Storage] = {}
        self._retired: dict[tuple[torch.device, int, Place], HalfBuffers] = {}
        self._by_id: dict[int, PoolHalf] = {}
        self._lines: dict[object, list[Line]] = {}
        self._next_id = 0
        self.lost: list[str] = []  # pools that graphs cut in ways of which none could be translated
        self.shadows_copied = False  # a graph returns its caches: what is known of a tensor may be a copy
        self.generation = 0  # changes when a half is dropped, so that kept bindings are made anew
        self._lock = threading.Lock()
        if not unseen:
            with self._all_lock:
                self._all.add(self)

    def storage_of(self, tensor: torch.Tensor) -> Storage:
        """The record of a tensor's storage, made if it is new."""
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        if known is None:
            with self._lock:
                self._drop_dead()
                # holding the weak reference keeps the address from being reused for another storage
                known = self._storages.setdefault(storage._cdata, Storage(StorageWeakRef(storage)))
        return known

    def half_of(self, storage: Storage, view: torch.Tensor, site: SitePlan, number: int) -> PoolHalf:
        """The half that ``view`` is, made if it is new.

        Raises:
            CaptureError: it is new and a CUDA graph is being captured.
            EngineError: the engine declared its bytes otherwise, or for several layers of which this is none.
        """
        layout = SlotLayout(tuple(view.shape), site.slot_axes, view.dtype, site.paged or bool(storage.declared))
        place = Place(int(view.storage_offset()) * view.element_size(), tuple(view.stride()), layout)
        half = self._declared_half(storage, place, site) if storage.declared else storage.halves.get(place)
        if half is None:
            if view.is_cuda and torch.cuda.is_current_stream_capturing():
                raise CaptureError(f"the KV cache {site.pool!r} has no shadow yet")
            with self._lock:
                half = storage.halves[place] = self._make(view, place, site, number)
                self.generation += storage.watched
            self._find_in_others(storage, view, place)
        elif half.kind == "read" and site.kind != "read":
            self._gains_writer(half, site)
        return half

    def _find_in_others(self, storage: Storage, view: torch.Tensor, place: Place) -> None:
        """Note what other sessions guard of a new half; an engine knows what it declares."""
        with self._all_lock:
            others = [] if self._unseen else [registry for registry in self._all if registry is not self]
        for theirs in (registry.known(view) for registry in others):
            if theirs is None or theirs.declared or storage.declared:
                continue
            if any(half.place.overlaps(place) for half in list(theirs.halves.values())):
                storage.shared = theirs.shared = True

    def free_line(self, key: object) -> Line | None:
        """A line whose caches are all gone."""
        with self._lock:
            self._drop_dead()
            used = {id(shadow.line) for storage in self._storages.values() for shadow in storage.shadows.values()}
        return next((line for line in self._lines.get(key, ()) if id(line) not in used), None)

    def new_line(self, key: object, views: Sequence[torch.Tensor], sites: Sequence[ReturnedSite]) -> Line:
        """The line of a cache that no call has returned.

        Raises:
            CaptureError: a CUDA graph is being captured.
        """
        for view, site in zip(views, sites, strict=True):
            if view.is_cuda and torch.cuda.is_current_stream_capturing():
                raise CaptureError(f"the KV cache {site.plan.pool!r} has no shadow yet")
        with self._lock:
            halves = [self._make(v, s.place, s.plan, s.number) for v, s in zip(views, sites, strict=True)]
            line = Line(key, tuple(halves))
            self._lines.setdefault(key, []).append(line)
        return line

    def copies_shadows(self) -> None:
        """A graph returns its caches: from here on what is known of a tensor may be a copy."""
        if not self.shadows_copied:
            self.shadows_copied = True
            self.generation += 1

    def records(self, tensor: torch.Tensor) -> bool:
        """Whether a graph records bytes of a tensor's storage: it writes them, or has returned the tensor."""
        storage = self.known(tensor)
        return storage is not None and (bool(storage.shadows) or any(h.kind != "read" for h in storage.halves.values()))

    def _gains_writer(self, half: PoolHalf, site: SitePlan) -> None:
        """A graph writes what others only read so far: from here on it knows how far each row goes."""
        half.kind, half.peers = site.kind, {}
        half.buffers.forget_rows()
        self.generation += 1

    def without_slots(self, view: torch.Tensor, site: SitePlan) -> PoolHalf:
        """A half for a site that only checks the halves of other graphs."""
        layout = SlotLayout((0,), (0,), view.dtype)
        place = Place(0, (1,), layout)
        buffers = HalfBuffers.allocate(layout, self._planes, view.device)
        info = HalfInfo(-1, site.layer, site.label, site.pool, None, 0)
        return PoolHalf(-1, info, place, buffers, (0, 0), 0, view.data_ptr(), "read")

    def declare(self, view: torch.Tensor, half: PoolHalf) -> None:
        """Register a half of an engine's pool, which is known before any graph."""
        storage = self.storage_of(view)
        with self._lock:
            storage.declared.append(half)
            storage.halves.setdefault(half.place, half)
            self._by_id[half.id] = half

    def name(self, half: PoolHalf) -> None:
        """Register what no graph writes, so that reports can name it."""
        self._by_id[half.id] = half

    def new_id(self) -> int:
        """An unused number for a half."""
        self._next_id += 1
        return self._next_id - 1

    def _declared_half(self, storage: Storage, place: Place, site: SitePlan) -> PoolHalf | None:
        """The half of an engine's pool that ``place`` is, in whatever shape it is seen; None if it is none."""
        found = [h for h in storage.declared if h.place.same_slots(place)]
        if not found:
            clash = next((h for h in storage.declared if h.place.overlaps(place)), None)
            if clash is not None:
                raise EngineError(_declared_otherwise(clash, place, site))
            return storage.halves.get(place)
        named = found if len(found) == 1 else _of_layer(found, site)
        if len(named) != 1:
            layers = [f"{h.info.layer} of pool {h.info.pool}" for h in found]
            raise EngineError(
                f"layer {site.layer!r} writes a tensor that is declared for {', '.join(layers)}, and it is not plain "
                "which of them it is: give the pools layer_names that are the paths of the modules"
            )
        half = named[0]
        if half.place == place:
            return half
        alias = storage.aliases.get((place, half.id))
        if alias is None:
            alias = storage.aliases[place, half.id] = dataclasses.replace(half, place=place)
        return alias

    def _make(self, view: torch.Tensor, place: Place, site: SitePlan, number: int) -> PoolHalf:
        buffers = self._retired.pop((view.device, view.data_ptr(), place), None)
        if buffers is None:
            buffers = HalfBuffers.allocate(place.layout, self._planes, view.device)
        else:
            buffers.reset()
        same = [site.layer, site.label, site.pool]  # as where each layer is compiled by itself, or for a new cache
        known = ((h.info.layer, h.info.half, h.info.pool) for h in self._by_id.values())
        twins = sum([name.partition(" #")[0] for name in names] == same for names in known)
        half_id = self.new_id()
        half = PoolHalf(
            id=half_id,
            info=HalfInfo(
                id=half_id,
                layer=_numbered(site.layer, twins) if _called_like_pool(site) else site.layer,
                half=site.label,
                pool=_numbered(site.pool, twins),
                rows=place.layout.rows if place.layout.has_rows else None,
                positions=place.layout.positions,
                heads=site.heads,
            ),
            place=place,
            buffers=buffers,
            seeds=seeds_of(site, number),
            layer_number=number,
            address=view.data_ptr(),
            kind=site.kind,
        )
        self._by_id[half.id] = half
        return half

    def recut(self, storage: Storage, tensor: torch.Tensor, mine: Sequence[PoolHalf], written: Collection[int]) -> None:
        """Replace halves that cut the same bytes in another way by the halves that a graph writes.

        What they have recorded is carried over, since the graph writes the cache without updating it.

        Args:
            tensor: of the storage.
            mine: the halves that the graph writes in it.
            written: ids of all that the graph writes.
        """
        others = [h for h in storage.halves.values() if h.id not in written and h.space is None]
        gone = [h for h in others if any(h.place.overlaps(k.place) for k in mine)]
        if gone:
            self.lost += carry_over(tensor, gone, mine)
        for half in mine:
            before = [h for h in gone if h.place.overlaps(half.place)]
            half.order = min([half.order, *(h.order for h in before)])
            if not storage.suspects.isdisjoint(h.id for h in before):  # whose change is still to be judged
                storage.suspects.add(half.id)
        for half in gone:
            self._forget(storage, half)

    def forget(self, tensor: torch.Tensor) -> int:
        """Forget what is recorded about a tensor's storage; returns how many halves that were."""
        storage = self.known(tensor)
        halves = list(storage.halves.values()) if storage else []
        for half in halves:
            half.buffers.reset()
        returned = len(storage.shadows) if storage else 0
        if storage:
            storage.shadows.clear()
        return len(halves) + returned

    def exchange_rows(self, tensor: torch.Tensor, only: bool) -> None:
        """From now on nothing but an exchange of rows is a legal change of a tensor's halves; or anything again."""
        storage = self.known(tensor)
        for half in storage.halves.values() if storage else ():
            half.exchanges_rows = only

    def _forget(self, storage: Storage, half: PoolHalf) -> None:
        del storage.halves[half.place]
        self._by_id.pop(half.id, None)
        self.generation += 1

    def by_id(self, half_id: int) -> PoolHalf | None:
        """The half with this number, while its cache lives."""
        return self._by_id.get(half_id)

    def view_of(self, half: PoolHalf) -> torch.Tensor | None:
        """The half in its storage, or in the tensor that was returned last; None if that is gone."""
        kept = (s.reference for s in self._storages.values() if s.halves.get(half.place) is half)
        reference, place = half.latest or (next(kept, None), half.place)
        memory = None if reference is None else torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        if memory is None:
            return None
        whole = torch.empty(0, dtype=place.layout.dtype, device=half.buffers.digest.device)
        first = place.offset // place.layout.dtype.itemsize
        return whole.set_(memory, first, place.layout.shape, place.strides)

    def identity_of(self, half: PoolHalf) -> IdentityBuffers | None:
        """The identity of a half's slot space, if one of its halves keeps it."""
        peers = (self._by_id.get(peer) for peer in half.peers)
        return next((p.identity for p in peers if p is not None and p.identity is not None), None)

    def pools_in(self, tensor: torch.Tensor) -> int:
        """How many pools an engine keeps in a tensor's storage."""
        storage = self.known(tensor)
        return len({h.info.pool for h in storage.declared}) if storage is not None else 0

    def declared_axes(self, tensor: torch.Tensor, view: torch.Tensor) -> tuple[int, ...] | None:
        """The axes that number slots in a view of an engine's tensor, as the engine declared them.

        Args:
            view: its fake, in whatever order of axes; sizes may be symbols, which stay what they are.

        Returns:
            None if the view is no half that the engine declared.
        """
        storage = self.known(tensor)
        sizes, strides = ([_hint(n) for n in numbers] for numbers in (view.shape, view.stride()))
        offset = _hint(view.storage_offset()) * view.element_size()
        for half in storage.declared if storage is not None else ():
            place = half.place
            if (place.offset, place.layout.dtype) == (offset, view.dtype):
                axes = place.slot_axes_in(sizes, strides)
                if axes is not None:
                    return axes
        return None

    def known(self, tensor: torch.Tensor) -> Storage | None:
        """The record of a tensor's storage, if it has halves."""
        return self._storages.get(tensor.untyped_storage()._cdata)

    def halves(self) -> list[PoolHalf]:
        """Every half of a living storage."""
        with self._lock:
            self._drop_dead()
            return [h for s in self._storages.values() for h in s.halves.values()]

    def _drop_dead(self) -> None:
        """Release the shadows of caches that are gone.

        On a GPU a captured graph may still hold a shadow's address, and it is replayed again if a new
        cache lands on the old one's address: such shadows are kept for it.
        """
        for key, storage in list(self._storages.items()):
            if storage.reference.expired():
                del self._storages[key]
                self.generation += bool(storage.halves)  # no binding is kept of a tensor that a graph returned
                for place, half in storage.halves.items():
                    self._by_id.pop(half.id, None)
                    device = half.buffers.digest.device
                    if device.type == "cuda":
                        self._retired[(device, half.address, place)] = half.buffers
