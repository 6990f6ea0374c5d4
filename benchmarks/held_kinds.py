"""Training programs whose steps differ from one to the next, for `benchmarks.held`.

A program has one model or two, their optimizers, and what it keeps between steps. Its decisions come from the
number of the step alone: two programs of one kind do the same, and so do two ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.varying_kinds import LENGTH, MLP, WIDTH, Block, Net, Recycling

ROWS = 3
LATE_FROM = 20
"""The step at which the second loss of `LateLoss` begins."""


class Program:
    """One kind of training.

    Args:
        rank: of this process; ranks have other batches.
        share: what spreads a model over ranks.

    Attributes:
        models: those that are limited.
        optimizers: one for each model.
    """

    blocks: ClassVar[int] = 4

    def __init__(self, rank: int = 0, share: Callable[[nn.Module], None] | None = None) -> None:
        self.rank = rank
        self.models = tuple(self.build())
        if share is not None:
            for model in self.models:
                share(model)
        self.optimizers = [self.optimizer(model) for model in self.models]

    @property
    def model(self) -> Any:
        """The first model."""
        return self.models[0]

    def build(self) -> Sequence[nn.Module]:
        """Make the models."""
        return [Plain(blocks=self.blocks)]

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Make the optimizer of a model."""
        return torch.optim.SGD(model.parameters(), lr=1e-3)

    def parts(self, number: int) -> tuple[nn.Module, ...]:
        """The models that take part in a step."""
        return self.models

    def inputs(self, number: int, by: random.Random) -> tuple[Any, ...]:
        """What a step is given: tensors, and what the program has decided."""
        return (self.batch(number),)

    def step(self, *inputs: Any) -> list[Tensor]:
        """One forward and backward; returns what is compared beside gradients."""
        loss = self.model(*inputs)
        loss.backward()
        return [loss.detach()]

    def between(self, number: int) -> None:
        """What the program does after a step: update parameters, clear gradients."""
        self.update()

    def update(self) -> None:
        """Step the optimizers and clear gradients."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def batch(self, seed: int, length: int = LENGTH, rows: int = ROWS) -> Tensor:
        """A batch of random numbers."""
        generator = torch.Generator().manual_seed(10 * seed + self.rank)
        return torch.randn(rows, length, WIDTH, generator=generator)


class Plain(Net):
    """Blocks in turn, and a loss."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.loss(x)


class Features(Net):
    """Blocks in turn, without a loss."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class RecyclingPasses(Program):
    """A random number of passes through three blocks; the last ones alone have gradients (AlphaFold)."""

    def build(self) -> Sequence[nn.Module]:
        return [Recycling()]

    def inputs(self, number: int, by: random.Random) -> tuple[Any, ...]:
        return self.batch(number), Recycling.draw(by)


class Documents(Net):
    """Attention within each of the documents that a row holds; lengths come as a list or as a tensor."""

    def forward(self, x: Tensor, lengths: list[int] | Tensor) -> Tensor:
        cuts = lengths if isinstance(lengths, list) else lengths.tolist()
        cuts = tuple(length for length in cuts if length)
        for block in self.blocks:
            x = block(x, cuts)
        return self.loss(x)


class PackedList(Program):
    """Packed rows; the number and the lengths of documents are a list of Python."""

    def build(self) -> Sequence[nn.Module]:
        return [Documents(blocks=self.blocks)]

    def inputs(self, number: int, by: random.Random) -> tuple[Any, ...]:
        ends = sorted(by.sample(range(8, LENGTH - 8), by.randint(0, 5)))
        return self.batch(number), [b - a for a, b in zip([0, *ends], [*ends, LENGTH], strict=True)]


class PackedTensor(PackedList):
    """Packed rows; the forward reads the lengths from a tensor of a fixed size."""

    def inputs(self, number: int, by: random.Random) -> tuple[Any, ...]:
        x, lengths = super().inputs(number, by)
        return x, torch.tensor(lengths + [0] * (6 - len(lengths)))


class Dropping(Net):
    """Each block is left out by chance (LayerDrop), as a random number of PyTorch says within the forward."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand(()).item() < 0.7:
                x = block(x)
        return self.loss(x)


