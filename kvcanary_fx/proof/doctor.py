"""Self-proof: on a scratch pool of the user's own layout, one fault per check is planted, and each must be reported.

A sanitizer that is broken looks exactly like a program without bugs.  The doctor tells the two apart, on the device,
dtype and layout at hand, through the same graph rewrite and the same kernels that guard the real pools.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..config import CanaryConfig
from ..engine.batch import Batch
from ..engine.kv_pool import KVPool
from ..engine.session import EngineSession
from ..errors import SelfTestError
from ..kernels.checks import CHECKS
from ..kernels.writes.layout import FLOAT_DTYPES
from ..passes.write_ops import register_kv_write
from ..reports.summary import by_importance, muted

#: Slots of the scratch pool, and of one page where it has pages.
SLOTS, PAGE = 32, 8

_LIBRARY = torch.library.Library("kvcanary_doctor", "FRAGMENT")
_LIBRARY.define("store(Tensor(a!) pool, Tensor value, Tensor slots, int shift) -> ()")
register_kv_write("kvcanary_doctor::store", slots="slots", pools={"pool": "value"})


def _store(pool: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, shift: int) -> None:
    """A KV write; ``shift`` makes it go wrong."""
    pool[slots + shift] = value


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("store", _store, _device)
torch.library.register_fake("kvcanary_doctor::store", lambda *_: None, lib=_LIBRARY)


@dataclasses.dataclass(frozen=True)
class Finding:
    """What the doctor saw of one check.

    Attributes:
        check: its name; ``silence`` for the run without a fault.
        fault: what was planted.
        ok: the check spoke, and only where it should.
        told: what was reported, by the checks' names.
    """

    check: str
    fault: str
    ok: bool
    told: tuple[str, ...]


class Scratch:
    """A session over a small pool with the layout of a real one, and one request with three tokens stored."""

    def __init__(self, pool: KVPool, config: CanaryConfig):
        device = pool.device
        self.tensors = [[_scratch_tensor(pool, t) for t in layer] for layer in pool.tensors]
        self.table = torch.zeros(3, SLOTS, dtype=torch.int32, device=device)
        self.table[1] = torch.arange(1, SLOTS + 1, device=self.table.device)
        scratch = dataclasses.replace(
            pool,
            layers=self.tensors,
            request_table=self.table,
            table_page_size=1,
            slot_map=None,
            slots_from="slots",
            reserved=(0,),
            padding_row=None,
            window=None,
            ring=False,
            tokens_per_slot=1,
            state=False,
            written_once=False,
            batch=None,
            scales={},
            order="NHD",
            kv_axis=None,
            token_offset=0,
            allocations=True,
        )
        # behind the forward everything is found that the check before it should have found
        settings = dataclasses.replace(config, mode="log", verify_fraction="1", verify_after=False)
        self.session = EngineSession([scratch], settings)
        self.session.mark_ready()
        self.session.pool.allocate(range(1, 9), owner="patient")
        self.stored = 0
        self._generator = torch.Generator("cpu").manual_seed(0)
        # Dynamo keeps what it compiled with the code object, and gives up after a few sessions over one
        write = types.FunctionType(_write_all.__code__.replace(), globals())
        self._write = torch.compile(write, backend=self.session.backend, dynamic=False)

    def reset(self) -> None:
        """Back to one request with three tokens, and nothing reported."""
        pool = self.session.pool
        self.table[1] = torch.arange(1, SLOTS + 1, device=self.table.device)
        pool.release(range(1, 9))
        pool.allocate(range(1, 9), owner="patient")
        self.session.mark_ready()
        self.stored = 0
        self.forward([1, 2, 3])

    def forward(
        self,
        slots: Sequence[int],
        received: Sequence[int] | None = None,
        shift: int = 0,
        nan: bool = False,
        **plan: Any,
    ) -> None:
        """One step that appends a token per slot.

        Args:
            received: slots that the write gets, if not the planned ones.
            shift: how far from them it really writes.
            nan: write a NaN.
            plan: fields of the batch that are not what they should be.
        """
        end = self.stored + len(slots)
        batch = Batch(
            input_ids=list(range(self.stored, end)),
            slots=list(slots),
            request_rows=[1],
            prefix_lens=[self.stored],
            extend_lens=[len(slots)],
            request_ids=["patient"],
            history=torch.arange(SLOTS, device="cpu").unsqueeze(0),
            history_lens=[SLOTS],
        )
        values = [[self._values(tensor, len(slots), nan) for tensor in layer] for layer in self.tensors]
        given = torch.tensor(list(slots if received is None else received), device=self.table.device)
        with torch.no_grad(), self.session.step(dataclasses.replace(batch, **plan)), self.session.forward():
            self._write(_flattened(self.tensors, self.session.pool.declared.paged), values, given, shift)
        self.stored = end

    def _values(self, tensor: torch.Tensor, n: int, nan: bool) -> torch.Tensor:
        shape = (n, *tensor.shape[2 if self.session.pool.declared.paged else 1 :])
        if tensor.dtype not in FLOAT_DTYPES:
            return torch.randint(0, 100, shape, generator=self._generator, device="cpu").to(tensor.device, tensor.dtype)
        made = torch.randn(shape, generator=self._generator, device="cpu")
        if nan:
            made.view(n, -1)[0, 0] = torch.nan
        return made.to(tensor.device, tensor.dtype)

    def flip(self, slot: int) -> None:
        """Change one bit of the last tensor of the last layer."""
        tensor = self.tensors[-1][-1]
        row = _flattened([[tensor]], self.session.pool.declared.paged)[0][0][slot]
        raw = row.contiguous().view(-1).view(torch.uint8).clone()
        raw[0] ^= 1
        row.copy_(raw.view(tensor.dtype).view(row.shape))


def _write_all(
    tensors: list[list[torch.Tensor]], values: list[list[torch.Tensor]], slots: torch.Tensor, shift: int
) -> None:
    for layer, given in zip(tensors, values, strict=True):
        for tensor, value in zip(layer, given, strict=True):
            torch.ops.kvcanary_doctor.store(tensor, value, slots, shift)


def _scratch_tensor(pool: KVPool, tensor: torch.Tensor) -> torch.Tensor:
    """A small tensor with the row shape, type and device of a real one."""
    shape = (SLOTS // PAGE, PAGE, *tensor.shape[2:]) if pool.paged else (SLOTS, *tensor.shape[1:])
    return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)


def _flattened(tensors: list[list[torch.Tensor]], paged: bool) -> list[list[torch.Tensor]]:
    """Tensors as ``[slots, ...]`` without a copy."""
    return [[t.flatten(0, 1) if paged else t for t in layer] for layer in tensors]


def _misread_table(scratch: Scratch) -> None:
    scratch.table[1, 1] = 99
    scratch.forward([4])


def _free_early(scratch: Scratch) -> None:
    scratch.session.pool.release([2], owner="patient")
    scratch.forward([4])


def _flip_and_read(scratch: Scratch) -> None:
    scratch.flip(2)
    scratch.forward([4])


def _flip_and_sweep(scratch: Scratch) -> None:
    scratch.flip(2)
    scratch.session.sweep.run()


def _foreign_history(scratch: Scratch) -> None:
    scratch.forward([4], history=torch.arange(SLOTS, device="cpu").flip(0).unsqueeze(0))


def _compare_ranks_that_differ(scratch: Scratch) -> None:
    scratch.session.compare_digests(1, 2)


#: For each check what is planted, and how.
FAULTS: dict[str, tuple[str, Callable[[Scratch], None]]] = {
    "content": ("a flipped bit in a stored slot", _flip_and_read),
    "operand": ("a write that lands one slot further", lambda s: s.forward([4], shift=1)),
    "bounds": ("a table entry beyond the pool", _misread_table),
    "poison": ("a NaN in what is written", lambda s: s.forward([4], nan=True)),
    "chain": ("a position that is off by one", lambda s: s.forward([4], positions=[4])),
    "index": ("a write that receives another slot", lambda s: s.forward([4], received=[5])),
    "owner": ("a slot released while its request reads it", _free_early),
    "namespace": ("a prefix of another namespace", lambda s: s.forward([4], namespaces=[7])),
    "token": ("a history that is not what is stored", _foreign_history),
    "digest": ("two digests that differ", _compare_ranks_that_differ),
    "sweep": ("a flipped bit in an idle slot", _flip_and_sweep),
}


def examine(pool: KVPool, config: CanaryConfig) -> Iterator[Finding]:
    """Plant one fault per enabled check on a scratch copy of a pool's layout, after one run without any."""
    with muted():
        yield from _examine_all(pool, config)


