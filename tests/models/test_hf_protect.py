"""One call protects a Hugging Face model: generate with its prefill, copies, settings, versions."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import threading

import pytest
import torch
from packaging.version import Version
from test_families import HOLDS

import kvcanary_fx
from kvcanary_fx.adapters import huggingface
from kvcanary_fx.adapters.huggingface import (
    batching as huggingface_batching,
)
from kvcanary_fx.adapters.huggingface import (
    caches as huggingface_caches,
)
from kvcanary_fx.adapters.huggingface import (
    proof as huggingface_proof,
)
from kvcanary_fx.adapters.huggingface import (
    versions as huggingface_versions,
)
from kvcanary_fx.adapters.huggingface.caches import cache_name
from kvcanary_fx.adapters.versions import Tested
from kvcanary_fx.proof import tiny
from kvcanary_fx.runtime.readback import Readback

transformers = pytest.importorskip("transformers", minversion="5.23")

pytestmark = pytest.mark.usefixtures("on_device")  # where models are built

NEW, PROMPT = 8, 6

#: From 5.24 on: a forward takes its cache under this name, and the old one; drafts may have a static cache.
_NEW_NAMES = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason=f"transformers {transformers.__version__}"
)


def generate(model, ids, **options):
    defaults = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    return model.generate(ids, **defaults | options)


def check_generate(arch, **settings):
    """Same tokens as the plain model's, silent, and a bit flipped in each layer is reported for each layer."""
    try:
        model = tiny.build(arch)
    except (AttributeError, KeyError) as e:
        pytest.skip(f"transformers {transformers.__version__} has no {arch}: {e!r}")
    ids = tiny.prompt(model, 2, PROMPT)
    # over its dynamic cache transformers gives it other tokens
    static = dict(cache_implementation="static") if arch == "deepseek_v32" else {}
    plain = generate(model, ids, disable_compile=True, **static)
    model = huggingface.protect(model, mode="log", **settings)
    assert torch.equal(generate(model, ids, **static), plain)
    session = kvcanary_fx.session_of(model)
    assert (session.violations(), session.uncovered) == ([], [])
    assert session.calls in (NEW, NEW - 1)  # an encoder-decoder's prefill is adopted
    flips = FlipEachLayer(model, NEW - 2)
    generate(model, ids, stopping_criteria=transformers.StoppingCriteriaList([flips]), **static)
    told = {v.layer for v in session.violations() if v.check == "content"}
    assert {n for n in flips.layers if any(f".{n}." in f"{layer}." for layer in told)} == flips.layers
    assert len(flips.layers) >= 2


class Watcher(transformers.StoppingCriteria):
    """Never stops; acts after each forward of a model's generate: 1 is the prefill.

    Attributes:
        cache: the static cache that it runs over.
    """

    def __init__(self, model):
        self.steps, self.cache, original = 0, None, model._prepare_static_cache

        def prepare(*args, **kwargs):
            self.cache = original(*args, **kwargs)
            return self.cache

        model._prepare_static_cache = prepare

    def __call__(self, input_ids, scores, **kwargs):
        self.steps += 1
        self.act()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class AfterStep(Watcher):
    """Flips a bit of a row's slot, or of those of all, once, after a forward."""

    def __init__(self, model, step, layer, half, slot, row=1):
        super().__init__(model)
        self.step, self.place, self.slot, self.row = step, (layer, half), slot, row

    def act(self):
        if self.steps == self.step:
            held = {(layer, half): t for layer, half, t in tiny.cache_tensors(self.cache)}
            held[self.place].data.view(torch.int32)[self.row, -1, self.slot, -1] ^= 1 << 9


