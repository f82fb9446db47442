"""Speculative decoding: drafts are written, verified, and rejected ones overwritten, in the target model's cache."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import vllm_drafts
import vllm_runs


@pytest.fixture(scope="module", params=vllm_drafts.METHODS)
def found(request, models):
    """What each scene gave, by its name."""
    scenes = list(vllm_drafts.scenes(request.param))
    runs = [{"model": "llama", "scene": f"{request.param} {name}"} for name in scenes]
    alone = request.param == "ngram"  # vLLM makes no engine after numba was loaded
    parts = [[run] for run in runs] if alone else [runs]
    given = [result for part in parts for result in vllm_runs.results(models, part, "log")]
    return dict(zip(scenes, given, strict=True), method=request.param)


@pytest.fixture
def layers(found):
    """The same, of drafts that have layers."""
    if found["method"] == "ngram":
        pytest.skip("prompt lookup has no layers")
    return found


def test_drafted_tokens_are_silent(found):
    plain, drafting = found["load"]["plain"], found["load"]["drafting"]
    assert drafting["tokens"] == plain["tokens"]
    assert drafting["recorded"] > plain["recorded"]  # some drafts were written and rejected
    if found["method"] != "eagle":  # no guess of a random head is right
        assert drafting["steps"] < plain["steps"]
    assert drafting["layers"] == plain["layers"]  # a draft's own are in a session of their own
    assert drafting["violations"] == plain["violations"] == []


def test_layers_of_a_draft_are_checked_in_each_of_its_forwards(layers):
    draft, steps = layers["load"]["drafting"]["draft"], layers["load"]["drafting"]["steps"]
    assert len(draft["layers"]) == 1
    assert draft["calls"] == [0, 3 * steps]
    assert min(draft["slots_checked"], draft["checked"], draft["recorded"]) > 0
    assert draft["uncovered"] == []


@pytest.mark.slow
def test_eagle_of_the_third_kind_is_guarded_as_the_first_is(models):
    (found,) = vllm_runs.results(models, [{"model": "llama", "scene": "eagle3 load"}], "log")
    plain, drafting = found["plain"], found["drafting"]
    assert drafting["tokens"] == plain["tokens"]
    assert plain["violations"] == drafting["violations"] == []
    assert len(drafting["draft"]["layers"]) == 1
    assert min(drafting["draft"]["slots_checked"], drafting["draft"]["recorded"]) > 0
    assert drafting["draft"]["uncovered"] == []


def test_crowd_is_silent(layers):
    crowd = layers["crowd"]
    assert crowd["violations"] == []
    assert crowd["left"] == 0
    assert crowd["preempted"] > 0
    assert crowd["skipped"] > 0
    in_graph, outside = crowd["draft"]["calls"]
    assert in_graph > 0
    assert outside == 0
    assert crowd["draft"]["uncovered"] == []


def test_flip_in_a_layer_of_a_draft(layers):
    flip = layers["draft flip"]
    assert flip["told"] == [[flip["layer"], *where] for where in flip["flips"]]
    assert flip["requests"] == ["A"]
    assert flip["forwards"] == [0]  # the first that reads it
    assert flip["checks"] == ["content"]
    assert flip["of the target"] == 0
    assert flip["counts"]["content"] > 0


@pytest.mark.parametrize(
    ("abort", "error", "finished"),
    [("engine", "KVCacheViolation", {}), ("request", None, {"A": "error", "B": "length"})],
)
def test_flip_in_a_layer_of_a_draft_ends(models, abort, error, finished):
    run = {"model": "llama", "scene": "draft flip ends"}
    (found,) = vllm_runs.results(models, [run], "raise", KVCANARY_VLLM_ABORT=abort)
    assert found == {"error": error, "finished": finished}


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("slots shifted", ["index", "TABLE_DIFFERS", 2, "A"]),
        ("rejections forgotten", ["token", "REJECTED_TOKEN", 1, "A"]),
        ("nothing stored", ["bounds", "OUT_OF_RANGE", 0, "A"]),
    ],
)
def test_bug_of_a_drafter_is_reported(layers, fault, told):
    assert layers["draft faults"][fault] == [told]


def test_draft_that_cannot_be_guarded_is_named(caplog):
    from kvcanary_fx.adapters.vllm import pools

    drafter = SimpleNamespace(method="mtp", attn_layer_names=["mtp.1", "mtp.0"])
    assert pools.draft_groups(SimpleNamespace(drafter=drafter)) == []
    assert "kvcanary.unguarded draft layers (mtp.0, ...): drafts of mtp are not supported" in caplog.text


def test_flip_while_drafting(found):
    flip = found["flip"]
    assert flip["violations"] == [["content", "model.layers.0.self_attn.attn", "V", flip["slot"], 41]]


def test_rejected_draft_that_the_scheduler_counts_is_reported(found):
    (request, position), violations = found["rejected"]["victim"], found["rejected"]["violations"]
    assert violations[0] == ["token", "WRONG_TOKEN", position, request]
    assert {named for *_, named in violations} == {request}