class DroppedLayers(Program):
    """Layers are dropped by chance."""

    blocks = 6

    def build(self) -> Sequence[nn.Module]:
        return [Dropping(blocks=self.blocks)]


class MixtureBlock(Block):
    """A block with four experts in place of the MLP, in a loop; a router sends each token to one.

    Args:
        every: whether an expert without tokens runs nevertheless, as FSDP demands where ranks differ.
    """

    def __init__(self, width: int, every: bool) -> None:
        super().__init__(width)
        self.every = every
        self.mlp = nn.ModuleList(MLP(width, 2 * width) for _ in range(4))
        self.router = nn.Linear(width, 4)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:  # pyright: ignore
        normed = self.first(x)
        x = x + self.attention(normed, normed)
        tokens = self.second(x).flatten(0, 1)
        shares = self.router(tokens).softmax(-1)
        chosen, out = (shares + bias).argmax(-1), torch.zeros_like(tokens)
        for number, expert in enumerate(self.mlp):
            rows = (chosen == number).nonzero().flatten()
            if self.every or len(rows):
                out = out.index_add(0, rows, expert(tokens[rows]) * shares[rows, number, None])
        return x + out.view_as(x)


class Routed(Net):
    """Mixtures of experts in turn, and a loss."""

    def __init__(self, blocks: int, every: bool) -> None:
        super().__init__(blocks=0)
        self.blocks = nn.ModuleList(MixtureBlock(WIDTH, every) for _ in range(blocks))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, bias)
        return self.loss(x)


class Experts(Program):
    """Experts in a loop, with a bias on the router that differs from step to step."""

    blocks = 3

    def build(self) -> Sequence[nn.Module]:
        sharded = torch.distributed.is_available() and torch.distributed.is_initialized()
        return [Routed(self.blocks, every=sharded)]

    def inputs(self, number: int, by: random.Random) -> tuple[Any, ...]:
        return self.batch(number), torch.tensor([0.5 * by.random() ** 3 for _ in range(4)])


