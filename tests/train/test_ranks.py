"""`lowtide train` on several processes: the losses of one process, budgets that hold on each, checkpoints
that move between layouts.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_each_backend, on_ranks
from trained import options, trail

import lowtide
from lowtide.train import checkpoint
from lowtide.train.checkpoint import CheckpointError
from lowtide.train.options import OptionError
from lowtide.train.part import WholeModel
from lowtide.train.trainer import train

pytestmark = on_each_backend
LAYOUTS = [
    {"tp": 2, "dp": 2},
    {"tp": 2, "dp": 2, "sequence_parallel": True},
    {"dp": 4},
]


def run(text: Path, changes: list[dict[str, Any]]) -> list[list[float]]:
    warnings.simplefilter("ignore", lowtide.LowtideWarning)
    return [trail(train(options(text, **each))) for each in changes]


@pytest.mark.slow
def test_every_layout_has_the_losses_of_one_process(text: Path) -> None:
    cases = [{"model": model, **layout} for model in ("gpt-nano", "llama-nano") for layout in LAYOUTS]
    alone = {model: trail(train(options(text, model=model))) for model in ("gpt-nano", "llama-nano")}
    for found in on_ranks(4, run, text, cases):
        for case, losses in zip(cases, found, strict=True):
            assert losses == pytest.approx(alone[case["model"]], rel=2e-5), case


def test_hugging_face_models_are_shared_by_their_own_plan(text: Path) -> None:
    pytest.importorskip("transformers")
    name = (
        "hf:llama:hidden_size=32,intermediate_size=64,"
        "num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,vocab_size=256"
    )
    alone = trail(train(options(text, model=name)))
    cases = [{"model": name, "tp": 2}, {"model": name, "tp": 2, "sequence_parallel": True}]
    for found in on_ranks(2, run, text, cases):
        for case, losses in zip(cases, found, strict=True):
            assert losses == pytest.approx(alone, rel=2e-5), case


def hosted(text: Path) -> list[list[list[float]]]:
    cases: list[dict[str, Any]] = [{"dp": 2, "steps": 2}, {"tp": 2, "steps": 2}, {"pp": 2, "steps": 2}]
    return [run(text, [case, {**case, "optimizer_host_fraction": 0.5}]) for case in cases]


def test_the_optimizer_may_lie_on_the_host_of_every_rank(text: Path) -> None:
    """Data parallel, tensor parallel and in stages: losses and norms of an optimizer on the device, bit by
    bit.
    """
    for found in on_ranks(2, hosted, text):
        for plain, moved in found:
            assert moved == plain


def test_several_processes_do_not_choose_a_share_each(text: Path) -> None:
    with pytest.raises(OptionError, match="choose its own share"):
        options(text, dp=2, optimizer_host_fraction="auto")


def moved_and_resumed(text: Path, folder: Path) -> list[list[float]]:
    """From a run of one process, with state on the host and without."""
    found = []
    for number, share in enumerate((None, 0.5)):
        asked = options(text, steps=4, tp=2, checkpoint_dir=folder / str(number), resume=True)
        found.append(train(dataclasses.replace(asked, optimizer_host_fraction=share)).losses)
    return found


def test_a_run_of_one_process_goes_on_with_two_and_state_on_the_host(text: Path, tmp_path: Path) -> None:
    whole = train(options(text, steps=4))
    for number in range(2):
        train(options(text, steps=4, stop_after=2, checkpoint_dir=tmp_path / str(number)))
    for found in on_ranks(2, moved_and_resumed, text, tmp_path):
        assert found[0] == found[1]
        assert found[0] == pytest.approx(whole.losses[2:], rel=2e-5)
    again = train(options(text, steps=6, checkpoint_dir=tmp_path / "1", resume=True))
    assert again.first_step == 4


def budgets(text: Path) -> tuple[list[float], list[float], dict[str, Any]]:
    warnings.simplefilter("ignore", lowtide.LowtideWarning)
    asked = options(
        text,
        tp=2,
        sequence_parallel=True,
        dropout=0.1,
        unfused_attention=True,
        batch=8,
        seq=128,
        grad_accum=1,
    )
    plain = train(asked)
    planned = train(dataclasses.replace(asked, budget="75%", policy=None, compare=True))
    assert planned.comparison is not None
    return trail(plain), trail(planned), planned.comparison.to_json()


def test_a_budget_holds_on_every_rank_and_changes_no_bit(text: Path) -> None:
    for plain, planned, comparison in on_ranks(2, budgets, text):
        assert planned == plain
        assert comparison["within_budget"] and comparison["bitwise_equal"], comparison
        assert comparison["planned"]["peak_bytes"] < comparison["plain"]["peak_bytes"]


def averaged(text: Path) -> tuple[int | None, list[int], list[int]]:
    warnings.simplefilter("ignore", lowtide.LowtideWarning)
    asked = options(text, dp=2, seq=64, steps=3, grad_accum=1, eval_every=0, budget="min", policy=None)
    found = train(asked)
    return found.budget_bytes, found.step_peak_bytes, found.steps_over_budget


def test_gradients_that_are_averaged_are_within_the_smallest_budget(text: Path) -> None:
    """The optimizer's own step is the peak there, and what gradients are copied into is live beside its
    state.
    """
    for budget, peaks, over in on_ranks(2, averaged, text):
        assert budget is not None and not over
        assert max(peaks) > 0.97 * budget


def compiled(text: Path) -> tuple[list[float], list[float], dict[str, Any]]:
    warnings.simplefilter("ignore", lowtide.LowtideWarning)
    asked = options(text, dp=2, dropout=0.1, batch=8, seq=64, steps=2, eval_every=0)
    plain = train(asked)
    step = {"compile": True, "compile_backend": "aot_eager"}
    planned = train(dataclasses.replace(asked, budget="85%", policy=None, compare=True, **step))
    assert planned.comparison is not None
    return trail(plain), trail(planned), planned.comparison.to_json()


@pytest.mark.slow
def test_compiled_steps_of_several_processes_hold_the_budget_and_change_no_bit(text: Path) -> None:
    for plain, planned, comparison in on_ranks(2, compiled, text):
        assert planned == plain
        assert comparison["within_budget"] and comparison["bitwise_equal"], comparison
        assert comparison["planned"]["peak_bytes"] < comparison["plain"]["peak_bytes"]


def resume(text: Path, folder: Path) -> list[float]:
    """A run in two parts of which the second has another layout."""
    parts = options(text, steps=4, checkpoint_dir=folder, tp=2, dp=2, sequence_parallel=True)
    first = train(dataclasses.replace(parts, stop_after=2))
    second = train(dataclasses.replace(parts, tp=1, dp=4, sequence_parallel=False, resume=True))
    assert second.first_step == 2
    return first.losses + second.losses


def test_a_run_goes_on_in_another_layout_and_on_one_process(text: Path, tmp_path: Path) -> None:
    whole = train(options(text, steps=4)).losses
    for parts in on_ranks(4, resume, text, tmp_path):
        assert parts == pytest.approx(whole, rel=2e-5)
    (manifest,) = [json.loads(file.read_text()) for file in tmp_path.glob("step-00000004.json")]
    assert len(manifest["files"]) == 1
    assert not list(tmp_path.glob("*.tmp"))
    (tmp_path / "step-00000004.json").unlink()
    alone = train(options(text, steps=4, checkpoint_dir=tmp_path, resume=True, seed=0))
    assert alone.first_step == 2 and alone.losses == pytest.approx(whole[2:], rel=2e-5)


def damaged(text: Path, folder: Path) -> int:
    """The newest of two checkpoints is damaged: every rank goes on from the one before."""
    warnings.simplefilter("ignore", lowtide.LowtideWarning)
    asked = options(text, checkpoint_dir=folder, tp=2, checkpoint_every=1, steps=4)
    train(dataclasses.replace(asked, stop_after=3))
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        file = max(folder.glob("step-00000003-00001-*.pt"))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    torch.distributed.barrier()
    return train(dataclasses.replace(asked, resume=True)).first_step


def test_a_damaged_shard_is_found_by_all(text: Path, tmp_path: Path) -> None:
    assert on_ranks(2, damaged, text, tmp_path) == [2, 2]


def full_disk(text: Path, folder: Path) -> str:
    """One rank cannot write: all of them hear of it, and what was there stays."""
    asked = options(text, checkpoint_dir=folder, tp=2, checkpoint_every=1)
    train(dataclasses.replace(asked, stop_after=1))
    write = checkpoint.write

    def fails(*args: Any) -> Any:
        if torch.distributed.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return write(*args)

    checkpoint.write = fails
    try:
        with pytest.raises(CheckpointError) as error:
            train(dataclasses.replace(asked, resume=True))
    finally:
        checkpoint.write = write
    return str(error.value)


def test_a_rank_that_cannot_write_is_named_by_all(text: Path, tmp_path: Path) -> None:
    for message in on_ranks(2, full_disk, text, tmp_path):
        assert "rank 1 cannot write a checkpoint" in message and "No space left" in message
    assert checkpoint.steps(tmp_path) == [1]


def test_layouts_that_cannot_be_say_what_to_do(text: Path) -> None:
    for changes, expected in [
        ({"sequence_parallel": True}, "--sequence-parallel: it splits the sequence among the --tp"),
        ({"dp": 3}, "--batch 4: a microbatch is split among --dp 3"),
        ({"tp": 3, "sequence_parallel": True}, "--seq 32: --sequence-parallel splits it among --tp 3"),
        ({"schedule": "1f1b"}, "--schedule 1f1b: it is a pipeline's"),
        ({"tp": 0}, "--tp 0: at least 1"),
    ]:
        with pytest.raises(OptionError, match=expected):
            options(text, **changes)
    with pytest.raises(
        OptionError,
        match=r"needs 4 processes, and this is one.*\n  torchrun --nproc-per-node 4 -m lowtide "
        r"train --tp 2 --dp 2",
    ):
        train(options(text, tp=2, dp=2))


def too_many(text: Path) -> str:
    with pytest.raises(OptionError) as error:
        train(options(text, tp=1))
    return str(error.value)


def test_processes_without_work_are_refused(text: Path) -> None:
    for message in on_ranks(2, too_many, text):
        assert "layout of 1 processes, and 2 were started" in message and "--dp 2" in message


def interrupted(text: Path, folder: Path) -> tuple[int, bool]:
    """One rank is asked to stop in its second step."""
    step, count = WholeModel.step, iter(range(100))

    def asked_to_stop(self: Any, *args: Any) -> float:
        if torch.distributed.get_rank() == 1 and next(count) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *args)

    WholeModel.step = asked_to_stop  # type: ignore[method-assign]
    try:
        result = train(options(text, checkpoint_dir=folder, tp=2, steps=4))
    finally:
        WholeModel.step = step  # type: ignore[method-assign]
    return result.last_step, result.stopped


def test_a_request_to_stop_stops_all_after_the_same_step(text: Path, tmp_path: Path) -> None:
    assert on_ranks(2, interrupted, text, tmp_path) == [(2, True), (2, True)]
    assert checkpoint.steps(tmp_path) == [2]