def masks(model, tokens, **options):
    """Whether attention gets a mask: in each layer of the prefill, and of a decode step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as watched:
        generate(model, tokens, max_new_tokens=2, **options)
    calls = [bool(e.input_shapes[3]) for e in watched.events() if e.name == "aten::scaled_dot_product_attention"]
    return calls[:2], calls[2:]


@pytest.mark.parametrize(("case", "prefill"), [("plain", False), ("padded", True), ("threads", True)])
def test_the_prefill_has_a_mask_only_where_transformers_own_has_one(case, prefill):
    """Without one attention is faster; a second thread would see the changed name of the model's attention."""
    plain = tiny.build("llama")
    model = huggingface.protect(copy.deepcopy(plain), mode="raise", inner="eager")
    ids = tiny.prompt(model, 2, PROMPT)
    if case == "threads":
        other = threading.Thread(target=generate, args=(model, ids))
        other.start()
        other.join()
    options = {"attention_mask": (torch.arange(PROMPT) > 1).long().expand(2, -1)} if case == "padded" else {}
    generate(model, ids, max_new_tokens=2, **options)  # makes the cache, by a token of its own
    assert masks(model, ids, **options) == ([prefill] * 2, [True] * 2)
    if case != "threads":
        static = {"cache_implementation": "static"}
        assert masks(plain, ids, **static, **options)[0] == [prefill] * 2
    assert model.config._attn_implementation == "sdpa"


def test_what_had_no_turn_when_generate_ends_is_in_the_summary():
    model = huggingface.protect(tiny.build("llama"), mode="log", inner="eager", budget="10%")
    for _ in range(2):  # each generate counts anew
        generate(model, tiny.prompt(model, 2, PROMPT))
        told = f"never compared, of what was stored before these {NEW - 1} steps: 89 %"
        assert told in kvcanary_fx.session_of(model).summary()


def test_log_mode_reports_the_last_steps_of_generate_when_it_returns(monkeypatch):
    """As on a GPU, where it looks now and then."""
    model = huggingface.protect(tiny.build("llama"), mode="log", inner="eager")
    ids = tiny.prompt(model, 2, PROMPT)
    generate(model, ids)
    made = Readback.__init__

    def far(self, *args):
        made(self, *args)
        self.at_once = False

    monkeypatch.setattr(Readback, "__init__", far)
    monkeypatch.setattr(Readback, "is_due", lambda self: False)
    session = kvcanary_fx.session_of(model)
    session._readbacks._of.clear()
    flips = AfterStep(model, NEW - 1, 1, "K", 2)
    generate(model, ids, stopping_criteria=transformers.StoppingCriteriaList([flips]))
    assert [(v.check, v.row, v.position) for v in session.known_violations()] == [("content", 1, 2)]


class Looks(Watcher):
    """Shows the cache to ``look``."""

    def __init__(self, model, look):
        super().__init__(model)
        self.look = look

    def act(self):
        self.look(self.cache)


@pytest.mark.parametrize(("arch", "lengths"), [("deepseek_v3", [6]), ("gemma3", [6, 6]), ("llama", [6, 9])])
def test_generate_is_guarded_from_the_prefill_on(arch, lengths):
    model = tiny.build(arch)
    prompts = [tiny.prompt(model, 2, length) for length in lengths]
    plain = [generate(model, ids) for ids in prompts]
    model = huggingface.protect(tiny.build(arch), inner="eager")
    for ids, expected in zip(prompts, plain, strict=True):
        assert torch.equal(generate(model, ids), expected)
    session = kvcanary_fx.session_of(model)
    stats = session.stats()
    assert stats.steps == len(prompts) * NEW
    assert stats.adopted == 0
    assert stats.violations == 0
    assert session.uncovered == []
    if arch != "gemma3":  # whose window rewrites all of its slots in each step
        assert stats.recorded == 4 * 2 * sum(ids.shape[1] + NEW - 1 for ids in prompts)


@pytest.mark.parametrize(("layer", "half"), [(0, "V"), (1, "K")])
def test_a_bit_of_the_prefill_flipped_before_the_first_decode_step_is_found_in_it(layer, half):
    model = huggingface.protect(tiny.build("llama"), inner="eager")
    flip = AfterStep(model, 1, layer, half, slot=2)
    with pytest.raises(kvcanary_fx.KVCacheViolation) as caught:
        generate(model, tiny.prompt(model, 2, PROMPT), stopping_criteria=transformers.StoppingCriteriaList([flip]))
    assert [(v.check, v.half, v.row, v.position, v.step) for v in caught.value.violations] == [
        ("content", half, 1, 2, 2)
    ]
    assert f".{layer}." in caught.value.violations[0].layer


