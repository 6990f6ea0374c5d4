"""The Trainer of transformers under a limit: the same weights bit by bit, peaks within the budget and in its
logs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import lowtide
from lowtide import meter

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = [
    pytest.mark.usefixtures("quiet_transformers"),
    pytest.mark.skipif(not meter.available(), reason="needs the counting allocator"),
]


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Random tokens; the last batch is a small one."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 64, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def model(seed: int = 0) -> Any:
    """Two layers, with dropout."""
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def trainer(
    folder: Path, callbacks: Any = (), seed: int = 0, epochs: int = 2, made: Any = None, **options: Any
) -> Any:
    """A trainer that accumulates, evaluates and saves."""
    args = transformers.TrainingArguments(
        str(folder), num_train_epochs=epochs, use_cpu=True, logging_steps=1, disable_tqdm=True,
        eval_strategy="epoch", save_strategy="epoch", max_grad_norm=0.5,
        **{
            "report_to": [],
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            **options,
        },
    )  # fmt: skip
    return transformers.Trainer(
        made or model(seed), args, train_dataset=Rows(), eval_dataset=Rows(), callbacks=list(callbacks)
    )


def weights(trained: Any) -> list[torch.Tensor]:
    """All parameters, copied."""
    return [parameter.detach().clone() for parameter in trained.model.parameters()]


@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=["float32", "bf16"])
def test_a_trainer_gives_the_same_weights_within_the_budget(tmp_path: Path, options: Any) -> None:
    from lowtide.integrations.hugging_face import LimitMemory

    plain = trainer(tmp_path / "plain", **options)
    plain.train()
    callback = LimitMemory("80%")
    limited = trainer(tmp_path / "limited", [callback], **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", lowtide.LowtideWarning)
        limited.train()
    assert all(map(torch.equal, weights(plain), weights(limited)))
    assert callback.handle is not None and callback.handle.plan is not None
    rows = [row for row in limited.state.log_history if "loss" in row]
    assert len(rows) == 4
    for row in rows[1:]:  # the first step is looked at
        assert 0 < row["memory_peak_mib"] <= row["memory_budget_mib"] + 0.01
        assert row["memory_predicted_mib"] <= row["memory_budget_mib"] + 0.01
    assert lowtide.handle_of(limited.model) is None, "the limit goes with the training"


def test_a_trainer_finds_the_batch_that_fits_the_budget(tmp_path: Path) -> None:
    from lowtide.integrations.hugging_face import LimitMemory

    def train(rows: int, budget: Any, **options: Any) -> LimitMemory:
        callback = LimitMemory(budget)
        options |= {"gradient_accumulation_steps": 1, "per_device_train_batch_size": rows}
        trainer(tmp_path, [callback], epochs=1, **options).train()
        return callback

    handle = train(2, "min").handle
    assert handle is not None and handle.budget_bytes is not None
    budget = handle.budget_bytes + 4096
    with pytest.raises(torch.OutOfMemoryError, match="too small"):
        train(16, budget)
    found = train(16, budget, auto_find_batch_size=True).handle
    assert found is not None and found.plan is not None and found.plan.predicted_peak_bytes <= budget


def test_a_trainer_that_checkpoints_leaves_that_to_the_limit(tmp_path: Path) -> None:
    """The model's own gradient checkpointing is off for the run, and on again after it."""
    from lowtide.integrations.hugging_face import LimitMemory

    new = hasattr(transformers.TrainingArguments, "activation_checkpointing")
    options = {"activation_checkpointing" if new else "gradient_checkpointing": True}
    plain = trainer(tmp_path / "plain", epochs=1, **options)
    plain.train()
    callback = LimitMemory("80%")
    limited = trainer(tmp_path / "limited", [callback], epochs=1, **options)
    with pytest.warns(lowtide.LowtideWarning, match="off while its limit is on") as told:
        limited.train()
    assert len([one for one in told if issubclass(one.category, lowtide.LowtideWarning)]) == 1
    assert all(map(torch.equal, weights(plain), weights(limited)))
    assert callback.handle is not None and callback.handle.plan is not None and callback.handle.plan.replayed
    assert any(getattr(module, "gradient_checkpointing", False) for module in limited.model.modules())


def test_the_optimizers_state_counts_though_it_comes_later(tmp_path: Path) -> None:
    from lowtide.integrations.hugging_face import LimitMemory

    callback = LimitMemory("90%")
    limited = trainer(tmp_path, [callback], epochs=1)
    limited.train()
    assert callback.handle is not None and callback.handle.graph is not None
    parameters = sum(parameter.nbytes for parameter in limited.model.parameters())
    assert callback.handle.graph.resident_bytes >= 3 * parameters, "two moments beside the parameters"
    with pytest.raises(lowtide.BudgetError, match="optimizer"):
        trainer(tmp_path / "small", [LimitMemory(2 * parameters)]).train()
    with pytest.raises(lowtide.BudgetError, match="'60' has no unit"):
        LimitMemory("60")


