"""Running one program: guarded, unguarded beside it, and the oracle's verdict."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

import kvcanary_fx
from fuzz.containers import wrap
from fuzz.faults import apply_fault, reorder, zero_from
from fuzz.models import STRAY, VOCAB, adopt, build
from fuzz.oracle import Cell, Cells, Oracle
from fuzz.program import DTYPES, FAULTS, OF_AN_OP, Event, Program
from fuzz.reports import Names
from fuzz.write_idioms import GLITCH, UNSHOWN
from kvcanary_fx import CanaryBackend, CanaryConfig


class Failure(AssertionError):
    """A program that shows a fault of the canary."""

    kind = "failure"
    program: Program


class FalseAlarm(Failure):
    kind = "false alarm"


class SilentMiss(Failure):
    kind = "missed"


class WrongPlace(Failure):
    kind = "wrong place"


class OtherNumbers(Failure):
    kind = "numeric"


class Crash(Failure):
    kind = "crash"


class Invalid(Exception):
    """The program does not run unguarded either."""


@dataclasses.dataclass
class Outcome:
    """How a program went.

    Attributes:
        faults, found, said: faults that were to be found; that were; and those in a cache that the summary calls
            unguarded.
        steps: guarded forwards.
        unable: why the inner backend cannot run the program, guarded or not; empty if it can.
    """

    faults: int = 0
    found: int = 0
    said: int = 0
    steps: int = 0
    failure: Failure | None = None
    unable: str = ""


class Side:
    """A model and its cache."""

    def __init__(self, program: Program):
        self.program = program
        self.tensors = self.allocate()
        self.model = build(program, self.tensors)
        self.cache = wrap(self.tensors, program.container)
        self.run: Callable[..., torch.Tensor] = self.model

    def allocate(self) -> list[list[torch.Tensor]]:
        return self.program.layout.allocate(self.program.sizes, DTYPES[self.program.dtype])

    def renew(self, models: list[Any]) -> None:
        """Go on with a new cache."""
        self.tensors = self.allocate()
        self.cache = wrap(self.tensors, self.program.container)
        for model in models:
            adopt(self.program, model, self.tensors)

    def forward(self, inputs: tuple[Any, ...]) -> torch.Tensor:
        """One forward; a model that returns a new cache works on that from now on."""
        out = self.run(*inputs, self.cache)
        if self.program.way.unit != "new":
            return out
        out, self.tensors = out
        self.cache = wrap(self.tensors, self.program.container)
        return out

    def cells(self, table: torch.Tensor) -> Cells:
        program = self.program
        z, layout = program.sizes, program.layout
        return {
            (layer, half): layout.cells(layout.half(self.tensors, layer, half), table, z)
            for layer in range(z.layers)
            for half in range(2)
        }


class Run:
    """One program on its way."""

    def __init__(self, program: Program, inner: str, plain_inner: str | None):
        self.program = program
        self.table = program.table()
        self.random = torch.Generator().manual_seed(program.seed + 1)
        self.plain, self.guarded = Side(program), Side(program)
        self.outside = build(program, self.guarded.tensors)  # works on the guarded cache, unguarded
        self.backend = CanaryBackend(CanaryConfig(inner=inner, mode="log"))
        self.session = self.backend.session
        self._compile()
        if plain_inner is not None:
            for module in self.plain.model.layers if program.compiled == "layers" else [self.plain.model]:
                module.compile(backend=plain_inner)
        self.names = Names(program, len(self.guarded.tensors[0]))
        self.oracle = self.new_oracle()
        self.length = 0
        self.inside: list[Event] = []
        self.glitch: list[Any] = []
        self.stray: set[int] = set()  # slots that an op of this step wrote to by mistake
        self.resting: tuple[Any, ...] | None = None
        self.outcome = Outcome()
        self.told = 0

    def _compile(self) -> None:
        side, how = self.guarded, self.program.compiled
        if how == "model":
            side.run = torch.compile(side.model, backend=self.backend)
        elif how == "protect":
            side.run = kvcanary_fx.protect(side.model, inner=self.backend.config.inner, mode="log")
            self.session = kvcanary_fx.session_of(side.model)
        else:
            for layer in side.model.layers:
                layer.compile(backend=self.backend)

    def new_oracle(self) -> Oracle:
        program = self.program
        self.named: dict[tuple[str, str, str], set[int]] = {}  # by what reports call it, the layers that were meant
        return Oracle(
            self.guarded.cells(self.table),
            program.rows,
            program.merged,
            program.way.rolls,
            program.later_slots_asked,
        )

    # ---- events

    def do(self, event: Event) -> None:
        if event.what == "step":
            self.step()
        elif event.what in FAULTS:
            self.damage(event)
        elif event.what in OF_AN_OP:
            self.glitch = [event.layer % self.program.sizes.layers, event.half % 2, event.what]
        elif event.what == "turns":
            self.take_turns()
        else:
            self.change(event)

    def damage(self, event: Event) -> None:
        """Plant a fault, now or inside the next step."""
        if self.length == 0:
            return
        if event.inside and self.program.broken and not self.program.way.rolls:
            self.inside.append(event)
            return
        for side in (self.plain, self.guarded):
            apply_fault(self.program, side.tensors, self.table, event, self.length)
        self.oracle.counted |= event.counted or self.program.inference

    def take_turns(self) -> None:
        """Go on with the other cache: at first a new one, then the one that rested."""
        sides = (self.plain, self.guarded)
        rested, self.resting = self.resting, (*((s.tensors, s.cache) for s in sides), self.oracle, self.length)
        if rested is None:
            self.change(Event("new_cache"))
            return
        for side, (side.tensors, side.cache) in zip(sides, rested, strict=False):
            for model in (side.model, self.outside) if side is self.guarded else (side.model,):
                adopt(self.program, model, side.tensors)
        self.oracle, self.length = rested[2:]
        self.named = {}

    def change(self, event: Event) -> None:
        """What code outside may do."""
        z = self.program.sizes
        if event.what in ("prefill", "prompt"):
            if event.what == "prompt":
                self.length = 0
            self._forward_outside(event.size)
        for side in (self.plain, self.guarded):
            if event.what == "reset":
                zero_from(self.program, side.tensors, self.table, 0)
            elif event.what == "crop_zero" and not self.program.way.rolls:
                zero_from(self.program, side.tensors, self.table, min(event.size, self.length))
            elif event.what == "reorder":
                order = [(row + event.size) % z.batch for row in range(z.batch)]
                reorder(self.program, side.tensors, self.table, order)
            elif event.what == "new_cache":
                side.renew([side.model, self.outside] if side is self.guarded else [side.model])
        if event.what in ("reset", "new_cache"):
            self.length = 0
        if event.what in ("crop", "crop_zero") and not self.program.way.rolls:
            self.length = min(event.size, self.length)
        if event.what == "new_cache":
            self.oracle = self.new_oracle()
        else:
            self.oracle.legal(self.guarded.cells(self.table), counted=event.what != "crop" or self.program.inference)

    def _forward_outside(self, count: int) -> None:
        count = min(count, self._room())
        if count <= 0:
            return
        inputs = self._inputs(count)
        self._quietly(inputs)
        guarded, self.guarded.run = self.guarded.run, self.outside
        self.guarded.forward(inputs)
        self.guarded.run = guarded
        if self.program.way.unit == "new":
            self.oracle.forget()
        self.length += count

    def _room(self) -> int:
        z = self.program.sizes
        return z.length if self.program.way.rolls else z.length - self.length

    def step(self) -> None:
        count = self.program.tokens
        if self._room() < count:
            return
        inputs, start = self._inputs(count), self.length
        self._arm(self.plain, start)
        GLITCH[:] = self.glitch
        expected = self._quietly(inputs)
        sites = [site for plan in self.session.plans for site in plan.sites]
        self.oracle.unwritten = bool(sites) and all(site.kind == "read" for site in sites)
        self.oracle.guessed = self.program.slots_guessed
        self.oracle.alone = self.program.halves_alone
        self.oracle.one_layer = judged_by_layer(self.program, self.outcome.steps)
        checked = self.guarded.cells(self.table)
        must, may = self.oracle.before(checked, start)
        self._arm(self.guarded, start, must, may)
        GLITCH[:] = self.glitch
        try:
            out = self.guarded.forward(inputs)
        except Exception as e:
            raise Crash(f"{type(e).__name__}: {e}") from e
        self.inside.clear()
        self.length += count
        self.outcome.steps += 1
        cells = self.guarded.cells(self.table)
        self._same_numbers(out, expected)
        if self.glitch:
            badly = self.oracle.written((self.glitch[0], self.glitch[1]), start, count)
            self.stray = strays(self.glitch[2], inputs[2], self.program.sizes.slots)
            must, may = must | {c for c in badly if self._comes_out_wrong(c)}, may | badly
            self.glitch = []
        reported = self._judge(must, may)
        strayed = bool(self.stray) and not self.program.broken  # behind a break the checks saw what strayed
        self.stray = set()
        self.oracle.after(cells, start, count, reported, checked if strayed else cells)

    def _comes_out_wrong(self, cell: Cell) -> bool:
        """Whether a cell that an op did not write has wrong bytes: not if the same token was there in the first layer,
        or another sequence's stray write put it there.
        """
        was_there = bool(self.oracle.truth[cell.layer, cell.half][cell.row, cell.position].any())
        strayed = int(self.table[cell.row, cell.position]) in self.stray
        return not strayed and (cell.layer > 0 or not was_there)

    def _arm(self, side: Side, start: int, must: set[Cell] | None = None, may: set[Cell] | None = None) -> None:
        """Let faults happen in the next graph break."""
        STRAY.clear()

        def happen() -> None:
            for event in self.inside:
                apply_fault(self.program, side.tensors, self.table, event, start)
            if must is not None and may is not None:
                self.oracle.counted |= any(e.counted for e in self.inside) or self.program.inference
                first = 1 if self.program.broken == "layers" else 0
                more = self.oracle.before(side.cells(self.table), start, first)
                must.update(c for c in more[0] if c.layer or c.half not in self.program.replaced)
                may.update(more[1])

        if self.inside:
            STRAY.append(happen)

    def _inputs(self, count: int) -> tuple[Any, ...]:
        program, z = self.program, self.program.sizes
        ids = torch.randint(0, VOCAB, (z.batch, count), generator=self.random)
        at = torch.arange(self.length, self.length + count)
        positions = at.expand(z.batch, count)
        index = at % z.length
        if program.layout.of.pool:
            index = self.table[:, self.length : self.length + count].reshape(-1)
        slots = torch.arange(z.length)
        if program.way.rolls:
            held = slots + (self.length + count - z.length)
            mask = (held >= 0) & (held <= at.unsqueeze(1))
        else:
            mask = slots <= at.unsqueeze(1)
        model = self.outside
        positions = positions % z.length
        tokens = ids if program.shows_ids else (model.embed[ids] + model.places[positions]).transpose(1, 2)
        return tokens, positions, index, self.length if program.way.start else 0, self.table, mask

    def _quietly(self, inputs: tuple[Any, ...]) -> torch.Tensor:
        """Run the plain model."""
        try:
            return self.plain.forward(inputs)
        except (RuntimeError, NotImplementedError, IndexError, AssertionError) as e:
            raise Invalid(f"{type(e).__name__}: {e}") from e

    # ---- verdict

    def _same_numbers(self, out: torch.Tensor, expected: torch.Tensor) -> None:
        pairs = [(out, expected)]
        pairs += [
            (a, b)
            for mine, theirs in zip(self.guarded.tensors, self.plain.tensors, strict=True)
            for a, b in zip(mine, theirs, strict=True)
        ]
        if self.backend.config.inner == "inductor":
            same = all(torch.allclose(a.float(), b.float(), rtol=1e-3, atol=1e-3) for a, b in pairs)
        else:
            same = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
        if not same:
            worst = max(float((a.float() - b.float()).abs().max()) for a, b in pairs)
            raise OtherNumbers(f"step {self.outcome.steps}: differs from the unguarded run by {worst:.2g}")

    def _judge(self, must: set[Cell], may: set[Cell]) -> set[Cell]:
        """Compare what was reported in this step with what was to be; the cells that were reported."""
        violations = self.session.violations()
        fresh, self.told = violations[self.told :], len(violations)
        reported: set[Cell] = set()
        for violation in fresh:
            meant = self.names.cells(violation, self.table)
            hit = meant & may
            told = f"step {self.outcome.steps}: {violation.line()}"
            if not may:
                raise FalseAlarm(told)
            if not hit and violation.slot in self.stray:
                reported |= meant  # what was there before the op wrote to it: read behind a break in the same step
                continue
            if not hit:
                raise WrongPlace(f"{told}; wrong are {sorted(map(dataclasses.astuple, may))}")
            name = (violation.layer, violation.half, violation.pool)
            layers = {c.layer for c in hit} & self.named.setdefault(name, {c.layer for c in hit})
            if not layers or not self.names.precise(violation, meant):
                raise WrongPlace(f"{told}; does not say which layer or half")
            self.named[name] = layers
            reported |= hit
        if self.program.merged:
            reported |= {dataclasses.replace(c, half=1 - c.half) for c in reported}
        missed = must - reported
        self.outcome.faults += len(must)
        self.outcome.found += len(must & reported)
        unguarded = self.names.unguarded(self.session.summary()) if missed else set()
        silent = {c for c in missed if (c.layer, c.half) not in unguarded}
        if silent:
            raise SilentMiss(f"step {self.outcome.steps}: {sorted(map(dataclasses.astuple, silent))}")
        self.outcome.said += len(missed)
        return reported


def judged_by_layer(program: Program, steps: int) -> bool:
    """Whether the graphs of the forward that follows ``steps`` others judge one layer, or one half, without the others.

    Graphs of one half each are known to make up a forward from the second one on, unless they are compiled anew in it:
    the position was a constant in the first.
    """
    apart = program.broken not in ("", "between") or program.compiled == "layers"
    unshown = program.halves_alone and program.idiom in UNSHOWN
    anew = program.halves_alone and program.way.start and steps == 1
    return program.sizes.layers == 1 or apart or unshown or anew


def strays(how: str, index: torch.Tensor, slots: int) -> set[int]:
    """The slots that an op writes to by mistake."""
    wrong = {"slot": index + 1, "stride": index * 2 % slots}.get(how, index[:0])
    return set(wrong.tolist())


def run_program(program: Program, inner: str = "eager") -> Outcome:
    """Run a program; its outcome, with the first failure if there is one.

    The unguarded run beside it is eager.  Where the guarded one crashes or has other numbers, the program runs once
    more beside one that the inner backend compiles: Inductor keeps a half-precision product in float32, cannot run a
    write in a branch whose operand is a view, and loses a region's write to a view of an input.

    Raises:
        Invalid: it does not run unguarded either.
    """
    outcome = _run_beside(program, inner, None)
    if inner != "eager" and isinstance(outcome.failure, (Crash, OtherNumbers)):
        outcome = _run_beside(program, inner, inner)
        if outcome.failure is not None:  # a write that the inner backend loses is nothing to find changes in
            _require_right_numbers(program, inner)
    return outcome


def _require_right_numbers(program: Program, inner: str) -> None:
    """Refuse a program whose unguarded forwards have other numbers under the inner backend than under no compiler.

    Raises:
        Invalid: they have, by more than rounding.
    """
    with _alone(program):
        run = Run(program, "eager", inner)
        while run.length < 4 and run._room() >= program.tokens:
            inputs = run._inputs(program.tokens)
            given, right = run._quietly(inputs), run.guarded.forward(inputs)
            if not torch.allclose(given.float(), right.float(), rtol=0.05, atol=0.05):
                raise Invalid(f"{inner} has other numbers than no compiler, unguarded")
            run.length += program.tokens


def _run_beside(program: Program, inner: str, plain_inner: str | None) -> Outcome:
    """Run a program beside its unguarded one, which is eager if ``plain_inner`` is None."""
    with _alone(program):
        run = Run(program, inner, plain_inner)
        try:
            for event in program.events:
                run.do(event)
        except Failure as failure:
            run.outcome.failure = failure
    return run.outcome


@contextlib.contextmanager
def _alone(program: Program) -> Iterator[None]:
    """Nothing is left of programs that ran before."""
    torch._dynamo.reset()
    STRAY.clear()
    logging.getLogger("kvcanary").setLevel(logging.CRITICAL)
    context: contextlib.AbstractContextManager[Any] = torch.inference_mode() if program.inference else torch.no_grad()
    # more steps than Dynamo compiles variants of a program whose position is a constant: the rest would be unguarded
    with context, torch._dynamo.config.patch(recompile_limit=64):
        yield
