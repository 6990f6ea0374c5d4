"""Every command knows a model by any of its names, in either case."""

from __future__ import annotations

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from lowtide import estimate
from lowtide.cli import app
from lowtide.estimate.hugging_face import from_hugging_face
from lowtide.estimate.presets import SMALL
from lowtide.estimate.settings import configure
from lowtide.model_names import _ALIASES, HUB, HUGGING_FACE, meant
from lowtide.models import PRESETS, ModelError, model_spec, preset


@pytest.mark.parametrize("name", [*PRESETS, *estimate.PRESETS, *_ALIASES])
def test_a_name_is_taken_in_either_case(name: str) -> None:
    for known in (PRESETS, estimate.PRESETS):
        found = meant(name, known)
        assert found == meant(name.upper(), known) == meant(name.title(), known)
        assert found in known or found is None
    if name in PRESETS:
        assert preset(name.upper()) == PRESETS[name]
    assert meant(name, estimate.PRESETS) is not None, "what is built has a formula"


def test_tables_name_models_that_there_are() -> None:
    assert {*HUB, *HUGGING_FACE, *SMALL} <= set(estimate.PRESETS)
    assert set(_ALIASES.values()) <= set(estimate.PRESETS)
    assert set(SMALL) <= set(PRESETS)


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_transformers_builds_what_was_published(name: str) -> None:
    pytest.importorskip("transformers")
    built = from_hugging_face(model_spec(name.title()).describe()).shape
    published = estimate.preset(name).shape
    assert replace(built, sequence=1) == replace(published, sequence=1)
    assert configure(HUGGING_FACE[name]).model == published, "a formula takes that spelling, too"


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in estimate.PRESETS or name in SMALL])
def test_formulas_have_the_shapes_that_are_built(name: str) -> None:
    assert estimate.preset(name).shape.parameters() == PRESETS[name].parameters()


def test_a_formula_takes_a_type_of_transformers_with_settings() -> None:
    pytest.importorskip("transformers")
    asked = "hf:Qwen3:num_hidden_layers=3,hidden_size=64,num_attention_heads=4,num_key_value_heads=2"
    shape = configure(asked).model
    assert (shape.layers, shape.hidden, shape.qk_norm) == (3, 64, True)
    with pytest.raises(estimate.EstimateError, match="models of type 'bert' are not understood"):
        configure("hf:bert")


def test_a_folder_goes_before_a_model_of_its_name(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Mixtral").mkdir()
    with pytest.raises(ModelError, match=r"Mixtral.config\.json"):
        model_spec("Mixtral")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Qwen3-8B", "its name on the hub is Qwen/Qwen3-8B, and lowtide estimate, .* know 'qwen3-8b'"),
        ("Mixtral-8x8b", "did you mean 'mixtral-8x7b'"),
        ("530b", "there is no model '530b': the built-in ones are .* hf:TYPE"),
    ],
)
def test_a_name_that_cannot_be_built_says_what_can(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_spec(name)


@pytest.mark.parametrize(
    "asked",
    [
        ["plan", "--model", "GPT-nano", "--batch", "1", "--seq", "16"],
        ["report", "--model", "GPT-Nano", "--batch", "1", "--seq", "16", "--out", "page.html"],
        ["estimate", "--model", "HF:Mixtral", "--device", "H100"],
        ["suggest", "--model", "GPT-Small", "--devices", "1", "--device", "h100"],
        ["suggest", "--model", "hf:mixtral", "--devices", "8", "--device", "h100", "--seq", "4096"],
    ],
)
def test_commands(asked: list[str], tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, asked)
    assert not result.exception or isinstance(result.exception, SystemExit), result.output
    assert "tokens" in result.output or "peak" in result.output
