"""Methods of engines that are wrapped: one object, any number of times, and taken off again."""

from __future__ import annotations

import copy
import pickle

import pytest

from kvcanary_fx.adapters.hooks import hook, unhook


class Engine:
    def step(self) -> list[str]:
        return ["step"]


def around(name):
    return lambda original, *args: [name, *original(*args)]


def test_wrappers_are_called_from_the_last_to_the_first_and_come_off_in_that_order():
    engine = Engine()
    hook(engine, "step", around("inner"))
    hook(engine, "step", around("outer"))
    assert engine.step() == ["outer", "inner", "step"]
    unhook(engine, "step")
    assert engine.step() == ["inner", "step"]
    unhook(engine, "step")
    unhook(engine, "step")
    assert engine.step() == ["step"]
    assert "step" not in vars(engine)


def test_other_objects_and_copies_are_plain():
    engine = Engine()
    hook(engine, "step", around("ours"))
    assert Engine().step() == copy.deepcopy(engine).step() == pickle.loads(pickle.dumps(engine)).step() == ["step"]


def test_what_an_engine_does_not_have_cannot_be_wrapped():
    with pytest.raises(AttributeError, match="stop"):
        hook(Engine(), "stop", around("ours"))
