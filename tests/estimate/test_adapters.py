"""LoRA, DoRA and QLoRA: counts against peft's models, and what backward keeps against what PyTorch does."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.estimate import Config, EstimateError, configure, estimate
from lowtide.estimate.adapters import layer_adapters, layer_bytes
from lowtide.estimate.devices import device
from lowtide.estimate.flops import attention_flops, iteration_flops, layer_flops, logit_flops
from lowtide.estimate.layer import layer_terms
from lowtide.estimate.lines import total
from lowtide.estimate.speed import step_time
from lowtide.estimate.suggest import suggest

P = 8_030_261_248
"""Parameters of llama3-8b."""


def llama(**changes: Any) -> Config:
    usual: dict[str, Any] = dict(dtype="bf16-true", recompute="full", loss="fused-linear", lora=16)
    return configure("llama3-8b", **(usual | changes))


def small(**changes: Any) -> Config:
    sizes: dict[str, Any] = dict(
        layers=2, hidden=256, heads=4, kv_heads=2, ffn=512, vocab=512, seq=128, mlp="swiglu"
    )
    more: dict[str, Any] = dict(
        norm="rmsnorm", positions="rotary", bias=False, tied=False, attention="fused", dropout=0.0
    )
    return configure(**(sizes | more | changes))


def hugging_face(config: Config) -> nn.Module:
    """The same model as transformers builds it."""
    transformers = pytest.importorskip("transformers")
    shape = config.model
    made = transformers.LlamaConfig(
        num_hidden_layers=shape.layers, hidden_size=shape.hidden, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, intermediate_size=shape.ffn, vocab_size=shape.vocab,
        tie_word_embeddings=shape.tied, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(made)


def adapted(config: Config, model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model with peft's adapters."""
    peft = pytest.importorskip("peft")
    names = {"all-linear": ["q", "k", "v", "o", "gate", "up", "down"], "attention": list("qkvo")}
    targets = names.get(config.lora_targets) or config.lora_targets.split(",")
    how = peft.LoraConfig(
        r=config.lora, target_modules=[f"{name}_proj" for name in targets], use_dora=config.dora
    )
    single = config.lora_dtype == "fp32"
    return peft.get_peft_model(model.to(dtype), how, autocast_adapter_dtype=single)


@pytest.mark.parametrize(
    "settings",
    [
        dict(lora=16), dict(lora=8, lora_targets="attention"), dict(lora=4, lora_targets="q,v"),
        dict(lora=16, dora=True),
    ],
)  # fmt: skip
def test_as_many_parameters_as_peft_trains(settings: dict[str, Any]) -> None:
    config = small(**settings)
    model = adapted(config, hugging_face(config), torch.bfloat16)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert config.model.layers * layer_adapters(config) == trained
    stage = estimate(config).stages[0]
    held = sum(parameter.nbytes for parameter in model.parameters())
    assert stage.weights_bytes == held
    assert stage.gradients_bytes == 4 * trained and stage.optimizer_bytes == 8 * trained


