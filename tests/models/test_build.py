"""Names of models: presets, Hugging Face types and configuration files, and everything that can be wrong with
them.
"""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.models import ModelError, build_model, model_spec

TINY_GPT2 = "hf:gpt2:n_layer=1,n_embd=32,n_head=2,vocab_size=300,n_positions=64"


def test_a_hugging_face_type_with_settings_builds_and_trains() -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    spec = model_spec(TINY_GPT2)
    assert (spec.vocabulary, spec.positions) == (300, 64)
    model = build_model(spec)
    tokens = torch.randint(256, (2, 17))
    output = model(tokens[:, :-1], tokens[:, 1:])
    output.loss.backward()
    assert output.logits is None
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model(tokens).logits.shape == (2, 17, 300)


@pytest.mark.parametrize("inside", ["config.json", "folder"])
def test_a_configuration_file_or_its_folder_names_a_model(tmp_path: Path, inside: str) -> None:
    pytest.importorskip("transformers")
    values = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({**values, "vocab_size": 256, "auto_map": {"AutoConfig": "evil.py"}})
    )
    spec = model_spec(str(tmp_path if inside == "folder" else tmp_path / "config.json"))
    assert spec.vocabulary == 256
    assert build_model(spec)(torch.zeros(1, 4, dtype=torch.long)).logits.shape == (1, 4, 256)
    assert spec.describe()["hidden_size"] == 32
    json.dumps(spec.describe())


def test_bert_as_a_causal_model_does_not_see_the_future() -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    settings = "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=64,vocab_size=256"
    model = build_model(f"hf:bert:{settings}").eval()
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[:, 5:] = 0
    torch.testing.assert_close(model(tokens).logits[:, :5], model(changed).logits[:, :5])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt-namo", "did you mean 'gpt-nano'"),
        ("hf:nope", "no model type 'nope'"),
        ("hf:gpt2:depth=3", "no such setting"),
        ("hf:gpt2:n_layer=abc", "n_layer.* expected int"),
        ("hf:gpt2:n_layer", "key=value"),
        ("hf:t5", "does not build as a causal language model"),
        ("hf:gpt2:n_head=7", "does not build"),
        ("hf:vit", "has no vocabulary"),
        ("missing/config.json", "cannot read the model configuration"),
    ],
)
def test_a_wrong_name_says_what_is_wrong(name: str, message: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ModelError, match=message):
        build_model(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is no JSON"), ("[]", "names no 'model_type'"), ('{"a": 1}', "names no 'model_type'")],
)
def test_a_broken_configuration_file_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        model_spec(str(tmp_path / "config.json"))


def test_changes_for_built_in_models_do_not_vanish_into_a_hugging_face_one() -> None:
    with pytest.raises(ModelError, match="dropout: only built-in models take this"):
        model_spec(TINY_GPT2, {"dropout": 0.1})


def test_without_transformers_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "transformers":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModelError, match=r"pip install 'lowtide\[hf\]'"):
        model_spec("hf:gpt2")
