"""The trainer: losses fall, the budget holds, and a run that was stopped or killed goes on as if nothing had
been.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide import meter
from lowtide.budget import format_bytes
from lowtide.extensions.moves.speeds import link_speeds
from lowtide.train import checkpoint, resume
from lowtide.train.checkpoint import CheckpointError
from lowtide.train.memory import RunMeter
from lowtide.train.options import OptionError, TrainOptions
from lowtide.train.progress import Progress
from lowtide.train.result import TrainResult
from lowtide.train.trainer import TrainError, train


def options(text: Path, **changes: Any) -> TrainOptions:
    small = {
        "model": "gpt-nano",
        "data": text,
        "steps": 8,
        "batch": 8,
        "seq": 128,
        "warmup": 2,
        "eval_every": 4,
        "eval_batches": 2,
    }
    return TrainOptions(**{**small, "budget": "75%", "compare": False, **changes})


def unplanned(text: Path, **changes: Any) -> TrainOptions:
    """Where it does not matter what is kept."""
    return options(text, budget=None, policy="keep_all", **changes)


class Told(Progress):
    """Notes what a run says."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def trail(result: TrainResult) -> list[tuple[float, float]]:
    return list(zip(result.losses, result.gradient_norms, strict=True))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (content,) = checkpoint.load(folder).contents()
    return {piece["name"]: piece["tensors"]["weight"] for piece in content["pieces"]}


@pytest.mark.skipif(not meter.available(), reason="needs a C++ compiler for the counting allocator")
def test_what_an_earlier_run_left_behind_does_not_count_against_this_one() -> None:
    gc.disable()
    try:
        with meter.peak("cpu"):
            left: list[object] = [torch.zeros(1 << 20)]
            left.append(left)
            del left
            with RunMeter(torch.device("cpu")) as memory, memory.block() as block:
                gc.collect()
                torch.zeros(1024)
        assert block.bytes == 4096
    finally:
        gc.enable()


def test_the_loss_falls_under_a_budget(text: Path) -> None:
    result = train(options(text, steps=60, lr=3e-3))
    assert result.losses[0] > 5
    assert sum(result.losses[-5:]) / 5 < 3.2
    assert result.validation[-1][0] == 60
    assert result.validation[-1][1] < result.validation[0][1]


def test_training_under_a_budget_is_bitwise_training_without_one(text: Path, tmp_path: Path) -> None:
    runs = {}
    for name, changes in {
        "plain": {"budget": None, "policy": "keep_all"},
        "planned": {"budget": "70%"},
    }.items():
        runs[name] = trail(
            train(
                options(text, steps=4, dropout=0.1, grad_accum=2, checkpoint_dir=tmp_path / name, **changes)
            )
        )
    assert runs["planned"] == runs["plain"]
    for name, tensor in weights(tmp_path / "plain").items():
        assert torch.equal(tensor, weights(tmp_path / "planned")[name])