def test_with_the_backend_alone_the_prefill_is_adopted_and_its_flip_is_not_found():
    """The difference that the adapter makes."""
    model, backend = tiny.build("llama"), kvcanary_fx.CanaryBackend(kvcanary_fx.CanaryConfig(inner="eager"))
    config = transformers.CompileConfig(backend=backend, mode=None)
    config._compile_all_devices = True
    flip = AfterStep(model, 1, 1, "V", slot=2)
    generate(
        model,
        tiny.prompt(model, 2, PROMPT),
        cache_implementation="static",
        compile_config=config,
        stopping_criteria=transformers.StoppingCriteriaList([flip]),
    )
    stats = backend.session.stats()
    assert stats.violations == 0
    assert stats.adopted == 4 * 2 * PROMPT


def test_transformers_own_compilation_does_not_go_around_the_guarded_call():
    """As on a GPU, where transformers compiles the decode step unasked."""
    config = transformers.CompileConfig(backend="eager", mode=None)
    config._compile_all_devices = True
    model = huggingface.protect(tiny.build("llama", layers=1), inner="eager")
    generate(model, tiny.prompt(model, 1, PROMPT), compile_config=config)
    assert kvcanary_fx.session_of(model).stats().steps == NEW


def test_decode_steps_are_compiled_as_transformers_would_and_the_prefill_is_not_captured(monkeypatch):
    """As on a GPU: CUDA graphs for the steps of generate, unless protect is told another mode."""
    asked = []

    def compile_with(self, options):
        asked.append(options.get("mode"))
        backend = kvcanary_fx.CanaryBackend(kvcanary_fx.CanaryConfig(inner="eager"), owner=self.session)
        return torch.compile(self._module._call_impl, backend=backend)

    monkeypatch.setattr(huggingface.Protection, "_compile_with", compile_with)
    model = tiny.build("llama", layers=1)
    ids = tiny.prompt(model, 2, PROMPT)
    plain = generate(model, ids)
    config = transformers.CompileConfig()
    config._compile_all_devices = True
    model = huggingface.protect(model)
    for _ in range(2):
        assert torch.equal(generate(model, ids, compile_config=config), plain)
    assert asked == [None, "reduce-overhead"]
    assert kvcanary_fx.session_of(model).stats().steps == 2 * NEW
    huggingface.protect(model, compile_mode="max-autotune-no-cudagraphs")
    generate(model, ids, compile_config=config)
    assert asked[2:] == ["max-autotune-no-cudagraphs"]


def test_the_cache_of_one_generate_serves_the_next_so_that_what_was_captured_is_replayed():
    model = tiny.build("llama")
    ids = tiny.prompt(model, 2, PROMPT)
    plain = [generate(model, ids), generate(model, ids + 1)]
    model = huggingface.protect(model, inner="eager")
    assert torch.equal(generate(model, ids), plain[0])
    session = kvcanary_fx.session_of(model)
    shadows, recorded = session.registry._next_id, session.stats().recorded
    assert torch.equal(generate(model, ids + 1), plain[1])
    assert session.registry._next_id == shadows  # as many as there were ever made
    assert session.stats().recorded == 2 * recorded
    assert (session.stats().adopted, session.stats().violations, session.uncovered) == (0, 0, [])
    flip = AfterStep(model, 3, 1, "K", slot=2)
    with pytest.raises(kvcanary_fx.KVCacheViolation):
        generate(model, ids, stopping_criteria=transformers.StoppingCriteriaList([flip]))


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_the_second_generate_captures_no_cuda_graph(device, monkeypatch):
    captured, enter = [], torch.cuda.graphs.graph.__enter__
    monkeypatch.setattr(torch.cuda.graphs.graph, "__enter__", lambda self: (captured.append(self), enter(self))[1])
    model = huggingface.protect(tiny.build("llama"))
    ids = tiny.prompt(model, 2, PROMPT)
    generate(model, ids)
    assert captured
    captured.clear()
    generate(model, ids + 1)
    assert captured == []
    assert kvcanary_fx.session_of(model).stats().recorded > 0


