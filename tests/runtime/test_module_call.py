"""Compiled modules of one class, in threads."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch

from kvcanary_fx.compile import module_call
from kvcanary_fx.compile.module_call import ModuleCall

CALLS = 5


def forward(x):
    return x + 1


class Scene:
    """Two models of one class.  While the first one is compiled, a call of the second begins, which ends behind it."""

    def __init__(self):
        self.compiled: Counter[str] = Counter()
        self.first, self.second = ModuleCall(forward, self._compile_first, {}), ModuleCall(forward, self._compile, {})
        self._compiling, self._inside, self._left = (threading.Event() for _ in range(3))

    def _compile_first(self, gm, example_inputs):
        self.compiled["first"] += 1
        self._compiling.set()
        self._inside.wait(0.3)  # not where the second one is about to be compiled, too: Dynamo does one at a time
        return gm.forward

    def _compile(self, gm, example_inputs):
        self.compiled["second"] += 1

        def run(*args):
            self._inside.set()
            self._left.wait(10)
            return gm.forward(*args)

        return run

    def run(self):
        self._left.set()
        self.second(torch.zeros(1))  # is compiled
        for _ in range(CALLS):
            for event in (self._compiling, self._inside, self._left):
                event.clear()
            other = threading.Thread(target=self._call_second)
            other.start()
            self.first(torch.zeros(1))
            self._compiling.set()
            self._left.set()
            other.join()

    def _call_second(self):
        assert self._compiling.wait(10)
        self.second(torch.zeros(1))


@pytest.fixture
def scene(monkeypatch):
    monkeypatch.setattr(module_call, "_THREADS", module_call._Threads())
    return Scene()


def test_a_model_is_compiled_once_more_if_another_is_called_meanwhile(scene):
    """Seen with torch 2.13: in each call, until the recompile limit."""
    scene.run()
    assert scene.compiled["first"] <= 2
    assert scene.compiled["second"] <= 2


def test_threads_that_follow_each_other_share_nothing(scene):
    """As with a streamer, for which each generate has a thread of its own."""
    scene._inside.set()
    scene._left.set()
    for call in (scene.first, scene.second) * 2:
        thread = threading.Thread(target=call, args=(torch.zeros(1),))
        thread.start()
        thread.join()
    assert scene.compiled == {"first": 1, "second": 1}
    assert not module_call._THREADS.at_once