@pytest.mark.parametrize(
    "changes",
    [
        {"dropout": 0.2},
        pytest.param(
            {"model": "llama-nano", "dtype": "bf16", "grad_accum": 3, "dropout": 0.2}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_resumed_run_goes_the_same_way(
    text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any]
) -> None:
    whole = options(text, checkpoint_dir=tmp_path / "whole", **changes)
    parts = options(text, checkpoint_dir=tmp_path / "parts", **changes)
    expected = train(whole)
    first = train(dataclasses.replace(parts, stop_after=3, budget=None, policy="full"))
    with caplog.at_level("INFO", "lowtide"):
        second = train(dataclasses.replace(parts, resume=True, stop_after=5, budget="90%"))
    assert not [line for line in caplog.messages if "profiled a first step" in line], "the profile is kept"
    third = train(dataclasses.replace(parts, resume=True, budget=None, policy="sqrt"))
    assert (second.first_step, third.first_step) == (3, 5)
    assert trail(first) + trail(second) + trail(third) == trail(expected)
    assert third.validation[-1] == expected.validation[-1]
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(tensor, weights(tmp_path / "parts")[name])


@pytest.mark.skipif(not meter.available(), reason="needs a C++ compiler for the counting allocator")
def test_a_resumed_run_counts_the_state_that_it_loaded(text: Path, tmp_path: Path) -> None:
    whole = train(unplanned(text, checkpoint_dir=tmp_path / "whole"))
    parts = unplanned(text, checkpoint_dir=tmp_path / "parts")
    first = train(dataclasses.replace(parts, stop_after=3))
    second = train(dataclasses.replace(parts, resume=True))
    assert first.step_peak_bytes[1:] == whole.step_peak_bytes[1:3]
    assert second.step_peak_bytes[1:] == whole.step_peak_bytes[4:], "the first step after a start plans"


def test_the_comparison_holds_the_budget_and_finds_equal_bits(text: Path, tmp_path: Path) -> None:
    result = train(options(text, compare=True, steps=4, json=tmp_path / "r.json"))
    comparison = result.comparison
    assert comparison is not None
    assert comparison.plain is not None
    assert comparison.different == ()
    assert comparison.within_budget
    assert comparison.planned.peak_bytes < comparison.plain.peak_bytes
    assert comparison.planned.peak_bytes == pytest.approx(comparison.plan.predicted_peak_bytes, rel=0.01)
    assert comparison.plain.peak_bytes == pytest.approx(comparison.plan.plain_peak_bytes, rel=0.01)
    assert comparison.plain.curve.peak_bytes == comparison.plain.peak_bytes
    assert comparison.plan.budget_bytes is not None
    assert all(peak <= comparison.plan.budget_bytes for peak in result.step_peak_bytes[1:])
    told = json.loads(json.dumps(result.to_json()))
    assert told["comparison"]["bitwise_equal"] is True
    assert told["comparison"]["plain"]["peak_bytes"] == comparison.plain.peak_bytes


@pytest.mark.skipif(not meter.available(), reason="needs a C++ compiler for the counting allocator")
@pytest.mark.parametrize("policy", ["optimal", "mixed"])
def test_every_step_stays_within_the_budget_the_planning_ones_included(text: Path, policy: str) -> None:
    link_speeds.cache_clear()
    result = train(options(text, policy=policy, steps=3, seq=64, budget="60%"))
    assert result.budget_bytes is not None and len(result.step_peak_bytes) == 3
    assert max(result.step_peak_bytes) <= result.budget_bytes
    assert result.within_budget and result.steps_over_budget == []


@pytest.mark.skipif(not meter.available(), reason="needs a C++ compiler for the counting allocator")
@pytest.mark.parametrize(
    "more", [{}, {"grad_accum": 2}, {"policy": "mixed"}], ids=["", "accumulates", "mixed"]
)
def test_a_default_that_is_raised_to_the_smallest_that_works_is_held_in_every_step(
    text: Path, more: dict[str, Any]
) -> None:
    """A small batch, whose budget the optimizer's step decides. No step is run aside, and nothing of the
    refused one stays alive, though nobody collects garbage. What is told is what holds: the most that any
    micro-batch needs; and tiers are timed before a step runs."""
    link_speeds.cache_clear()
    gc.collect()
    gc.disable()
    try:
        run = options(text, batch=2, seq=64, steps=4, eval_every=0, budget="60%", raise_budget=True, **more)
        told = Told()
        result = train(run, told)
    finally:
        gc.enable()
    assert result.within_budget and result.steps_over_budget == []
    assert result.budget_bytes is not None and max(result.step_peak_bytes) > 0.9 * result.budget_bytes
    assert [note for note in told.notes if format_bytes(result.budget_bytes) in note]


def test_one_step_over_the_budget_is_not_held() -> None:
    result = TrainResult(
        TrainOptions(), "text", 1, first_step=10, budget_bytes=100, step_peak_bytes=[90, 120, 110]
    )
    assert not result.within_budget and result.steps_over_budget == [12, 13] and result.worst_step == 12
    told = result.to_json()
    assert (told["within_budget"], told["worst_step"], told["steps_over_budget"]) == (False, 12, [12, 13])


def test_a_run_leaves_no_signal_handler_behind(text: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    train(unplanned(text, steps=1, warmup=0))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_folder_with_a_run_is_not_overwritten(text: Path, tmp_path: Path) -> None:
    train(unplanned(text, steps=2, checkpoint_dir=tmp_path))
    with pytest.raises(OptionError, match="holds a run at step 2: pass --resume"):
        train(unplanned(text, steps=2, checkpoint_dir=tmp_path))
    with pytest.raises(OptionError, match="is at step 2 already"):
        train(unplanned(text, steps=2, checkpoint_dir=tmp_path, resume=True))


@pytest.fixture(scope="module")
def begun(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that stopped after its first step."""
    folder = tmp_path_factory.mktemp("begun")
    train(unplanned(text, stop_after=1, checkpoint_dir=folder))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 5}, "it has --seed 0, not 5"),
        ({"grad_accum": 2}, "it has --grad-accum 1, not 2"),
        ({"grad_accum": 2, "batch": 3}, r"it has --batch \d+, not 3; it has --grad-accum 1, not 2"),
        ({"model": "gpt-tiny"}, "a model of another shape"),
        ({"data": None}, "trained on other text"),
        (
            {"seed": 5, "lr": 0.1, "steps": 4},
            r"--steps 8, not 4; it has --seed 0, not 5; it has --lr 0\.001, not 0\.1",
        ),
    ],
)
def test_a_run_is_not_resumed_as_another_one(
    text: Path, begun: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        train(unplanned(text, checkpoint_dir=begun, resume=True, **changes))


def test_a_run_goes_on_in_other_micro_batches(text: Path, tmp_path: Path) -> None:
    """A step is of the same sequences: the losses are those of the run as it was begun."""
    asked = unplanned(text, steps=4, batch=4, grad_accum=1)
    whole = train(asked)
    begun = dataclasses.replace(asked, checkpoint_dir=tmp_path)
    train(dataclasses.replace(begun, stop_after=2))
    rest = train(dataclasses.replace(begun, resume=True, batch=1, grad_accum=4))
    assert rest.first_step == 2
    assert rest.losses == pytest.approx(whole.losses[2:], rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (8, 1)),
        ({"pp": 2}, (4, 2)),
        ({"pp": 2, "schedule": "zbv"}, (2, 4)),
        ({"pp": 4, "dp": 2}, (2, 4)),
        ({"grad_accum": 4}, (2, 4)),
        ({"batch": 2}, (2, 4)),
        ({"batch": 2, "grad_accum": 8}, (2, 8)),
        ({"pp": 16}, (8, 1)),
    ],
)
def test_the_sequences_of_a_step_are_those_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], expected: tuple[int, int]
) -> None:
    monkeypatch.setattr(checkpoint, "steps", lambda folder: [1])
    monkeypatch.setattr(resume, "started_with", lambda folder: {"batch": 8, "grad_accum": 1})
    defaults: dict[str, Any] = {"batch": 12, "grad_accum": 1, "pp": 1, "dp": 1, "schedule": None}
    asked = {**defaults, **changes, "checkpoint_dir": tmp_path, "json": None, "report": None, "compare": None}
    found = resume.options_to_resume(asked, set(changes))
    assert (found["batch"], found["grad_accum"]) == expected


def test_a_resumed_run_may_get_more_steps(text: Path, tmp_path: Path) -> None:
    begun = unplanned(text, steps=2, checkpoint_dir=tmp_path)
    first = train(begun)
    longer = train(dataclasses.replace(begun, steps=4, resume=True))
    assert (longer.first_step, longer.last_step) == (2, 4)
    whole = train(unplanned(text, steps=2))
    assert trail(first) == trail(whole), "what was done is what a run of that length does"
    with pytest.raises(OptionError, match="is at step 4 already, of 4: pass --steps 8"):
        train(dataclasses.replace(begun, steps=4, resume=True))


def test_there_is_nothing_to_resume_in_an_empty_folder(text: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        train(options(text, checkpoint_dir=tmp_path, resume=True))


def test_a_diverging_run_stops_and_says_what_to_lower(text: Path) -> None:
    with pytest.raises(TrainError, match="lower --lr"):
        train(unplanned(text, steps=50, lr=1e30, warmup=0, clip=0.0))


def test_a_model_larger_than_the_machine_is_refused_before_anything_is_allocated(text: Path) -> None:
    with pytest.raises(OptionError, match=r"parameters, gradients and optimizer state take 2\.5\d TiB"):
        train(options(text, model="gpt3-175b"))


def command(text: Path, folder: Path, *more: str) -> list[str]:
    line = [
        sys.executable,
        "-m",
        "lowtide",
        "train",
        "--model",
        "gpt-nano",
        "--data",
        str(text),
        "--batch",
        "8",
        "--seq",
        "128",
    ]
    line += [
        "--policy",
        "full",
        "--steps",
        "12",
        "--checkpoint-dir",
        str(folder),
        "--checkpoint-every",
        "1",
        "--no-compare",
    ]
    return [*line, "--json", str(folder / "results.json"), *more]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills with SIGKILL")
def test_a_run_killed_with_9_resumes_and_ends_where_an_unharmed_one_does(text: Path, tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    expected = train(options(text, steps=12, warmup=12, checkpoint_dir=whole, budget=None, policy="full"))
    process = subprocess.Popen(command(text, killed), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    limit = time.monotonic() + 120
    while len(checkpoint.steps(killed)) < 2 and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors.decode()
    before = checkpoint.load(killed).step
    assert 1 <= before < 12
    results = train(
        options(text, steps=12, warmup=12, checkpoint_dir=killed, budget=None, policy="full", resume=True)
    )
    assert results.first_step == before
    assert results.losses == expected.losses[before:]
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(killed)[name])


@pytest.mark.skipif(os.name == "nt", reason="sends SIGTERM")
def test_a_run_asked_to_stop_saves_and_can_go_on(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    line = command(text, folder, "--steps", "100000")
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    limit = time.monotonic() + 120
    while not checkpoint.steps(folder) and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    step = checkpoint.load(folder).step
    assert f"stopped after step {step}" in " ".join(output.split())
    assert len(json.loads((folder / "results.json").read_text())["losses"]) == step


def test_weights_and_tokenizer_of_a_folder_are_where_a_run_begins(text: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from lowtide.models import ModelError, build_model
    from lowtide.train.tokenizer import train_tokenizer

    folder = tmp_path / "model"
    tokenizer = train_tokenizer([text.read_bytes()], 300)
    tokenizer.save(folder)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config)
    config.save_pretrained(folder)
    begins = unplanned(text, model=str(folder), pretrained=True, steps=2, batch=2, seq=32, lr=1e-30)
    with pytest.raises(ModelError, match=r"a model\.safetensors is needed there"):
        train(begins)
    model.save_pretrained(folder)
    built = build_model(begins.spec(tokenizer.vocabulary))
    assert built.training and all(
        torch.equal(one, other) for one, other in zip(model.parameters(), built.parameters(), strict=True)
    )
    curves = tmp_path / "curves"
    result = train(dataclasses.replace(begins, checkpoint_dir=tmp_path / "run", tensorboard=curves))
    saved = weights(tmp_path / "run")
    for name, tensor in model.state_dict().items():
        assert torch.allclose(saved[f"model.{name}"], tensor), "so small a rate leaves them as they were"
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told = EventAccumulator(str(curves)).Reload()
    assert [row.value for row in told.Scalars("loss")] == pytest.approx(result.losses)
    assert [row.step for row in told.Scalars("validation_loss")] == [2]
    assert "memory/peak_mib" in told.Tags()["scalars"] or not meter.available()


def test_a_trained_tokenizer_is_the_same_when_a_run_goes_on(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    small = unplanned(text, steps=4, seq=32, tokenizer="train:300")
    whole = train(dataclasses.replace(small, checkpoint_dir=tmp_path / "whole"))
    parts = dataclasses.replace(small, checkpoint_dir=tmp_path / "parts")
    first = train(dataclasses.replace(parts, stop_after=2))
    second = train(dataclasses.replace(parts, resume=True))
    assert trail(first) + trail(second) == trail(whole)
    with pytest.raises(OptionError, match="or with another tokenizer"):
        train(dataclasses.replace(parts, steps=5, resume=True, tokenizer=None))


def test_a_checkpoint_folder_that_cannot_be_made_is_refused_before_the_first_step(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("lowtide.train.trainer._part", lambda *_: pytest.fail("training began"))
    with pytest.raises(CheckpointError, match=r"cannot write a checkpoint to .*file/run"):
        train(options(text, checkpoint_dir=tmp_path / "file" / "run"))
