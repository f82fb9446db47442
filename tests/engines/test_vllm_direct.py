"""Ops of ours that are called without the dispatcher, and those that are not."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kvcanary_fx.adapters.vllm.direct import DirectOp, call_directly, told_before


@pytest.fixture(scope="module")
def op():
    """An op that adds to ``out``, and what its function was given."""
    calls, library = [], torch.library.Library("kvcanary_test_direct", "FRAGMENT")

    def add(x, out, times=1):
        calls.append((type(x), times))
        out += times * x
        return out.sum()

    library.define("add(Tensor x, Tensor(a!) out, int times=1) -> Tensor")
    library.impl("add", add, "CPU")
    torch.library.register_fake("kvcanary_test_direct::add", lambda x, out, times=1: x.new_empty(()), lib=library)
    call_directly("kvcanary_test_direct", "add", add)
    yield torch.ops.kvcanary_test_direct.add, calls
    library._destroy()


def through_the_dispatcher(call):
    """The names of the ops that a mode sees."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        call()
    return seen


def test_a_call_with_plain_tensors_goes_to_the_function(op):
    add, calls = op
    calls.clear()
    out = torch.zeros(2)
    with torch.profiler.profile() as profile:
        assert float(add(torch.ones(2), out, times=3)) == 6
    assert calls == [(torch.Tensor, 3)]
    assert out.tolist() == [3, 3]
    assert "kvcanary_test_direct::add" not in {event.key for event in profile.key_averages()}


def test_a_mode_sees_the_op(op):
    add, _ = op
    out = torch.zeros(2)
    assert "kvcanary_test_direct.add.default" in through_the_dispatcher(lambda: add(torch.ones(2), out))
    assert out.tolist() == [1, 1]


def test_tensors_without_memory_run_nothing(op):
    add, calls = op
    calls.clear()
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(2))
        found = add(x, x)
    assert add(x, x).shape == found.shape == ()  # outside of the mode, too
    assert calls == []


def test_the_overload_and_named_arguments_go_through_the_dispatcher(op):
    add, _ = op
    with torch.profiler.profile() as profile:
        add.default(torch.ones(2), torch.zeros(2))
    assert "kvcanary_test_direct::add" in {event.key for event in profile.key_averages()}
    with torch.profiler.profile() as profile:
        assert float(add(x=torch.ones(2), out=torch.zeros(2), times=2)) == 4
    assert "kvcanary_test_direct::add" in {event.key for event in profile.key_averages()}


def test_it_is_the_op_in_a_graph(op):
    add, _ = op
    assert isinstance(add, DirectOp)
    assert torch.ops.kvcanary_test_direct.add is add
    assert add._qualified_op_name == "kvcanary_test_direct::add"
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(add, (x, x)))
    traced = torch.fx.GraphModule({}, graph)
    assert "torch.ops.kvcanary_test_direct.add(" in traced.code
    assert float(traced(torch.ones(2))) == 4


def test_attention_and_its_write_are_such_ops():
    from kvcanary_fx.adapters.vllm import ops

    ops.register()
    for name in (*ops.WITH_CHECKS.values(), *ops.UPDATES.values()):
        namespace, op = name.split("::")
        assert isinstance(getattr(getattr(torch.ops, namespace), op), DirectOp), name


def test_somebody_is_told_before_each_call(op):
    add, calls = op
    calls.clear()
    told, out, body = [], torch.zeros(2), add.body
    with pytest.raises(ZeroDivisionError), told_before([add], lambda: told.append(len(calls))):
        add(torch.ones(2), out)
        add(torch.ones(2), out, times=2)
        raise ZeroDivisionError
    assert told == [0, 1], "before it"
    assert out.tolist() == [3, 3]
    add(torch.ones(2), out)
    assert (told, add.body) == ([0, 1], body), "and then it is as it was"
