"""A model that takes images: its tokens stand for the image and the place in it, and a mixed-up image is reported."""

from __future__ import annotations

import pytest
import vllm_images
import vllm_runs
from vllm_images import IMAGE_TOKENS, picture
from vllm_rig import prompt

LAYERS = [f"language_model.model.layers.{i}.self_attn.attn" for i in range(2)]


@pytest.fixture(scope="module")
def plain(models):
    """What the model says without the canary, in a process of its own."""
    (found,) = vllm_runs.results(models, [{"model": "blip2", "scene": "images"}], mode=None)
    return found


@pytest.fixture(scope="module")
def rig(models):
    made = vllm_images.make_rig(models)
    yield made
    made.close()


def test_same_tokens_and_no_violation_over_shared_images_and_shared_text(rig, plain):
    computed = vllm_images.load(rig)
    assert any(0 < n < IMAGE_TOKENS for n in computed), f"no prompt was cut within its image: {computed}"
    assert rig.tokens == plain["tokens"]
    for request, found in rig.logprobs.items():
        assert found == pytest.approx(plain["logprobs"][request], abs=1e-5)
    assert rig.logprobs["red"] == pytest.approx(rig.logprobs["red too"], abs=1e-5)
    assert rig.logprobs["red"] != pytest.approx(rig.logprobs["blue"], abs=1e-3)
    assert rig.cached == plain["cached"]
    again = {name: rig.cached[f"{name} again"] for name in ("red", "blue", "red too", "none")}
    assert again == {"red": 96, "blue": 96, "red too": 96, "none": 32}
    assert rig.session.violations() == []
    rig.session.health.check()
    assert rig.session.uncovered == []
    assert list(rig.layers()) == LAYERS
    assert rig.session.stats().recorded > 0


def test_compiled_and_preempted_the_same(models, plain):
    (found,) = vllm_runs.results(models, [{"model": "blip2", "scene": "images harder"}], mode="log")
    assert found["tokens"] == plain["tokens"]
    assert found["violations"] == []
    assert found["preempted"] > 0
    assert found["in_graph"] > 0


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("position", [5, IMAGE_TOKENS + 5])
def test_flip_is_found_within_an_image_and_behind_it(rig, half, position):
    request = f"flip{half}{position}"
    rig.add(request, prompt(10 + half, 50), **picture(100 + 2 * position + half))
    before, slots = len(rig.session.violations()), []
    rig.run(lambda step: slots.append(rig.flip(LAYERS[1], half, request, position)) if step == 3 else None)
    new = rig.session.violations()[before:]
    assert {(v.check, v.layer, v.half, v.position, v.slot) for v in new} == {
        ("content", LAYERS[1], "KV"[half], position, slots[0])
    }
    assert str(new[0].request).startswith(f"{request}-")


def test_prefix_of_another_image_is_reported(rig, monkeypatch):
    """vLLM's prefix cache forgets the images: one's prompt takes up what the other's left."""
    from vllm.v1.core import kv_cache_utils

    monkeypatch.setattr(kv_cache_utils, "_gen_mm_extra_hash_keys", lambda request, start, end, index: ([], index))
    text, before = prompt(20, 60), len(rig.session.violations())
    rig.add("donor", text, **picture(20))
    rig.run()
    rig.add("same", text, **picture(20))
    rig.run()
    assert len(rig.session.violations()) == before
    rig.add("other", text, **picture(21))
    rig.run()
    new = rig.session.violations()[before:]
    assert {(v.check, v.why, str(v.request).rpartition("-")[0]) for v in new} == {("token", "WRONG_TOKEN", "other")}
    assert {v.position for v in new} == set(range(IMAGE_TOKENS))


def test_text_behind_another_image_is_reported(rig, monkeypatch):
    """A block of the same text at the same positions, computed behind another image: its tokens are right."""
    from vllm.v1.core.block_pool import BlockPool

    text, pages = prompt(30, 80), {}
    for name, seed in (("donor", 30), ("other", 31)):
        rig.add(name, text, **picture(seed))
    rig.run(lambda step: pages.update({r: rig.pages(r)[0] for r in ("donor", "other")}) if step == 4 else None)
    find, before = BlockPool.get_cached_block, len(rig.session.violations())

    def find_wrong(self, block_hash, groups):
        found = find(self, block_hash, groups)
        return [self.blocks[pages["other"][2]]] if found and found[0].block_id == pages["donor"][2] else found

    monkeypatch.setattr(BlockPool, "get_cached_block", find_wrong)
    rig.add("mixed", text, **picture(30))
    rig.run()
    new = rig.session.violations()[before:]
    assert {(v.check, str(v.request).rpartition("-")[0]) for v in new} == {("chain", "mixed")}
    assert {v.slot // 32 for v in new} == {pages["other"][2]}
