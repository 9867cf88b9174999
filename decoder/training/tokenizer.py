"""The byte-level BPE tokenizer: trained on the training text, saved so that transformers and vLLM load it too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from json import dumps
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
# A line break and the next line's indentation join the punctuation before them (":\n        " is one token): of four
# patterns tried at 4,096 tokens this one reads most bytes a token on held-out text (3.65; GPT-2's kind 3.48).
PIECES = r"[^\S\n]?[^\W\d_]+|\d|_+|[^\S\n]?[^\s\w]+[\n]?[^\S\n]*|\n+[^\S\n]*|[^\S\n]+"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of `vocab_size` tokens; id 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=[END_OF_TEXT], show_progress=False
        ),
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_positions: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    (folder / "tokenizer.json").write_text(tokenizer.to_str() + "\n")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(dumps(settings, indent=2) + "\n")


def token_bytes(tokenizer: Tokenizer) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """How many bytes of text each token id stands for; the end-of-text token stands for none."""
    sizes = np.zeros(tokenizer.get_vocab_size(), dtype=np.int64)
    for token, index in tokenizer.get_vocab().items():
        sizes[index] = 0 if token == END_OF_TEXT else len(token)  # in byte-level BPE one character is one byte
    return sizes


def encode_stream(tokenizer: Tokenizer, texts: Sequence[str]) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """All texts as one run of ids, each followed by the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    pieces = [np.asarray([*e.ids, end], dtype=np.uint16) for e in tokenizer.encode_batch_fast(list(texts))]
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.uint16)
