"""The private torch APIs we lean on, one test each: a torch release that changes one fails here, by name."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import fx, nn
from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError
from torch._guards import TracingContext

from kvcanary_fx.passes import dynamo_calls
from kvcanary_fx.passes.dynamo_contract import append_static_input, clone_graph_module, graph_name, opaque_type_name
from kvcanary_fx.passes.names import source_name


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("k_cache", torch.zeros(4, 3))

    def forward(self, k, slot):
        self.k_cache[slot] = k
        return self.k_cache.sum()


ARGS = (torch.ones(2, 3), torch.tensor([0, 2]))


def compiled_with(backend):
    with torch.no_grad():
        return torch.compile(Layer(), backend=backend)(*ARGS)


def appended(gm, source=True, static=True):
    """A clone of a Dynamo graph with one more input, which it adds to."""
    clone = clone_graph_module(gm)
    state = append_static_input(clone, "state", torch.zeros(1, dtype=torch.int32))
    if not source:
        del state._dynamo_source
    if not static:
        del state.meta["tensor_dict"]
    with clone.graph.inserting_before(next(iter(reversed(clone.graph.nodes)))):
        clone.graph.call_method("add_", (state, 1))
    clone.recompile()
    return clone


def test_placeholders_have_sources_with_the_users_names():
    seen = []

    def backend(gm, example_inputs):
        seen.extend(source_name(n) for n in gm.graph.find_nodes(op="placeholder"))
        return gm.forward

    compiled_with(backend)
    assert sorted(seen) == ["k", "k_cache", "slot"]


def test_dynamo_reads_its_own_graph_again_so_a_pass_edits_a_clone():
    def editing_in_place(gm, example_inputs):
        append_static_input(gm, "state", torch.zeros(1, dtype=torch.int32))
        gm.recompile()
        state = torch.zeros(1, dtype=torch.int32)
        return lambda *args: gm.forward(*args, state)

    with pytest.raises(InternalTorchDynamoError, match="grapharg"):
        compiled_with(editing_in_place)
    torch._dynamo.reset()

    def editing_a_clone(gm, example_inputs):
        clone = appended(gm)
        state = torch.zeros(1, dtype=torch.int32)
        return lambda *args: clone.forward(*args, state)

    assert compiled_with(editing_a_clone) == 6


def test_an_appended_input_needs_a_source_which_may_be_none():
    from torch._dynamo.backends.debugging import aot_eager

    def backend(source):
        def compile_it(gm, example_inputs):
            state = torch.zeros(1, dtype=torch.int32)
            run = aot_eager(appended(gm, source=source), [*example_inputs, state])
            return lambda *args: run(*args, state)

        return compile_it

    assert compiled_with(backend(source=True)) == 6
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="_dynamo_source"):
        compiled_with(backend(source=False))


@pytest.mark.parametrize("static", [True, False])
def test_an_appended_input_is_static_for_cuda_graphs_only_with_metadata_that_says_so(static):
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    seen = []

    def inner(gm, example_inputs, **kwargs):
        names = [n.name for n in gm.graph.find_nodes(op="placeholder")]
        seen.append((len(names), list(kwargs["static_input_idxs"])))
        return compile_fx_inner(gm, example_inputs, **kwargs)

    def backend(gm, example_inputs):
        state = torch.zeros(1, dtype=torch.int32)
        graph = appended(gm, static=static)
        uncached = {"force_disable_caches": True}
        run = compile_fx(graph, [*example_inputs, state], inner_compile=inner, config_patches=uncached)
        return lambda *args: run(*args, state)

    assert compiled_with(backend) == 6
    count, indices = seen[0]
    assert (count - 1 in indices) == static


def test_a_clone_keeps_what_aot_autograd_looks_up():
    checked = []

    def backend(gm, example_inputs):
        clone = clone_graph_module(gm)
        assert clone._param_name_to_source is gm._param_name_to_source
        assert clone.meta == gm.meta
        for old, new in zip(gm.graph.nodes, clone.graph.nodes, strict=True):
            assert old is not new
            assert old.meta.keys() == new.meta.keys()
            checked.append(new.op)
        return gm.forward

    compiled_with(backend)
    assert "placeholder" in checked
    assert "output" in checked


def test_the_code_of_a_clone_is_written_when_it_is_first_called(monkeypatch):
    written, write = [], fx.Graph.python_code

    def counting(graph, *args, **kwargs):
        written.append(graph)
        return write(graph, *args, **kwargs)

    def backend(gm, example_inputs):
        monkeypatch.setattr(fx.Graph, "python_code", counting)
        clone = appended(gm)
        clone.recompile()
        assert written == []
        return lambda *args: clone(*args, torch.zeros(1, dtype=torch.int32))

    compiled_with(backend)
    assert len(written) == 1


def test_a_graph_says_where_it_comes_from():
    names = []

    def backend(gm, example_inputs):
        names.append(graph_name(gm))
        return gm.forward

    compiled_with(backend)
    assert names[0].startswith("graph 0/0 (forward, test_dynamo_contract.py:")


def test_the_tracing_context_says_which_function_is_compiled():
    seen = []

    def backend(gm, example_inputs):
        seen.append(TracingContext.get().traced_code[0].co_name)
        return gm.forward

    compiled_with(backend)
    assert seen == ["forward"]


def test_tracing_is_known_to_the_thread_that_traces_alone():
    seen = {}

    def backend(gm, example_inputs):
        seen["compiling"] = dynamo_calls.tracing_here()
        other = threading.Thread(target=lambda: seen.update(beside=dynamo_calls.tracing_here()))
        other.start()
        other.join()
        return gm.forward

    @torch.compile(backend=backend)
    def traced(x):
        return x + 1 if dynamo_calls.tracing_here() else x - 1

    assert traced(torch.zeros(1)).item() == 1
    assert seen == {"compiling": True, "beside": False}
    assert not dynamo_calls.tracing_here()


def test_the_backend_that_dynamo_compiles_for_and_its_options():
    seen = []

    def backend(gm, example_inputs, options):
        seen.append(dynamo_calls.backend_at_work())
        return gm.forward

    torch.compile(lambda x: x + 1, backend=backend, options={"a": 1})(torch.zeros(1))
    assert seen == [(backend, {"a": 1})]
    assert dynamo_calls.backend_at_work() is None


@pytest.mark.parametrize("isolated", [{}, dynamo_calls.isolation()], ids=["shared", "isolated"])
def test_hooks_run_around_each_call_of_a_compiled_callable(isolated):
    calls = []

    def backend(gm, example_inputs):
        hooks, cache = dynamo_calls.enter_hooks()
        assert (cache >= 0) is bool(isolated)
        assert not dynamo_calls.at_recompile_limit(code, cache)
        found.append(cache)
        hooks.append(lambda: calls.append("before") or (lambda: calls.append("after")))
        return gm.forward

    def plus(x):
        return x + 1

    code, found = plus.__code__, []
    compiled = torch.compile(plus, backend=backend, **isolated)
    compiled(torch.zeros(1))
    assert calls == []
    compiled(torch.zeros(1))
    with torch.compiler.set_stance("force_eager"):
        compiled(torch.zeros(1))
    assert calls == ["before", "after"] * 2
    with torch._dynamo.config.patch(recompile_limit=1):
        assert dynamo_calls.at_recompile_limit(code, found[0])


def test_the_module_whose_method_is_the_compiled_callable():
    seen, layer = [], Layer()

    def backend(gm, example_inputs):
        seen.append(dynamo_calls.module_called())
        return gm.forward

    torch.compile(layer, backend=backend)(*ARGS)
    torch._dynamo.reset()
    torch.compile(layer.forward, backend=backend)(*ARGS)
    torch.compile(lambda *args: layer(*args), backend=backend)(*ARGS)
    assert seen == [layer, layer, None]
    assert dynamo_calls.module_called() is None


def test_sizes_that_were_seen_are_forgotten():
    dynamic = []

    def backend(gm, example_inputs):
        dynamic.append(any(isinstance(given, torch.SymInt) for given in example_inputs))
        return gm.forward

    def plus(x):
        return x + 1

    with dynamo_calls.sizes_forgotten():
        torch.compile(plus, backend=backend)(torch.zeros(2))
    for length in 3, 4:
        torch.compile(plus, backend=backend)(torch.zeros(length))
    assert dynamic == [False, False, True]


def test_the_compilers_stance_and_what_keeps_it_from_compiling():
    assert dynamo_calls.stance() is None
    with torch.compiler.set_stance("force_eager"):
        assert "set_stance('force_eager')" in dynamo_calls.stance()
    with torch.compiler.set_stance("default", force_backend="eager"):
        assert "set_stance(force_backend='eager')" in dynamo_calls.stance()
    assert dynamo_calls.obstacle() is None
    seen = []
    torch.vmap(lambda x: (seen.append(dynamo_calls.obstacle()), x)[1])(torch.zeros(2))
    assert "function transform" in seen[0]


def test_inductors_wrapper_checks_options_and_applies_modes():
    wrapper = torch._TorchCompileInductorWrapper("max-autotune-no-cudagraphs", None, None)
    assert wrapper.config["max_autotune"] is True
    with pytest.raises(RuntimeError, match="Unexpected optimization option nonsense"):
        torch._TorchCompileInductorWrapper(None, {"nonsense": 1}, None)


def test_a_module_is_called_through_the_hook_that_compile_uses():
    layer, calls = Layer(), []
    layer._compiled_call_impl = lambda *args: calls.append(args)
    layer(*ARGS)
    assert calls == [ARGS]
    assert "_compiled_call_impl" not in layer.__getstate__()


def test_a_schema_takes_an_opaque_type_by_its_registered_name():
    from opaque_engine import LayerName

    library = torch.library.Library("test_dynamo_contract", "FRAGMENT")
    library.define(f"named(Tensor x, {opaque_type_name(LayerName('a'))} layer) -> ()")
    seen = []
    library.impl("named", lambda x, layer: seen.append(layer.value), "CPU")
    torch.ops.test_dynamo_contract.named(torch.zeros(1), LayerName("layers.3"))
    assert seen == ["layers.3"]
    with pytest.raises(TypeError, match="a string or an object of a registered opaque type, not int"):
        opaque_type_name(3)