class Growing(Net):
    """Each chunk attends to what earlier steps have left in a cache, and leaves its own there."""

    def forward(self, x: Tensor, cache: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        grown = []
        for block, before in zip(self.blocks, cache, strict=True):
            normed = block.first(x)
            seen = torch.cat([before, normed], 1)
            grown.append(seen.detach())
            x = x + block.attention(normed, seen)
            x = x + block.mlp(block.second(x))
        return self.loss(x), grown


class GrowingCache(Program):
    """Truncated backpropagation through time with a cache that grows, and begins anew by chance."""

    most = 4 * LENGTH

    def build(self) -> Sequence[nn.Module]:
        self.cache: list[Tensor] = []
        return [Growing(blocks=self.blocks)]

    def inputs(self, number: int, by: random.Random) -> tuple[Any, ...]:
        long = bool(self.cache) and self.cache[0].shape[1] >= self.most
        if not self.cache or long or by.random() < 0.15:
            self.cache = [torch.zeros(ROWS, 0, WIDTH) for _ in range(self.blocks)]
        return self.batch(number), self.cache

    def step(self, *inputs: Any) -> list[Tensor]:
        loss, self.cache = self.model(*inputs)
        loss.backward()
        return [loss.detach()]


class OtherLengths(Program):
    """Another length in each step."""

    def inputs(self, number: int, by: random.Random) -> tuple[Any, ...]:
        return (self.batch(number, by.randint(24, 128)),)


class TwoForwards(Program):
    """Two forwards before one backward."""

    forwards: ClassVar[int] = 2
    blocks = 3

    def inputs(self, number: int, by: random.Random) -> tuple[Any, ...]:
        return tuple(self.batch(1000 * at + number) for at in range(self.forwards))

    def step(self, *inputs: Any) -> list[Tensor]:
        loss = torch.stack([self.model(x) for x in inputs]).sum()
        loss.backward()
        return [loss.detach()]


class ThreeForwards(TwoForwards):
    """Three forwards before one backward."""

    forwards = 3


class GradientPenalty(Program):
    """A penalty on the gradient by the input: ``create_graph=True`` in every step."""

    blocks = 3

    def inputs(self, number: int, by: random.Random) -> tuple[Any, ...]:
        return (self.batch(number).requires_grad_(),)

    def step(self, *inputs: Any) -> list[Tensor]:
        (x,) = inputs
        loss = self.model(x)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        total = loss + 0.1 * (slope.flatten(1).norm(dim=1) - 1).square().mean()
        total.backward()
        return [total.detach(), *([] if x.grad is None else [x.grad])]


class Sophia(Program):
    """Every fifth step estimates the Hessian's diagonal (Hutchinson) in place of training."""

    blocks, every = 3, 5

    def inputs(self, number: int, by: random.Random) -> tuple[Any, ...]:
        return self.batch(number), number % self.every == self.every - 1

    def step(self, *inputs: Any) -> list[Tensor]:
        x, estimates = inputs
        loss = self.model(x)
        if not estimates:
            loss.backward()
            return [loss.detach()]
        parameters = list(self.model.parameters())
        slopes = torch.autograd.grad(loss, parameters, create_graph=True)
        signs = [torch.randn_like(one) for one in slopes]
        dot = torch.stack([(a * b).sum() for a, b in zip(slopes, signs, strict=True)]).sum()
        curved = torch.autograd.grad(dot, parameters)
        return [loss.detach(), *(a * b for a, b in zip(curved, signs, strict=True))]


class Splats(nn.Module):
    """Gaussians in a plane, drawn at points of six views."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.means = nn.Parameter(torch.rand(count, 2))
        self.scales = nn.Parameter(torch.full((count,), -2.0))
        self.opacities = nn.Parameter(torch.zeros(count))
        self.colours = nn.Parameter(torch.rand(count, 64))  # as many as spherical harmonics have, about
        self.shade = nn.Linear(64, 3)

    def forward(self, points: Tensor, target: Tensor) -> Tensor:
        losses = []
        for at, colour in zip(points, target, strict=True):
            distances = (at[:, None] - self.means).square().sum(-1)
            weights = torch.exp(-distances * torch.exp(-2 * self.scales)) * torch.sigmoid(self.opacities)
            drawn = weights @ self.colours / (weights.sum(-1, keepdim=True) + 1e-3)
            losses.append((self.shade(drawn) - colour).square().mean())
        return torch.stack(losses).mean()


class DensifyAndPrune(Program):
    """Every tenth step other parameters take the place of all: more where gradients are large, or fewer where
    opacity is low, with the optimizer's state (Gaussian splatting).
    """

    views, points, least, most, every = 6, 16, 800, 2700, 10

    def build(self) -> Sequence[nn.Module]:
        return [Splats(self.least)]

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam([{"params": [one]} for one in model.parameters()], lr=1e-3)

    def inputs(self, number: int, by: random.Random) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(number)
        points = torch.rand(self.views, self.points, 2, generator=generator)
        return points, torch.rand(self.views, self.points, 3, generator=generator)

    def between(self, number: int) -> None:
        means = self.model.means
        slopes = means.grad.norm(dim=1)
        self.update()
        if number % self.every < self.every - 1:
            return
        count = len(means)
        if count < self.most:
            more = slopes.topk(min(count // 2, self.most - count)).indices
            self.replace(torch.cat([torch.arange(count), more]))
        else:
            self.replace(self.model.opacities.detach().topk(self.least).indices.sort().values)

    def replace(self, rows: Tensor) -> None:
        """Put parameters of these rows in place of those that are there."""
        optimizer = self.optimizers[0]
        for group, (name, old) in zip(
            optimizer.param_groups, list(self.model.named_parameters()), strict=True
        ):
            if "." in name:
                continue  # is not of the splats
            new = nn.Parameter(old.detach()[rows])
            state = optimizer.state.pop(old, {})
            optimizer.state[new] = {key: one[rows] if one.dim() else one for key, one in state.items()}
            group["params"] = [new]
            setattr(self.model, name, new)


class RetainedGraph(Program):
    """Two backwards through one forward: ``retain_graph=True`` in the first."""

    def build(self) -> Sequence[nn.Module]:
        return [Features(blocks=self.blocks)]

    def step(self, *inputs: Any) -> list[Tensor]:
        features = self.model(*inputs)
        first, second = features.square().mean(), features.abs().mean()
        first.backward(retain_graph=True)
        second.backward()
        return [first.detach(), second.detach()]


class TwoLosses(Net):
    """A loss after the first half of the blocks, and another one after a branch of the others."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        half = len(self.blocks) // 2
        for block in self.blocks[:half]:
            x = block(x)
        branch = x
        for block in self.blocks[half:]:
            branch = block(branch)
        return self.loss(x), self.head(branch).abs().mean()


class LateLoss(Program):
    """A second loss begins late, and reaches a branch of the forward that no backward has reached before."""

    blocks = 6

    def build(self) -> Sequence[nn.Module]:
        return [TwoLosses(blocks=self.blocks)]

    def inputs(self, number: int, by: random.Random) -> tuple[Any, ...]:
        return self.batch(number), number >= LATE_FROM

    def step(self, *inputs: Any) -> list[Tensor]:
        x, both = inputs
        first, second = self.model(x)
        loss = first + second if both else first
        loss.backward()
        return [first.detach(), second.detach()]


class Accumulation(Program):
    """Four micro-steps an update; gradients are cleared after the optimizer's step, and else stand."""

    micro_steps: ClassVar[int] = 4

    def between(self, number: int) -> None:
        if number % self.micro_steps == self.micro_steps - 1:
            self.update()


class ClearedAfterForward(Accumulation):
    """The same, but gradients of the update before stand until the next forward has ended."""

    def inputs(self, number: int, by: random.Random) -> tuple[Any, ...]:
        return self.batch(number), number % self.micro_steps == 0

    def step(self, *inputs: Any) -> list[Tensor]:
        x, clears = inputs
        loss = self.model(x)
        if clears:
            self.optimizers[0].zero_grad(set_to_none=True)
        loss.backward()
        return [loss.detach()]

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


class TwoModels(Program):
    """A generator and a discriminator, each with its limit: a step of the discriminator alone, then one
    through both.
    """

    blocks = 3

    def build(self) -> Sequence[nn.Module]:
        return [Features(blocks=self.blocks), Features(blocks=self.blocks)]

    def parts(self, number: int) -> tuple[nn.Module, ...]:
        return self.models if number % 2 else self.models[1:]

    def inputs(self, number: int, by: random.Random) -> tuple[Any, ...]:
        if number % 2:
            return (self.batch(number),)
        with torch.no_grad():
            return self.batch(1000 + number), self.models[0](self.batch(number))

    def step(self, *inputs: Any) -> list[Tensor]:
        generator, judge = self.models
        if len(inputs) == 1:
            loss = nn.functional.softplus(-judge(generator(inputs[0]))).mean()
        else:
            real, made = inputs
            loss = nn.functional.softplus(-judge(real)).mean() + nn.functional.softplus(judge(made)).mean()
        loss.backward()
        return [loss.detach()]

    def between(self, number: int) -> None:
        self.optimizers[0 if number % 2 else 1].step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)


KINDS: dict[str, type[Program]] = {
    "recycling": RecyclingPasses,
    "packed_list": PackedList,
    "packed_tensor": PackedTensor,
    "dropped": DroppedLayers,
    "experts": Experts,
    "cache": GrowingCache,
    "lengths": OtherLengths,
    "two_forwards": TwoForwards,
    "three_forwards": ThreeForwards,
    "penalty": GradientPenalty,
    "sophia": Sophia,
    "densify": DensifyAndPrune,
    "retained": RetainedGraph,
    "late_loss": LateLoss,
    "accumulation": Accumulation,
    "cleared_late": ClearedAfterForward,
    "two_models": TwoModels,
}

SHARDED = tuple(KINDS)[:5]
"""The kinds that run on two ranks, too."""
