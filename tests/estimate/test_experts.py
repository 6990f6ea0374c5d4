"""Mixtures of experts and latent attention: counts against what transformers builds, and what a layer keeps
against what autograd saves on fake tensors.
"""

from __future__ import annotations

import weakref
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import lowtide
from lowtide.estimate import Config, EstimateError, configure, estimate, from_hugging_face, preset
from lowtide.estimate.devices import device
from lowtide.estimate.flops import layer_flops
from lowtide.estimate.layer import layer_terms
from lowtide.estimate.simulation.traced import default_dtype
from lowtide.estimate.speed import step_time
from lowtide.estimate.traffic import stage_traffic
from lowtide.estimate.working import backward_moments
from lowtide.meter import available

transformers = pytest.importorskip("transformers")

QWEN = dict(
    hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
    moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, vocab_size=151936,
    max_position_embeddings=40960,
)  # fmt: skip
AIR = dict(
    hidden_size=4096, num_hidden_layers=46, num_attention_heads=96, num_key_value_heads=8, head_dim=128,
    moe_intermediate_size=1408, intermediate_size=10944, n_routed_experts=128, num_experts_per_tok=8,
    n_shared_experts=1, first_k_dense_replace=1, vocab_size=151552, attention_bias=True,
)  # fmt: skip
PUBLISHED: dict[str, Any] = {
    "mixtral-8x7b": ("MixtralConfig", dict(max_position_embeddings=32768)),
    "qwen3-30b-a3b": ("Qwen3MoeConfig", QWEN),
    "deepseek-v3": ("DeepseekV3Config", dict(max_position_embeddings=4096)),
    "gpt-oss-20b": ("GptOssConfig", dict(num_hidden_layers=24, num_local_experts=32)),
    "gpt-oss-120b": ("GptOssConfig", dict(num_hidden_layers=36, num_local_experts=128)),
    "glm4.5-air": ("Glm4MoeConfig", AIR),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_are_the_published_configurations(name: str) -> None:
    kind, sizes = PUBLISHED[name]
    config = getattr(transformers, kind)(**sizes)
    shape = from_hugging_face({"tie_word_embeddings": False, **config.to_dict()}).shape
    assert shape == preset(name).shape


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b"])
def test_as_many_parameters_as_transformers_builds(name: str) -> None:
    kind, sizes = PUBLISHED[name]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes))
    assert preset(name).shape.parameters() == sum(one.numel() for one in model.parameters())


def test_active_parameters() -> None:
    """Qwen3-30B-A3B: 3.3 B of 30.5; DeepSeek-V3: 37 B of 671 (its report, Section 1)."""
    assert preset("qwen3-30b-a3b").shape.active_parameters() == pytest.approx(3.3e9, rel=0.02)
    assert preset("deepseek-v3").shape.active_parameters() == pytest.approx(37e9, rel=0.02)
    dense = preset("llama3-8b").shape
    assert dense.active_parameters() == dense.parameters()


SMALL: dict[str, Any] = dict(
    layers=2, hidden=256, heads=4, ffn=96, vocab=512, seq=512, mlp="swiglu", norm="rmsnorm",
    positions="rotary", bias=False, tied=False, attention="fused", dropout=0.0, experts=16,
    experts_per_token=4, unfused_mlp=True,
)  # fmt: skip
SIZES: dict[str, Any] = dict(hidden_size=256, num_experts_per_tok=4)
BLOCKS: dict[str, Any] = {
    "softmax": ("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeSparseMoeBlock", {},
                dict(moe_intermediate_size=96, num_experts=16, norm_topk_prob=True)),
    "chosen": ("gpt_oss", "GptOssConfig", "GptOssMLP", dict(mlp="swiglu-clamped", bias=True),
               dict(intermediate_size=96, num_local_experts=16)),
    "sigmoid": ("deepseek_v3", "DeepseekV3Config", "DeepseekV3MoE", dict(shared_experts=1),
                dict(moe_intermediate_size=96, n_routed_experts=16, n_shared_experts=1, n_group=1,
                     topk_group=1)),
}  # fmt: skip


