"""Bad input: a clear error that names the flag and what would be valid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lowtide.estimate import (
    EstimateError,
    Shape,
    configure,
    estimate,
    from_hugging_face,
    model_states,
    read_config,
)
from lowtide.estimate.presets import PRESETS
from lowtide.models.presets import PRESETS as BUILT_IN

BAD = [
    (dict(model="22b", tp=3), "--tp=3", "1, 2, 4, 8, 16, 32, 64"),
    (dict(model="22b", pp=7), "--pp=7", "divisors|1, 2, 3, 4, 6"),
    (dict(model="22b", pp=4, interleave=5), "--interleave=5", "1, 2, 3, 4, 6"),
    (dict(model="22b", pp=2, interleave=2, global_batch=3), "--interleave=2", "multiple of 2"),
    (dict(model="22b", interleave=2), "--interleave=2 with --pp=1", "--pp 2"),
    (dict(model="22b", tp=8, sequence_parallel=True, seq=2047), "--seq=2047", "multiple of 8"),
    (dict(model="22b", sequence_parallel=True), "--sequence-parallel with --tp=1", "--tp 2"),
    (dict(model="22b", tp=-1), "--tp=-1", "from 1 to"),
    (dict(model="22b", tp=0), "--tp=0", "from 1 to"),
    (dict(model="22b", micro_batch=1 << 40), "--micro-batch=", "from 1 to"),
    (dict(model="22b", seq=1.5), "--seq=1.5", "whole number"),
    (dict(model="22b", seq=True), "--seq=True", "whole number"),
    (dict(model="22b", seq=4096), "--seq=4096", "2048"),
    (dict(model="22b", layers=-3), "--layers=-3", "from 1 to"),
    (dict(model="22b", hidden=6145), "--hidden=6145", "--heads=64"),
    (dict(model="22b", heads=0), "--heads=0", "from 1 to"),
    (dict(model="llama3-8b", kv_heads=5), "--kv-heads=5", "1, 2, 4, 8, 16, 32"),
    (dict(model="llama3-8b", heads=24, kv_heads=6, head_width=128, tp=4), "--kv-heads=6", "divide"),
    (dict(model="22b", dp=2, global_batch=3), "--global-batch=3", "--micro-batch=1 x --dp=2"),
    (dict(model="22b", zero=4), "--zero=4", "0, 1, 2, 3"),
    (dict(model="22b", recompute="most"), "--recompute='most'", "selective"),
    (dict(model="22b", recompute=49), "--recompute=49", "1 to 48"),
    (dict(model="22b", recompute=0), "--recompute=0", "1 to 48"),
    (dict(model="22b", dropout=1.0), "--dropout=1.0", "below 1"),
    (dict(model="22b", dropout=-0.1), "--dropout=-0.1", "at least 0"),
    (dict(model="22b", offload_optimizer=1.5), "--offload-optimizer=1.5", "at most 1"),
    (dict(model="22b", optimizer="adamm"), "--optimizer='adamm'", "adam"),
    (dict(model="22b", dtype="int8"), "--dtype='int8'", "bf16"),
    (
        dict(model="22b", partition_activations=True, tp=8),
        "--partition-activations with --recompute=none",
        "--recompute full",
    ),
    (
        dict(model="22b", partition_activations=True, recompute="full"),
        "--partition-activations with --tp=1",
        "--tp 2",
    ),
    (
        dict(model="22b", partition_activations=True, recompute="full", tp=8, sequence_parallel=True),
        "--partition-activations with --sequence-parallel",
        "one of the two",
    ),
    (dict(model="22b", loss_chunks=4), "--loss-chunks=4", "--loss chunked"),
    (dict(model="opt-1.3b", unfused_mlp=True), "--unfused-mlp", "swiglu and gelu"),
    (dict(model="22b", keep_output_tensors=True), "--keep-output-tensors", "--pp 2"),
    (dict(model="22b", memory_bytes=-1), "--memory=-1", "above 0"),
    (dict(model="22b", iteration_seconds=0), "--iteration-time=0", "above 0"),
    (dict(model="22c"), "'22c'", "did you mean '22b'"),
    (dict(model="22b", hiden=3), "'hiden'", "did you mean 'hidden'"),
    (dict(layers=2, heads=2), "no model", "--hidden"),
    (dict(model="llama3-8b", as_published=True), "--as-published", "22b, 175b"),
    (dict(layers=2, hidden=64, heads=2, mlp="geglu"), "--mlp='geglu'", "swiglu"),
    (dict(layers=2, hidden=64, heads=2, norm="batch"), "--norm='batch'", "rmsnorm"),
]


@pytest.mark.parametrize(
    ("settings", "names", "remedy"), BAD, ids=[f"{index}-{names}" for index, (_, names, _) in enumerate(BAD)]
)
def test_bad_settings(settings: dict[str, object], names: str, remedy: str) -> None:
    with pytest.raises(EstimateError) as caught:
        configure(**settings)  # type: ignore[arg-type]
    assert names in str(caught.value)
    assert any(text in str(caught.value) for text in remedy.split("|"))


def test_config_file(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"model": "llama3-8b", "tp": 4, "sequence-parallel": True, "seq": 8192}))
    config = read_config(file, tp=8)
    assert (config.tp, config.sequence_parallel, config.seq) == (8, True, 8192)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"model": "22b", "tensor_parallel": 8}', "'tensor_parallel'"),
        ('{"model": "22b", "tp": 8,}', "no JSON"),
        ("[1]", "no JSON object"),
        ('{"model": "22b", "tp": "8"}', "--tp='8'"),
    ],
)
def test_bad_config_file(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "run.json"
    file.write_text(text)
    with pytest.raises(EstimateError, match=says):
        read_config(file)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(EstimateError, match="cannot read"):
        read_config(tmp_path / "none.json")
    with pytest.raises(EstimateError, match="cannot read"):
        configure(tmp_path / "config.json")


LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192, "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "rope_scaling": None, "tie_word_embeddings": False, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip


def test_hugging_face_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for path in (tmp_path, tmp_path / "config.json"):
        config = configure(path, tp=4)
        assert config.model == PRESETS["llama3-8b"].shape
        assert config.attention == "fused" and config.dropout == 0


def test_hugging_face_files_that_are_not_understood() -> None:
    with pytest.raises(EstimateError, match=r"'bamba'.*llama"):
        from_hugging_face(LLAMA | {"model_type": "bamba"})
    with pytest.raises(EstimateError, match="None"):
        from_hugging_face({})
    with pytest.raises(EstimateError, match="num_hidden_layers"):
        from_hugging_face({key: value for key, value in LLAMA.items() if key != "num_hidden_layers"})
    with pytest.raises(EstimateError, match="relu"):
        from_hugging_face(LLAMA | {"hidden_act": "relu"})


def test_hugging_face_agrees_with_transformers() -> None:
    """Parameters of each kind that is understood, against the model that transformers builds of the same
    configuration.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = dict(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, vocab_size=128, head_dim=16,
        max_position_embeddings=32,
    )  # fmt: skip
    cases = [("gpt2", dict(n_layer=2, n_embd=64, n_head=4, vocab_size=128, n_positions=32))]
    cases += [
        (kind, sizes)
        for kind in (
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "nemotron",
            "gemma",
            "phi",
            "gpt_neox",
            "stablelm",
            "granite",
            "starcoder2",
        )
    ]
    short = dict(sizes, pad_token_id=0)
    cases += [("phi3", short), ("cohere", short), ("smollm3", short)]
    cases += [("stablelm", dict(sizes, use_parallel_residual=True, use_qkv_bias=True))]
    bare = dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=128)
    old = dict(parallel_attn=False, multi_query=False, alibi=True, bias=True)
    for more in ({}, dict(new_decoder_architecture=True, num_kv_heads=2), old):
        cases.append(("falcon", bare | more))
    opt = dict(ffn_dim=256, max_position_embeddings=32, word_embed_proj_dim=64)
    cases += [("opt", bare | opt), ("bloom", dict(n_layer=2, hidden_size=64, n_head=4, vocab_size=128))]
    cases += [("gpt_bigcode", dict(n_layer=2, n_embd=64, n_head=4, vocab_size=128, n_positions=32))]
    latent: dict[str, Any] = dict(
        sizes, num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1,
        moe_intermediate_size=32, first_k_dense_replace=1, qk_rope_head_dim=8, qk_nope_head_dim=16,
        v_head_dim=16, kv_lora_rank=32, head_dim=8,
    )  # fmt: skip
    cases += [("deepseek_v2", dict(latent, q_lora_rank=rank)) for rank in (None, 24)]
    cases += [("deepseek_v3", dict(latent, q_lora_rank=rank, n_group=1, topk_group=1)) for rank in (None, 24)]
    for kind, given in cases:
        config = transformers.AutoConfig.for_model(kind, **given)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        theirs = sum(parameter.numel() for parameter in {id(p): p for p in model.parameters()}.values())
        assert from_hugging_face(config.to_dict()).shape.parameters() == theirs, kind