@pytest.mark.parametrize("lora_dtype", ["fp32", "same"])
@pytest.mark.parametrize("lora_targets", ["all-linear", "attention", "q,v", "down"])
def test_a_frozen_product_keeps_no_input(lora_targets: str, lora_dtype: str) -> None:
    """What a layer's linear layers keep, counted by what autograd saves of peft's own."""
    config = small(dtype="bf16-true", lora=8, lora_targets=lora_targets, lora_dtype=lora_dtype)
    model = adapted(config, hugging_face(config), torch.bfloat16)
    names = {"q_proj": "x", "k_proj": "x", "v_proj": "x", "o_proj": "attended", "gate_proj": "y",
             "up_proj": "y", "down_proj": "product"}  # fmt: skip
    shape, tokens = config.model, config.tokens
    wide = {"x": shape.hidden, "y": shape.hidden, "attended": shape.query_width, "product": shape.ffn}
    inputs = {name: torch.randn(tokens, size).bfloat16().requires_grad_() for name, size in wide.items()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[0] == tokens:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    linear = {name.split(".")[-1]: m for name, m in model.named_modules() if name.endswith("_proj")}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = [linear[name](inputs[given]) for name, given in names.items()]
    terms = {term.name: int(term.bytes) for term in layer_terms(config)}
    counted = [
        "input of the q, k, v projection", "input of the MLP", "input of the MLP's last layer",
        "outputs of the adapters' A", "inputs of the adapters",
    ]  # fmt: skip
    own = sum(terms.get(name, 0) for name in counted)
    if lora_dtype == "same" and lora_targets in ("all-linear", "attention"):
        own += terms["input of the output projection"]  # which attention keeps itself
    assert outputs and sum(saved.values()) == own


def test_bytes_of_the_states() -> None:
    """Llama-3 8B, rank 16 on all linear layers: 41,943,040 parameters in float32 beside bfloat16 ones."""
    adapters = 41_943_040
    stage = estimate(llama()).stages[0]
    assert stage.weights_bytes == 2 * P + 4 * adapters
    assert (stage.gradients_bytes, stage.optimizer_bytes) == (4 * adapters, 8 * adapters)
    same = estimate(llama(lora_dtype="same")).stages[0]
    assert same.weights_bytes + same.gradients_bytes + same.optimizer_bytes == 2 * P + 8 * adapters
    sharded = estimate(llama(dp=4, zero=3)).stages[0]
    assert sharded.weights_bytes == stage.weights_bytes / 4


@pytest.mark.parametrize(("kind", "bits"), [("nf4", 4 + 8 / 64 + 32 / (64 * 256)), ("int8", 8), ("fp8", 8)])
def test_quantised_weights_have_scales_and_one_cast_copy(kind: str, bits: float) -> None:
    plain, quantised = (estimate(llama(quantize=name)).stages[0] for name in ("none", kind))
    matrices = 32 * 218_103_808
    rows = 0 if kind == "nf4" else 32 * 4 * (4096 + 1024 + 1024 + 4096 + 14336 + 14336 + 4096)
    freed = 2 * matrices - bits / 8 * matrices - rows
    assert plain.weights_bytes - quantised.weights_bytes == freed
    copy = next(line for line in quantised.lines if line.name == "weights cast back")
    assert copy.moments == {"loss": 0, "backward": 2 * 4096 * 14336, "update": 0}
    slower = step_time(llama(quantize=kind), device("a100")).total
    assert slower > step_time(llama(), device("a100")).total


def test_nf4_in_bytes_a_weight() -> None:
    norms = 2 * 2 * 4096
    weights = Fraction(int(layer_bytes(llama(quantize="nf4")) - norms), 218_103_808)
    assert float(weights) == pytest.approx(0.5 + 0.127 / 8, rel=1e-3)  # 2305.14314, Section 3: 0.127 bits


def test_dropout_of_the_adapters_inputs_keeps_them_and_masks() -> None:
    def added(config: Config) -> Fraction:
        return total(term for term in layer_terms(config) if term.name == "inputs of the adapters")

    read = 6 * 4096 + 14336  # of q, k, v, o, gate and up; of down
    usual, dropped = (llama(lora_dropout=p) for p in (0.0, 0.1))
    assert added(usual) == 4 * 8192 * read and added(dropped) == 5 * 8192 * read
    same, dropped = (llama(lora_dtype="same", lora_dropout=p) for p in (0.0, 0.1))
    assert added(same) == 0 and added(dropped) == 3 * 8192 * read


def test_flops_without_gradients_of_frozen_weights() -> None:
    config = llama(recompute="none")
    core, layer = attention_flops(config, 1), layer_flops(config, 1)
    adapters = 2 * 8192 * layer_adapters(config)
    found = iteration_flops(config)
    logits = logit_flops(config, 1)
    assert found.model == found.executed == 32 * (2 * (layer - core) + 3 * core + 3 * adapters) + 2 * logits
    again = iteration_flops(llama(reentrant=True))
    assert again.executed - again.model == 32 * (layer + adapters)


def test_only_adapters_are_reduced() -> None:
    found = estimate(llama(dp=2, zero=0)).traffic[0]
    assert [item.bytes for item in found] == [4 * 41_943_040]  # 2 (d - 1) / d of them, once


def test_suggest_takes_the_words() -> None:
    a100 = device("a100")
    given: dict[str, Any] = dict(
        seq=8192, dtype="bf16-true", lora=16, quantize="nf4", optimizer="paged-adamw-8bit",
        loss="fused-linear", global_batch=8,
    )  # fmt: skip
    found = suggest("llama3-8b", devices=1, device=a100, memory_bytes=24 * 2**30, **given)
    assert found.fits and "--lora 16" in found.best[0].flags() and "--quantize nf4" in found.best[0].flags()
    whole = suggest("llama3-8b", devices=1, device=a100, memory_bytes=24 * 2**30, seq=8192, global_batch=8,
                    dtype="bf16-true", offload_optimizer=0.0)  # fmt: skip
    assert not whole.fits
    with pytest.raises(EstimateError, match="--lora 16: --for lowtide does not run it; give --for any"):
        suggest("llama3-8b", devices=1, device=a100, runs_with="lowtide", lora=16)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (dict(quantize="nf4"), "--quantize=nf4 without --lora: all weights are trained"),
        (dict(dora=True), "--dora without --lora"),
        (dict(lora_targets="attention"), "--lora-targets=attention without --lora"),
        (dict(lora=16, lora_targets="q,conv"), "'conv' is no linear layer of the model; choose all-linear"),
        (dict(lora=-1), "--lora=-1"),
        (dict(lora=16, quantize="int3"), "--quantize='int3': choose none, nf4, int8, fp8"),
        (dict(lora=16, lora_dropout=1.0), "--lora-dropout=1.0"),
    ],
)
def test_refusals(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(EstimateError) as error:
        configure("llama3-8b", **settings)
    assert told in str(error.value)


def test_qlora_and_a_full_finetune_on_one_card_of_24_gb() -> None:
    """What docs/estimate.md says of Llama-3 8B at 8k tokens."""
    usual: dict[str, Any] = dict(seq=8192, dtype="bf16-true", loss="fused-linear")
    room: dict[str, Any] = dict(devices=1, device=device("a100"), memory_bytes=24 * 10**9)
    adapters = suggest(
        "llama3-8b", **room, **usual, lora=16, quantize="nf4", optimizer="paged-adamw-8bit"
    ).best[0].config  # fmt: skip
    assert (adapters.micro_batch, adapters.recompute, adapters.offload_optimizer) == (2, "full", 0)
    whole = suggest("llama3-8b", **room, **usual)
    assert all(one.config.offload_optimizer == 1 for one in whole.best) and whole.fits
    assert whole.best[0].config.micro_batch == 1


FLAT = """
import sys
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(64, 64, bias=False).requires_grad_(False)
        self.a, self.b = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x):
        return x + torch.relu(self.frozen(x) + self.b(self.a(x)))

distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
model = FullyShardedDataParallel(
    nn.Sequential(*(Layer() for _ in range(4))), auto_wrap_policy=ModuleWrapPolicy({Layer}),
    use_orig_params=True, device_id=torch.device("cpu"),
)
model(torch.ones(2, 64)).sum().backward()
model.zero_grad()
units = [one._handle.flat_param for one in model.modules()
         if isinstance(one, FullyShardedDataParallel) and one._handle]
print(sum(one.grad.nbytes for one in units), sum(one.nbytes for one in units))
distributed.destroy_process_group()
"""


def test_adapters_in_flat_parameters_give_frozen_weights_gradients() -> None:
    """FSDP 1 over layers: as many sharded gradients as shards, those of frozen weights too, and they stay."""
    done = subprocess.run([sys.executable, "-c", FLAT], capture_output=True, text=True, check=True)
    gradients, shards = map(int, done.stdout.split())
    assert gradients == shards
    usual: dict[str, Any] = dict(lora=8, lora_dtype="same", dtype="bf16-true", zero=3, dp=4, seq=512)
    usual["lora_targets"] = "q,v"
    plain, flat = (estimate(configure("llama2-7b", flat_parameters=way, **usual)) for way in (False, True))
    stage = flat.stages[0]
    assert stage.gradients_bytes == pytest.approx(stage.weights_bytes, rel=1e-6)
    assert flat.moments["loss"] - plain.moments["loss"] > 0.99 * stage.weights_bytes
    assert stage.layer_activations_bytes > plain.stages[0].layer_activations_bytes  # inputs are kept, too
    with pytest.raises(EstimateError, match="--lora-dtype same"):
        configure("llama2-7b", flat_parameters=True, **usual | dict(lora_dtype="fp32"))
