"""`lowtide train --cp`: ranks that share every sequence have the losses of one process, hold a budget, and go
on elsewhere.
"""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
from ranks import on_each_backend, on_ranks
from trained import options, trail

import lowtide
from lowtide import meter
from lowtide.train.options import OptionError
from lowtide.train.trainer import train

pytestmark = on_each_backend
HUGGING_FACE = (
    "hf:llama:hidden_size=32,intermediate_size=64,"
    "num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,vocab_size=256"
)
SHARED = {"tp": 2, "cp": 2, "sequence_parallel": True}


def runs(text: Path, cases: list[dict[str, Any]]) -> list[list[float]]:
    warnings.simplefilter("ignore", lowtide.LowtideWarning)
    return [trail(train(options(text, **case))) for case in cases]


def compare_with_one_process(text: Path, size: int, cases: list[dict[str, Any]]) -> None:
    alone = [trail(train(options(text, model=case["model"]))) for case in cases]
    for found in on_ranks(size, runs, text, cases):
        for case, losses, expected in zip(cases, found, alone, strict=True):
            assert losses == pytest.approx(expected, rel=2e-5), case


def test_losses_on_two_processes(text: Path) -> None:
    pytest.importorskip("transformers")
    cases = [
        {"model": "gpt-nano", "cp": 2, "cp_exchange": "ring"},
        {"model": HUGGING_FACE, "cp": 2, "shard_parameters": True},
    ]
    compare_with_one_process(text, 2, cases)


@pytest.mark.slow
def test_compiled_steps(text: Path) -> None:
    pytest.importorskip("transformers")
    compiled = {"compile": True, "compile_backend": "aot_eager", "policy": None, "budget": "min", "cp": 2}
    cases = [{"model": model, "cp_exchange": "ring", **compiled} for model in ("gpt-nano", HUGGING_FACE)]
    compare_with_one_process(text, 2, cases)


@pytest.mark.slow
def test_losses_on_four_processes(text: Path) -> None:
    pytest.importorskip("transformers")
    cases: list[dict[str, Any]] = [
        {"model": "llama-nano", **SHARED},
        {"model": "llama-nano", "cp": 2, "dp": 2},
        {"model": "gpt-nano", "cp": 2, "pp": 2, "cp_exchange": "ring"},
        {"model": HUGGING_FACE, "cp": 2, "dp": 2, "shard_parameters": True},
        {"model": HUGGING_FACE, "cp": 2, "dp": 2, "dp_replicate": 2, "shard_parameters": True},
        {"model": HUGGING_FACE, "cp": 4, "cp_exchange": "ring", "policy": "full"},
    ]
    compare_with_one_process(text, 4, cases)


def budgeted(text: Path, layout: dict[str, Any]) -> tuple[list[float], list[float], list[dict[str, Any]]]:
    warnings.simplefilter("ignore", lowtide.LowtideWarning)
    asked = options(text, batch=8, seq=128, grad_accum=1, eval_every=0, **layout)
    plain = train(asked)
    planned = train(dataclasses.replace(asked, budget="70%", policy=None, compare=True))
    assert planned.comparison is not None and planned.comparison.to_json()["bitwise_equal"]
    return trail(plain), trail(planned), planned.ranks


@pytest.mark.skipif(not meter.available(), reason="needs a C++ compiler for the counting allocator")
@pytest.mark.parametrize(
    "layout",
    [
        {"cp": 2},
        pytest.param({"cp": 2, "dp": 2, "shard_parameters": True}, marks=pytest.mark.slow),
        pytest.param({**SHARED, "cp_exchange": "ring"}, marks=pytest.mark.slow),
    ],
)
def test_a_budget_holds_on_every_rank_and_changes_no_bit(text: Path, layout: dict[str, Any]) -> None:
    size = 2 if len(layout) == 1 else 4
    for plain, planned, ranks in on_ranks(size, budgeted, text, layout):
        assert planned == plain
        for rank in ranks:
            assert max(rank["step_peak_bytes"]) <= rank["budget_bytes"], rank


def resumed(text: Path, folder: Path) -> list[float]:
    return train(options(text, steps=4, cp=2, checkpoint_dir=folder, resume=True)).losses


def test_a_run_of_one_process_goes_on_with_shared_sequences(text: Path, tmp_path: Path) -> None:
    whole = train(options(text, steps=4))
    train(options(text, steps=4, stop_after=2, checkpoint_dir=tmp_path))
    for found in on_ranks(2, resumed, text, tmp_path):
        assert found == pytest.approx(whole.losses[2:], rel=2e-5)
    again = train(options(text, steps=6, checkpoint_dir=tmp_path, resume=True))
    assert again.first_step == 4


def test_what_cannot_be_asked_for(text: Path) -> None:
    for asked, said in (
        ({"cp_exchange": "ring"}, "pass --cp 2 or more"),
        ({**SHARED, "seq": 28}, "8 pieces"),
        ({"cp": 2, "cp_exchange": "rings"}, "all-to-all"),
        ({"model": HUGGING_FACE, "cp": 2, "pp": 2}, "leave out --pp"),
    ):
        with pytest.raises(OptionError, match=said):
            options(text, **asked)
