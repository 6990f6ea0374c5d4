"""Hugging Face ``config.json`` files -> `Shape`. Only the keys that shape the model are read; transformers is
not needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lowtide.errors import expect
from lowtide.estimate.errors import EstimateError
from lowtide.estimate.presets import MODERN, Preset
from lowtide.estimate.shape import Shape

_MISSING = object()


def _get(data: Mapping[str, Any], source: str, *names: str, default: Any = _MISSING) -> Any:
    for name in names:
        if data.get(name) is not None:
            return data[name]
    if default is _MISSING:
        raise EstimateError(
            f"{source} has no {names[0]!r}, without which a {data.get('model_type')!r} model has no size"
        )
    return default


def _gpt2(data: Mapping[str, Any], source: str) -> Preset:
    if data.get("activation_function", "gelu_new") not in (
        "gelu",
        "gelu_new",
        "gelu_fast",
        "gelu_pytorch_tanh",
    ):
        raise EstimateError(
            f"{source}: the activation {data['activation_function']!r} is not understood; GELU is"
        )
    hidden = _get(data, source, "n_embd")
    shape = Shape(
        layers=_get(data, source, "n_layer"),
        hidden=hidden,
        heads=_get(data, source, "n_head"),
        ffn=_get(data, source, "n_inner", default=4 * hidden),
        vocab=_get(data, source, "vocab_size"),
        sequence=_get(data, source, "n_positions", "n_ctx"),
        tied=_get(data, source, "tie_word_embeddings", default=True),
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


def _llama(data: Mapping[str, Any], source: str, **style: Any) -> Preset:
    activation = _get(data, source, "hidden_act", "hidden_activation", default="silu")
    if activation not in ("silu", "swish"):
        raise EstimateError(
            f"{source}: a {data['model_type']!r} model with the activation {activation!r} is not understood; "
            "'silu' is"
        )
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
    return _experts(
        given, source, router="sigmoid", shared_experts=_get(data, source, "n_shared_experts", default=0),
        dense_layers=dense, dense_ffn=_get(data, source, "intermediate_size") if dense else 0, **style,
    )  # fmt: skip


def _nemotron(data: Mapping[str, Any], source: str) -> Preset:
    if _get(data, source, "hidden_act", default="relu2") != "relu2":
        raise EstimateError(
            f"{source}: a 'nemotron' model with the activation {data['hidden_act']!r} is not understood; "
            "'relu2' is"
        )
    shape = Shape(**_decoder(data, source), mlp="squared-relu")
    return Preset(shape, dict(MODERN))


READERS: dict[str, Callable[[Mapping[str, Any], str], Preset]] = {
    "gpt2": _gpt2, "llama": _llama, "mistral": _llama, "nemotron": _nemotron,
    "qwen2": lambda data, source: _llama(data, source, qkv_bias=True),
    "qwen3": lambda data, source: _llama(data, source, qk_norm=True), "mixtral": _experts,
    "qwen3_moe": lambda data, source: _experts(data, source, qk_norm=True), "deepseek_v3": _deepseek,
    "glm4_moe": lambda data, source: _deepseek(data, source, qk_norm=bool(data.get("use_qk_norm"))),
    "gpt_oss": lambda data, source: _experts(
        data, source, mlp="swiglu-clamped", bias=True, qkv_bias=True, sinks=True, router="chosen"),
}  # fmt: skip
"""What reads each ``model_type``."""


def from_hugging_face(data: Mapping[str, Any], source: str = "the configuration") -> Preset:
    """The shape and usual settings in a Hugging Face configuration.

    Args:
        data: the contents of a ``config.json``.
        source: what messages call it.

    Raises:
        EstimateError: the ``model_type`` is not understood, or a size is missing or does not fit.

    Example:
        >>> config = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12,
        ...     "vocab_size": 50257, "n_positions": 1024}
        >>> from_hugging_face(config).shape.parameters()
        124439808
    """
    contents = isinstance(data, Mapping)
    expect(contents, "from_hugging_face(data=)", data, "the dictionary in a config.json", EstimateError)
    kind = data.get("model_type")
    if kind not in READERS:
        raise EstimateError(
            f"{source}: models of type {kind!r} are not understood; {', '.join(READERS)} are. Give the sizes "
            "as flags (--layers --hidden --heads ...) where the model is built like one of these"
        )
    return READERS[kind](data, source)


def read_hugging_face(path: str | os.PathLike[str]) -> Preset:
    """The same from a ``config.json`` or the folder that holds one."""
    place = as_path("read_hugging_face", path)
    return from_hugging_face(read_json(place / "config.json" if place.is_dir() else place), repr(str(place)))


def no_formula(path: Path) -> str:
    """Why the model in a ``config.json`` or its folder has no formula; nothing where it has one."""
    data = read_json(path / "config.json" if path.is_dir() else path)
    try:
        from_hugging_face(data, f"{data.get('model_type')!r}")
    except EstimateError as error:
        return str(error)
    return ""


def as_path(function: str, path: Any) -> Path:
    """The path of that name.

    Raises:
        EstimateError: it is none.
    """
    expect(isinstance(path, str | os.PathLike), f"{function}(path=)", path, "a file's path", EstimateError)
    return Path(path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, with errors that name it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EstimateError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    except ValueError as error:
        raise EstimateError(f"{str(path)!r} is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise EstimateError(f"{str(path)!r} holds no JSON object")
    return data
