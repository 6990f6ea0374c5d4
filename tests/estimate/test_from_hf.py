"""`lowtide estimate --from-hf`: by formula where one fits, else by tracing what transformers builds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import lowtide
from lowtide.cli import app
from lowtide.estimate import EstimateError, configure, estimate
from lowtide.estimate.simulation.any_model import any_model
from lowtide.meter import available

transformers = pytest.importorskip("transformers")

TEXT: dict[str, Any] = dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=512,
)  # fmt: skip
TOWER: dict[str, Any] = dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, image_size=224
)


def written(config: Any, folder: Path) -> Path:
    path = folder / "config.json"
    path.write_text(config.to_json_string(use_diff=False))
    return path


def said(path: Path, *flags: str) -> str:
    done = CliRunner().invoke(app, ["estimate", "--from-hf", str(path), *flags], catch_exceptions=False)
    return " ".join(done.output.split())


def test_a_formula_where_one_fits(tmp_path: Path) -> None:
    path = written(transformers.LlamaConfig(**TEXT), tmp_path)
    told = said(path, "--seq", "256")
    assert "found by formula" in told
    plain = CliRunner().invoke(app, ["estimate", "--model", str(path), "--seq", "256"]).output
    assert " ".join(plain.split()) in told.replace(f"found by formula: {path} is of a type that has one", "")


@pytest.mark.skipif(not available(), reason="needs the counting allocator")
@pytest.mark.parametrize("name", ["gemma2", "vit"])
def test_a_trace_is_what_pytorch_takes(name: str, tmp_path: Path) -> None:
    """The most bytes of forward and backward above parameters, of real models on this machine."""
    torch.manual_seed(0)
    if name == "gemma2":
        found = transformers.Gemma2Config(**TEXT, head_dim=32)
        model = transformers.AutoModelForCausalLM.from_config(found).train()
        tokens = torch.zeros(2, 128, dtype=torch.long)
        inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    else:
        found = transformers.ViTConfig(**TOWER, architectures=["ViTForImageClassification"])
        model = transformers.ViTForImageClassification(found).train()
        inputs = {"pixel_values": torch.zeros(2, 3, 224, 224), "labels": torch.zeros(2, dtype=torch.long)}
    _, stage, (part,) = any_model(written(found, tmp_path), seq=128, micro_batch=2, dtype="fp32")
    assert part.parameters == sum(one.numel() for one in model.parameters())
    taken = lowtide.measure(lambda: model(**inputs).loss.backward()).peak_bytes
    assert max(part.loss, part.backward) == pytest.approx(taken, rel=0.03)
    state = 12 * part.parameters
    assert stage.total_bytes == max(state + max(part.loss, part.backward), 20 * part.parameters)


def test_a_vision_tower_is_traced_beside_its_language_model(tmp_path: Path) -> None:
    tower = dict(TOWER, model_type="clip_vision_model", patch_size=14)
    text = dict(TEXT, model_type="llama")
    path = written(transformers.LlavaConfig(vision_config=tower, text_config=text), tmp_path)
    told = said(path, "--seq", "128", "--dtype", "bf16-true", "--device", "rtx4090")
    assert "found by tracing on fake tensors (vision tower: " in told and "language model: " in told
    assert "'llava': models of type 'llava' are not understood" in told and "; fits 23.6 GiB" in told
    data = json.loads(
        CliRunner().invoke(app, ["estimate", "--from-hf", str(path), "--seq", "128", "--json"]).output
    )
    assert data["moments"]["backward"] > 0 and data["found_by"].startswith("found by tracing")


def test_recomputation_is_traced(tmp_path: Path) -> None:
    path = written(transformers.Gemma2Config(**TEXT, head_dim=32), tmp_path)
    kept = [any_model(path, seq=256, recompute=how)[2][0].kept for how in ("none", "full")]
    assert kept[1] < 0.5 * kept[0]


def test_what_a_trace_does_not_take(tmp_path: Path) -> None:
    path = written(transformers.Gemma2Config(**TEXT, head_dim=32), tmp_path)
    with pytest.raises(EstimateError, match=r"tp: .* has no formula, and a traced model takes --seq"):
        any_model(path, tp=2)
    with pytest.raises(EstimateError, match="--zero 0 or 1"):
        any_model(path, zero=3, dp=2)
    (tmp_path / "other").mkdir()
    sound = written(transformers.Wav2Vec2Config(), tmp_path / "other")
    with pytest.raises(EstimateError, match="'wav2vec2' model reads 'input_values' of no one size"):
        any_model(sound)
    refused = CliRunner().invoke(app, ["estimate", "--from-hf", str(path), "--model", "gpt2"])
    assert isinstance(refused.exception, EstimateError) and "leave --model" in str(refused.exception)


def test_a_formula_is_what_a_trace_finds(tmp_path: Path) -> None:
    """ReLU keeps its output alone."""
    found = transformers.OPTConfig(
        num_hidden_layers=4, hidden_size=256, num_attention_heads=4, vocab_size=1024, ffn_dim=1024,
        max_position_embeddings=512, word_embed_proj_dim=256, dropout=0.0,
    )  # fmt: skip
    path = written(found, tmp_path)
    run: dict[str, Any] = dict(seq=512, micro_batch=4, dtype="bf16-true")
    _, traced, _ = any_model(path, **run)
    ours = estimate(configure(path, **run, loss="transformers"))
    assert ours.total_bytes == pytest.approx(traced.total_bytes, rel=0.005)
