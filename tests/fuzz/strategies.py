"""Hypothesis strategies for programs."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st

from fuzz.containers import ARGUMENTS, CONTAINERS
from fuzz.layouts import FAMILIES, Layout, Sizes
from fuzz.program import DTYPES, FAULTS, OF_AN_OP, Event, Program
from fuzz.write_idioms import IDIOMS, Idiom

LENGTH = 12
LEGAL = ("prefill", "prompt", "reset", "crop", "crop_zero", "reorder", "new_cache", "turns")
BREAKS = ("", "layers", "before", "between", "after")


@st.composite
def layouts(draw: st.DrawFn, way: Idiom) -> Layout:
    """A layout that the idiom fits."""
    family = draw(st.sampled_from(way.families))
    packing = draw(st.sampled_from(way.packings))
    if packing == "kv1" and FAMILIES[family].axis == 0 and FAMILIES[family].batch is not None:
        packing = "kv0"  # no axis of sequences in front
    latent = packing in ("pair", "layers") and way.unit == "half" and draw(st.integers(0, 5)) == 5
    return Layout(family, packing, latent)


@st.composite
def faults(draw: st.DrawFn) -> Event:
    numbers = [draw(st.integers(0, n)) for n in (3, 1, 2, LENGTH - 1)]
    return Event(draw(st.sampled_from(FAULTS)), 1, *numbers, counted=draw(st.booleans()), inside=draw(st.booleans()))


@st.composite
def lives(draw: st.DrawFn, way: Idiom) -> tuple[Event, ...]:
    """What happens to a program: steps, legal changes and at most two faults, each followed by a step."""
    step = Event("step")
    events: list[Event] = []
    if draw(st.booleans()):
        events.append(Event("prefill", draw(st.integers(1, 5))))
    events += [step] * draw(st.integers(1, 3))
    for _ in range(draw(st.integers(0, 2))):
        change = draw(st.sampled_from(LEGAL))
        events += [Event(change, draw(st.integers(1, 5))), *[step] * draw(st.integers(1, 2))]
    mishaps = st.builds(Event, st.sampled_from(OF_AN_OP), layer=st.integers(0, 3), half=st.integers(0, 1))
    for _ in range(draw(st.integers(0, 2))):
        events += [draw(mishaps if way.name == "op_badly" else faults()), *[step] * draw(st.integers(1, 2))]
    return tuple(events)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    way = IDIOMS[draw(st.sampled_from(list(IDIOMS)))]
    layout = draw(layouts(way))
    containers = CONTAINERS
    count = 2 if layout.packing in ("pair", "layers") else 1
    if way.named:
        containers = tuple(c for c in CONTAINERS if c not in ("list", "tuple", "dict", "flat", "columns"))
    if way.unit == "new":
        containers = ARGUMENTS
    if count == 1:
        containers = tuple(c for c in containers if c != "fields")
    sizes = Sizes(
        layers=draw(st.sampled_from((1, 2, 2, 3, 1, 2, 4))),
        batch=draw(st.integers(1, 3)),
        heads=1 if layout.latent else draw(st.integers(1, 3)),
        length=LENGTH,
        dim=4,
    )
    program = Program(
        idiom=way.name,
        layout=layout,
        sizes=sizes,
        access=draw(st.sampled_from(("index", "unbind", "select", "narrow", "chunk"))),
        container=draw(st.sampled_from(containers)),
        names=draw(st.integers(0, 2)),
        dtype=draw(st.sampled_from(tuple(DTYPES))),
        breaks=draw(st.sampled_from(BREAKS)) if draw(st.integers(0, 2)) == 2 else "",
        compiled=draw(st.sampled_from(("model", "model", "protect", "layers"))),
        loop=draw(st.integers(0, 2)) == 2,
        tokens=draw(st.integers(1, 2)),
        shows_ids=draw(st.booleans()),
        inference=draw(st.integers(0, 4)) == 4,
        seed=draw(st.integers(0, 999)),
        events=draw(lives(way)),
    )
    # layers that are compiled by themselves are modules: else nothing would be compiled
    return dataclasses.replace(program, loop=program.loop and program.compiled != "layers")