def test_a_policy_does_without_a_budget(tmp_path: Path) -> None:
    from lowtide.integrations.hugging_face import LimitMemory

    callback = LimitMemory(policy="full")
    limited = trainer(tmp_path, [callback], epochs=1)
    limited.train()
    assert callback.handle is not None and callback.handle.plan is not None
    assert callback.handle.plan.policy == "full" and callback.handle.plan.replayed
    (last,) = [row for row in limited.state.log_history if row.get("step") == 2 and "loss" in row]
    assert last["memory_peak_mib"] > 0 and "memory_budget_mib" not in last


def test_resuming_goes_on_bit_by_bit_and_with_its_plans(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from lowtide.integrations.hugging_face import LimitMemory

    found, profiled = [], []
    for name, make in (("plain", list), ("limited", lambda: [LimitMemory("80%")])):
        trainer(tmp_path / name, make(), epochs=1).train()
        resumed = trainer(tmp_path / name, make(), seed=1)
        with caplog.at_level("INFO", "lowtide"):
            resumed.train(resume_from_checkpoint=True)
        profiled.append(sum("profiled a first step" in line for line in caplog.messages))
        found.append(weights(resumed))
    assert all(map(torch.equal, *found)) and profiled == [0, 0]


def test_what_is_no_trainer_is_refused() -> None:
    from lowtide.integrations.hugging_face import limit

    with pytest.raises(
        lowtide.PlanError, match=r"limit\(trainer=\) was given .*: give a transformers.Trainer"
    ):
        limit(model(), "80%")


def test_tensorboard_has_the_peaks(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from lowtide.integrations.hugging_face import limit

    limited = trainer(tmp_path, epochs=1, report_to=["tensorboard"])
    limit(limited, "80%")
    limited.train()
    written = reader.EventAccumulator(str(next(tmp_path.rglob("events.*")).parent))
    written.Reload()
    names = ("loss", "memory_peak_mib", "memory_predicted_mib", "memory_budget_mib")
    losses, peaks, predicted, budgets = (
        [e.value for e in written.Scalars(f"train/{name}")] for name in names
    )
    assert len(losses) == len(peaks) == len(predicted) == len(budgets) == 2
    assert 0 < peaks[-1] <= budgets[-1] + 0.01 and predicted[-1] <= budgets[-1] + 0.01


def test_a_model_from_a_local_folder(tmp_path: Path) -> None:
    from lowtide.integrations.hugging_face import LimitMemory

    model().save_pretrained(tmp_path / "there")
    found = []
    for callbacks in ([], [LimitMemory("80%")]):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "there")
        trained = trainer(tmp_path / "out", callbacks, epochs=1, made=loaded)
        trained.train()
        found.append(weights(trained))
    assert all(map(torch.equal, *found))


def test_a_limit_of_the_users_own_is_not_replaced_without_a_word(tmp_path: Path) -> None:
    from lowtide.integrations.hugging_face import LimitMemory

    limited = model()
    lowtide.limit_memory(limited, policy="full")
    with pytest.warns(lowtide.LowtideWarning, match="which LimitMemory replaces"):
        trainer(tmp_path, [LimitMemory(policy="full")], made=limited, epochs=1).train()


def test_a_callback_without_a_budget_is_refused_at_once() -> None:
    from lowtide.integrations.hugging_face import LimitMemory

    with pytest.raises(lowtide.BudgetError, match="LimitMemory needs a budget"):
        LimitMemory()


@pytest.mark.slow
@pytest.mark.filterwarnings("error::lowtide.LowtideWarning", "ignore:.*it compiled code")
def test_torch_compile_keeps_the_compiler_and_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is held by the compiled engine, with the backend that the Trainer was given."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # which a Trainer sets for the whole process
    from lowtide.compiled.compiled_handle import CompiledHandle
    from lowtide.integrations.hugging_face import LimitMemory

    options: dict[str, Any] = {"epochs": 1, "torch_compile": True, "torch_compile_backend": "aot_eager"}
    plain = trainer(tmp_path / "plain", epochs=1)
    plain.train()
    callback = LimitMemory("90%")
    limited = trainer(tmp_path / "limited", [callback], **options)
    limited.train()
    assert all(map(torch.equal, weights(plain), weights(limited)))
    held = callback.handle._limiter.compiled_handle  # type: ignore[union-attr]
    assert isinstance(held, CompiledHandle) and held._backend.name == "aot_eager" and held.plan is not None
    (last,) = [row for row in limited.state.log_history if row.get("step") == 2 and "loss" in row]
    assert 0 < last["memory_peak_mib"] <= last["memory_budget_mib"] + 0.01
    assert last["memory_predicted_mib"] <= last["memory_budget_mib"] + 0.01


def test_a_model_that_is_not_called_is_said() -> None:
    """As where accelerate's regional compilation trains a copy of it."""
    from lowtide.integrations.hugging_face import LimitMemory

    limited, callback = model(), LimitMemory("80%")
    callback.on_train_begin(None, None, None, model=limited)
    with pytest.warns(
        lowtide.LowtideWarning, match="without a call of the limited GPT2LMHeadModel.*REGIONAL_COMPILATION"
    ):
        callback.on_step_end(None, None, None)
    callback.on_train_end(None, None, None)
