"""Lightning's Trainer under a limit: the same weights bit by bit, peaks within the budget and in its logs."""

from __future__ import annotations

import glob
import os
import socket
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader

import lowtide
from lowtide import meter

lightning = pytest.importorskip("lightning")

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings(
        "ignore:.*(num_workers|log_every_n_steps|exists and is not empty|no `validation_step`).*"
    ),
    pytest.mark.skipif(not meter.available(), reason="needs the counting allocator"),
]


class Module(lightning.LightningModule):
    """Its ``training_step`` calls what stands in it, as most do."""

    def __init__(self, optimizers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)]
        self.net = nn.Sequential(*blocks)
        self.loss = nn.MSELoss()
        self.number = optimizers
        self.rows: list[dict[str, float]] = []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.loss(self.net(batch), batch)

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        self.log("validation", self.loss(self.net(batch), batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Reads(lightning.Callback):
    """Notes what was logged in each step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_before_zero_grad(self, trainer: Any, *_: Any) -> None:
        self.rows.append({name: float(value) for name, value in trainer.logged_metrics.items()})


class Parts(lightning.LightningModule):
    """Its ``training_step`` calls two parts, one after the other."""

    def __init__(self, automatic: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.GELU())
        self.decoder = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.automatic_optimization = automatic

    def training_step(self, batch: torch.Tensor, _: int) -> dict[str, torch.Tensor]:
        loss = nn.functional.mse_loss(self.decoder(self.encoder(batch)), batch)
        self.log("train", loss, prog_bar=True)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loader() -> Any:
    rows = torch.randn(600, 32, generator=torch.Generator().manual_seed(1))
    return DataLoader(rows, batch_size=256)  # type: ignore[arg-type]


def fit(folder: Path, callbacks: Any, epochs: int = 2, module: Any = None, **options: Any) -> Any:
    """A fitted module."""
    module = module or Module()
    resume = options.pop("resume", None)
    options = {"logger": False, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, **options}
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", enable_progress_bar=False, callbacks=callbacks,
        enable_model_summary=False, default_root_dir=folder, log_every_n_steps=1, **options,
    )  # fmt: skip
    trainer.fit(module, loader(), loader(), ckpt_path=resume, weights_only=False)
    return module


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}], ids=["float32", "bf16"])
def test_a_module_is_trained_to_the_same_weights_within_the_budget(tmp_path: Path, options: Any) -> None:
    from lowtide.integrations.lightning import LimitMemory

    plain = fit(tmp_path / "plain", [], **options)
    callback, reads = LimitMemory("80%"), Reads()
    with warnings.catch_warnings():
        warnings.simplefilter("error", lowtide.LowtideWarning)
        limited = fit(tmp_path / "limited", [callback, reads], **options)
    assert same(plain, limited)
    assert callback.handle is not None
    assert callback.handle.plan is not None and callback.handle.graph is not None
    parameters = sum(parameter.nbytes for parameter in limited.parameters())
    assert callback.handle.graph.resident_bytes >= 3 * parameters, "the optimizer's state counts"
    later = [row for row in reads.rows if "memory_peak_mib" in row][1:]
    assert later and all(row["memory_peak_mib"] <= row["memory_budget_mib"] + 0.01 for row in later)
    assert "training_step" not in vars(limited), "the limit goes with the training"


def test_a_step_that_calls_several_parts_is_limited_and_seen_in_tensorboard(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from lightning.pytorch.loggers import TensorBoardLogger

    from lowtide.integrations.lightning import LimitMemory

    plain = fit(tmp_path / "plain", [], module=Parts())
    callback = LimitMemory("95%")
    with warnings.catch_warnings():
        warnings.simplefilter("error", lowtide.LowtideWarning)
        limited = fit(tmp_path, [callback], module=Parts(), logger=TensorBoardLogger(str(tmp_path), "curves"))
    assert same(plain, limited)
    assert callback.handle is not None
    assert not all(plan.changes_nothing for plan in callback.handle.plans)
    (folder,) = (tmp_path / "curves").iterdir()
    written = events.EventAccumulator(str(folder))
    written.Reload()
    peaks, budgets = (
        [event.value for event in written.Scalars(f"memory_{what}_mib")] for what in ("peak", "budget")
    )
    assert len(peaks) >= 3 and len(written.Scalars("train")) >= 3
    assert all(0 < peak <= budget + 0.01 for peak, budget in zip(peaks[1:], budgets[1:], strict=True))


def test_a_limit_goes_when_training_fails_and_backward_in_the_step_is_left_there(tmp_path: Path) -> None:
    from lowtide.integrations.lightning import LimitMemory

    module = Parts()
    with pytest.raises(lowtide.BudgetError):
        fit(tmp_path / "small", [LimitMemory(1000)], module=module)
    assert "training_step" not in vars(module)
    manual = Parts(automatic=False)
    trainer = lightning.Trainer(
        max_steps=2, accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False,
        callbacks=[LimitMemory("90%", module="encoder")], enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(manual, loader())
    assert "training_step" not in vars(manual)


class Language(lightning.LightningModule):
    """A model of transformers that checkpoints; turned on before training, or as it begins."""

    def __init__(self, automatic: bool, late: bool) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
        self.automatic_optimization, self.late, self.checkpointed = automatic, late, []
        if not late:
            self.turn_on()

    def turn_on(self) -> None:
        new = getattr(self.model, "activation_checkpointing_enable", None)
        (new or self.model.gradient_checkpointing_enable)()

    def on_train_start(self) -> None:
        if self.late:
            self.turn_on()

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        self.checkpointed.append(self.model.is_gradient_checkpointing)
        loss = self.model(input_ids=batch, labels=batch).loss
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@pytest.mark.parametrize(("automatic", "late"), [(True, False), (False, False), (True, True)])
def test_a_model_that_checkpoints_leaves_that_to_the_limit(automatic: bool, late: bool) -> None:
    pytest.importorskip("transformers")
    from lowtide.integrations.lightning import LimitMemory

    rows, modules = torch.randint(64, (16, 32), generator=torch.Generator().manual_seed(1)), []
    callback = LimitMemory("80%")
    for callbacks in ([], [callback]):
        module = Language(automatic, late)
        trainer = lightning.Trainer(
            max_steps=3, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=callbacks,
            enable_checkpointing=False, enable_model_summary=False,
        )  # fmt: skip
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", lowtide.LowtideWarning)
            trainer.fit(module, DataLoader(rows, batch_size=4))  # type: ignore[arg-type]
        ours = [one for one in told if issubclass(one.category, lowtide.LowtideWarning)]
        assert len(ours) == len(callbacks), "it is said once"
        modules.append(module)
    assert [module.checkpointed for module in modules] == [[True] * 3, [False] * 3]
    assert modules[1].model.is_gradient_checkpointing, "on again after training"
    assert same(*modules)
    assert callback.handle is not None and callback.handle.plan is not None and callback.handle.plan.replayed


def test_resuming_goes_on_bit_by_bit_and_with_its_plans(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from lowtide.integrations.lightning import LimitMemory

    found = []
    for name, make in (("plain", list), ("limited", lambda: [LimitMemory("80%")])):
        fit(tmp_path / name, make(), epochs=1)
        (saved,) = glob.glob(str(tmp_path / name / "checkpoints" / "*.ckpt"))
        with caplog.at_level("INFO", "lowtide"):
            found.append(fit(tmp_path / name, make(), epochs=2, resume=saved))
    assert same(*found)
    assert not [line for line in caplog.messages if "profiled a first step" in line]


def test_a_part_is_named_or_refused(tmp_path: Path) -> None:
    from lowtide.integrations.lightning import LimitMemory

    callback = LimitMemory("80%", module="net")
    module = fit(tmp_path, [callback], epochs=1)
    assert callback.handle is not None and callback.handle.model is module.net
    with pytest.raises(lowtide.PlanError, match="no such submodule; it has net, loss"):
        fit(tmp_path / "other", [LimitMemory("80%", module="body")], epochs=1)


class Manual(Module):
    """Optimizes by hand: two optimizers, a half of the net each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, _: int) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(self.loss(self.net(batch), batch))
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        halves = self.net[:2].parameters(), self.net[2:].parameters()
        return torch.optim.AdamW(halves[0], lr=1e-3), torch.optim.SGD(halves[1], lr=1e-2)


def test_optimization_by_hand_with_two_optimizers(tmp_path: Path) -> None:
    from lowtide.integrations.lightning import LimitMemory

    options: dict[str, Any] = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    plain = fit(tmp_path / "plain", [], module=Manual(), **options)
    callback = LimitMemory("90%")
    with pytest.warns(lowtide.LowtideWarning, match="has 2 optimizers, and a limit counts one") as said:
        limited = fit(tmp_path / "limited", [callback], module=Manual(), **options)
    assert len([one for one in said if issubclass(one.category, lowtide.LowtideWarning)]) == 1
    assert same(plain, limited)
    assert callback.handle is not None and callback.handle.model is limited.net
    assert callback.handle.plan is not None and callback.handle.plan.replayed
    logged = limited.trainer.logged_metrics  # of the last step
    assert 0 < logged["memory_peak_mib"] <= logged["memory_budget_mib"] + 0.01


def _rank(rank: int, port: int, folder: str, limited: bool) -> None:
    from lightning.pytorch.plugins.environments import LightningEnvironment

    from lowtide.integrations.lightning import LimitMemory

    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2", LOCAL_RANK=str(rank), NODE_RANK="0",
        GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    torch.set_num_threads(1)
    reads, callback = Reads(), LimitMemory("80%")
    with warnings.catch_warnings():
        warnings.simplefilter("error", lowtide.LowtideWarning)
        module = fit(
            Path(folder), [callback, reads] if limited else [], devices=2, strategy="ddp",
            plugins=[LightningEnvironment()], enable_checkpointing=False, epochs=4,
        )  # fmt: skip
    weights = [parameter.detach() for parameter in module.parameters()]
    torch.save((weights, reads.rows), f"{folder}/{limited}{rank}")


@pytest.mark.slow
def test_two_processes_under_ddp(tmp_path: Path) -> None:
    for limited in (False, True):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.start_processes(_rank, (port, str(tmp_path), limited), nprocs=2, start_method="fork")
    for rank in range(2):
        plain, _ = torch.load(tmp_path / f"False{rank}")
        weights, rows = torch.load(tmp_path / f"True{rank}")
        assert all(map(torch.equal, plain, weights))
        later = [row for row in rows if "memory_peak_mib" in row][1:]
        assert later and all(row["memory_peak_mib"] <= row["memory_budget_mib"] + 0.01 for row in later)


@pytest.mark.filterwarnings("error::lowtide.LowtideWarning", "ignore:.*it compiled code")
def test_a_compiled_module_keeps_its_compiler_and_the_budget(tmp_path: Path) -> None:
    from lowtide.compiled.compiled_handle import CompiledHandle
    from lowtide.integrations.lightning import LimitMemory

    trained, reads, callback = [], Reads(), LimitMemory("90%")
    for callbacks, compiled in (([], False), ([callback, reads], True)):
        module = Module()
        fitted: Any = torch.compile(module, backend="aot_eager") if compiled else module
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", callbacks=callbacks, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(tmp_path),
        )  # fmt: skip
        before = fitted.training_step
        trainer.fit(fitted, loader())
        trained.append([p.detach().clone() for p in module.parameters()])
    assert all(map(torch.equal, *trained))
    held = callback.handle._limiter.compiled_handle  # type: ignore[union-attr]
    assert isinstance(held, CompiledHandle) and held._backend.name == "aot_eager"
    assert held.plan is not None and held.plan.replayed
    for row in reads.rows[3:]:
        assert 0 < row["memory_peak_mib"] <= row["memory_budget_mib"] + 0.01
    assert module.training_step.__wrapped__ == before, "it is compiled as it was"
