"""Steps of a 4B model of Qwen3's shape on one long sequence, for `lowtide plan` and for a card.

The environment says how long (``LONG_TOKENS``), whether MLPs, norms and loss are in tiles
(``LONG_TILED``), and how many layers (``LONG_LAYERS``).
"""

from __future__ import annotations

import os
from typing import Any

import torch

import lowtide

LAYERS, PIECES = 36, 16


def model_of(layers: int = LAYERS, small: bool = False) -> torch.nn.Module:
    """The model in bfloat16, on the current default device."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape: dict[str, Any] = dict(
        vocab_size=151_936, hidden_size=2560, intermediate_size=9728, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128,
    )  # fmt: skip
    if small:
        shape = dict(
            vocab_size=512, hidden_size=64, intermediate_size=192, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16,
        )  # fmt: skip
    more: dict[str, Any] = {"attn_implementation": "sdpa", "use_cache": False}
    config = Qwen3Config(
        **shape, num_hidden_layers=layers, tie_word_embeddings=True, max_position_embeddings=1 << 21, **more
    )
    return torch.nn.Module.to(Qwen3ForCausalLM(config), torch.bfloat16)


def in_tiles(model: torch.nn.Module, pieces: int = PIECES) -> torch.nn.Module:
    """The same model, whose MLPs, norms and loss run piece by piece."""
    for name, module in model.named_modules():
        if name.endswith((".mlp", "norm")):
            lowtide.tile(module, pieces=pieces)
    lowtide.chunked_loss(model, pieces=8 * pieces)
    return model


def batch_of(tokens: int, device: str, vocabulary: int = 512) -> dict[str, torch.Tensor]:
    """One sequence."""
    ids = torch.randint(vocabulary, (1, tokens), device=device)
    return {"input_ids": ids, "labels": ids}


def step() -> tuple[torch.nn.Module, tuple[()], dict[str, torch.Tensor]]:
    """For ``lowtide plan benchmarks.long_context_steps:step``: nothing is computed."""
    tokens, layers = int(os.environ["LONG_TOKENS"]), int(os.environ.get("LONG_LAYERS", LAYERS))
    with torch.device("meta"):
        model = model_of(layers)
    if os.environ.get("LONG_TILED"):
        model = in_tiles(model)
    return model, (), batch_of(tokens, "cpu")
