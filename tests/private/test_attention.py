"""PyTorch's flash attention does what `lowtide.private.attention` says."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from lowtide import private
from lowtide.private.attention import flash_attention, flash_attention_backward, has_flash_attention

CARD = pytest.param(
    "cuda",
    torch.bfloat16,
    0.05,
    marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card"),
)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("device", "dtype", "error"), [("cpu", torch.float64, 1e-14), CARD])
def test_parts_of_a_softmax(causal: bool, device: str, dtype: torch.dtype, error: float) -> None:
    """Results, log-sum-exps, and gradients of fewer heads of keys."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, 16, 8, dtype=dtype, device=device, requires_grad=True)
    k, v = (torch.randn(2, 2, 16, 8, dtype=dtype, device=device, requires_grad=True) for _ in range(2))
    grad = torch.randn(2, 4, 16, 8, dtype=dtype, device=device)
    assert has_flash_attention(q, k, v)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3, enable_gqa=True)
    expected.backward(grad)
    with torch.no_grad():
        out, lse = flash_attention(q, k, v, causal, 0.3)
        found = flash_attention_backward(grad, q, k, v, out, lse, causal, 0.3)
        scores = q.double() @ k.double().repeat_interleave(2, 1).transpose(-2, -1) * 0.3
        if causal:
            scores = scores.masked_fill(torch.ones(16, 16, device=device).triu(1).bool(), float("-inf"))
    assert (out - expected).abs().max() <= error
    assert (lse - scores.logsumexp(-1)).abs().max() <= error
    for own, tensor in zip(found, (q, k, v), strict=True):
        assert tensor.grad is not None and (own - tensor.grad).abs().max() <= error


def test_whether_attention_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not private.attention.is_attention_replaced()
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args: args[0])
    assert private.attention.is_attention_replaced()


def test_what_the_kernels_do_not_take() -> None:
    q = torch.ones(1, 2, 4, 8)
    assert not has_flash_attention(q, q, torch.ones(1, 2, 4, 6))
    assert not has_flash_attention(q.int(), q.int(), q.int())
    assert not has_flash_attention(*(torch.ones(1, 2, 4, 8, device="meta") for _ in range(3)))
