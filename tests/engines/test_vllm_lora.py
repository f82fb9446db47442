"""LoRA: the KV of equal tokens differs by adapter, which the namespace check knows from the adapter itself."""

from __future__ import annotations

import vllm_runs


def test_adapters_beside_each_other_are_silent(models):
    plain, guarded = (
        vllm_runs.results(models, [{"model": "llama", "scene": "lora"}], mode)[0] for mode in (None, "log")
    )
    assert guarded["tokens"] == plain["tokens"]
    assert len({tuple(guarded["tokens"][f"{number} 0"]) for number in range(3)}) == 3
    assert guarded["violations"] == []
    # K and V of two layers; the second round computes the last page of each prompt anew
    assert guarded["recorded"] // 4 == 3 * (96 + 5) + 3 * (32 + 5)


def test_prefix_of_another_adapter_is_reported(models):
    (found,) = vllm_runs.results(models, [{"model": "llama", "scene": "lora mixed up"}], "log")
    assert found["told"] == [["namespace", "OTHER_NAMESPACE", "R2"]]
