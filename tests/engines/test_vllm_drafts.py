"""Speculative decoding: drafts are written, verified, and rejected ones overwritten, in the target model's cache."""

from __future__ import annotations

import pytest
import vllm_drafts
import vllm_runs


@pytest.fixture(scope="module", params=vllm_drafts.METHODS)
def found(request, models):
    """What each scene gave, by its name."""
    runs = [{"model": "llama", "scene": f"{request.param} {name}"} for name in vllm_drafts.BY_NAME]
    alone = request.param == "ngram"  # vLLM makes no engine after numba was loaded
    parts = [[run] for run in runs] if alone else [runs]
    given = [result for part in parts for result in vllm_runs.results(models, part, "log")]
    return dict(zip(vllm_drafts.BY_NAME, given, strict=True), method=request.param)


def test_drafted_tokens_are_silent(found):
    plain, drafting = found["load"]["plain"], found["load"]["drafting"]
    assert drafting["tokens"] == plain["tokens"]
    assert drafting["recorded"] > plain["recorded"]  # some drafts were written and rejected
    if found["method"] != "eagle":  # no guess of a random head is right
        assert drafting["steps"] < plain["steps"]
    assert drafting["layers"] == plain["layers"]  # a draft's own are not guarded
    assert drafting["violations"] == plain["violations"] == []


def test_flip_while_drafting(found):
    flip = found["flip"]
    assert flip["violations"] == [["content", "model.layers.0.self_attn.attn", "V", flip["slot"], 41]]


def test_rejected_draft_that_the_scheduler_counts_is_reported(found):
    (request, position), violations = found["rejected"]["victim"], found["rejected"]["violations"]
    assert violations[0] == ["token", "WRONG_TOKEN", position, request]
    assert {named for *_, named in violations} == {request}
