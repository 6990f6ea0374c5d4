"""The norm of gradients that ranks hold parts of, and clipping by it: what one process with the whole model
has, by whomever it is taken.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor  # once, before processes are made
from benchmarks.throttled_link import ThrottledLink
from ranks import on_each_backend, on_ranks
from shared_models import make, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lowtide import parallel as lp
from lowtide.optim import HostOptimizer

pytestmark = on_each_backend
ORDERS = (2.0, math.inf, 1.0)
MOST = 0.05

Clip = Callable[[torch.optim.Optimizer, nn.Module], Tensor]
CLIPS: dict[str, Clip] = {
    "lowtide": lambda _, model: lp.clip_grad_norm(model.parameters(), MOST),
    "lowtide, foreach": lambda _, model: lp.clip_grad_norm(model.parameters(), MOST, foreach=True),
    "torch": lambda _, model: nn.utils.clip_grad_norm_(model.parameters(), MOST),
    "torch, foreach": lambda _, model: nn.utils.clip_grad_norm_(model.parameters(), MOST, foreach=True),
    "host": lambda optimizer, _: optimizer.clip_grad_norm_(MOST),  # type: ignore[attr-defined]
    "host, streamed": lambda optimizer, _: optimizer.clip_grad_norm_(MOST),  # type: ignore[attr-defined]
    "host, streamed over a link": lambda optimizer, _: optimizer.clip_grad_norm_(MOST),  # type: ignore
}


def model_of(dp: int, tp: int) -> nn.Module:
    """Shared key-value heads, a padded vocabulary, norms and biases that every rank holds."""
    torch.manual_seed(1)
    options: dict[str, Any] = {"hidden_width": 92, "tied": False, "key_value_heads": 2}
    if dp * tp == 1:
        return make("llama", None, False, **options)
    mesh = init_device_mesh(torch.get_default_device().type, (dp, tp), mesh_dim_names=("dp", "tp"))
    model = make("llama", mesh["tp"] if tp > 1 else None, tp > 1, **options)
    if dp > 1:
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        lp.mark_partial_gradients(model)
    return model


def optimizer_of(model: nn.Module, clip: str) -> torch.optim.Optimizer:
    if clip.startswith("host"):
        options: dict[str, Any] = {
            "link": ThrottledLink() if "link" in clip else None,
            "stream_gradients": "streamed" in clip,
        }
        return HostOptimizer(torch.optim.AdamW, model.parameters(), host_fraction=0.4, lr=1e-2, **options)
    return torch.optim.AdamW(model.parameters(), 1e-2)


def backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(tokens(), tokens().roll(-1, 1)).loss
    loss.backward()
    lp.allreduce_sequence_parallel_gradients(optimizer)
    return loss.item()


def number(norm: Any) -> float:
    return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()


def train(dp: int, tp: int, clip: str) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Losses and norms of three steps, and what this process holds whole in the end."""
    model = model_of(dp, tp)
    optimizer = optimizer_of(model, clip)
    found = []
    for _ in range(3):
        loss = backward(model, optimizer)
        found.append((loss, number(CLIPS[clip](optimizer, model))))
        if "streamed" not in clip:
            assert number(lp.get_grad_norm(model.parameters())) == pytest.approx(MOST, rel=1e-4)
        optimizer.step()
    replicated = {
        n: p.detach() for n, p in model.named_parameters() if not getattr(p, "tensor_model_parallel", False)
    }
    return found, {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in replicated.items()}


def check(ranks: list[Any], clip: str) -> None:
    expected, _ = train(1, 1, clip)
    _, first = ranks[0]
    for found, replicated in ranks:
        assert found == [pytest.approx(step, rel=1e-5) for step in expected]
        assert replicated and all(torch.equal(replicated[name], first[name]) for name in first)
        assert found == ranks[0][0], "every rank has the same loss and the same norm, to the bit"


def train_all(dp: int, tp: int, clips: list[str]) -> list[Any]:
    return [train(dp, tp, clip) for clip in clips]


@pytest.mark.parametrize(
    ("dp", "tp", "clips"), [(1, 2, list(CLIPS)), (2, 2, ["lowtide", "torch", "host", "host, streamed"])]
)
def test_clipped_steps_are_those_of_one_process(dp: int, tp: int, clips: list[str]) -> None:
    by_rank = on_ranks(dp * tp, train_all, dp, tp, clips)
    for clip, *ranks in zip(clips, *by_rank, strict=True):
        check(ranks, clip)


