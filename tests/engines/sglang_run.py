"""Generates with SGLang on the CPU: a tiny random Llama, two rounds of prompts that share a prefix.

    python tests/engines/sglang_run.py '{"max_total_tokens": 96}'

The argument has settings of SGLang's Engine.  Prints one line ``TOKENS`` with the new tokens of each prompt of each
round.  SGLang has no CPU build of some packages that it imports: ``sglang_stubs`` has to be on PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from tiny_configs import CONFIGS

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

#: Two whole rounds: the second finds the first one's prompts in the prefix cache.
PREFIX = list(range(40, 60))
PROMPTS = [PREFIX + [60 + i, 70 + 3 * i, 5 * i] for i in range(4)] + [list(range(100, 140))]
ROUNDS, NEW = 2, 12


def main(settings: dict[str, object]) -> None:
    import sglang

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIGS["llama"]))
        defaults = dict(
            model_path=folder,
            device="cpu",
            load_format="dummy",
            random_seed=0,
            skip_tokenizer_init=True,
            attention_backend="torch_native",
            sampling_backend="pytorch",
            max_total_tokens=256,
            max_running_requests=4,
            chunked_prefill_size=16,
            context_length=128,
            disable_cuda_graph=True,
            disable_overlap_schedule=True,
            dtype="bfloat16",
            mem_fraction_static=0.3,
            log_level="info",
        )
        engine = sglang.Engine(**defaults | settings)
        parameters = dict(max_new_tokens=NEW, temperature=0, ignore_eos=True)
        rounds = [engine.generate(input_ids=PROMPTS, sampling_params=parameters) for _ in range(ROUNDS)]
        print("TOKENS", json.dumps([[o["output_ids"] for o in outs] for outs in rounds]), flush=True)
        engine.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]) if len(sys.argv) > 1 else {})
