"""Small causal models of transformers, and a comparison of a step in pieces with the plain one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 320

_SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_OLD: dict[str, Any] = dict(vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=2)

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", _OLD),
    "gptj": ("GPTJForCausalLM", _OLD | {"rotary_dim": 8}),  # a bias
    "bloom": ("BloomForCausalLM", dict(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=2)),
    "opt": ("OPTForCausalLM", dict(
        vocab_size=VOCABULARY, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2,
        word_embed_proj_dim=32, max_position_embeddings=64,
    )),
    "falcon": ("FalconForCausalLM", dict(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
    )),  # a linear layer with a forward of its own
    "gpt_neox": ("GPTNeoXForCausalLM", _SHAPE),
    "llama": ("LlamaForCausalLM", _SHAPE),
    "qwen3": ("Qwen3ForCausalLM", _SHAPE),
    "gemma2": ("Gemma2ForCausalLM", _SHAPE | dict(
        head_dim=8, final_logit_softcapping=1.5,
    )),
    "cohere": ("CohereForCausalLM", _SHAPE | {"logit_scale": 0.3}),
    "granite": ("GraniteForCausalLM", _SHAPE | {"logits_scaling": 3.0}),
    "phi": ("PhiForCausalLM", _SHAPE),  # a bias
    "mixtral": ("MixtralForCausalLM", _SHAPE | dict(
        num_local_experts=4, output_router_logits=True,
    )),
    "mamba": ("MambaForCausalLM", dict(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4,
    )),
    "falcon_h1": ("FalconH1ForCausalLM", _SHAPE | dict(
        mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, lm_head_multiplier=0.4,
    )),
    "t5": ("T5ForConditionalGeneration", dict(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=2,
        decoder_start_token_id=0,
    )),
    "bart": ("BartForConditionalGeneration", dict(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64,
    )),
    "bert": ("BertForMaskedLM", dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2,
    )),
}  # fmt: skip
"""By name the class of transformers, and the parameters of its configuration."""


def build(family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A model of a family, with weights that are drawn alike each time. There is no dropout."""
    import transformers

    name, parameters = FAMILIES[family]
    kind = getattr(transformers, name)
    torch.manual_seed(seed)
    return kind(kind.config_class(**parameters | changes)).eval()


def batch(rows: int = 3, length: int = 21, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    """Tokens, and labels some of which do not count."""
    torch.manual_seed(1)
    tokens = torch.randint(3, vocabulary, (rows, length))
    labels = tokens.clone()
    labels[0, :7] = -100
    return {"input_ids": tokens, "labels": labels}


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    """The gradients of the parameters that learn; they are taken away from these."""
    loss.backward()
    found = [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def same_step(
    plain: nn.Module,
    chunked: nn.Module,
    step: Callable[[Any], Tensor],
    loss_within: float = 1e-6,
    within: float = 2e-5,
) -> None:
    """The loss of a step and its gradients are those of the plain model, within rounding."""
    ours, theirs = step(chunked), step(plain)
    assert torch.allclose(ours.double(), theirs.double(), loss_within, loss_within), (ours, theirs)
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    ours, theirs = gradients(chunked, ours.sum()), gradients(plain, theirs.sum())
    assert len(ours) == len(theirs) > 0
    scale = max(one.abs().max() for one in theirs)
    for own, other in zip(ours, theirs, strict=True):
        assert own.dtype == other.dtype
        far = (own - other).abs().max()
        assert far <= within * max(other.abs().max(), 1e-2 * scale), (far, other.abs().max())


def pair(family: str = "llama", pieces: int = 4, **changes: Any) -> tuple[Any, Any]:
    """A plain model, and the same one with a loss in pieces."""
    import lowtide

    plain = build(family, **changes)
    chunked = copy.deepcopy(plain)
    lowtide.chunked_loss(chunked, pieces)
    return plain, chunked