def norms(shared: bool) -> list[float]:
    model = model_of(1, 2 if shared else 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    backward(model, optimizer)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    found: list[float] = []
    for order in ORDERS:
        found += [
            number(lp.get_grad_norm(model.parameters(), order, foreach=foreach))
            for foreach in (None, True, False)
        ]
        found += [
            number(nn.utils.get_total_norm(gradients, order, foreach=foreach))
            for foreach in (None, True, False)
        ]
    for parameter in list(model.parameters())[::3]:
        parameter.grad = None
    found.append(number(lp.get_grad_norm(model.parameters())))
    optimizer.zero_grad()
    return [*found, number(lp.get_grad_norm(model.parameters()))]


def test_norms_of_every_order_and_of_missing_gradients() -> None:
    alone = norms(False)
    assert alone[-1] == 0.0
    for found in on_ranks(2, norms, True):
        assert found == pytest.approx(alone, rel=1e-9)


def refused() -> bool:
    model = model_of(1, 2)
    optimizer = HostOptimizer(torch.optim.AdamW, model.parameters(), host_fraction=0.4)
    model(tokens(), tokens().roll(-1, 1)).loss.backward()
    for clip in CLIPS:
        with pytest.raises(
            lp.ParallelError,
            match=r"allreduce_sequence_parallel_gradients.* lowtide\.parallel\.clip_grad_norm",
        ):
            CLIPS[clip](optimizer, model)
    lp.allreduce_sequence_parallel_gradients(model)
    next(model.parameters()).grad.fill_(math.nan)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="error_if_nonfinite=False"):
        lp.clip_grad_norm(model.parameters(), MOST, error_if_nonfinite=True)
    with pytest.raises(
        lp.ParallelError, match=r"norm_type=\) was given 0: give the order of a norm, above 0"
    ):
        lp.get_grad_norm(model.parameters(), 0)
    return True


def test_partial_gradients_and_norms_that_are_not_finite_are_refused() -> None:
    assert all(on_ranks(2, refused))


def survives() -> bool:
    """Copies of a model, unfrozen parameters and replaced ones are counted; gradients are plain tensors in
    everything else.
    """
    layer = lp.ColumnParallelLinear(4, 6, gather_output=False)
    twin = copy.deepcopy(layer)
    frozen = lp.ColumnParallelLinear(4, 6, gather_output=False).requires_grad_(False)
    frozen.load_state_dict(layer.state_dict(), assign=True)
    frozen.requires_grad_(True)
    x, expected = torch.ones(2, 4), None
    for module in (layer, twin, frozen, pickled(layer)):
        module(x).square().sum().backward()
        norm = nn.utils.get_total_norm([p.grad for p in module.parameters()])  # type: ignore[misc]
        expected = norm if expected is None else expected
        torch.testing.assert_close(norm, expected)  # a product's last bit may depend on where weights lie
        assert norm == lp.get_grad_norm(module.parameters())
        gradient: Any = module.weight.grad
        assert norm > gradient.detach().norm() == gradient.norm(), "a gradient's own norm() is this rank's"
        assert (
            type(gradient + 1) is Tensor
            and type(pickled(gradient)) is Tensor
            and torch.equal(pickled(gradient), gradient)
        )
        momentum = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
        momentum.step()
        assert all(type(state["momentum_buffer"]) is Tensor for state in momentum.state.values())
    return True


def pickled(item: Any) -> Any:
    file = io.BytesIO()
    torch.save(item, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_copies_and_replaced_parameters_are_counted() -> None:
    assert all(on_ranks(2, survives))


def stages() -> float:
    """Two stages of one layer each; a tied parameter is on both."""
    rank = dist.get_rank()
    layer, tied = nn.Linear(2, 1, bias=False), nn.Parameter(torch.ones(1))
    layer.weight.grad = torch.full((1, 2), 2.0 + rank)
    tied.grad = torch.full((1,), 6.0)
    parameters = [*layer.parameters(), tied]
    elsewhere = [tied] if rank else []
    norm = lp.clip_grad_norm(parameters, 1.0, pipeline=dist.group.WORLD, counted_elsewhere=elsewhere)
    assert torch.allclose(tied.grad, 6.0 / norm)
    return norm.item()


def test_stages_of_a_pipeline() -> None:
    expected = math.sqrt(2 * 4 + 2 * 9 + 36)
    assert on_ranks(2, stages) == [pytest.approx(expected)] * 2


def test_alone_it_is_torchs_own() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        models = [nn.Linear(7, 5, dtype=dtype) for _ in range(2)]
        for model in models:
            for parameter in model.parameters():
                parameter.grad = torch.arange(parameter.numel(), dtype=dtype).view_as(parameter)
        theirs, ours = (
            nn.utils.clip_grad_norm_(models[0].parameters(), 1.0),
            lp.clip_grad_norm(models[1].parameters(), 1.0),
        )
        assert torch.equal(theirs, ours)
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
