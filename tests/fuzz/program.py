"""What a random program is: a model with its cache, and what happens to it."""

from __future__ import annotations

import dataclasses

import torch

from fuzz.layouts import OF_ALL_LAYERS, PAGE, Layout, Sizes
from fuzz.write_idioms import IDIOMS, UNSHOWN, Idiom

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing that happens.

    Attributes:
        what: ``step``: a forward of the guarded model.  Legal changes from outside: ``prefill`` (``size`` tokens by
            the plain model), ``reset``, ``prompt`` (from position 0 on, over what is there), ``crop``, ``crop_zero``,
            ``reorder``, ``reorder_new``, ``new_cache``, ``turns`` (another cache, and back the next time).  Faults:
            ``flip``, ``zero``, ``copy``, ``swap``, ``head``; ``slot``, ``stride``, ``mirror``: an op of the next step
            writes to the next slot, to a wrong one, or other bytes.
        size: of a prefill or a crop, in tokens.
        layer, half, row, position: where a fault hits; taken modulo what there is.
        counted: the fault is an op that PyTorch's version counter sees.
        inside: the fault happens in a graph break in the middle of the next step.
    """

    what: str
    size: int = 1
    layer: int = 0
    half: int = 0
    row: int = 0
    position: int = 0
    counted: bool = False
    inside: bool = False

    def __str__(self) -> str:
        if self.what not in FAULTS + OF_AN_OP:
            return self.what if self.what in ("step", "reset", "new_cache", "turns") else f"{self.what} {self.size}"
        how = " counted" * self.counted + " inside" * self.inside
        return f"{self.what} {'KV'[self.half % 2]}{self.layer} row {self.row} position {self.position}{how}"


FAULTS = ("flip", "zero", "copy", "swap", "head")
OF_AN_OP = ("slot", "stride", "mirror")


@dataclasses.dataclass(frozen=True)
class Program:
    """A model with its cache, and what happens to it.

    Attributes:
        access: how the model finds a half in a tensor that holds several.
        container: how caches reach the model.
        names: what they are called.
        breaks: where the graph breaks: ``layers``, ``before`` and ``after`` the writes, ``between`` K and V.
        compiled: ``model``, ``protect``, or ``layers`` by themselves.
        loop: layers are no modules of their own.
        shows_ids: token ids and positions are inputs of the graph.
        reads_first: attention reads the cache before the new tokens are written.
        seed: of weights and tokens.
    """

    idiom: str
    layout: Layout
    sizes: Sizes
    access: str = "index"
    container: str = "list"
    names: int = 0
    dtype: str = "float32"
    breaks: str = ""
    compiled: str = "model"
    loop: bool = False
    tokens: int = 1
    shows_ids: bool = False
    inference: bool = False
    seed: int = 0
    events: tuple[Event, ...] = ()

    def __str__(self) -> str:
        z = self.sizes
        flags = [f"breaks {self.breaks}"] * bool(self.breaks) + ["loop"] * self.loop + ["ids"] * self.shows_ids
        flags += ["inference"] * self.inference
        return (
            f"{self.idiom} {self.layout} {self.access} {self.container}{self.names} {self.dtype} L{z.layers} "
            f"B{z.batch} H{z.heads} T{self.tokens} {self.compiled} {' '.join(flags)} | "
            f"{', '.join(map(str, self.events))}"
        )

    @property
    def way(self) -> Idiom:
        return IDIOMS[self.idiom]

    @property
    def merged(self) -> bool:
        """One slot holds K and V side by side, so that they are one half."""
        return self.way.unit == "both" and self.layout.packing in ("kv1", "joint")

    @property
    def rows(self) -> bool:
        """The model writes to rows, one for each sequence: "below the next write" has a meaning."""
        family = self.layout.of
        return family.batch is not None and family.batch < family.axis and not self.way.moved

    @property
    def broken(self) -> str:
        """Where the graph really breaks: not between K and V that are written at once, nor between layers of which
        there is one."""
        at_once = self.breaks == "between" and self.way.unit in ("both", "pair")
        return "" if at_once or (self.breaks == "layers" and self.sizes.layers == 1) else self.breaks

    @property
    def halves_alone(self) -> bool:
        """Each graph holds one half."""
        return self.broken == "between" and self.way.unit == "half"

    @property
    def later_slots_asked(self) -> bool:
        """A slot's new tokens are told from a fault by the slots behind it: not in a graph of several layers whose
        writes do not show their slots.
        """
        together = not self.broken or (self.broken == "after" and self.loop)  # one reads what the last one wrote
        several = self.sizes.layers > (2 if self.merged else 1) and together and self.compiled != "layers"
        return self.rows and not (several and self.idiom in UNSHOWN)

    @property
    def slots_guessed(self) -> bool:
        """The slots are taken for heads of sequences: the graph that writes shows neither its slots nor attention."""
        return self.idiom in UNSHOWN and self.broken == "after" and self.layout.family == "bhsd"

    @property
    def replaced(self) -> tuple[int, ...]:
        """Halves of the first layer that are new tensors when the graph breaks: nobody reads the old ones again."""
        return {"between": (0,), "after": (0, 1)}.get(self.broken, ()) if self.way.unit == "new" else ()

    @property
    def one_tensor(self) -> bool:
        """All layers are in the same tensors."""
        return self.layout.packing in OF_ALL_LAYERS

    def table(self) -> torch.Tensor:
        """The slots of a pool by sequence and position: int64 ``[B, S]``."""
        z = self.sizes
        free = torch.randperm(z.slots - 2 * PAGE, generator=torch.Generator().manual_seed(self.seed)) + PAGE
        return free[: z.batch * z.length].view(z.batch, z.length)
