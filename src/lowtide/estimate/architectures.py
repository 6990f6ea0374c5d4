"""What the keys of a Hugging Face ``config.json`` mean in each architecture -> `Shape`, and the settings of a
run that transformers' own code of the architecture brings with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lowtide.estimate.errors import EstimateError
from lowtide.estimate.presets import MODERN, Preset
from lowtide.estimate.shape import Shape

_MISSING = object()
_SILU = ("silu", "swish")
_GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")


def _get(data: Mapping[str, Any], source: str, *names: str, default: Any = _MISSING) -> Any:
    for name in names:
        if data.get(name) is not None:
            return data[name]
    if default is _MISSING:
        raise EstimateError(
            f"{source} has no {names[0]!r}, without which a {data.get('model_type')!r} model has no size"
        )
    return default


def _gpt2(data: Mapping[str, Any], source: str, **style: Any) -> Preset:
    _activation(data, source, _GELU, "activation_function")
    hidden = _get(data, source, "n_embd")
    shape = Shape(
        layers=_get(data, source, "n_layer"),
        hidden=hidden,
        heads=_get(data, source, "n_head"),
        ffn=_get(data, source, "n_inner", default=4 * hidden),
        vocab=_get(data, source, "vocab_size"),
        sequence=_get(data, source, "n_positions", "n_ctx"),
        tied=_get(data, source, "tie_word_embeddings", default=True),
        **style,
    )
    dropout = max(
        float(_get(data, source, key, default=0.1)) for key in ("resid_pdrop", "attn_pdrop", "embd_pdrop")
    )
    return Preset(shape, {"attention": "fused", "dropout": dropout})


def _decoder(data: Mapping[str, Any], source: str) -> dict[str, Any]:
    """What Llama's config and those after it have in common."""
    heads = _get(data, source, "num_attention_heads")
    return dict(
        layers=_get(data, source, "num_hidden_layers"), hidden=_get(data, source, "hidden_size"),
        heads=heads, kv_heads=_get(data, source, "num_key_value_heads", default=heads),
        head_width=_get(data, source, "head_dim", default=0), ffn=_get(data, source, "intermediate_size"),
        vocab=_get(data, source, "vocab_size"), sequence=_get(data, source, "max_position_embeddings"),
        positions="rotary", bias=bool(_get(data, source, "mlp_bias", default=False)),
        qkv_bias=bool(_get(data, source, "attention_bias", default=False)),
        tied=bool(_get(data, source, "tie_word_embeddings", default=False)),
    )  # fmt: skip


def _activation(data: Mapping[str, Any], source: str, known: tuple[str, ...], *names: str) -> None:
    """Refuse an activation that keeps other tensors than those that are known."""
    found = _get(data, source, *names, default=known[0])
    if found not in known:
        raise EstimateError(
            f"{source}: a {data['model_type']!r} model with the activation {found!r} is not understood; "
            f"{known[0]!r} is"
        )


def _llama(
    data: Mapping[str, Any], source: str, activations: tuple[str, ...] = _SILU, **style: Any
) -> Preset:
    _activation(data, source, activations, "hidden_act", "hidden_activation")
    given: dict[str, Any] = {**_decoder(data, source), "mlp": "swiglu", "norm": "rmsnorm", **style}
    usual = dict(MODERN, dropout=float(_get(data, source, "attention_dropout", default=0.0)))
    return Preset(Shape(**given), usual)


def _experts(data: Mapping[str, Any], source: str, **style: Any) -> Preset:
    """A mixture of experts in every layer, as Mixtral and Qwen 3 have it."""
    count = _get(data, source, "num_local_experts", "num_experts")
    chosen = _get(data, source, "num_experts_per_tok")
    if data.get("mlp_only_layers") or data.get("decoder_sparse_step", 1) != 1:
        raise EstimateError(f"{source}: experts in some layers only are not understood")
    if "moe_intermediate_size" in data:
        data = {**data, "intermediate_size": data["moe_intermediate_size"]}
    return _llama(data, source, experts=count, experts_per_token=chosen, **style)


def _deepseek(data: Mapping[str, Any], source: str, **style: Any) -> Preset:
    """Shared experts, and one MLP in the first layers; with latent attention where there are latents."""
    latent = data.get("kv_lora_rank")
    if latent:
        rope = _get(data, source, "qk_rope_head_dim")
        style |= dict(
            kv_latent=latent, rope_width=rope, query_latent=_get(data, source, "q_lora_rank", default=0),
            head_width=_get(data, source, "qk_nope_head_dim") + rope,
            value_width=_get(data, source, "v_head_dim"),
        )  # fmt: skip
    given = {**data, "num_local_experts": _get(data, source, "n_routed_experts")}
    dense = _get(data, source, "first_k_dense_replace", default=0)
    style = dict(router="sigmoid") | style
    return _experts(
        given, source, shared_experts=_get(data, source, "n_shared_experts", default=0), dense_layers=dense,
        dense_ffn=_get(data, source, "intermediate_size") if dense else 0, **style,
    )  # fmt: skip


