"""accelerate and peft need nothing: a limit sees through what they wrap, put there before or after."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide


def net() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3)]
    return nn.Sequential(*blocks)


@pytest.fixture
def accelerator(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A fresh one."""
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    yield accelerate.Accelerator(cpu=True, mixed_precision=request.param, gradient_accumulation_steps=2)
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize("accelerator", ["no", "bf16"], indirect=True)
@pytest.mark.parametrize("before", [True, False])
def test_a_limit_before_and_after_prepare(accelerator: Any, before: bool) -> None:
    found = []
    for limited in (False, True):
        model, handle = net(), None
        optimizer = torch.optim.AdamW(model.parameters())
        if limited and before:
            handle = lowtide.limit_memory(model, "90%", optimizer=optimizer)
        prepared, wrapped = accelerator.prepare(model, optimizer)
        if limited and not before:
            handle = lowtide.limit_memory(prepared, "90%", optimizer=wrapped)
        for number in range(4):
            with accelerator.accumulate(prepared):
                x = torch.randn(256, 32, generator=torch.Generator().manual_seed(number))
                accelerator.backward(prepared(x).square().mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
                wrapped.step()
                wrapped.zero_grad()
        if handle is not None:
            assert handle.plan is not None and handle.plan.budget_bytes is not None
            assert (
                handle.measured_peak_bytes is None or handle.measured_peak_bytes <= handle.plan.budget_bytes
            )
            there = lowtide.handle_of(accelerator.unwrap_model(prepared))
            assert there is not None and there.plan is not None
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("mixed", "before"), [("no", False), ("bf16", True)], ids=["prepare first", "limit first, bf16"]
)
@pytest.mark.filterwarnings("error::lowtide.LowtideWarning", "ignore:.*it compiled code")
def test_accelerates_compiler_plugin_keeps_the_budget(mixed: str, before: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState

    from lowtide.compiled.compiled_handle import CompiledHandle

    AcceleratorState._reset_state(True)
    plugin = accelerate.utils.TorchDynamoPlugin(backend="aot_eager")
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=mixed, dynamo_plugin=plugin)
    model, x = net(), torch.randn(256, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    handle = lowtide.limit_memory(model, "90%", optimizer=optimizer) if before else None
    prepared, wrapped = accelerator.prepare(model, optimizer)
    handle = handle or lowtide.limit_memory(prepared, "90%", optimizer=wrapped)
    for _ in range(3):
        accelerator.backward(prepared(x).square().mean())
        wrapped.step()
        wrapped.zero_grad()
    assert handle.plan is not None and handle.plan.replayed and handle.plan.budget_bytes is not None
    assert handle.measured_peak_bytes is not None
    assert handle.measured_peak_bytes <= handle.plan.budget_bytes
    engine = handle if isinstance(handle, CompiledHandle) else handle._limiter.compiled_handle
    assert engine._backend.name == "aot_eager" and lowtide.handle_of(prepared) is handle
    AcceleratorState._reset_state(True)


def epochs(accelerator: Any, folder: Path, limited: bool, first: int = 0) -> list[torch.Tensor]:
    """Two epochs with accumulation, evaluated and saved after each, from the epoch ``first`` on. The limit is
    there before the optimizer, and before `prepare`.
    """
    torch.manual_seed(first)  # other weights than those that are loaded
    model = nn.Sequential(net(), nn.Dropout(0.1))
    handle = lowtide.limit_memory(model, "90%") if limited else None
    data = torch.randn(6 * 256, 32, generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(data, batch_size=256)  # type: ignore[arg-type]
    prepared, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    if handle is not None:
        handle.set_optimizer(optimizer)
    if first:
        accelerator.load_state(str(folder / f"{first}"))
    losses = []
    for epoch in range(first, 2):
        prepared.train()
        for batch in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if handle is not None and handle.plan is not None and handle.measured_peak_bytes is not None:
                assert handle.plan.budget_bytes is not None
                # the first step is looked at, and checkpoints no more than whole blocks
                assert handle.measured_peak_bytes <= handle.plan.budget_bytes * (1 if losses else 2)
        prepared.eval()
        with torch.no_grad():
            losses.append(torch.stack([prepared(batch).square().mean() for batch in loader]))
        accelerator.save_state(str(folder / f"{epoch + 1}"))
    if handle is not None:
        assert handle.graph is not None
        parameters = sum(parameter.nbytes for parameter in model.parameters())
        assert handle.graph.resident_bytes >= 3 * parameters, "the optimizer that came later counts"
    accelerator.free_memory()
    return [*losses[-1:], *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.parametrize("accelerator", ["no", "bf16"], indirect=True)
def test_a_run_is_evaluated_saved_and_goes_on_bit_by_bit(accelerator: Any, tmp_path: Path) -> None:
    plain = epochs(accelerator, tmp_path / "plain", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", lowtide.LowtideWarning)
        whole = epochs(accelerator, tmp_path / "limited", True)
        resumed = epochs(accelerator, tmp_path / "limited", True, first=1)
    assert all(map(torch.equal, plain, whole)) and all(map(torch.equal, plain, resumed))


@pytest.mark.parametrize("accelerator", ["bf16"], indirect=True)
@pytest.mark.parametrize("when", ["before", "after", "both"])
def test_a_model_unwrapped_from_its_mixed_precision_keeps_its_limit(accelerator: Any, when: str) -> None:
    """It computes in its own precision again, and it can be copied and pickled as a plain model can."""

    def train(one: nn.Module) -> list[torch.Tensor]:
        one.zero_grad()
        one(torch.ones(256, 32)).square().mean().backward()
        return [parameter.grad.clone() for parameter in one.parameters() if parameter.grad is not None]

    model = net()
    exact = train(copy.deepcopy(model))
    if when != "after":
        lowtide.limit_memory(model, "90%")
    prepared = accelerator.prepare(model)
    if when != "before":
        lowtide.limit_memory(prepared, "90%")
    rounded = train(prepared)
    assert not all(map(torch.equal, exact, rounded)), "autocast is on"
    twin = copy.deepcopy(prepared)
    model.zero_grad()
    assert all(map(torch.equal, train(twin), rounded))
    assert all(parameter.grad is None for parameter in model.parameters())

    plain = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    for copied in (copy.deepcopy(plain), copy.deepcopy(copy.deepcopy(plain)), plain):
        handle = lowtide.handle_of(copied)
        assert handle is not None and handle.model is copied
        assert all(map(torch.equal, train(copied), exact)) and len(handle.plans) >= 1
        handle.remove()
        assert all(map(torch.equal, train(copied), exact)) and lowtide.handle_of(copied) is None
    assert all(map(torch.equal, train(pickle.loads(pickle.dumps(plain))), exact))


def test_a_model_with_a_hook_of_accelerate_is_copied_with_its_limit() -> None:
    """The hook wraps the limit by `functools.update_wrapper`, which copies attributes."""
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    def train(one: nn.Module) -> list[torch.Tensor | None]:
        one.zero_grad()
        one(torch.ones(256, 32)).square().mean().backward()
        return [parameter.grad for parameter in one.parameters()]

    model = net()
    plain = train(copy.deepcopy(model))
    handle = lowtide.limit_memory(model, "90%")
    add_hook_to_module(model, ModelHook())
    for one in (model, copy.deepcopy(model)):
        for _ in range(2):
            assert all(map(torch.equal, train(one), plain))
    assert len(handle.plans) == 1
    assert lowtide.handle_of(remove_hook_from_module(model)) is handle


def test_adapters_of_peft_around_a_frozen_model() -> None:
    peft = pytest.importorskip("peft")
    found = []
    for limited in (False, True):
        config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=r".*\.[02]")
        model = peft.get_peft_model(net(), config)
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.1)
        handle = lowtide.limit_memory(model, "90%") if limited else None
        torch.manual_seed(1)
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(256, 32)).square().mean().backward()
        with torch.no_grad(), model.disable_adapter():
            frozen = model(torch.ones(1, 32))
        assert handle is None or handle.plan is not None
        found.append([frozen, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) > 1 and all(map(torch.equal, *found))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.usefixtures("quiet_transformers")
@pytest.mark.parametrize("checkpoints", [False, True], ids=["plain", "gradient_checkpointing"])
def test_adapters_go_on_from_what_was_saved(checkpoints: bool, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = dict(vocab_size=64, hidden_size=32, intermediate_size=128, num_hidden_layers=2)
    whole = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, num_attention_heads=2))
    tokens = torch.randint(64, (4, 4, 32))
    adapted: list[torch.Tensor] = []

    def train(model: Any, steps: range, limited: bool, state: Any = None) -> Any:
        if checkpoints:
            model.enable_input_require_grads()
            model.base_model.model.gradient_checkpointing_enable()
        model.train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        if state is not None:
            optimizer.load_state_dict(state)
        told = pytest.warns(lowtide.LowtideWarning, match="off while its limit is on")
        with told if limited and checkpoints else contextlib.nullcontext():
            handle = lowtide.limit_memory(model, "98%", optimizer=optimizer) if limited else None
        for step in steps:
            model(input_ids=tokens[step], labels=tokens[step]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if handle is not None:
            assert handle.plan is not None and handle.plan.budget_bytes is not None
            assert not handle.plan.changes_nothing, "what the model recomputed itself is the plan's to decide"
            assert handle.plan.predicted_peak_bytes <= handle.plan.budget_bytes
        return optimizer.state_dict()

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    for limited in (False, True):
        torch.manual_seed(1)
        model = peft.get_peft_model(copy.deepcopy(whole), config)
        if limited:
            state = train(model, range(2), limited)
            model.save_pretrained(tmp_path)
            model = peft.PeftModel.from_pretrained(copy.deepcopy(whole), tmp_path, is_trainable=True)
            train(model, range(2, 4), limited, state)
        else:
            train(model, range(4), limited)
        adapted.append(torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad]))
    assert torch.equal(*adapted) and not torch.equal(adapted[0], torch.zeros_like(adapted[0]))
