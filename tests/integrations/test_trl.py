"""SFTTrainer of TRL under a limit, with and without an adapter of peft: the same weights bit by bit, within
the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide import meter

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
pytestmark = [
    pytest.mark.usefixtures("quiet_transformers"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not meter.available(), reason="needs the counting allocator"),
]


def trained(
    folder: Path, callbacks: Any, adapter: bool, bf16: bool, steps: int = 3, **options: Any
) -> list[torch.Tensor]:
    """The weights that a short run trains, evaluation and accumulation included; it goes on with a run that
    was saved in its folder.
    """
    from lowtide.train.tokenizer import train_tokenizer

    texts = [f"{i} squared is {i * i}." for i in range(24)]
    tokenizer = train_tokenizer([text.encode() for text in texts], 280).tokenizer
    tokenizer.pad_token = tokenizer.eos_token
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    args = trl.SFTConfig(
        str(folder), per_device_train_batch_size=8, gradient_accumulation_steps=2, max_steps=steps, bf16=bf16,
        report_to=[], use_cpu=True, logging_steps=1, disable_tqdm=True, eval_strategy="epoch", max_length=32,
        **{"save_strategy": "no", **options},
    )  # fmt: skip
    more: dict[str, Any] = {}
    if adapter:
        peft = pytest.importorskip("peft")
        more["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    rows = datasets.Dataset.from_dict({"text": texts})
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    trainer = trl.SFTTrainer(
        str(folder / "model"), args, train_dataset=rows, eval_dataset=rows,
        processing_class=tokenizer, callbacks=callbacks, **more,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    for row in [row for row in trainer.state.log_history if "memory_peak_mib" in row][2:]:
        assert 0 < row["memory_peak_mib"] <= row["memory_budget_mib"] + 0.01
    assert bool(callbacks) == any("memory_peak_mib" in row for row in trainer.state.log_history)
    return [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]


@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "adapter"])
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
def test_sft_gives_the_same_weights_within_the_budget(tmp_path: Path, adapter: bool, bf16: bool) -> None:
    from lowtide.integrations.hugging_face import LimitMemory

    callback = LimitMemory("98%")  # the loss of TRL is live at the peak, and cannot be recomputed
    plain = trained(tmp_path / "plain", [], adapter, bf16)
    limited = trained(tmp_path / "limited", [callback], adapter, bf16)
    assert len(plain) > 0 and all(map(torch.equal, plain, limited))
    assert callback.handle is not None and callback.handle.plan is not None


@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "adapter"])
def test_sft_is_saved_and_goes_on_bit_by_bit(tmp_path: Path, adapter: bool) -> None:
    from lowtide.integrations.hugging_face import LimitMemory

    saves = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    plain = trained(tmp_path / "plain", [], adapter, False, steps=4, **saves)
    trained(tmp_path / "limited", [LimitMemory("98%")], adapter, False, steps=2, **saves)
    resumed = trained(tmp_path / "limited", [LimitMemory("98%")], adapter, False, steps=4, **saves)
    assert len(plain) > 0 and all(map(torch.equal, plain, resumed))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_sft_with_a_loss_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smoothing: float) -> None:
    """Label smoothing is taken of the logits; without it the trainer makes none, and nothing changes."""
    import lowtide

    def in_pieces(self: Any, *args: Any, **kwargs: Any) -> Any:
        lowtide.chunked_loss(self.model, 4)
        return train(self, *args, **kwargs)

    train = trl.SFTTrainer.train
    options = {"label_smoothing_factor": smoothing}
    plain = trained(tmp_path / "plain", [], False, False, **options)
    monkeypatch.setattr(trl.SFTTrainer, "train", in_pieces)
    chunked = trained(tmp_path / "chunked", [], False, False, **options)
    for own, other in zip(chunked, plain, strict=True):
        assert torch.equal(own, other) if not smoothing else torch.allclose(own, other, 1e-5, 1e-7)


@pytest.mark.slow
def test_torch_compile_keeps_the_compiler_and_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lowtide.compiled.compiled_handle import CompiledHandle
    from lowtide.integrations.hugging_face import LimitMemory

    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # which a Trainer sets for the whole process
    callback = LimitMemory("98%")
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    weights = trained(tmp_path / "limited", [callback], False, False, **compiled)
    assert callback.handle is not None and len(weights) > 0
    held = callback.handle._limiter.compiled_handle
    assert isinstance(held, CompiledHandle) and held._backend.name == "aot_eager" and held.plan is not None