def _examine_all(pool: KVPool, config: CanaryConfig) -> Iterator[Finding]:
    scratch = Scratch(pool, config)
    yield _examine(scratch, "silence", "nothing", lambda s: s.forward([4]), None)
    floats = all(t.dtype in FLOAT_DTYPES for layer in pool.tensors for t in layer)
    for check, row in CHECKS.items():
        (fault, plant), told = FAULTS[check], (row.reports.name or "?").lower()
        if check in config.checks and told in config.checks and (check != "poison" or floats):
            yield _examine(scratch, check, fault, plant, told)


def _examine(scratch: Scratch, check: str, fault: str, plant: Callable[[Scratch], None], told: str | None) -> Finding:
    scratch.reset()
    before = scratch.session.violations()
    plant(scratch)
    found = by_importance(scratch.session.violations())
    names = tuple(dict.fromkeys(v.check for v in found))
    ok = not before and (names[:1] == (told,) if told is not None else not names)
    return Finding(check, fault, ok, names)


def require_health(pools: Sequence[KVPool], config: CanaryConfig) -> None:
    """Refuse to start where a check stays silent about its fault, or speaks without one.

    Raises:
        SelfTestError: naming the checks.
    """
    failed = [f for pool in pools for f in examine(pool, config) if not f.ok]
    if failed:
        raise SelfTestError([(f.check, f.fault, f.told) for f in failed])