def test_a_cache_that_somebody_has_is_not_taken_for_another_call():
    model = huggingface.protect(tiny.build("llama", layers=1), inner="eager")
    ids = tiny.prompt(model, 2, PROMPT)
    for _ in range(2):
        generate(model, ids)
    whole = generate(model, ids, return_dict_in_generate=True)[cache_name(model)]
    before = whole.layers[0].keys.clone()
    generate(model, ids - 1)
    assert torch.equal(whole.layers[0].keys, before)
    del whole
    generate(model, ids)
    keys = None

    def look(cache):
        nonlocal keys
        keys = cache.layers[0].keys

    generate(model, ids, stopping_criteria=transformers.StoppingCriteriaList([Looks(model, look)]))
    before = keys.clone()
    generate(model, ids - 1)
    assert torch.equal(keys, before)
    with torch.inference_mode():
        generate(model, ids)
    generate(model, ids)
    generate(model, tiny.prompt(model, 3, PROMPT))
    assert kvcanary_fx.session_of(model).stats().violations == 0


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["past_key_values", pytest.param("cache", marks=_NEW_NAMES)])
def test_a_static_cache_of_the_users_own_and_the_chunks_of_a_prefill_are_guarded(name):
    model = tiny.build("llama")
    ids = tiny.prompt(model, 2, 9)
    plain = generate(model, ids)
    model = huggingface.protect(model, inner="eager")
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    assert torch.equal(generate(model, ids, **{name: cache}, prefill_chunk_size=4), plain)
    stats = kvcanary_fx.session_of(model).stats()
    assert (stats.adopted, stats.violations) == (0, 0)
    assert stats.steps == 3 + NEW - 1
    assert stats.recorded == 4 * 2 * (9 + NEW - 1)


def test_a_decode_step_that_another_backend_compiles_is_guarded():
    """As a loop of one's own is compiled: the step, the sampling behind it, and the model within, all at once."""
    plain = tiny.build("llama")
    model = huggingface.protect(copy.deepcopy(plain), mode="log")
    ids = tiny.prompt(plain, 1, PROMPT)

    @torch.compile(backend="eager")
    def decode(model, token, position, cache):
        return model(token, position_ids=position, **{cache_name(model): cache}).logits[:, -1:].argmax(-1)

    def run(model):
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        found = []
        with torch.no_grad():
            for at in range(PROMPT):
                found.append(decode(model, ids[:, at : at + 1], torch.tensor([[at]], device=ids.device), cache))
                if at == PROMPT - 2:
                    yield torch.cat(found)
                    cache.layers[1].keys.data[0, 0, 2, 3] += 1

    tokens = [list(run(one)) for one in (plain, model)]  # what was compiled for the one is not taken for the other
    assert torch.equal(tokens[0][0], tokens[1][0])
    (found,) = {v.slot for v in kvcanary_fx.session_of(model).violations() if v.check == "content"}
    assert found == 2


def test_a_dynamic_cache_is_said_to_be_unguarded():
    model = huggingface.protect(tiny.build("llama"), inner="eager")
    ids = tiny.prompt(model, 1, PROMPT)
    generate(model, ids, **{cache_name(model): transformers.DynamicCache(config=model.config)})
    session = kvcanary_fx.session_of(model)
    assert session.stats().steps == 0
    assert "use cache_implementation='static'" in session.uncovered[0]


def test_an_encoder_decoders_prefill_is_adopted():
    model = tiny.build("bart")
    ids = tiny.prompt(model, 2, PROMPT)
    plain = generate(model, ids)
    model = huggingface.protect(model, inner="eager")
    assert torch.equal(generate(model, ids), plain)
    stats = kvcanary_fx.session_of(model).stats()
    assert stats.violations == 0
    assert stats.adopted > 0
    assert stats.checked > 0


class FlipEachLayer(Watcher):
    """Flips a bit of the first row of every layer, after a forward."""

    def __init__(self, model, step):
        super().__init__(model)
        self.step, self.layers = step, set[int]()

    def act(self):
        for layer, half, tensor in tiny.cache_tensors(self.cache) if self.steps == self.step else []:
            if layer not in self.layers and "cross" not in half:
                self.layers.add(layer)
                written = tensor.data.view(torch.int32).reshape(tensor.shape[0], -1)[0].nonzero()[0]
                tensor.data.view(torch.int32).view(tensor.shape[0], -1)[0, written] ^= 1 << 5


