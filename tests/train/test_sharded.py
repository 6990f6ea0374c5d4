"""`lowtide train --shard-parameters`: FSDP2 outside the tensor group has the losses of one process, in less
memory, and goes on elsewhere.
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
from lowtide.errors import BudgetError
from lowtide.train import checkpoint
from lowtide.train.options import OptionError
from lowtide.train.trainer import train

pytestmark = on_each_backend
HUGGING_FACE = (
    "hf:llama:hidden_size=32,intermediate_size=64,"
    "num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,vocab_size=256"
)


def runs(text: Path, cases: list[dict[str, Any]]) -> list[tuple[list[float], int]]:
    """Losses of each run, and the most that a step took."""
    warnings.simplefilter("ignore", lowtide.LowtideWarning)
    results = [train(options(text, **{"compare": None, **case})) for case in cases]
    return [(trail(result), max(result.step_peak_bytes[1:], default=0)) for result in results]


@pytest.mark.slow
def test_the_losses_are_those_of_one_process_and_of_ddp(text: Path) -> None:
    pytest.importorskip("transformers")
    shared: dict[str, Any] = {"tp": 2, "dp": 2, "sequence_parallel": True}
    dropped = {"model": "gpt-nano", "dropout": 0.1, **shared}
    cases: list[dict[str, Any]] = [
        {"model": "llama-nano", "policy": "full", **shared},
        {"model": HUGGING_FACE, "policy": "full", "tp": 2, "dp": 2},
        {"model": "gpt-nano", "dp": 4},
    ]
    alone = [trail(train(options(text, model=case["model"], compare=False))) for case in cases]
    sharded = [{**case, "shard_parameters": True} for case in [*cases, dropped]]
    for *found, fsdp, ddp in on_ranks(4, runs, text, [*sharded, {**dropped, "compare": False}]):
        for case, (losses, _), expected in zip(cases, found, alone, strict=True):
            assert losses == pytest.approx(expected, rel=2e-5), case
        assert fsdp[0] == pytest.approx(ddp[0], rel=2e-5), "the same masks are drawn"
        assert fsdp[1] < ddp[1] or not meter.available(), (
            "half of parameters, gradients and optimizer state lie elsewhere"
        )


def budgeted(text: Path) -> tuple[list[list[float]], list[list[dict[str, Any]]]]:
    """Losses and ranks with everything kept, and under 80 % of that."""
    shape: dict[str, Any] = {
        "model": "gpt-nano",
        "steps": 2,
        "batch": 8,
        "seq": 128,
        "unfused_attention": True,
        "tp": 2,
        "dp": 2,
    }
    asked = options(
        text, shard_parameters=True, sequence_parallel=True, grad_accum=1, eval_every=0, compare=None, **shape
    )
    with pytest.raises(BudgetError, match=r"the budget of 1 MiB is too small: .*MiB") as error:
        train(dataclasses.replace(asked, policy=None, budget="1MiB"))
    assert error.value.smallest_bytes is not None and error.value.smallest_bytes > 2**20
    results = [train(asked), train(dataclasses.replace(asked, policy=None, budget="80%"))]
    return [trail(result) for result in results], [result.ranks for result in results]


@pytest.mark.skipif(not meter.available(), reason="needs a C++ compiler for the counting allocator")
def test_a_budget_holds_for_the_whole_step(text: Path) -> None:
    for (plain, planned), (kept, limited) in on_ranks(4, budgeted, text):
        assert planned == plain
        for rank in limited:
            assert max(rank["step_peak_bytes"][1:]) <= rank["budget_bytes"], rank
            assert rank["predicted_peak_bytes"] <= rank["budget_bytes"] < max(kept[0]["step_peak_bytes"])


SHARDED: dict[str, Any] = {
    "policy": None,
    "steps": 2,
    "batch": 32,
    "seq": 64,
    "grad_accum": 1,
    "eval_every": 0,
    "compare": None,
    "dp": 2,
    "shard_parameters": True,
}


def compared(text: Path, changes: dict[str, Any]) -> tuple[Any, bool, list[float]]:
    """What was compared, whether it was shown, and the losses."""
    warnings.simplefilter("ignore", lowtide.LowtideWarning)
    result = train(options(text, **{**SHARDED, **changes}))
    return result.comparison, result.report is not None, result.losses


def holds(text: Path, changes: dict[str, Any]) -> list[bool]:
    """On which of two ranks the step was shown, once it is known that it held its budget on both."""
    alone = train(options(text, **{**SHARDED, "dp": 1, "shard_parameters": False, "budget": "100%"})).losses
    found = on_ranks(2, compared, text, changes)
    for comparison, _, losses in found:
        assert comparison.different == () and comparison.within_budget
        assert comparison.planned.peak_bytes < 0.85 * comparison.plain.peak_bytes
        assert losses == pytest.approx(alone, rel=1e-5)
    return [shown for _, shown, _ in found]


@pytest.mark.skipif(not meter.available(), reason="needs a C++ compiler for the counting allocator")
def test_a_sharded_step_is_compared_and_shown(text: Path, tmp_path: Path) -> None:
    assert holds(text, {"budget": "60%", "report": tmp_path / "page.html"}) == [True, False]


@pytest.mark.slow
@pytest.mark.skipif(not meter.available(), reason="needs a C++ compiler for the counting allocator")
def test_a_sharded_step_is_compiled(text: Path) -> None:
    assert not any(holds(text, {"budget": "80%", "compile": True, "compile_backend": "aot_eager"}))


def hybrid(text: Path, folder: Path) -> tuple[list[float], list[float], list[Any]]:
    """The losses of two groups of two that share the model each, and that go on in another layout."""
    asked = options(text, steps=4, batch=32, seq=64, compare=None, checkpoint_dir=folder, budget="60%")
    asked = dataclasses.replace(asked, policy=None, dp=4, grad_accum=1)
    alone = train(dataclasses.replace(asked, checkpoint_dir=None, policy="keep_all", budget=None))
    first = train(dataclasses.replace(asked, shard_parameters=True, dp_replicate=2, stop_after=3))
    again = train(dataclasses.replace(asked, dp=2, tp=2, resume=True))
    return (
        alone.losses,
        first.losses + again.losses,
        [first.comparison is not None and first.comparison.within_budget, first.budget_bytes],
    )


@pytest.mark.slow
def test_two_groups_share_the_model_each(text: Path, tmp_path: Path) -> None:
    for alone, found, (within, budget) in on_ranks(4, hybrid, text, tmp_path):
        assert found == pytest.approx(alone, rel=2e-5) and within and budget


def resumed(text: Path, folder: Path) -> tuple[list[float], list[float], list[float]]:
    """A whole run, and one in three parts: sharded, in another layout, sharded among more."""
    asked = options(
        text,
        steps=6,
        checkpoint_dir=folder,
        tp=2,
        dp=2,
        sequence_parallel=True,
        shard_parameters=True,
        compare=False,
    )
    whole = train(dataclasses.replace(asked, checkpoint_dir=None, shard_parameters=False))
    first = train(dataclasses.replace(asked, stop_after=2))
    again = dataclasses.replace(asked, resume=True)
    second = train(dataclasses.replace(again, stop_after=4, shard_parameters=False, sequence_parallel=False))
    third = train(dataclasses.replace(again, stop_after=5, tp=1, dp=4, sequence_parallel=False))
    assert (second.first_step, third.first_step) == (2, 4)
    return whole.losses, first.losses + second.losses + third.losses, third.gradient_norms


@pytest.mark.slow
def test_a_sharded_run_goes_on_in_any_layout(text: Path, tmp_path: Path) -> None:
    for whole, parts, _ in on_ranks(4, resumed, text, tmp_path):
        assert parts == pytest.approx(whole[:5], rel=2e-5)
    alone = train(options(text, steps=6, checkpoint_dir=tmp_path, resume=True, compare=False))
    assert alone.first_step == 5 and alone.losses == pytest.approx(whole[5:], rel=2e-5)
    assert checkpoint.steps(tmp_path)[-1] == 6


def test_what_does_not_go_together_says_what_to_do(text: Path) -> None:
    for changes, expected in [
        ({"dp": 1}, "--shard-parameters: .* pass --dp 2 or more"),
        ({"pp": 2, "grad_accum": 2}, "--shard-parameters: .* leave out --pp, or this"),
        ({"policy": None}, "--shard-parameters: it needs a budget or a policy: pass --budget"),
        ({"dp_replicate": 2}, "--dp-replicate 2: it divides the --dp 2 ranks into groups of two or more"),
        ({"dp_replicate": 2, "shard_parameters": False}, "--dp-replicate 2: .* pass that, too"),
        ({"optimizer_host_fraction": 0.5}, "--optimizer-host-fraction 0.5: the budget of --shard"),
    ]:
        with pytest.raises(OptionError, match=expected):
            options(text, **{"dp": 2, "shard_parameters": True, "compare": None, **changes})
    with pytest.raises(
        OptionError, match=r"torchrun --nproc-per-node 2 -m lowtide train --dp 2 --shard-parameters"
    ):
        train(options(text, dp=2, shard_parameters=True, compare=None))
