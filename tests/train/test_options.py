"""Options that cannot take effect raise, and name the way out."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.errors import LowtideError
from lowtide.train.options import OptionError, TrainOptions
from lowtide.train.planning import PlanOptions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "--steps 0: at least 1"),
        ({"batch": -1}, "--batch -1: at least 1"),
        ({"grad_accum": 0}, "--grad-accum 0: at least 1"),
        ({"lr": 0.0}, r"--lr 0\.0: a positive"),
        ({"lr": float("nan")}, "--lr nan: a positive"),
        ({"clip": -1.0}, r"--clip -1\.0: it cannot be negative"),
        ({"warmup": 30, "steps": 20}, "--warmup 30: it is longer than the run of --steps 20"),
        ({"dtype": "fp16"}, "--dtype fp16: choose fp32 or bf16"),
        ({"checkpoint_every": 5}, "--checkpoint-every 5: it needs --checkpoint-dir"),
        ({"resume": True}, "--resume: it needs --checkpoint-dir"),
        ({"stop_after": 300}, "--stop-after 300: choose a step from 1 to --steps 100"),
        ({"report": Path("a.png"), "compare": False}, "leave out --no-compare"),
        (
            {"report": Path("a.html"), "pp": 2, "grad_accum": 2},
            "does not compare them: leave out --pp or --report$",
        ),
        ({"json": Path("missing/a.json")}, "--json missing/a.json: cannot write a file there"),
        ({"lr_schedule": "steep"}, "--lr-schedule steep: choose one of cosine, linear, constant"),
        ({"device": "tpu9"}, "--device tpu9"),
        ({"device": "mps"}, "--device mps: choose cpu, cuda"),
    ],
)
def test_an_impossible_value_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        TrainOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "gpt-nano", "seq": 2000}, "gpt-nano has 1024 positions, choose at most that"),
        ({"model": "hf:gpt2:vocab_size=100"}, "vocabulary of 100 is too small for bytes"),
        ({"model": "gpt-nano", "pretrained": True}, "gpt-nano is a shape and has no weights"),
    ],
)
def test_a_model_that_cannot_read_the_text_is_refused(options: dict[str, Any], message: str) -> None:
    if options["model"].startswith("hf:"):
        pytest.importorskip("transformers")
    with pytest.raises(OptionError, match=message):
        TrainOptions(**options).spec()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_that_is_not_there_is_refused() -> None:
    for options in (TrainOptions, PlanOptions):
        with pytest.raises(OptionError, match="sees no CUDA device, choose cpu"):
            options(device="cuda")


def test_a_picture_without_matplotlib_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name)
    )
    with pytest.raises(LowtideError, match=r"pip install 'lowtide\[train\]'"):
        TrainOptions(report=Path("a.png"))


def test_what_shapes_the_losses_is_in_the_trajectory_and_the_rest_is_not() -> None:
    base = TrainOptions(model="gpt-nano").trajectory("text")
    for same in ({"budget": "80%"}, {"policy": "full"}, {"compare": False}, {"eval_every": 1}):
        assert TrainOptions(model="gpt-nano", **same).trajectory("text") == base
    for other in (
        {"seed": 1},
        {"lr": 1e-4},
        {"dropout": 0.1},
        {"grad_accum": 2},
        {"dtype": "bf16"},
        {"steps": 90},
        {"unfused_attention": True},
    ):
        assert TrainOptions(model="gpt-nano", **other).trajectory("text") != base
    assert TrainOptions(model="gpt-nano").trajectory("other text") != base