@pytest.mark.parametrize("arch", [a for a in HOLDS if a not in ("gemma3", "deepseek_v3")])  # which have tests above
def test_generate_of_every_family_is_guarded(arch, device):
    check_generate(arch, inner="eager")


def test_drafted_tokens_are_generated_as_without_us_and_said_to_be_unguarded():
    ids = tiny.prompt(tiny.build("llama"), 1, PROMPT)
    ways = [
        lambda: dict(prompt_lookup_num_tokens=3),
        lambda: dict(assistant_early_exit=1),
        lambda: dict(assistant_model=huggingface.protect(tiny.build("llama", layers=1, seed=1), inner="eager")),
    ]
    for options in ways:
        plain = generate(tiny.build("llama"), ids, **options())
        model = huggingface.protect(tiny.build("llama"), inner="eager")
        assert torch.equal(generate(model, ids, **options()), plain)
        session = kvcanary_fx.session_of(model)
        assert session.calls == 0
        assert [why.partition(" with drafted tokens")[0] for why in session.uncovered] == ["generate"]
        assert "or no drafts" in session.summary()


@_NEW_NAMES
@pytest.mark.parametrize("assistant", [False, True])
def test_drafted_tokens_over_a_static_cache_are_guarded(assistant):
    """What was rejected is written again."""
    model, draft = tiny.build("llama"), tiny.build("llama", layers=1, seed=1)
    ids = tiny.prompt(model, 1, PROMPT)
    drafts = dict(assistant_model=draft) if assistant else dict(prompt_lookup_num_tokens=3)
    plain = generate(model, ids, **drafts)
    model = huggingface.protect(model, inner="eager")
    session = kvcanary_fx.session_of(model)
    for _ in range(2):
        assert torch.equal(generate(model, ids, **drafts, cache_implementation="static"), plain)
    assert (session.violations(), session.uncovered, session.stats().adopted) == ([], [], 0)
    assert session.stats().checked > 0
    flip = transformers.StoppingCriteriaList([FlipEachLayer(model, 2)])
    with pytest.raises(kvcanary_fx.KVCacheViolation) as caught:
        generate(model, ids, **drafts, cache_implementation="static", stopping_criteria=flip)
    told = {(v.check, v.layer) for v in caught.value.violations}
    assert {("content", f"model.layers.{layer}.self_attn") for layer in range(2)} <= told


def generates_as_without_us(model):
    """Protects the model; its session."""
    ids = torch.randint(3, 64, (2, PROMPT))
    plain = generate(model.eval(), ids)
    huggingface.protect(model, inner="eager")
    assert torch.equal(generate(model, ids), plain)
    return kvcanary_fx.session_of(model)


def test_a_model_that_transformers_has_no_static_cache_for_keeps_its_own():
    config = transformers.GPTNeoConfig(
        vocab_size=64, hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]],
        max_position_embeddings=64, window_size=4,
    )  # fmt: skip
    session = generates_as_without_us(transformers.GPTNeoForCausalLM(config))
    assert "GPTNeoForCausalLM has the same tokens only over a DynamicCache" in session.summary()


def test_a_model_that_makes_its_cache_itself_is_not_told_to_take_a_static_one():
    """Seen: MiniMax's summary said that cache_implementation='static' guards it, which transformers ignores for it."""
    config = transformers.MiniMaxConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1, block_size=4,
        layer_types=["full_attention", "linear_attention"],
    )  # fmt: skip
    session = generates_as_without_us(transformers.MiniMaxForCausalLM(config))
    assert "coverage lost: MiniMaxForCausalLM makes its cache itself" in session.summary()
    assert "static" not in session.summary()


