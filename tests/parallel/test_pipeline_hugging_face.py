"""Hugging Face's decoders, cut into stages at their layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_each_backend, on_ranks, seeded
from trained import options

from lowtide import meter
from lowtide.models import ModelError, build_model
from lowtide.models.build import HuggingFaceModel
from lowtide.models.stage import cut
from lowtide.train.options import OptionError
from lowtide.train.trainer import train

pytest.importorskip("transformers")
SMALL = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
WIDE = {**SMALL, "intermediate_size": 64}
GROUPED = {**WIDE, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen2": GROUPED,
    "gemma2": {**GROUPED, "head_dim": 8},
    "mixtral": GROUPED,
    "gpt_neox": WIDE,
    "gpt2": {"vocab_size": 256, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64},
    "opt": {**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32, "pad_token_id": 0},
    "bloom": {"vocab_size": 256, "hidden_size": 32, "n_layer": 4, "n_head": 4},
}


def name_of(family: str) -> str:
    return f"hf:{family}:" + ",".join(f"{key}={value}" for key, value in FAMILIES[family].items())


def built(family: str) -> HuggingFaceModel:
    torch.manual_seed(0)
    model = build_model(name_of(family)).eval()
    assert isinstance(model, HuggingFaceModel)
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_stages_behind_each_other_are_the_model(family: str) -> None:
    """Masks, places, tied weights and norms."""
    model = built(family)
    tokens = torch.randint(256, (2, 16), generator=seeded(1))
    loss = model(tokens, tokens).loss
    assert loss is not None
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model = built(family)
    stages = cut(model, 3, [0, 1, 2])
    first = stages[0](tokens)
    entering = first.detach().requires_grad_()
    between = stages[1](entering)
    leaving = between.detach().requires_grad_()
    found = stages[2].loss(stages[2](leaving), tokens)
    found.backward()
    between.backward(leaving.grad)
    first.backward(entering.grad)
    assert torch.equal(found, loss)
    own = {name: p for stage in stages for name, p in stage.model.named_parameters()}
    assert own.keys() >= gradients.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(own[name].grad, gradient, rtol=1e-4, atol=1e-6), name


def runs(text: Path, cases: list[dict[str, Any]]) -> list[tuple[list[float], dict[str, Any]]]:
    found = []
    for case in cases:
        result = train(options(text, **case))
        mine = result.ranks[torch.distributed.get_rank()]
        found.append(([*result.losses, *result.gradient_norms, *(v for _, v in result.validation)], mine))
    return found


@on_each_backend
@pytest.mark.skipif(not meter.available(), reason="needs a C++ compiler for the counting allocator")
@pytest.mark.filterwarnings("ignore")
def test_two_stages_train_as_one_process(text: Path, tmp_path: Path) -> None:
    """Tied weights, a plan within a budget, and a checkpoint that goes on in one process."""
    model = name_of("gpt2") + ",embd_pdrop=0,attn_pdrop=0,resid_pdrop=0"
    alone = train(options(text, model=model, compare=False, checkpoint_dir=None))
    shape: dict[str, Any] = dict(model=model, pp=2, grad_accum=2, compare=None)
    cases = [shape, {**shape, "policy": None, "budget": "80%", "checkpoint_dir": tmp_path, "stop_after": 2}]
    expected = [*alone.losses, *alone.gradient_norms, *(loss for _, loss in alone.validation)]
    for (plain, _), (_, limited) in on_ranks(2, runs, text, cases):
        assert plain == pytest.approx(expected, rel=1e-4)
        assert limited["predicted_peak_bytes"] <= limited["budget_bytes"]
    resumed = train(options(text, model=model, compare=False, checkpoint_dir=tmp_path, resume=True))
    assert resumed.first_step == 2 and resumed.losses == pytest.approx(alone.losses[2:], rel=1e-4)


def test_what_cannot_be_cut_says_so(text: Path) -> None:
    with pytest.raises(OptionError, match="--tp 2: a pipeline cuts a Hugging Face model between its blocks"):
        options(text, model=name_of("llama"), pp=2, tp=2, grad_accum=2, compare=None)
    with pytest.raises(OptionError, match="has 4 layers, which do not fill 8 stages"):
        options(text, model=name_of("llama"), pp=8, grad_accum=8, compare=None)
    with pytest.raises(ModelError, match="it has no list of 5 layers"):
        model = built("llama")
        model.model.config.num_hidden_layers = 5  # type: ignore[union-attr]
        cut(model, 2, [0])