@pytest.mark.parametrize("name", sorted(set(PRESETS) & set(BUILT_IN)))
def test_presets_agree_with_the_built_in_models(name: str) -> None:
    assert (
        PRESETS[name].shape.parameters() == BUILT_IN[name].parameters()
        or PRESETS[name].shape.sequence != BUILT_IN[name].positions
    )


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt2", 0.12444), ("gpt2-xl", 1.558), ("llama-7b", 6.738), ("llama2-70b", 68.977),
        ("llama3-8b", 8.030), ("llama3-70b", 70.554),
        ("llama3-1b", 1.236), ("llama3-3b", 3.213), ("llama3-405b", 405.85), ("mistral-7b", 7.242),
        ("qwen2-7b", 7.616), ("qwen2-72b", 72.706),
        ("qwen3-8b", 8.191), ("qwen3-32b", 32.762), ("qwen-7b", 7.721), ("qwen2-0.5b", 0.494),
        ("qwen2.5-3b", 3.086), ("qwen2.5-32b", 32.764), ("yi-6b", 6.061), ("yi-34b", 34.389),
        ("tinyllama-1.1b", 1.100), ("gemma-2b", 2.506), ("gemma-7b", 8.538), ("phi-2", 2.780),
        ("phi-3-mini", 3.821), ("phi-4", 14.66), ("falcon-7b", 6.922), ("falcon-40b", 41.303),
        ("pythia-1b", 1.012), ("pythia-6.9b", 6.857), ("gpt-neox-20b", 20.555), ("opt-1.3b", 1.316),
        ("opt-66b", 65.72), ("bloom-7b1", 7.069), ("bloom-176b", 176.247), ("starcoder2-7b", 7.174),
    ],
)  # fmt: skip
def test_presets_have_the_sizes_on_their_model_cards(name: str, billions: float) -> None:
    assert PRESETS[name].shape.parameters() / 1e9 == pytest.approx(billions, rel=1e-3)