@pytest.mark.skipif(not hasattr(transformers, "HYV4ForCausalLM"), reason=f"transformers {transformers.__version__}")
def test_sparse_attention_with_an_indexer_has_the_tokens_that_it_has_without_us():
    """Seen: HY-V4, GLM-MoE-DSA and AXK2 got the static cache, and with it other tokens, as DeepSeek-V3.2 would."""
    mla = dict(q_lora_rank=16, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
    config = transformers.HYV4Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, index_n_heads=1, index_head_dim=16, index_topk=3, initializer_range=0.3, pad_token_id=0, **mla,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.HYV4ForCausalLM(config)
    assert "HYV4ForCausalLM has the same tokens only over a DynamicCache" in generates_as_without_us(model).summary()


def test_a_decoder_in_a_pair_of_models_is_asked_whether_a_static_cache_fits():
    """Seen: VisionEncoderDecoderModel is marked as its decoder is, on the model and not on its class."""
    model = tiny.build("llama")
    type_marked, model._can_compile_fullgraph = type(model)._can_compile_fullgraph, False
    assert type_marked
    assert "only over a DynamicCache" in generates_as_without_us(model).summary()


def test_a_model_whose_generate_is_that_of_a_module_inside_it_is_said_to_be_unguarded():
    class Outer(transformers.LlamaForCausalLM):
        """Generates as Blip-2 does."""

        def generate(self, ids, **options):
            return self.inner[0].generate(ids, **options)

    inner = tiny.build("llama")
    model = Outer(inner.config)
    model.inner = [inner]
    session = generates_as_without_us(model)
    assert "Outer.generate called no forward of Outer" in session.summary()
    session = generates_as_without_us(inner)
    assert (session.uncovered, session.stats().violations) == ([], 0)
    assert session.stats().checked > 0


@pytest.mark.parametrize("alibi", [False, True])
def test_falcon_with_alibi_generates_as_without_us_and_is_said_to_be_unguarded(alibi):
    """Its bias does not fit a static cache, and transformers raises over one."""
    config = transformers.FalconConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, alibi=alibi, pad_token_id=0,
    )  # fmt: skip
    session = generates_as_without_us(transformers.FalconForCausalLM(config))
    assert [why.partition(" works only")[0] for why in session.uncovered] == [
        "FalconForCausalLM with config.alibi"
    ] * alibi
    assert ("coverage lost: FalconForCausalLM with config.alibi" in session.summary()) == alibi
    assert (session.stats().recorded > 0) == (not alibi)


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_the_returned_cache_has_room_for_the_next_turns(arch):
    def turns(model):
        ids, cache, name = tiny.prompt(tiny.build(arch), 2, PROMPT), {}, cache_name(model)
        for more in (3, 9, 5):  # past gemma3's window in the second
            out = generate(model, ids, max_new_tokens=more, return_dict_in_generate=True, **cache)
            cache = {name: out[name]}
            ids = torch.cat((out.sequences, out.sequences[:, :4]), 1)
        return out.sequences

    torch.manual_seed(5)
    plain = turns(tiny.build(arch))
    model = huggingface.protect(tiny.build(arch), inner="eager")
    torch.manual_seed(5)
    assert torch.equal(turns(model), plain)
    session = kvcanary_fx.session_of(model)
    assert session.violations() == []
    assert session.uncovered == []


def test_off_leaves_the_model_as_it_was():
    model = tiny.build("llama")
    before = dict(model.__dict__)
    assert huggingface.protect(model, mode="off") is model
    assert model.__dict__ == before


def test_a_copy_is_plain_and_unprotect_takes_everything_off():
    model = huggingface.protect(huggingface.protect(tiny.build("llama"), inner="eager"), inner="eager")
    twin = copy.deepcopy(model)
    ids = tiny.prompt(model, 1, PROMPT)
    generate(twin, ids)
    assert twin.generate.__self__ is twin
    assert kvcanary_fx.session_of(model).calls == 0
    assert huggingface.unprotect(model) is model
    assert not {"generate", "generate_batch", "init_continuous_batching"} & set(model.__dict__)
    with pytest.raises(TypeError, match="not protected"):
        kvcanary_fx.session_of(model)


