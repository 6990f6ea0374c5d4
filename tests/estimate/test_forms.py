"""Forms in which frameworks write the same layer, each to the byte against what autograd saves on fake
tensors: norms in separate operations, one product of q, k and v, experts' inputs that are weighed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_experts import SMALL, Fused, saved_bytes
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide import meter
from lowtide.estimate import Config, EstimateError, configure
from lowtide.estimate.layer import core_terms, layer_terms
from lowtide.estimate.lines import total
from lowtide.estimate.simulation.traced import default_dtype
from lowtide.estimate.working import backward_moments

TOKENS, HIDDEN = 512, 256
DENSE: dict[str, Any] = SMALL | dict(experts=None, experts_per_token=None, dtype="bf16-true")


def kept(config: Config) -> float:
    return float(sum(term.bytes for term in layer_terms(config)))


def test_norms_in_separate_operations() -> None:
    """transformers' RMS norm: of a row its deviation aside, which the paper leaves out."""
    modeling = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    with FakeTensorMode(), default_dtype(torch.bfloat16):
        norm, rows = modeling.Qwen3RMSNorm(HIDDEN), torch.randn(1, TOKENS, HIDDEN, requires_grad=True)
        wide = modeling.Qwen3RMSNorm(64)
        heads = torch.randn(1, TOKENS, 4 + 4, 64, requires_grad=True)
        one, turned = saved_bytes(norm, rows) - 4 * TOKENS, saved_bytes(wide, heads) - 4 * TOKENS * 8
    assert (one, turned) == (6 * TOKENS * HIDDEN, 6 * TOKENS * 8 * 64)
    for way, inputs in (("none", 2), ("full", 1)):  # bfloat16 inputs that are freed; a checkpoint stays
        plain, apart = (
            kept(configure(**DENSE, qk_norm=True, recompute=way, unfused_norms=how)) for how in (False, True)
        )
        assert apart - plain == 2 * one - inputs * 2 * TOKENS * HIDDEN + turned - 2 * TOKENS * 8 * 64
    with pytest.raises(EstimateError, match="--unfused-norms with --norm=layernorm"):
        configure("gpt2", unfused_norms=True)


class Attention(nn.Module):
    """As LitGPT has it: q and k are turned, v is a view of the one product."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.view(1, TOKENS, 4, 64).transpose(1, 2) for one in self.qkv(x).split(HIDDEN, dim=-1))
        attended = Fused.apply(torch.cat((-q[..., 32:], q[..., :32]), -1), k * 2, v)
        return self.out(attended.transpose(1, 2).reshape(1, TOKENS, HIDDEN))


def test_values_that_are_a_view_of_one_product() -> None:
    with FakeTensorMode(), default_dtype(torch.bfloat16):
        saved = saved_bytes(Attention(), torch.randn(1, TOKENS, HIDDEN, requires_grad=True))
    config = configure(**DENSE, fused_qkv=True)
    own = [term for term in layer_terms(config) if term.part in ("attention", "core")]
    assert saved == sum(term.bytes for term in own)
    assert kept(config) - kept(configure(**DENSE)) == 2 * TOKENS * 2 * HIDDEN


class Experts(nn.Module):
    """torchtitan's: inputs are weighed in float32, and outputs scattered as they are; or outputs are."""

    def __init__(self, before: bool = True) -> None:
        super().__init__()
        self.before = before
        self.w1, self.w3 = (nn.Parameter(torch.empty(16, HIDDEN, 96)) for _ in range(2))
        self.w2 = nn.Parameter(torch.empty(16, 96, HIDDEN))

    def forward(self, x: Tensor, scores: Tensor, index: Tensor, ends: Tensor) -> Tensor:
        wide = index.reshape(-1, 1).expand(-1, HIDDEN)
        rows = torch.gather(x, 0, wide)
        if self.before:
            rows = (rows.float() * scores.reshape(-1, 1)).to(x.dtype)
        gate = torch._grouped_mm(rows, self.w1, offs=ends)
        made = nn.functional.silu(gate) * torch._grouped_mm(rows, self.w3, offs=ends)
        out = torch._grouped_mm(made, self.w2, offs=ends)
        if not self.before:
            out = (out.float() * scores.reshape(-1, 1)).to(x.dtype)
        return torch.zeros_like(x).scatter_add(0, wide, out)


