"""protect: a module stays what it was, and runs guarded."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported

import kvcanary_fx
from kvcanary_fx import KVCacheViolation, UnknownSettingError, protect, session_of


class Plain(nn.Module):
    """Attention over a cache in two buffers."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.zeros(1, 16, 8))

    def forward(self, x, pos):
        k = self.lin(x)
        self.k_cache[:, pos] = k
        self.v_cache[:, pos] = k
        return torch.softmax(x @ self.k_cache.transpose(1, 2), -1) @ self.v_cache


@protect(inner="eager", dynamic=False)
class Guarded(Plain):
    pass


@protect
class GuardedBare(Plain):
    pass


class Child(Guarded):
    def forward(self, x, pos):
        return super().forward(x, pos) + 1


def run(model, steps=3, start=0):
    with torch.no_grad():
        outs = [model(torch.full((1, 1, 8), 0.1 * (n + 1)), torch.tensor([n])) for n in range(start, start + steps)]
    return torch.cat(outs)


def corrupt(model):
    model.k_cache.data[0, 1, 3] += 1


@pytest.mark.parametrize("kind", [Guarded, Child])
def test_class_decorator_guards_each_instance_on_its_own(kind):
    first, second = kind(), kind()
    run(first)
    run(second)
    assert session_of(first) is not session_of(second)
    assert session_of(first).stats().recorded == 6
    corrupt(first)
    run(second, 1, 3)
    with pytest.raises(KVCacheViolation):
        run(first, 1, 3)


def test_bare_decorator_uses_the_defaults():
    model = GuardedBare()
    run(model, 1)
    assert session_of(model).config == kvcanary_fx.CanaryConfig()


def test_instance_is_guarded_in_place_and_returned():
    model = Plain()
    assert protect(model, inner="eager") is model
    run(model)
    corrupt(model)
    with pytest.raises(KVCacheViolation):
        run(model, 1, 3)


def test_same_output_state_dict_and_type():
    torch.manual_seed(3)
    plain = Plain()
    guarded = Guarded()
    guarded.load_state_dict(plain.state_dict())
    assert list(guarded.state_dict()) == list(plain.state_dict())
    assert torch.equal(run(guarded), run(plain))
    assert isinstance(guarded, Plain)
    assert type(guarded) is Guarded
    assert guarded.__getstate__().keys() == plain.__getstate__().keys()
    assert [n for n, _ in guarded.named_parameters()] == [n for n, _ in plain.named_parameters()]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_work_and_are_guarded_through_their_class(copied):
    model = Guarded()
    run(model)
    twin = copied(model)
    assert torch.equal(run(twin, 1, 3), run(model, 1, 3))
    assert session_of(twin) is not session_of(model)
    corrupt(twin)
    with pytest.raises(KVCacheViolation):
        run(twin, 1, 4)
    run(model, 1, 4)


