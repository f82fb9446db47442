"""A tiny Whisper with random weights and a made-up vocabulary: a decoder reads an encoder by cross-attention."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import torch

#: What vLLM asks of an encoder-decoder model: its processor, so its tokenizer, and whole prompts in a step.
ARGUMENTS: dict[str, Any] = dict(
    skip_tokenizer_init=False,
    load_format="safetensors",  # of vLLM's own dummy weights every logit is the same
    max_model_len=128,
    max_num_batched_tokens=512,
)

#: The token that vLLM puts before a decoder's prompt that does not start with it.
START = 257

_SPECIAL = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|translate|>", "<|notimestamps|>"]


#: The names of the models, with the seconds that each hears: 50 positions of the encoder's a second.
SECONDS = {"whisper": 1, "whisper_4s": 4}


def write(path: pathlib.Path, seconds: int = 1) -> None:
    """Put its configuration, weights and processor into ``path``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperTokenizerFast,
    )

    vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()) + _SPECIAL)}
    bytewise = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.add_special_tokens(_SPECIAL)
    (path / "vocab.json").write_text(json.dumps(vocabulary))
    (path / "merges.txt").write_text("#version: 0.2\n")
    WhisperTokenizerFast(tokenizer_object=bytewise, additional_special_tokens=_SPECIAL[1:]).save_pretrained(path)
    WhisperFeatureExtractor(feature_size=16, chunk_length=seconds).save_pretrained(path)
    end = vocabulary["<|endoftext|>"]
    config = WhisperConfig(
        vocab_size=len(vocabulary),
        num_mel_bins=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        d_model=128,
        max_source_positions=50 * seconds,
        max_target_positions=128,
        pad_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=START,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        init_std=0.2,  # so that tokens differ, and depend on the sound
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        WhisperForConditionalGeneration(config).save_pretrained(path)


def sound(seed: int, seconds: float = 1) -> np.ndarray:
    """So much noise at 16 kHz, a second if nothing is said, that depends on ``seed`` alone."""
    return np.random.default_rng(seed).standard_normal(int(16000 * seconds)).astype(np.float32)
