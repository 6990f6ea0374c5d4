"""Promise 1, operation by operation: whatever a forward is made of, loss, gradients, buffers and random state
are the plain step's.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide

N = 16


class Body(nn.Module):
    """Two linear layers around whatever a test puts in the middle."""

    def __init__(self, middle: Any, width: int = N) -> None:
        super().__init__()
        self.first = nn.Linear(N, width)
        self.middle = middle
        self.last = nn.Linear(N, N)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        return torch.tanh(self.last(self.middle(h))).square().sum()


class Run(nn.Module):
    """A function as a module, so that a deep copy is easy."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def body(function: Any, width: int = N) -> Body:
    torch.manual_seed(7)
    return Body(Run(function), width)


def batch(rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, N, generator=torch.Generator().manual_seed(3))


def add_in_place(h: torch.Tensor) -> torch.Tensor:
    y = h * 2
    y += 1
    y.mul_(0.5)
    return y


def write_into_view(h: torch.Tensor) -> torch.Tensor:
    y = h.exp()
    z = y * 1.5
    z[:, :4] = h[:, :4].sin()
    z[1:3].add_(1.0)
    z[:, 5].zero_()
    return z * y


def fill_buffer(h: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(h)
    out[:, : N // 2] = h[:, : N // 2].exp()
    out[:, N // 2 :] = h[:, N // 2 :].cos()
    return out * out


def fill_zeros(h: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(h.shape[0], N)
    for k in range(4):
        out[:, k::4] = h[:, k::4] ** (k + 2)
    return out.sigmoid() * out


def relu_in_place(h: torch.Tensor) -> torch.Tensor:
    y = F.dropout(F.relu(h) * 2.0, 0.3, True, True)  # the product saves nothing that dropout overwrites
    return F.hardtanh_(F.leaky_relu_(y + 0.1, 0.2) * 1.5, -0.5, 0.5)


def masked(h: torch.Tensor) -> torch.Tensor:
    mask = h > 0.1
    y = h.masked_fill(mask, -2.0).exp()
    return torch.where(mask, y, y * h).masked_fill_(mask.logical_not(), 0.25)


def views(h: torch.Tensor) -> torch.Tensor:
    a, b = h.chunk(2, -1)
    y = torch.cat([b.t().contiguous().t() * a, a[:, ::2].exp(), b[:, 1::2].cos()], -1)
    return y.view(-1, 4, 4).transpose(1, 2).reshape(-1, N).unflatten(-1, (2, 8)).flip(1).flatten(1)


def unfolded(h: torch.Tensor) -> torch.Tensor:
    windows = h.unfold(1, 4, 1)  # overlapping
    rows = h.as_strided((h.shape[0], N), (N, 1)).sin()
    return F.pad((windows.exp() * windows).sum(-1), (0, 3)) + rows + torch.diagonal(h[:6, :6]).exp().sum()


def expanded(h: torch.Tensor) -> torch.Tensor:
    row = h.mean(0, keepdim=True).exp().expand(h.shape[0], -1)
    column = h[:, :1].sin().expand(-1, N)
    return row * column * torch.sigmoid(row) + torch.exp(column)


def same_twice(h: torch.Tensor) -> torch.Tensor:
    y = h.exp()
    return y * y + y @ y.t() @ y + F.softmax(y, -1) * y


def as_other_dtype(h: torch.Tensor) -> torch.Tensor:
    pair = torch.view_as_complex(h.exp().view(-1, N // 2, 2))
    turned = pair * torch.polar(torch.ones(N // 2), torch.arange(N // 2) / 3)
    back = torch.view_as_real(turned * turned.conj() + pair.conj().exp() * pair.conj()).flatten(1)
    there = torch.view_as_real(pair.conj().resolve_conj()).flatten(1)
    return back * there * pair.conj().imag.repeat(1, 2) + torch.fft.irfft(torch.fft.rfft(h), n=N)


def sorting(h: torch.Tensor) -> torch.Tensor:
    top, index = h.exp().topk(N // 2, -1)
    return (
        torch.cat([top * top, torch.gather(h.sin(), 1, index)], -1)
        * h.sort(-1).values.exp()
        * h.cumsum(-1).tanh()
    )


def indexing(h: torch.Tensor) -> torch.Tensor:
    rows = torch.tensor([0, 2, 2, 1, 0, 5])
    y = h.exp()[rows]
    z = (
        torch.zeros_like(y)
        .index_add(0, rows, y * h)
        .index_put((rows[:3], rows[:3]), h[0, :3], accumulate=True)
    )
    return y * z + torch.zeros_like(h).scatter_add(1, rows.expand(6, 6), y[:, :6].cos())


def attention(h: torch.Tensor) -> torch.Tensor:
    q, k, v = h.view(1, 2, 3, N).sin(), h.view(1, 2, 3, N).cos(), h.view(1, 2, 3, N).exp()
    return (
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
        + F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)
    ).view(-1, N)


def foreach(h: torch.Tensor) -> torch.Tensor:
    parts = torch._foreach_exp([h[:, :8].clone(), h[:, 8:].clone()])
    return torch.cat(torch._foreach_mul(parts, [p.sin() for p in parts]), -1)


def random_of_all_kinds(h: torch.Tensor) -> torch.Tensor:
    noise = (
        torch.randn_like(h)
        + torch.rand(h.shape)
        + torch.empty_like(h).uniform_(-1, 1)
        + torch.empty_like(h).normal_()
    )
    kept = torch.bernoulli(torch.sigmoid(h.detach())) + torch.empty_like(h).bernoulli_(0.5)
    shuffled = h[:, torch.randperm(N)] * torch.randint(1, 4, (N,))
    dropped = F.alpha_dropout(h.exp() * noise, 0.2, True) * kept.exp()
    return dropped + F.rrelu(shuffled, training=True) * F.feature_alpha_dropout(h, 0.2, True)


def gumbel(h: torch.Tensor) -> torch.Tensor:
    return F.gumbel_softmax(h, tau=0.7, hard=True) * h.exp() + F.gumbel_softmax(h * 2).sin()


def own_generator(h: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(h.shape, generator=generator) * h.exp()
    kept = torch.bernoulli(torch.full_like(h, 0.5), generator=generator)
    return noise * kept * noise + torch.rand(h.shape, generator=generator) * h.sin()


def scalars(h: torch.Tensor) -> torch.Tensor:
    return h * h.mean() / (h.std() + 1e-3) + h.norm() * torch.tensor(2.0) * h.exp().max()


def empty(h: torch.Tensor) -> torch.Tensor:
    nothing = h[:0].exp()
    return torch.cat([nothing * nothing, h.exp() * h]) + nothing.sum()


def out_of(h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y, mask = torch.empty_like(h), torch.empty(h.shape, dtype=torch.bool)
        torch.exp(h, out=y)
        torch.gt(h, 0, out=mask)
    return h * y * mask * torch.addcmul(h, y, h, value=0.5)


def detached(h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = h.abs().amax(-1, keepdim=True).exp()
        scale /= 2
    return h / scale * h.detach().sin() + torch.nan_to_num(h / 0.0, 1.0, 2.0, 3.0)


def not_a_number(h: torch.Tensor) -> torch.Tensor:
    y = h * torch.where(torch.arange(N) == 3, math.nan, 1.0)
    z = y * torch.where(torch.arange(N) == 4, -0.0, 1.0)
    return torch.nan_to_num(z.exp() * z)


def set_data(h: torch.Tensor) -> torch.Tensor:
    y = h.exp()
    z = y.detach().clone()
    z.data = h.detach().cos()
    return h * z * z.exp()


FUNCTIONS = [
    add_in_place, write_into_view, fill_buffer, fill_zeros, relu_in_place, masked, views, unfolded, expanded,
    same_twice, as_other_dtype,
    sorting, indexing, attention, foreach, random_of_all_kinds, gumbel, own_generator, scalars, empty,
    out_of, detached, not_a_number,
    set_data,
]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_evicts_everything(twins: Any, function: Any) -> None:
    handle = twins(body(function)).check(lambda model: model(batch()))
    assert handle.kept == {}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_in_a_scope(same: Any, function: Any) -> None:
    model = body(function)
    results = []
    for scoped in (False, True):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        if scoped:
            with lowtide.checkpointing():
                loss = model(batch())
        else:
            loss = model(batch())
        loss.backward()
        results.append([loss.detach(), torch.get_rng_state(), *[p.grad.clone() for p in model.parameters()]])
    assert all(same(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("verify", ["always", "never"])
def test_verify_changes_no_number(twins: Any, verify: str, everything: Any) -> None:
    twins(body(random_of_all_kinds), verify=verify, policy=everything).check(lambda model: model(batch()))


def test_dropout_modules_draw_once(twins: Any) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(N, N), nn.Dropout(0.4), nn.GELU(), nn.Dropout1d(0.3), nn.AlphaDropout(0.2), nn.Linear(N, 1)
    )
    twins(model, loss_fn=torch.sum).check(lambda m: m(batch()).sum())


def test_batch_norm_statistics_move_once(twins: Any) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4, momentum=None), nn.SiLU(),
        nn.Flatten(), nn.LazyLinear(8), nn.BatchNorm1d(8, track_running_stats=False), nn.Sigmoid(),
    )  # fmt: skip
    x = torch.randn(4, 3, 8, 8)
    model(x)
    pair = twins(model, loss_fn=lambda y: y.square().sum())
    pair.check(lambda m: m(x).square().sum())
    assert int(pair.limited[1].num_batches_tracked) == 4


def test_batch_norm_in_evaluation_mode(twins: Any) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(N, N), nn.BatchNorm1d(N), nn.Tanh(), nn.Linear(N, 1)).eval()
    twins(model, loss_fn=torch.sum).check(lambda m: m(batch()).sum())


class Counting(nn.Module):
    """A forward that writes its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(N, N)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("average", torch.ones(N))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x).exp()
        with torch.no_grad():
            self.count += 1
            self.average.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        y = h * self.average.clone() / self.count.clone()
        return (y.sin() * y).sum()


def test_buffers_that_forward_writes_move_once(twins: Any) -> None:
    pair = twins(Counting())
    pair.check(lambda m: m(batch()))
    assert pair.limited.count == 3


def test_power_iteration_of_spectral_norm(twins: Any) -> None:
    torch.manual_seed(1)
    spectral_norm, weight_norm = (
        nn.utils.parametrizations.spectral_norm,
        nn.utils.parametrizations.weight_norm,
    )
    model = nn.Sequential(spectral_norm(nn.Linear(N, N)), nn.Tanh(), weight_norm(nn.Linear(N, 1)))
    twins(model, loss_fn=torch.sum).check(lambda m: m(batch()).sum())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, N)
        self.block = nn.Sequential(nn.LayerNorm(N), nn.Linear(N, 2 * N), nn.GELU(), nn.Linear(2 * N, N))
        self.head = nn.Linear(N, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(
        self,
        tokens: torch.Tensor,
        *,
        labels: torch.Tensor,
        scale: float = 1.0,
        mask: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        h = self.embed(tokens)
        h = h + self.block(h) * scale
        h = h + self.block(h)  # the same weights twice
        if mask is not None:
            h = h * mask["inner"][0]
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def test_tied_weights_and_keyword_arguments(twins: Any) -> None:
    tokens = torch.randint(0, 11, (3, 5))
    mask = {"inner": [torch.rand(3, 5, 1)], "name": "x"}
    twins(Tied()).check(lambda m: m(tokens, labels=tokens.roll(1, 1), scale=0.5, mask=mask))


def test_returns_more_than_the_loss(twins: Any) -> None:
    class Output(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tied = Tied()

        def forward(self, tokens: torch.Tensor) -> dict[str, Any]:
            h = self.tied.block(self.tied.embed(tokens))
            return {
                "loss": self.tied(tokens, labels=tokens),
                "logits": self.tied.head(h),
                "name": "two",
                "nothing": None,
            }

    def run(model: nn.Module) -> torch.Tensor:
        found = model(tokens)
        assert found["name"] == "two" and found["nothing"] is None
        return found["loss"] + found["logits"].square().mean()

    tokens = torch.randint(0, 11, (3, 5))
    twins(Output()).check(run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(twins: Any, dtype: torch.dtype) -> None:
    tokens = torch.randint(0, 11, (3, 5))

    def run(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return model(tokens, labels=tokens)

    twins(Tied()).check(run)


def test_autocast_inside_forward_and_low_precision_copies_of_weights(twins: Any) -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tied = Tied()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                h = self.tied.block(self.tied.embed(tokens))
                with torch.autocast("cpu", enabled=False):
                    h = self.tied.block(h.float())
                h = self.tied.block(h)
            return h.float().square().mean()

    tokens = torch.randint(0, 11, (3, 5))
    handle = twins(Inside()).check(lambda m: m(tokens))
    copies = [
        o for o in handle.graph.operations if o.name == "aten._to_copy.default" and o.phase == "forward"
    ]
    assert copies and any(o.index in handle.plan.replayed for o in copies)


@pytest.mark.parametrize("inside", ["forward", "backward", "both"])
def test_backward_under_another_autocast_than_forward(same: Any, everything: Any, inside: str) -> None:
    tokens, found = torch.randint(0, 11, (3, 5)), []
    torch.manual_seed(0)
    plain = Tied()
    limited = copy.deepcopy(plain)
    lowtide.limit_memory(limited, policy=everything)
    for model in (plain, limited):
        for _ in range(2):
            model.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside != "backward"):
                loss = model(tokens, labels=tokens)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside != "forward"):
                loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert all(map(same, *found))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(twins: Any, dtype: torch.dtype) -> None:
    tokens = torch.randint(0, 11, (3, 5))
    twins(Tied().to(dtype)).check(lambda m: m(tokens, labels=tokens))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent(twins: Any, kind: Any) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = kind(N, N, num_layers=2, batch_first=True, dropout=0.2)
            self.head = nn.Linear(N, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.inner(x)[0].exp()).sum()

    x = torch.randn(2, 5, N)
    twins(Recurrent()).check(lambda m: m(x))


def test_convolutions_and_pooling(twins: Any) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Conv1d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Hardswish(inplace=True), nn.MaxPool1d(2),
        nn.ConvTranspose1d(8, 8, 2, 2),
        nn.PReLU(8), nn.AdaptiveAvgPool1d(4), nn.LeakyReLU(0.1, inplace=True), nn.InstanceNorm1d(8),
        nn.Upsample(scale_factor=2),
        nn.Flatten(),
    )  # fmt: skip
    x = torch.randn(2, 3, 16)
    twins(model, loss_fn=lambda y: y.exp().sum()).check(lambda m: m(x).exp().sum())


def test_multihead_attention_module(twins: Any) -> None:
    torch.manual_seed(2)
    model = nn.TransformerEncoderLayer(N, 2, 32, 0.1, batch_first=True, norm_first=True)
    x = torch.randn(2, 5, N)
    twins(model, loss_fn=lambda y: y.square().sum()).check(lambda m: m(x).square().sum())


def test_inputs_that_want_gradients(same: Any, everything: Any) -> None:
    model = body(same_twice)
    grads = []
    for limited in (False, True):
        if limited:
            lowtide.limit_memory(model, policy=everything)
        x = batch().requires_grad_()
        h = x * 2
        model(h).backward()
        grads.append(x.grad)
    assert same(*grads)


def test_frozen_parameters(twins: Any) -> None:
    model = body(same_twice)
    model.first.requires_grad_(False)
    twins(model).check(lambda m: m(batch()))


def test_vmap_and_functional_transforms_inside(twins: Any) -> None:
    def function(h: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(lambda row: (row.exp() * row).softmax(-1))(h) * h

    twins(body(function)).check(lambda m: m(batch()))