def saved_bytes(module: nn.Module, *inputs: torch.Tensor, **given: Any) -> int:
    """Bytes of the storages that autograd saves of a module, parameters aside."""
    own = {one.untyped_storage()._cdata for one in module.parameters()}
    packed: list[weakref.ref[torch.Tensor]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(weakref.ref(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(*inputs, **given)
    alive = [tensor for ref in packed if (tensor := ref()) is not None]  # as long as the output is there
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in alive}
    assert out is not None
    return sum(size for key, size in storages.items() if key not in own)


@pytest.mark.parametrize("router", BLOCKS)
def test_experts_keep_what_autograd_saves(router: str) -> None:
    """To the byte: transformers' grouped products in bfloat16, on fake tensors."""
    folder, config, block, more, sizes = BLOCKS[router]
    module = getattr(transformers.models, folder)
    made = getattr(transformers, config)(**SIZES, **sizes)
    made._experts_implementation = "grouped_mm"
    with FakeTensorMode(), default_dtype(torch.bfloat16):
        built = getattr(getattr(module, f"modeling_{folder}"), block)(made)
        kept = saved_bytes(built, torch.randn(1, 512, 256, requires_grad=True))
    config_here = configure(**(SMALL | more), router=router)
    terms = [term for term in layer_terms(config_here) if term.part == "mlp"]
    counted = sum(term.bytes for term in terms if term.name != "input of the MLP norm")
    assert counted == kept


class Fused(torch.autograd.Function):
    """Keeps what a fused kernel of attention keeps."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
        batch, heads, seq, _ = query.shape
        out = query.new_empty(batch, seq, heads, value.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out


class Norm(nn.Module):
    """Keeps its input, as a fused norm does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def test_latent_attention_keeps_what_autograd_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte, where norms and attention are fused kernels; the turn's table aside."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    def attend(query: Any, key: Any, value: Any, **given: Any) -> Any:
        return Fused.apply(query, key, value)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    made = transformers.DeepseekV3Config(
        hidden_size=256, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=96, kv_lora_rank=64,
        qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
    )  # fmt: skip
    made._attn_implementation = "sdpa"
    with FakeTensorMode(), default_dtype(torch.bfloat16):
        built = DeepseekV3Attention(made, 0)
        built.q_a_layernorm, built.kv_a_layernorm = Norm(96), Norm(64)
        turn, x = torch.randn(1, 512, 16), torch.randn(1, 512, 256, requires_grad=True)
        kept = saved_bytes(built, x, position_embeddings=(turn, turn), attention_mask=None)
    config = configure(
        **(SMALL | dict(experts=None, experts_per_token=None, head_width=48, value_width=32)),
        query_latent=96, kv_latent=64, rope_width=16,
    )  # fmt: skip
    counted = sum(term.bytes for term in layer_terms(config) if term.part in ("attention", "core"))
    assert kept == counted + turn.nbytes


def qwen(**changes: Any) -> Config:
    usual: dict[str, Any] = dict(dtype="bf16-true", dp=8, zero=3, seq=4096, recompute="full")
    return configure("qwen3-30b-a3b", **(usual | changes))


def test_expert_parallel_ranks_hold_their_experts_only() -> None:
    """ZeRO 3 splits everything among all ranks either way; without it experts alone are apart."""
    shape = preset("qwen3-30b-a3b").shape
    experts = 48 * 128 * 3 * 2048 * 768
    rest = shape.parameters() - experts
    plain, apart = (estimate(qwen(zero=0, ep=ep)).stages[0] for ep in (1, 8))
    assert plain.weights_bytes == 2 * (rest + experts)
    assert apart.weights_bytes == 2 * (rest + experts // 8)
    first = estimate(qwen(zero=1, ep=8)).stages[0]
    assert first.optimizer_bytes == pytest.approx(4 * (rest + experts) / 8, abs=2)
    split, both = (estimate(qwen(ep=ep)).stages[0] for ep in (1, 8))
    assert split.weights_bytes == both.weights_bytes == pytest.approx(2 * (rest + experts) / 8, abs=2)

    def gathered(stage: Any) -> int:
        return next(line.bytes for line in stage.lines if line.name == "gathered weights")

    assert gathered(split) - gathered(both) == 2 * 2 * (experts // 48) * 7 // 8


def test_rows_of_the_busiest_rank() -> None:
    """What experts keep follows the tokens that go there; what is sent is all but a rank's own."""
    even, busy = (qwen(ep=8, recompute="none", imbalance=more) for more in (1.0, 1.5))
    names = ("inputs of the experts", "outputs of the experts")
    for name in names:
        kept = [next(t.bytes for t in layer_terms(one) if t.name == name) for one in (even, busy)]
        assert kept == [2 * 4096 * 8 * 2048, Fraction(3, 2) * 2 * 4096 * 8 * 2048]
    sent = {item.link: item.bytes for item in stage_traffic(even, 0)}
    assert sent["expert"] == 4 * 48 * (2 * 4096 * 8 * 2048) * 7 // 8
    assert step_time(busy, device("h100")).expert > step_time(even, device("h100")).expert
    assert "expert" not in {item.link for item in stage_traffic(qwen(), 0)}


def test_flops_of_the_active_parameters() -> None:
    shape = preset("qwen3-30b-a3b").shape
    own = 2048 * (2 * 32 + 2 * 4) * 128 + 8 * 3 * 2048 * 768 + 128 * 2048
    assert layer_flops(qwen(), 1) == 2 * 4096 * own + 4 * 4096**2 * 4096
    assert shape.layers * own == pytest.approx(shape.active_parameters() - 2 * 151936 * 2048, rel=1e-3)


@pytest.mark.skipif(not available(), reason="needs the counting allocator")
@pytest.mark.parametrize("single", [False, True])
def test_weighing_takes_what_pytorch_takes(single: bool) -> None:
    """The rows' gradient, and its products with the weights and with the rows, in the weights' dtype."""
    tokens, k, hidden = 512, 8, 256
    rows = torch.randn(tokens * k, hidden, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(tokens * k, 1, dtype=torch.float32 if single else torch.bfloat16, requires_grad=True)
    token = torch.randperm(tokens * k) // k
    weighed = (rows.to(weights.dtype) * weights).bfloat16()
    out = torch.zeros(tokens, hidden, dtype=torch.bfloat16).index_add(0, token, weighed)
    given = torch.randn_like(out)
    taken = lowtide.measure(lambda: torch.autograd.grad(out, (rows, weights), given)).peak_bytes
    config = configure(layers=1, hidden=hidden, heads=4, ffn=64, mlp="swiglu", norm="rmsnorm", seq=tokens,
                       experts=16, experts_per_token=k, dtype="bf16-true", weigh_float32=single)  # fmt: skip
    counted = backward_moments(config)["weighing of the experts' outputs"]
    stream = 2 * tokens * hidden  # its gradient, which is not made here
    assert taken == pytest.approx(float(counted - stream), rel=0.01)
    once_more = [line.moments for line in estimate(config).stages[0].lines if "once more" in line.name]
    assert once_more == [{"loss": 0, "backward": rows.nbytes, "update": 0}]


def test_layers_with_one_mlp_have_terms_of_their_own() -> None:
    config = configure("deepseek-v3", dp=64, zero=3, dtype="bf16-true", recompute="none")
    lines = {line.formula: line for line in estimate(config).stages[0].lines if "gate" in line.name}
    tokens = config.tokens
    assert lines["4sbf"].bytes == 3 * 4 * tokens * 18432
    assert lines["4sb(k+1)f"].bytes == 58 * 4 * tokens * 9 * 2048


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (dict(model="llama3-8b", experts=8), "--experts=8 --experts-per-token=0: give both"),
        (dict(model="llama3-8b", dp=8, ep=2), "--ep=2 with --experts=0"),
        (dict(model="qwen3-30b-a3b", dp=8, ep=16), "it has to divide both"),
        (dict(model="qwen3-30b-a3b", imbalance=1.2), "--imbalance=1.2 with --ep=1"),
        (dict(model="llama3-8b", shared_experts=1), "--shared-experts=1 without --experts"),
    ],
)
def test_refusals(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(EstimateError) as error:
        configure(**settings)
    assert told in str(error.value)
