"""Hugging Face models under generate: what is legal stays silent, and every flipped bit is found."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from torch import nn

import kvcanary_fx
from kvcanary_fx import CanaryBackend, CanaryConfig
from kvcanary_fx.adapters.huggingface.caches import cache_name
from kvcanary_fx.proof import tiny

transformers = pytest.importorskip("transformers")

ARCHITECTURES = sorted(tiny.ARCHITECTURES)


class Generator:
    """A tiny model whose generate is compiled with a canary backend of its own."""

    def __init__(self, arch: str, backend: CanaryBackend | None = None, seed: int = 0):
        self.model = tiny.build(arch, seed=seed)
        self.backend = backend or CanaryBackend(CanaryConfig(inner="eager"))
        self.config = transformers.CompileConfig(backend=self.backend, mode=None)
        self.config._compile_all_devices = True  # transformers compiles on GPUs only, unless told
        torch.manual_seed(1)

    def ids(self, batch: int, length: int) -> torch.Tensor:
        return torch.randint(1, 128, (batch, length))

    def plain(self, ids: torch.Tensor, **options) -> torch.Tensor:
        defaults = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
        if "cache" in options:
            options[cache_name(self.model)] = options.pop("cache")
        return self.model.generate(ids, **{**defaults, **options})

    def __call__(self, ids: torch.Tensor, **options) -> torch.Tensor:
        if "cache" not in options:
            options.setdefault("cache_implementation", "static")
        return self.plain(ids, compile_config=self.config, **options)

    def silent(self) -> bool:
        return self.backend.session.violations() == [] and self.backend.session.uncovered == []

    def cache(self, length: int = 64):
        return transformers.StaticCache(config=self.model.config, max_cache_len=length)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def one_generator(request):
    """Compiled once for all tests that only look whether a way to generate is silent: most of their time was
    Dynamo's, over the same model again.  Its guards see to it that what another way needs is compiled as well."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):  # or the ways that come last would run unguarded
        yield Generator(request.param)


@pytest.fixture
def generator(one_generator, keeps_compiled):
    """Nothing was said before the test, and something is checked in it."""
    assert one_generator.silent()
    torch.manual_seed(1)
    checked = one_generator.backend.session.stats().checked
    yield one_generator
    assert one_generator.backend.session.stats().checked > checked


def test_same_tokens_and_both_halves_of_every_layer(generator):
    for length in (5, 9, 3):
        ids = generator.ids(2, length)
        assert torch.equal(generator(ids), generator.plain(ids))
    assert generator.silent()
    for plan in generator.backend.session.plans:
        layers = {site.layer.rsplit(".", 1)[0] for site in plan.sites}
        assert len(layers) == 2
        assert [s.label for s in plan.sites] == ["K", "V"] * 2
    assert generator.backend.session.stats().checked > 0


def test_left_padding(generator):
    for _ in range(2):
        ids = generator.ids(3, 6)
        mask = torch.ones_like(ids)
        mask[0, :3] = mask[1, :1] = 0
        ids[mask == 0] = 0
        assert torch.equal(generator(ids, attention_mask=mask), generator.plain(ids, attention_mask=mask))
    assert generator.silent()


def test_sampling(generator):
    for _ in range(3):
        generator(generator.ids(2, 5), do_sample=True)
    assert generator.silent()


def test_reset_with_prompts_that_end_where_the_last_sequence_did(generator):
    cache = generator.cache()
    generator(generator.ids(2, 5), cache=cache)
    for length in (12, 19, 26):
        cache.reset()
        generator(generator.ids(2, length), cache=cache)
    assert generator.silent()


def test_the_same_under_inference_mode(generator):
    with torch.inference_mode():
        cache = generator.cache()
        for length in (5, 12, 19):
            cache.reset()
            generator(generator.ids(2, length), cache=cache)
    assert generator.silent()


def test_chat_that_continues_its_cache(generator):
    cache, ids = generator.cache(), generator.ids(1, 5)
    for _ in range(3):
        ids = torch.cat([generator(ids, cache=cache), generator.ids(1, 4)], dim=1)
    assert generator.silent()


def test_new_caches(generator):
    for _ in range(3):
        generator(generator.ids(2, 5), cache=generator.cache(40))
    assert generator.silent()


def test_beam_search(one_generator, keeps_compiled):
    """Transformers compiles no step of a beam search, so nothing is checked in it."""
    for _ in range(2):
        ids = one_generator.ids(2, 5)
        assert torch.equal(one_generator(ids, num_beams=3), one_generator.plain(ids, num_beams=3))
    assert one_generator.silent()


def test_chunked_prefill(generator):
    ids = generator.ids(2, 10)
    assert torch.equal(generator(ids, prefill_chunk_size=4), generator.plain(ids))
    assert generator.silent()


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_two_models_in_two_threads(arch):
    backend, failures = CanaryBackend(CanaryConfig(inner="eager")), []

    def work(seed: int) -> None:
        try:
            generator = Generator(arch, backend=backend, seed=seed)
            for _ in range(3):
                generator(generator.ids(2, 5))
        except Exception as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert backend.session.violations() == []


@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt2"])
def test_compiled_prefill_and_two_caches_that_take_turns(arch):
    generator = Generator(arch)
    model = generator.model
    run = torch.compile(model.forward, backend=generator.backend)
    caches, name = [generator.cache(40) for _ in range(2)], cache_name(model)
    heads = getattr(model.config, "num_key_value_heads", 4)
    for cache in caches:
        cache.early_initialization(1, heads, 8, torch.float32, "cpu")
    with torch.no_grad():
        for cache in caches:
            run(generator.ids(1, 5), **{name: cache})
        for _ in range(5):
            for cache in caches:
                run(generator.ids(1, 1), **{name: cache})
    assert generator.silent()
    caches[1].layers[1].values.data[0, 1, 3, 2] += 0.5
    with torch.no_grad(), pytest.raises(kvcanary_fx.KVCacheViolation) as caught:
        run(generator.ids(1, 1), **{name: caches[1]})
    assert [(v.half, v.index) for v in caught.value.violations] == [("V", 3)]


def test_a_dynamic_cache_cannot_be_guarded_and_is_told_by_name(caplog):
    generator = Generator("llama")
    run = torch.compile(generator.model.forward, backend=generator.backend)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "kvcanary"):
        out, name = generator.model(generator.ids(1, 4)), cache_name(generator.model)
        run(generator.ids(1, 1), **{name: out[name]})
    assert f"rebuilt by cat each step ({name}.layers[0].keys" in caplog.text
    assert "cache_implementation='static'" in caplog.text


def test_protect_on_a_model_guards_its_own_calls():
    model = kvcanary_fx.protect(tiny.build("llama"), inner="eager")
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    cache.early_initialization(1, 2, 8, torch.float32, "cpu")
    with torch.no_grad():
        model(torch.randint(1, 128, (1, 5)), **{cache_name(model): cache})
        model(torch.randint(1, 128, (1, 1)), **{cache_name(model): cache})
    assert isinstance(model, nn.Module)
    assert kvcanary_fx.session_of(model).stats().recorded == 6 * 4
