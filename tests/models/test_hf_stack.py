"""Steps of a guarded ``generate``, or batch, do not wait for pieces of Python's stack, however deep their caller is."""

from __future__ import annotations

import sys

import batches
import pytest
import torch

from kvcanary_fx.adapters import huggingface
from kvcanary_fx.proof import tiny
from kvcanary_fx.runtime.stack_room import CLAIMED

transformers = pytest.importorskip("transformers", minversion="5.17")
resource = pytest.importorskip("resource")

pytestmark = [
    pytest.mark.usefixtures("on_device"),  # where models are built
    pytest.mark.skipif(sys.version_info < (3, 11), reason="frames are not kept in pieces"),
]

STEPS = 24


def has_room() -> bool:
    """Whether the caller has been called with half a mebibyte of stack in one piece."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_stacksize < CLAIMED:
        frame = frame.f_back
    return frame is not None


def below(depth, call):
    return below(depth - 1, call) if depth else call()


@pytest.mark.skipif(not hasattr(resource, "RUSAGE_THREAD"), reason="page faults are not counted by thread")
def test_steps_of_generate_take_no_memory_at_any_depth_of_the_stack():
    """Unguarded, and under guard before, some depths had 1 to 70 page faults in each step."""
    model = huggingface.protect(tiny.build("llama"), mode="log", inner="eager")
    ids = tiny.prompt(model, 1, 8)

    def faults() -> float:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        model.generate(ids, max_new_tokens=STEPS, do_sample=False, eos_token_id=None, pad_token_id=0)
        return (resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before) / STEPS

    below(0, faults)
    found = {depth: min(below(depth, faults) for _ in range(3)) for depth in range(0, 120, 8)}
    assert max(found.values()) < 1, found


def test_a_batch_runs_with_room(monkeypatch):
    model = batches.guarded("llama")
    seen = []
    monkeypatch.setattr(model._compiled_call_impl, "before_batch", lambda processor: seen.append(has_room()))
    batches.generate(model, batches.prompts(7, 9), 4)
    assert seen
    assert all(seen)


def test_a_generate_runs_with_room_and_what_follows_it_does_not():
    model, seen = huggingface.protect(tiny.build("llama"), mode="log", inner="eager"), []

    class Looks(transformers.StoppingCriteria):
        def __call__(self, ids, scores, **others):
            seen.append(has_room())
            return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

    stopping = transformers.StoppingCriteriaList([Looks()])
    ids = tiny.prompt(model, 1, 8)
    model.generate(ids, max_new_tokens=3, eos_token_id=None, pad_token_id=0, stopping_criteria=stopping)
    assert seen == [True] * 3
    assert not has_room()