@pytest.mark.parametrize("arch", ["llama", "gemma3", "t5"])
def test_beams_are_guarded(arch):
    """Seen: transformers makes new tensors of each reordered cache, so nothing was compared, and nothing said so."""
    plain = tiny.build(arch)
    model = huggingface.protect(copy.deepcopy(plain), mode="log", inner="eager")
    for batch, beams, prompt in ((1, 3, PROMPT), (2, 2, PROMPT + 3), (1, 3, PROMPT)):
        ids = tiny.prompt(plain, batch, prompt)
        assert torch.equal(generate(model, ids, num_beams=beams), generate(plain, ids, num_beams=beams))
    session = kvcanary_fx.session_of(model)
    before = session.stats()
    assert (before.violations, session.uncovered) == (0, [])
    assert before.checked > 2 * before.adopted
    flip = AfterStep(model, NEW - 3, 1, "K", slot=1, row=slice(None))  # some beams do not go on
    criteria = transformers.StoppingCriteriaList([flip])
    generate(model, tiny.prompt(plain, 2, PROMPT), num_beams=2, stopping_criteria=criteria)
    assert {(v.half, v.index) for v in session.violations()} == {("K", 1)}
    assert "reorder_cache" not in vars(flip.cache), "the cache is as it was"


@contextlib.contextmanager
def flip_before(model, forward, row, number, slot):
    """In this block a bit is flipped before a forward of ``generate``, when beams have been exchanged."""
    original, forwards = model.prepare_inputs_for_generation, itertools.count(1)

    def prepare(*args, **kwargs):
        inputs = original(*args, **kwargs)
        if next(forwards) == forward:
            tensor = tiny.cache_tensors(inputs[cache_name(model)])[number][2]
            at = [size - 1 for size in tensor.shape[1:]]
            if tensor.dim() == 4 and tensor.shape[2] >= PROMPT:
                at[1] = min(slot, at[1])
            tensor.data.view(torch.int32)[(row, *at)] ^= 1 << 5
        return inputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "prepare_inputs_for_generation", prepare)
        yield


@pytest.mark.parametrize("arch", ["llama", "gemma3", "jamba"])
def test_a_bit_flipped_in_any_beam_is_found(arch):
    """Seen: in a beam that had got another one's cache twice, it was taken for a token of a new prompt."""
    model = huggingface.protect(tiny.build(arch), mode="log", inner="eager")
    session, ids = kvcanary_fx.session_of(model), tiny.prompt(model, 1, PROMPT)
    for row, number, slot in itertools.product(range(3), range(4), (1, PROMPT + 2)):  # an old one and the newest
        before = len(session.violations())
        with flip_before(model, 5, row, number, slot):
            generate(model, ids, num_beams=3, max_new_tokens=6)
        told = session.violations()[before:]
        assert [(v.check, v.row if v.row is not None else v.index) for v in told] == [("content", row)]
    assert session.uncovered == []


def test_calls_of_many_sizes_stay_below_the_recompile_limit():
    """Seen: RecompileLimitError in the tenth call, as prefills and steps, for one sequence and for several, with sizes
    that become dynamic one after the other are more than Dynamo's eight variants."""
    model = huggingface.protect(tiny.build("llama", layers=1), inner="eager")
    sizes = [(4, 12, 3), (1, 6, 5), (3, 12, 4), (1, 9, 3), (2, 20, 3), (2, 20, 6), (1, 20, 3), (4, 7, 7), (1, 5, 2)]
    with torch._dynamo.config.patch(recompile_limit=4):  # the same with fewer calls
        for batch, prompt, new in sizes:
            model.generate(tiny.prompt(model, batch, prompt), max_new_tokens=new, do_sample=False)
        assert torch._dynamo.config.recompile_limit == 4
    session = kvcanary_fx.session_of(model)
    assert session.uncovered == []
    assert session.calls == sum(new for *_, new in sizes)


def test_a_protected_model_is_saved_and_read_as_a_plain_one(tmp_path):
    """Seen: "cannot pickle code objects", from torch.save."""
    model = huggingface.protect(tiny.build("llama"), inner="eager")
    ids = tiny.prompt(model, 1, PROMPT)
    tokens = generate(model, ids)
    torch.save(model, tmp_path / "model.pt")
    read = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(generate(read, ids), tokens)
    with pytest.raises(TypeError, match="not protected"):
        kvcanary_fx.session_of(read)
    calls = kvcanary_fx.session_of(model).calls
    generate(model, ids)
    assert kvcanary_fx.session_of(model).calls > calls, "the model itself stays protected"


