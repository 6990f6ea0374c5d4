"""Lightning's Trainer under a limit: the same weights bit by bit, peaks within the budget and in its logs."""

from __future__ import annotations

import glob
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lowtide
from lowtide import meter

lightning = pytest.importorskip("lightning")

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*(num_workers|log_every_n_steps|exists and is not empty).*"),
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


def loader() -> Any:
    rows = torch.randn(600, 32, generator=torch.Generator().manual_seed(1))
    return DataLoader(rows, batch_size=256)  # type: ignore[arg-type]


def fit(folder: Path, callbacks: Any, epochs: int = 2, module: Any = None, **options: Any) -> Any:
    """A fitted module."""
    module = module or Module()
    resume = options.pop("resume", None)
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=callbacks,
        enable_model_summary=False, default_root_dir=folder, accumulate_grad_batches=2,
        gradient_clip_val=0.5, log_every_n_steps=1, **options,
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
    assert callback.handle is not None and callback.handle.model is limited.net
    assert callback.handle.plan is not None and callback.handle.graph is not None
    parameters = sum(parameter.nbytes for parameter in limited.parameters())
    assert callback.handle.graph.resident_bytes >= 3 * parameters, "the optimizer's state counts"
    later = [row for row in reads.rows if "memory_peak_mib" in row][1:]
    assert later and all(row["memory_peak_mib"] <= row["memory_budget_mib"] + 0.01 for row in later)
    assert lowtide.handle_of(limited.net) is None


def test_resuming_goes_on_bit_by_bit(tmp_path: Path) -> None:
    from lowtide.integrations.lightning import LimitMemory

    found = []
    for name, make in (("plain", list), ("limited", lambda: [LimitMemory("80%")])):
        fit(tmp_path / name, make(), epochs=1)
        (saved,) = glob.glob(str(tmp_path / name / "checkpoints" / "*"))
        found.append(fit(tmp_path / name, make(), epochs=2, resume=saved))
    assert same(*found)


def test_a_part_is_named_or_refused(tmp_path: Path) -> None:
    from lowtide.integrations.lightning import LimitMemory

    callback = LimitMemory("80%", module="net")
    module = fit(tmp_path, [callback], epochs=1)
    assert callback.handle is not None and callback.handle.model is module.net
    with pytest.raises(lowtide.PlanError, match="no such part, but net, loss"):
        fit(tmp_path / "other", [LimitMemory("80%", module="body")], epochs=1)
