"""What a model is made of: parametrizations, norms, recurrent nets, routing, shared and sparse weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import Limit
from loops import STEPS, Patterns, data, loop, mlp, sgd
from torch import nn
from torch.nn.utils import parametrizations, parametrize, rnn

PATTERNS = Patterns()


@PATTERNS.add
def weight_norm(limit: Limit) -> Iterator[Any]:
    model = mlp()
    for at in (0, 2, 4):
        parametrizations.weight_norm(model[at])
    yield from loop(limit(model))


@PATTERNS.add
def spectral_norm(limit: Limit) -> Iterator[Any]:
    model = mlp()
    parametrizations.spectral_norm(model[2])
    yield from loop(limit(model))


@PATTERNS.add
def old_spectral_and_weight_norm(limit: Limit) -> Iterator[Any]:
    model = mlp()
    nn.utils.spectral_norm(model[0])
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(model[2])
    yield from loop(limit(model))


@PATTERNS.add
def orthogonal_parametrization(limit: Limit) -> Iterator[Any]:
    model = mlp()
    parametrizations.orthogonal(model[2])
    yield from loop(limit(model))


@PATTERNS.add
def own_parametrization_cached(limit: Limit) -> Iterator[Any]:
    class Symmetric(nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return w.triu() + w.triu(1).t()

    model = mlp()
    parametrize.register_parametrization(model[2], "weight", Symmetric())
    limit(model)
    optimizer = sgd(model)
    for number in range(STEPS):
        optimizer.zero_grad()
        with parametrize.cached():
            loss = (model(data(number)) + model(data(number + 50))).square().mean()
            loss.backward()
        yield model, loss
        optimizer.step()


@PATTERNS.add
def frozen_batch_norm(limit: Limit) -> Iterator[Any]:
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    model[1].eval().requires_grad_(False)
    yield from loop(limit(model))


@PATTERNS.add
def low_rank_adapters(limit: Limit) -> Iterator[Any]:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down, self.up = (
                nn.Linear(base.in_features, 2, bias=False),
                nn.Linear(2, base.out_features, bias=False),
            )
            self.drop = nn.Dropout(0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.up(self.down(self.drop(x))) * 2.0

    model = mlp()
    for at in (0, 2, 4):
        model[at] = Adapted(model[at])
    yield from loop(limit(model))


@PATTERNS.add
def tied_weights(limit: Limit) -> Iterator[Any]:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body, self.head = (
                nn.Embedding(50, 32),
                nn.Linear(32, 32),
                nn.Linear(32, 50, bias=False),
            )
            self.head.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(
                self.head(self.body(self.embed(tokens)).relu()).flatten(0, 1), tokens.flatten()
            )

    model = limit(Tied())
    optimizer = sgd(model)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randint(50, (8, 16), generator=torch.Generator().manual_seed(number)))
        loss.backward()
        yield model, loss
        optimizer.step()


@PATTERNS.add
def dropout_in_nested_modules(limit: Limit) -> Iterator[Any]:
    def nest(depth: int) -> nn.Module:
        inner = nest(depth - 1) if depth else nn.Identity()
        return nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), inner, nn.AlphaDropout(0.1), nn.RReLU())

    yield from loop(limit(nest(3)))


class Recurrent(nn.Module):
    """A recurrent net over padded sequences, packed."""

    def __init__(self, kind: type[nn.RNNBase], packed: bool) -> None:
        super().__init__()
        self.cell = kind(
            16, 24, num_layers=1 + packed, batch_first=True, dropout=0.1 * packed, bidirectional=False
        )
        self.head, self.packed = nn.Linear(24, 4), packed

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        if not self.packed:
            return self.head(self.cell(x)[0]).square().mean()
        sequence = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, _ = rnn.pad_packed_sequence(self.cell(sequence)[0], batch_first=True)
        return self.head(output).square().mean()


def _recurrent(limit: Limit, kind: type[nn.RNNBase], packed: bool) -> Iterator[Any]:
    model = limit(Recurrent(kind, packed))
    optimizer = sgd(model)
    for number in range(STEPS):
        optimizer.zero_grad()
        x = data(number, rows=8 * 4).view(8, 4, 16).requires_grad_()
        loss = model(x, torch.tensor([4, 3, 2, 4, 2, 1, 4, 3]))
        loss.backward()
        yield model, loss, x.grad
        optimizer.step()


@PATTERNS.add
def rnn_plain(limit: Limit) -> Iterator[Any]:
    yield from _recurrent(limit, nn.RNN, packed=False)


@PATTERNS.add
def gru_plain(limit: Limit) -> Iterator[Any]:
    yield from _recurrent(limit, nn.GRU, packed=False)


@PATTERNS.add
def lstm_packed(limit: Limit) -> Iterator[Any]:
    yield from _recurrent(limit, nn.LSTM, packed=True)


@PATTERNS.add
def lstm_cell_with_truncated_backward(limit: Limit) -> Iterator[Any]:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.LSTMCell(16, 24), nn.Linear(24, 4)

        def forward(self, x: torch.Tensor, state: Any) -> Any:
            total = x.new_zeros(())
            for row in x.unbind(1):
                state = self.cell(row, state)
                total = total + self.head(state[0]).square().mean()
            return total, state

    model, state = limit(Cell()), None
    optimizer = sgd(model)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss, state = model(data(number, rows=48).view(16, 3, 16), state)
        loss.backward()
        state = tuple(part.detach() for part in state)
        yield model, loss, state
        optimizer.step()


@PATTERNS.add
def ctc_loss(limit: Limit) -> Iterator[Any]:
    class Speech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(outputs=6)

        def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            scores = self.net(x).log_softmax(-1)
            return F.ctc_loss(scores, targets, torch.full((4,), 20), torch.full((4,), 5))

    model = limit(Speech())
    optimizer = sgd(model)
    for number in range(STEPS):
        optimizer.zero_grad()
        x = data(number, rows=80).view(20, 4, 16).requires_grad_()
        loss = model(x, torch.randint(1, 6, (4, 5), generator=torch.Generator().manual_seed(number)))
        loss.backward()
        yield model, loss, x.grad
        optimizer.step()


@PATTERNS.add
def in_place_activations(limit: Limit) -> Iterator[Any]:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.norm, self.two = (
                nn.Conv1d(4, 8, 3),
                nn.BatchNorm1d(8),
                nn.Conv1d(8, 8, 3, padding=1),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = F.relu_(self.norm(self.one(x.view(-1, 4, 4).repeat(1, 1, 4))))
            h = h + self.two(h)
            h += 1
            h[:, 0].mul_(2)
            return F.leaky_relu_(h, 0.1)

    yield from loop(limit(InPlace()))


@PATTERNS.add
def batch_norm_statistics(limit: Limit) -> Iterator[Any]:
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8, momentum=None),
        nn.ReLU(True),
        nn.Conv2d(8, 4, 2),
        nn.BatchNorm2d(4),
    )
    yield from loop(limit(nn.Sequential(nn.Unflatten(1, (1, 4, 4)), *net)))


@PATTERNS.add
def own_generator(limit: Limit) -> Iterator[Any]:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.generator = mlp(), torch.Generator().manual_seed(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            noise = torch.randn(x.shape, generator=self.generator)
            return self.body(x * (1 + 0.1 * noise)) * torch.rand(4)

    yield from loop(limit(Noisy()))


@PATTERNS.add
def early_stop(limit: Limit) -> Iterator[Any]:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.depth = nn.ModuleList(nn.Linear(16, 16) for _ in range(5)), 5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks[: self.depth]:
                x = x + block(x).tanh()
            return x

    model = limit(Deep())
    for depth, things in zip((5, 3, 4), loop(model), strict=False):
        yield things
        model.depth = depth - 1


@PATTERNS.add
def stochastic_depth(limit: Limit) -> Iterator[Any]:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                if torch.rand(()) < 0.7:
                    x = x + block(x).relu()
            return x * self.blocks[0].weight.sum()

    yield from loop(limit(Drops()))


@PATTERNS.add
def routing_by_data(limit: Limit) -> Iterator[Any]:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(16, 4), nn.ModuleList(mlp(outputs=16) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight, chosen = self.gate(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for at, expert in enumerate(self.experts):
                rows = torch.nonzero(chosen == at).flatten()
                if len(rows):
                    out.index_add_(0, rows, expert(x[rows]) * weight[rows, None])
            return out

    yield from loop(limit(Experts()))


@PATTERNS.add
def attention_with_masks(limit: Limit) -> Iterator[Any]:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.1)
            self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(16), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.view(8, 16, 16), src_mask=self.mask, is_causal=True)

    yield from loop(limit(Attends()))


@PATTERNS.add
def buffers_replaced_in_forward(limit: Limit) -> Iterator[Any]:
    class Centers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(outputs=8)
            self.register_buffer("center", torch.zeros(8))
            self.register_buffer("count", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.body(x)
            if self.training:
                self.center = 0.9 * self.center + 0.1 * h.detach().mean(0)
                self.count += 1
            return h - self.center

    yield from loop(limit(Centers()))


@PATTERNS.add
def sparse_embedding_gradients(limit: Limit) -> Iterator[Any]:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.bag, self.head = (
                nn.Embedding(40, 8, sparse=True),
                nn.EmbeddingBag(40, 8, mode="sum", sparse=True),
                nn.Linear(16, 4),
            )

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return (
                self.head(torch.cat([self.embed(tokens).mean(1), self.bag(tokens)], 1).tanh()).square().mean()
            )

    model = limit(Bags())
    optimizer = sgd(model)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randint(40, (16, 8), generator=torch.Generator().manual_seed(number)))
        loss.backward()
        yield loss, [p.grad.to_dense() for p in model.parameters()]
        optimizer.step()


@PATTERNS.add
def channels_last_and_resampling(limit: Limit) -> Iterator[Any]:
    net = nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 8, 3, padding=1), nn.SiLU(),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.MaxPool2d(2),
        nn.ConvTranspose2d(8, 2, 2, stride=2),
    )  # fmt: skip
    yield from loop(limit(net.to(memory_format=torch.channels_last)))


@PATTERNS.add
def complex_numbers(limit: Limit) -> Iterator[Any]:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.head = nn.Parameter(torch.randn(9, dtype=torch.cfloat)), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=16).relu())

    yield from loop(limit(Spectral()))