def test_what_cannot_be_protected_is_refused():
    with pytest.raises(TypeError, match="guards any other module"):
        huggingface.protect(torch.nn.Linear(2, 2))

    class Diffusion(torch.nn.Linear):
        """Has a generate of its own, as DiffusionGemmaForBlockDiffusion does.  Seen: an AttributeError."""

        def generate(self, ids):
            return ids

    with pytest.raises(TypeError, match="Diffusion has a generate of its own, and "):
        huggingface.protect(Diffusion(2, 2))
    with pytest.raises(kvcanary_fx.UnknownSettingError, match="modus"):
        huggingface.protect(tiny.build("llama"), modus="raise")
    with pytest.raises(TypeError, match="no session over a paged cache"):
        huggingface.batch_session(huggingface.protect(tiny.build("llama"), inner="eager"))


# ---- versions


@pytest.fixture
def untested_version(monkeypatch):
    monkeypatch.setattr(
        huggingface_versions, "TESTED", Tested("huggingface", "transformers", "6.0", "6.1", "proving itself")
    )
    proofs = huggingface_versions.require_known_version, huggingface_versions.require_known_batches
    for proof in proofs:
        proof.cache_clear()
    yield
    for proof in proofs:
        proof.cache_clear()


def test_an_untested_version_is_named_and_proves_itself(untested_version, caplog, monkeypatch):
    findings = []

    def noting(examine):
        return lambda: findings.extend(examine()) or findings

    for name in ("examine_generate", "examine_batches"):
        monkeypatch.setattr(huggingface_proof, name, noting(getattr(huggingface_proof, name)))
    caplog.set_level(logging.WARNING, "kvcanary")
    model = huggingface.protect(tiny.build("llama"), inner="eager")
    assert f"kvcanary.huggingface transformers {transformers.__version__} is untested" in caplog.text
    assert "tested with 6.0 up to, not including, 6.1" in caplog.text
    assert [f.check for f in findings if f.ok] == ["silence", "content"]
    findings.clear()
    model.init_continuous_batching()  # before the first batch
    assert "kvcanary.violation" not in caplog.text  # of the proof's own faults
    assert [f.check for f in findings if f.ok] == ["silence", "content", "owner", "index"]


def test_an_untested_version_whose_hooks_are_gone_does_not_start(untested_version, monkeypatch):
    """As if transformers wrote its cache by another method."""
    monkeypatch.setattr(
        huggingface_batching.GuardedProcessor, "_update", lambda self, original, *a, **k: original(*a, **k)
    )
    monkeypatch.setattr(huggingface_proof, "examine_generate", list)
    model = huggingface.protect(tiny.build("llama"), inner="eager")
    with pytest.raises(kvcanary_fx.SelfTestError, match="planted a flipped bit in a paged cache, reported nothing"):
        model.generate_batch([[1, 2]])


def test_an_untested_version_that_lacks_what_is_wrapped_does_not_start(untested_version, monkeypatch):
    def gone(self, *args, **kwargs):
        raise AttributeError("'PagedAttentionCache' object has no attribute 'cache_allocators'")

    monkeypatch.setattr(huggingface_batching.GuardedProcessor, "__init__", gone)
    monkeypatch.setattr(huggingface_proof, "examine_generate", list)
    model = huggingface.protect(tiny.build("llama"), inner="eager")
    with pytest.raises(kvcanary_fx.SelfTestError, match=r"planted nothing, reported .*no attribute 'cache_allocators'"):
        model.init_continuous_batching()


def test_an_untested_version_that_gives_the_cache_another_name_does_not_start(untested_version, monkeypatch):
    """As 5.24 did: nothing of a prefill was guarded, and the proof, which called the model itself, was silent."""
    monkeypatch.setattr(huggingface_caches, "_ARGUMENTS", ("another",))
    with pytest.raises(kvcanary_fx.SelfTestError, match="in what a prefill wrote, reported nothing"):
        huggingface.protect(tiny.build("llama"), inner="eager")


def test_an_untested_version_whose_generate_is_not_guarded_does_not_start(untested_version, monkeypatch):
    monkeypatch.setattr(huggingface_proof, "_flip", lambda cache: None)  # as if it went unseen
    with pytest.raises(kvcanary_fx.SelfTestError, match="in what a prefill wrote, reported nothing"):
        huggingface.protect(tiny.build("llama"), inner="eager")
