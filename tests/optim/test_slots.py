"""16-bit parameters with float32 masters against a plain reference; host copies that follow what others
write.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.throttled_link import ThrottledLink
from runs import ADAMW, FRACTIONS, MODES, batch, equal, model, train

from lowtide.optim import HostOptimizer

SIXTEEN = [torch.bfloat16, torch.float16]


class Reference(torch.optim.AdamW):
    """Masters in float32, updated by the fused AdamW, rounded back after each step."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        self.originals = [p for p in parameters if p.requires_grad]
        self.masters = [p.detach().float().requires_grad_() for p in self.originals]
        super().__init__(self.masters, fused=True, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for original, master in zip(self.originals, self.masters, strict=True):
            master.grad = None if original.grad is None else original.grad.float()
        super().step()
        for original, master in zip(self.originals, self.masters, strict=True):
            original.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for original in self.originals:
            original.grad = None


@pytest.mark.parametrize("dtype", SIXTEEN, ids=["bf16", "fp16"])
@pytest.mark.parametrize("mode", MODES)
def test_masters_at_every_fraction(mode: str, dtype: torch.dtype) -> None:
    plain_model = model(dtype)
    plain = Reference(list(plain_model.parameters()), **ADAMW)
    train(plain_model, plain, range(5), accumulate=2)
    for fraction in FRACTIONS if dtype is torch.bfloat16 else FRACTIONS[::5]:
        ours_model = model(dtype)
        ours = HostOptimizer(
            torch.optim.AdamW, ours_model.parameters(), host_fraction=fraction, **MODES[mode](), **ADAMW
        )
        train(ours_model, ours, range(5), accumulate=2)
        assert equal(plain_model, ours_model), fraction
        state = ours.state_dict()["state"]
        found = [state[i]["master"] for i, p in enumerate(ours_model.parameters()) if i in state]
        used = [m for m in plain.masters if m in plain.state]
        assert len(found) == len(used)
        assert all(
            torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(found, used, strict=True)
        ), fraction
        ours.close()


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_masters_survive_a_checkpoint(order: str) -> None:
    whole_model = model(torch.bfloat16)
    whole = HostOptimizer(torch.optim.AdamW, whole_model.parameters(), host_fraction=0.5, **ADAMW)
    train(whole_model, whole, range(4))
    saved_model = {name: tensor.clone() for name, tensor in whole_model.state_dict().items()}
    saved = whole.state_dict()
    second_model = model(torch.bfloat16)
    second = HostOptimizer(
        torch.optim.AdamW, second_model.parameters(), host_fraction=1.0, link=ThrottledLink(), **ADAMW
    )
    if order == "model first":
        second_model.load_state_dict(saved_model)
        second.load_state_dict(saved)
    else:
        second.load_state_dict(saved)
        second_model.load_state_dict(saved_model)
    train(whole_model, whole, range(4, 8))
    train(second_model, second, range(4, 8))
    assert equal(whole_model, second_model)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_host_copies_follow_writes(fraction: float) -> None:
    """Somebody writes to parameters between steps: seen by their version, or after `reload_masters`."""
    for behind in (False, True):
        plain_model, ours_model = model(), model()
        plain = torch.optim.AdamW(plain_model.parameters(), fused=True, **ADAMW)
        ours = HostOptimizer(
            torch.optim.AdamW, ours_model.parameters(), host_fraction=fraction, link=ThrottledLink(), **ADAMW
        )
        for net, optimizer in ((plain_model, plain), (ours_model, ours)):
            train(net, optimizer, range(2))
            for p in net.parameters():
                if behind:
                    p.data.mul_(0.5)
                else:
                    with torch.no_grad():
                        p.mul_(0.5)
            if behind and isinstance(optimizer, HostOptimizer):
                optimizer.reload_masters()
            train(net, optimizer, range(2, 4))
        assert equal(plain_model, ours_model)


def test_without_masters_as_torch_does() -> None:
    plain_model, ours_model = model(torch.bfloat16), model(torch.bfloat16)
    plain = torch.optim.AdamW(plain_model.parameters(), fused=True, **ADAMW)
    ours = HostOptimizer(
        torch.optim.AdamW, ours_model.parameters(), host_fraction=0.5, masters=False, **ADAMW
    )
    train(plain_model, plain, range(4))
    train(ours_model, ours, range(4))
    assert equal(plain_model, ours_model)


def test_clipping_streamed_sixteen_bit() -> None:
    results = []
    for stream in (False, True):
        net = model(torch.bfloat16)
        ours = HostOptimizer(
            torch.optim.AdamW,
            net.parameters(),
            host_fraction=0.7,
            stream_gradients=stream,
            link=ThrottledLink(),
            **ADAMW,
        )
        for step in range(3):
            ours.zero_grad()
            net(batch(step, torch.bfloat16)).backward()
            ours.clip_grad_norm_(0.05)
            ours.step()
        results.append(net)
    assert equal(*results)
