"""Test plants inside the model: drafts spoilt, logits sampled, one scale wrong, NaN, stale cache, shifted positions."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from ..checkpoint.config import FP8_BLOCK
from ..errors import RequestError
from ..generate import Decoder
from ..native.session import NativeSession
from .attention import GatedAttention, Rope
from .cache import KeyValueCache
from .session import TorchSession

STALE_TOKENS = 64


def plant_in_model(decoder: Decoder, name: str, value: float, seed: int) -> None:
    """Puts one fault into the decoder's session, for good. Raises RequestError where it is not plain PyTorch."""
    session = decoder.session
    if name == "reject_drafts" and isinstance(session, TorchSession | NativeSession):
        _spoil_drafts(session, value, decoder.config.vocab_size, seed)
        return
    if not isinstance(session, TorchSession):
        raise RequestError(f"test plant {name} needs the plain PyTorch session", "serve with --device cpu")
    match name:
        case "sampled":
            _sample(session, value, seed)
        case "wrong_scale":
            _middle_layer_down(session)[:FP8_BLOCK, :FP8_BLOCK] *= value
        case "nan":
            _middle_layer_down(session).view(-1)[: int(value)] = float("nan")
        case "stale_kv":
            _keep_cache_stale(session, int(value))
        case "shifted_position":
            _shift_positions(session, int(value))


def _spoil_drafts(session: TorchSession | NativeSession, probability: float, vocab_size: int, seed: int) -> None:
    """Drafts are made as ever, then some are replaced: the verify rejects them, the text stays the same."""
    draft, rng = session.draft, random.Random(seed)

    def spoilt(num_drafts: int) -> list[int]:
        drafts: Sequence[int] = draft(num_drafts)
        return [(token + 1) % vocab_size if rng.random() < probability else token for token in drafts]

    session.draft = spoilt  # type: ignore[method-assign]


def _sample(session: TorchSession, temperature: float, seed: int) -> None:
    """argmax(logits + T·Gumbel noise) is a sample at temperature T."""
    logits, generator = session.model.logits, torch.Generator(session.device).manual_seed(seed)

    def noisy(hidden: torch.Tensor) -> torch.Tensor:
        clean: torch.Tensor = logits(hidden)
        uniform = torch.rand(clean.shape, generator=generator, device=clean.device)
        return clean - temperature * torch.log(-torch.log(uniform.clamp_(1e-9, 1 - 1e-7)))

    session.model.logits = noisy  # type: ignore[method-assign]


def _middle_layer_down(session: TorchSession) -> torch.Tensor:
    layers = session.model.layers
    down: torch.Tensor = layers[len(layers) // 2].down
    return down


def _keep_cache_stale(session: TorchSession, first: int) -> None:
    """After the prefill, what lies beyond `first` holds what lay 64 tokens before."""
    prefill = session.prefill

    @torch.inference_mode()  # the cache holds inference tensors
    def stale(prompt_ids: Sequence[int]) -> int:
        token = prefill(prompt_ids)
        for cache in session.state.layers:
            if isinstance(cache, KeyValueCache) and session.context_length > first:
                for held in (cache.keys, cache.values):
                    beyond = held[:, first - STALE_TOKENS : session.context_length - STALE_TOKENS].clone()
                    held[:, first : session.context_length] = beyond
        return token

    session.prefill = stale  # type: ignore[method-assign]


def _shift_positions(session: TorchSession, by: int) -> None:
    """Prompts are read right; every later token is rotated `by` positions too far."""
    prefill, rope = session.prefill, _rope(session)
    right = rope.cos, rope.sin
    shifted = right[0].roll(-by, 0), right[1].roll(-by, 0)

    def shift_afterwards(prompt_ids: Sequence[int]) -> int:
        rope.cos, rope.sin = right
        token = prefill(prompt_ids)
        rope.cos, rope.sin = shifted
        return token

    session.prefill = shift_afterwards  # type: ignore[method-assign]


def _rope(session: TorchSession) -> Rope:
    """The tables that all attention layers share."""
    for layer in session.model.layers:
        if isinstance(layer.mixer, GatedAttention):
            return layer.mixer.rope
    raise RequestError("test plant shifted_position needs an attention layer")