@pytest.mark.parametrize("before", [True, False])
def test_experts_that_are_weighed_in_float32(before: bool) -> None:
    """All but the router's own: scores, and each choice's place."""
    with FakeTensorMode(), default_dtype(torch.bfloat16):
        x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
        scores = torch.randn(TOKENS * 4, dtype=torch.float32, requires_grad=True)
        index, ends = torch.zeros(TOKENS * 4, dtype=torch.long), torch.zeros(16, dtype=torch.int32)
        saved = saved_bytes(Experts(before), x, scores, index, ends)
    config = configure(**SMALL, dtype="bf16-true", score_before_experts=before, weigh_float32=not before)
    own = {term.name: term.bytes for term in layer_terms(config) if term.part == "mlp"}
    left_out = ("input of the MLP norm", "scores and choices of the router")
    counted = sum(size for name, size in own.items() if name not in left_out)
    assert saved - scores.nbytes - index.nbytes - ends.nbytes == counted
    flag = "score_before_experts" if before else "weigh_float32"
    with pytest.raises(EstimateError, match=f"--{flag.replace('_', '-')}: the model has no experts"):
        configure("llama3-8b", **{flag: True})


@pytest.mark.parametrize("before", [True, False])
def test_backward_of_experts_that_are_weighed_in_float32(before: bool) -> None:
    """Measured, of one layer's experts; scores and places of rows aside."""
    module = Experts(before).bfloat16()
    x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    scores = torch.zeros(TOKENS * 4, requires_grad=True)
    index, ends = torch.arange(TOKENS * 4) // 4, torch.arange(128, 2049, 128, dtype=torch.int32)

    def step() -> None:
        out = module(x, scores, index, ends)
        x.grad = scores.grad = module.w1.grad = module.w2.grad = module.w3.grad = None
        out.backward(torch.zeros_like(out))

    config = configure(**SMALL, dtype="bf16-true", score_before_experts=before, weigh_float32=not before)
    own = ("experts", "gate", "silu", "last layer")
    live = sum(term.bytes for term in layer_terms(config) if any(name in term.name for name in own))
    moments = backward_moments(config)
    moment = next(size for name, size in moments.items() if name.startswith("weighing"))
    assert before or moment == max(moments.values())
    weights = sum(one.nbytes for one in module.parameters()) if before else 0  # their gradients
    counted = live + moment + weights + x.nbytes  # and the output
    assert meter.measure(step, device="cpu").peak_bytes == pytest.approx(float(counted), rel=0.002)


def test_expert_parallel_ranks_beside_layers_with_one_mlp() -> None:
    """DeepSeek's first layers have no experts to share."""
    apart = configure("deepseek-v3", dp=64, zero=3, ep=8, imbalance=1.2, score_before_experts=True)
    assert [kind.ep for _, kind in apart.kinds] == [1, 8] and kept(apart.kinds[1][1]) > 0


def test_attention_and_mlp_behind_one_norm() -> None:
    """Phi: the stream, its norm, queries, keys, values and attention's output; of the MLP five of 4h with
    GELU's tanh written out: its input, the tanh, two factors and their product.
    """
    config = configure("phi-2", seq=1024, dtype="bf16-true", unfused_mlp=True)
    kept = total(layer_terms(config)) - total(core_terms(config))
    assert kept == 2 * 1024 * 2560 * (6 + 5 * 4)
    beside = configure("pythia-2.8b", seq=1024, dtype="bf16-true", fused_qkv=False)
    assert total(layer_terms(beside)) - total(core_terms(beside)) == 2 * 1024 * 2560 * (7 + 2 * 4)