def test_torch_save_of_a_protected_instance():
    model = protect(Plain(), inner="eager")
    run(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(run(loaded, 1, 3), run(model, 1, 3))
    with pytest.raises(TypeError, match=r"Plain is not protected: call kvcanary_fx\.protect"):
        session_of(loaded)


def test_to_another_dtype_is_a_new_cache():
    model = Guarded()
    run(model)
    model.to(torch.float64)
    with torch.no_grad():
        model(torch.randn(1, 1, 8, dtype=torch.float64), torch.tensor([3]))
    assert session_of(model).violations() == []


def test_hooks_run():
    model, calls = Guarded(), []
    model.register_forward_hook(lambda module, args, out: calls.append("after"))
    model.register_forward_pre_hook(lambda module, args: calls.append("before"))
    run(model, 2)
    assert calls == ["before", "after"] * 2
    assert session_of(model).stats().recorded == 4


def test_instances_are_released():
    import gc
    import weakref

    model = Guarded()
    run(model)
    gone = weakref.ref(model)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


def test_off_runs_the_module_as_it_is():
    model = protect(Plain(), mode="off")
    run(model)
    assert session_of(model).plans == []


def test_settings_are_checked_when_given():
    with pytest.raises(UnknownSettingError, match=r"unknown setting 'mod' in protect\(\) \(did you mean 'mode'"):
        protect(Plain(), mod="log")
    with pytest.raises(TypeError, match=r"protect takes an nn\.Module class or instance, not function"):
        protect(run)


def test_compile_options_are_passed_on():
    model = protect(Plain(), inner="eager", fullgraph=True, dynamic=True)
    run(model)
    assert len(session_of(model).plans) == 1


# ---- compiled again


def guarded_steps(model, call, start):
    before = session_of(model).calls
    run(call, 2, start)
    return session_of(model).calls - before


@pytest.mark.parametrize(
    "kind", [lambda: protect(Plain(), inner="eager", dynamic=False), Guarded], ids=["one", "class"]
)
def test_a_guarded_module_that_is_compiled_again_stays_guarded(kind, caplog):
    model = kind()
    with caplog.at_level("WARNING", "kvcanary"):
        model.compile(backend="eager")
        model.compile(backend="eager")
    assert guarded_steps(model, model, 0) == 2
    (said,) = [r.getMessage() for r in caplog.records if "kvcanary.kept" in r.getMessage()]
    assert ".compile(...) would have replaced the guard" in said
    assert "protect(model, mode='off')" in said
    assert guarded_steps(model, torch.compile(model, backend="eager"), 2) == 2
    corrupt(model)
    with pytest.raises(KVCacheViolation):
        run(model, 1, 4)


class Bigger(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, pos):
        return self.inner(x, pos) * 2


def in_a_function(model):
    return torch.compile(lambda x, pos: model(x, pos) * 2, backend="eager")


def in_a_bigger_model(model):
    return torch.compile(Bigger(model), backend="eager")


def in_a_model_that_compiles_itself(model):
    bigger = Bigger(model)
    bigger.compile(backend="eager")
    return bigger


@pytest.mark.parametrize(
    "kind", [lambda: protect(Plain(), inner="eager", dynamic=False), Guarded], ids=["one", "class"]
)
@pytest.mark.parametrize("way", [in_a_function, in_a_bigger_model, in_a_model_that_compiles_itself])
def test_a_guarded_module_stays_guarded_in_what_another_backend_compiles(way, kind):
    """Dynamo traces a module without hooks from its forward on, and does not ask who compiles its calls."""
    model, plain = kind(), Plain()
    plain.load_state_dict(model.state_dict())
    compiled = way(model)
    assert torch.equal(run(compiled), run(Bigger(plain)))
    assert session_of(model).stats().steps == 3
    corrupt(model)
    with pytest.raises(KVCacheViolation):
        run(compiled, 1, 3)


@pytest.mark.parametrize(
    "kind",
    [
        lambda **settings: protect(Plain(), **settings),
        lambda **settings: protect(type("Decorated", (Plain,), {}), **settings)(),
    ],
    ids=["one", "class"],
)
def test_a_module_without_a_guard_and_one_in_a_guarded_graph_are_taken_in(kind):
    off = kind(inner="eager", mode="off")
    run(torch.compile(lambda x, pos: off(x, pos) * 2, backend="eager", fullgraph=True))
    guarded = kind(inner="eager")
    backend = kvcanary_fx.CanaryBackend(kvcanary_fx.CanaryConfig(inner="eager"))
    run(torch.compile(lambda x, pos: guarded(x, pos) * 2, backend=backend, fullgraph=True))
    assert backend.session.stats().steps == 3


def test_code_that_was_compiled_for_an_instance_without_a_guard_is_not_taken_for_one_with_it():
    """As where one decode function runs a model and its guarded twin, or a model that is put under guard later."""
    plain, model = Plain(), protect(Plain(), inner="eager", dynamic=False)
    decode = torch.compile(lambda model, x, pos: model(x, pos) * 2, backend="eager")
    for one in (plain, model):
        run(lambda x, pos, one=one: decode(one, x, pos))
    assert session_of(model).stats().steps == 3
    protect(plain, inner="eager", dynamic=False)
    run(lambda x, pos: decode(plain, x, pos), 1, 3)
    assert session_of(plain).stats().steps == 1


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "deepcopy", "pickle"]
)
def test_a_copy_of_a_guarded_instance_runs_itself(copied):
    model, plain = protect(Plain(), inner="eager"), Plain()
    twin = copied(model)
    assert vars(twin).keys() == vars(plain).keys()
    twin.lin, twin.k_cache, twin.v_cache = plain.lin, torch.zeros(1, 16, 8), torch.zeros(1, 16, 8)
    assert torch.equal(run(twin), run(plain))
    assert session_of(model).calls == 0


def test_a_forward_that_the_class_is_given_later_is_called():
    kind = type("Patched", (Plain,), {"forward": lambda self, x, pos: Plain.forward(self, x, pos)})
    kind.forward.__name__ = "forward"
    plain = kind()
    model = protect(copy.deepcopy(plain), inner="eager")
    assert torch.equal(run(model), run(plain))
    kind.forward = lambda self, x, pos: Plain.forward(self, x, pos) + 1
    assert torch.equal(run(model, 1, 3), run(plain, 1, 3))
    assert session_of(model).stats().steps == 4


def test_a_forward_that_an_instance_is_given_is_called_and_stays():
    plain = Plain()
    model = protect(copy.deepcopy(plain), inner="eager")
    assert torch.equal(run(model), run(plain))
    for one in (plain, model):
        one.forward = mine = lambda x, pos, one=one: Plain.forward(one, x, pos) + 1
    assert torch.equal(run(model, 1, 3), run(plain, 1, 3))
    assert model.forward is mine


def test_a_guarded_module_in_a_graph_without_breaks_names_the_way_out():
    model = protect(Plain(), inner="eager")
    with pytest.raises(Unsupported, match="compile it with backend='kvcanary', or without fullgraph=True"):
        run(torch.compile(model, backend="eager", fullgraph=True))


def test_a_guarded_module_is_part_of_a_guarded_graph():
    for outer in (Bigger(protect(Plain(), inner="eager")), protect(Plain(), inner="eager")):
        backend = kvcanary_fx.CanaryBackend(kvcanary_fx.CanaryConfig(inner="eager"))
        run(torch.compile(outer, backend=backend, fullgraph=True))
        assert backend.session.stats().steps == 3
        assert session_of(getattr(outer, "inner", outer)).calls == 0


@pytest.mark.parametrize("strict", [True, False])
def test_a_guarded_module_is_exported_as_it_is(strict):
    x, pos = torch.randn(1, 1, 8), torch.tensor([0])
    sizes = [
        len(torch.export.export(model, (x, pos), strict=strict).graph.nodes)
        for model in (Plain(), protect(Plain(), inner="eager"))
    ]
    assert sizes[0] == sizes[1]


def test_a_module_whose_guard_is_off_may_be_compiled():
    model = protect(protect(Plain(), inner="eager"), mode="off")
    model.compile(backend="eager")
    run(model)
    with pytest.raises(TypeError, match="is not protected"):
        session_of(model)