def _nemotron(data: Mapping[str, Any], source: str) -> Preset:
    _activation(data, source, ("relu2",), "hidden_act")
    shape = Shape(**_decoder(data, source), mlp="squared-relu")
    return Preset(shape, dict(MODERN))


def _bigcode(data: Mapping[str, Any], source: str) -> Preset:
    return _gpt2(data, source, kv_heads=1 if _get(data, source, "multi_query", default=True) else 0)


def _fused(found: Preset) -> Preset:
    """The same where values are a part of one product of q, k and v, and keep it."""
    return Preset(found.shape, {**found.usual, "fused_qkv": True})


def _two_matrices(data: Mapping[str, Any], source: str, run: Mapping[str, Any], **style: Any) -> Preset:
    """An MLP of two matrices with GELU, and norms with biases."""
    _activation(data, source, _GELU, "hidden_act", "activation")
    return Preset(Shape(**{**_decoder(data, source), **style}), {**MODERN, **run})


def _neox(data: Mapping[str, Any], source: str) -> Preset:
    bias = bool(_get(data, source, "attention_bias", default=True))
    given = {**data, "num_key_value_heads": None, "head_dim": None}
    dropout = max(
        float(_get(data, source, key, default=0.0)) for key in ("attention_dropout", "hidden_dropout")
    )
    return _two_matrices(
        given, source, {"fused_qkv": True, "dropout": dropout}, bias=True, qkv_bias=bias,
        parallel=bool(_get(data, source, "use_parallel_residual", default=True)),
    )  # fmt: skip


def _phi(data: Mapping[str, Any], source: str) -> Preset:
    """Attention and MLP behind one norm; the output layer has a bias."""
    dropout = max(float(_get(data, source, key, default=0.0)) for key in ("attention_dropout", "resid_pdrop"))
    vocab = _get(data, source, "vocab_size")
    return _two_matrices(
        data, source, {"dropout": dropout}, bias=True, qkv_bias=True, parallel=True, norms=1, more=vocab
    )


def _falcon(data: Mapping[str, Any], source: str) -> Preset:
    """One norm or two beside each other, or one behind the other; biases, and positions, or neither."""
    _activation(data, source, _GELU, "activation")
    heads, new = (
        _get(data, source, "num_attention_heads", "n_head"),
        bool(data.get("new_decoder_architecture")),
    )
    parallel = new or bool(_get(data, source, "parallel_attn", default=True))
    shared = (parallel and not new) or data.get("num_ln_in_parallel_attn") == 1
    alone = bool(_get(data, source, "multi_query", default=True))
    kv_heads = _get(data, source, "num_kv_heads", default=heads) if new else 1 if alone else heads
    hidden = _get(data, source, "hidden_size")
    shape = Shape(
        layers=_get(data, source, "num_hidden_layers", "n_layer"), hidden=hidden, heads=heads,
        kv_heads=kv_heads, ffn=_get(data, source, "ffn_hidden_size", default=4 * hidden),
        vocab=_get(data, source, "vocab_size"),
        sequence=_get(data, source, "max_position_embeddings", default=2048), positions="rotary",
        bias=bool(_get(data, source, "bias", default=False)), parallel=parallel, norms=1 if shared else 2,
        tied=bool(_get(data, source, "tie_word_embeddings", default=True)),
    )  # fmt: skip
    dropout = max(
        float(_get(data, source, key, default=0.0)) for key in ("attention_dropout", "hidden_dropout")
    )
    return Preset(shape, {**MODERN, "dropout": dropout, "fused_qkv": not data.get("alibi")})