def test_usual_sizes_follow() -> None:
    assert Shape(layers=1, hidden=4096, heads=32, mlp="swiglu").ffn == 11008
    assert configure("gpt2", hidden=1024, heads=16).model.ffn == 4096
    assert configure("gpt2").global_batch == 1
    assert configure("gpt2", pp=3, dp=2, micro_batch=4).global_batch == 24


def test_states_of_nothing() -> None:
    with pytest.raises(EstimateError, match=r"parameters=\) was given 0"):
        model_states(0)


def test_estimates_are_plain_numbers() -> None:
    text = json.dumps(estimate(configure("22b", tp=8, sequence_parallel=True)).to_json())
    data = json.loads(text)
    stage = data["stages"][0]
    names = ("weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "temporaries_bytes")
    moments = stage["moments"]
    assert stage["total_bytes"] == data["total_bytes"] == moments[stage["peak_at"]] == max(moments.values())
    assert moments == {
        name: sum(line["moments"][name] for line in stage["lines"]) for name in ("loss", "backward", "update")
    }
    assert stage["total_bytes"] == sum(stage[name] for name in names)  # gradients have a buffer of their own
    assert data["mfu"] is None and data["hfu"] is None
    assert all(isinstance(stage[name], int) for name in names)
    assert all(line["source"] and line["formula"] for line in stage["lines"])