def _opt(data: Mapping[str, Any], source: str) -> Preset:
    """Learned positions, two of which no token has; ReLU."""
    _activation(data, source, ("relu",), "activation_function")
    hidden = _get(data, source, "hidden_size")
    if _get(data, source, "word_embed_proj_dim", default=hidden) != hidden:
        raise EstimateError(f"{source}: an OPT whose embedding is narrower than its layers is not understood")
    shape = Shape(
        layers=_get(data, source, "num_hidden_layers"), hidden=hidden,
        heads=_get(data, source, "num_attention_heads"), ffn=_get(data, source, "ffn_dim"), mlp="relu",
        vocab=_get(data, source, "vocab_size"), sequence=_get(data, source, "max_position_embeddings"),
        bias=bool(_get(data, source, "enable_bias", default=True)), more=2 * hidden,
        tied=bool(_get(data, source, "tie_word_embeddings", default=True)),
    )  # fmt: skip
    dropout = max(float(_get(data, source, key, default=0.0)) for key in ("attention_dropout", "dropout"))
    return Preset(shape, {**MODERN, "dropout": dropout})


def _bloom(data: Mapping[str, Any], source: str) -> Preset:
    """A norm behind the embedding; positions are added to the scores, which are therefore there."""
    hidden = _get(data, source, "hidden_size", "n_embed")
    shape = Shape(
        layers=_get(data, source, "num_hidden_layers", "n_layer"), hidden=hidden,
        heads=_get(data, source, "num_attention_heads", "n_head"), vocab=_get(data, source, "vocab_size"),
        sequence=_get(data, source, "seq_length", default=2048), positions="rotary", more=2 * hidden,
        tied=bool(_get(data, source, "tie_word_embeddings", default=True)),
    )  # fmt: skip
    dropout = max(
        float(_get(data, source, key, default=0.0)) for key in ("attention_dropout", "hidden_dropout")
    )
    return Preset(shape, {"attention": "unfused", "dropout": dropout})


def _stablelm(data: Mapping[str, Any], source: str) -> Preset:
    if data.get("qk_layernorm"):
        raise EstimateError(f"{source}: a 'stablelm' model with norms of queries and keys is not understood")
    parallel = bool(_get(data, source, "use_parallel_residual", default=False))
    style: dict[str, Any] = dict(norm="layernorm", parallel=parallel, norms=1 if parallel else 2)
    return _llama(data, source, qkv_bias=bool(data.get("use_qkv_bias")), **style)


def _qwen(data: Mapping[str, Any], source: str) -> Preset:
    """The first Qwen, whose ``intermediate_size`` is that of gate and up together."""
    given = {
        **data, "intermediate_size": _get(data, source, "intermediate_size") // 2,
        "max_position_embeddings": _get(data, source, "seq_length", "max_position_embeddings"),
    }  # fmt: skip
    return _llama(given, source, qkv_bias=True)


def _cohere(data: Mapping[str, Any], source: str) -> Preset:
    """Attention and MLP behind one norm, which has no bias."""
    qk_norm = bool(data.get("use_qk_norm"))
    if qk_norm:
        raise EstimateError(f"{source}: a 'cohere' model with norms of queries and keys is not understood")
    tied = bool(_get(data, source, "tie_word_embeddings", default=True))
    return _llama(data, source, parallel=True, norms=1, tied=tied)


READERS: dict[str, Callable[[Mapping[str, Any], str], Preset]] = {
    "gpt2": _gpt2, "llama": _llama, "mistral": _llama, "nemotron": _nemotron, "gpt_bigcode": _bigcode,
    "gpt_neox": _neox, "phi": _phi, "falcon": _falcon, "opt": _opt, "bloom": _bloom, "qwen": _qwen,
    "stablelm": _stablelm, "cohere": _cohere, "granite": _llama, "smollm3": _llama, "internlm2": _llama,
    "gemma": lambda data, source: _llama(
        data, source, _GELU[::-1], tied=bool(_get(data, source, "tie_word_embeddings", default=True))),
    "phi3": lambda data, source: _fused(_llama(data, source)),
    "starcoder2": lambda data, source: _two_matrices(
        data, source, {}, bias=bool(_get(data, source, "use_bias", default=True)),
        qkv_bias=bool(_get(data, source, "use_bias", default=True)),
        tied=bool(_get(data, source, "tie_word_embeddings", default=True))),
    "deepseek_v2": lambda data, source: _deepseek(data, source, router="softmax"),
    "qwen2": lambda data, source: _llama(data, source, qkv_bias=True),
    "qwen3": lambda data, source: _llama(data, source, qk_norm=True), "mixtral": _experts,
    "qwen3_moe": lambda data, source: _experts(data, source, qk_norm=True), "deepseek_v3": _deepseek,
    "glm4_moe": lambda data, source: _deepseek(data, source, qk_norm=bool(data.get("use_qk_norm"))),
    "gpt_oss": lambda data, source: _experts(
        data, source, mlp="swiglu-clamped", bias=True, qkv_bias=True, sinks=True, router="chosen"),
}  # fmt: skip
"""What reads each ``model_type``."""
