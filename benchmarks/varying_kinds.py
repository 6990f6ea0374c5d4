"""Models whose steps run other operations each time: recycling passes of which the last ones alone have
gradients, packed documents of other lengths, layers that a coin leaves out, experts that get as many tokens
as a router sends, chunks that attend to all before them.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

WIDTH, LENGTH, ROWS = 64, 96, 2
LARGE = 128, 16  # width and rows: operations take as long as those of real steps


class Attention(nn.Module):
    """Of queries to a sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        keys, values = self.kv(of).chunk(2, -1)
        scores = self.q(x) @ keys.transpose(-1, -2) / keys.shape[-1] ** 0.5
        return self.out(scores.softmax(-1) @ values)


class MLP(nn.Module):
    """Two layers."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and MLP, with a residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width), MLP(width, 4 * width)

    def forward(self, x: torch.Tensor, cuts: tuple[int, ...] = ()) -> torch.Tensor:
        parts = self.first(x).split(list(cuts), 1) if cuts else [self.first(x)]
        x = x + torch.cat([self.attention(part, part) for part in parts], 1)
        return x + self.mlp(self.second(x))


class Net(nn.Module):
    """Blocks; subclasses say how a step goes through them."""

    def __init__(self, width: int = WIDTH, blocks: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks: Any = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, width)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).square().mean()


class Recycling(Net):
    """Passes, of which only the last ones have gradients."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width, 3)

    def forward(self, x: torch.Tensor, how: tuple[int, int]) -> torch.Tensor:
        passes, with_gradients = how
        state = torch.zeros_like(x)
        for number in range(passes):
            with torch.set_grad_enabled(number >= passes - with_gradients):
                state = x + state
                for block in self.blocks:
                    state = block(state)
        return self.loss(state)

    @staticmethod
    def draw(by: random.Random) -> tuple[int, int]:
        passes = by.randint(1, 4)
        return passes, by.randint(1, min(3, passes))


class Packed(Net):
    """Documents in one sequence, whose lengths the step reads from a tensor."""

    def forward(self, x: torch.Tensor, how: torch.Tensor) -> torch.Tensor:
        cuts = tuple(length for length in how.tolist() if length)
        for block in self.blocks:
            x = block(x, cuts)
        return self.loss(x)

    @staticmethod
    def draw(by: random.Random) -> torch.Tensor:
        ends = sorted(by.sample(range(8, LENGTH - 8), by.randint(0, 5)))
        lengths = [b - a for a, b in zip([0, *ends], [*ends, LENGTH], strict=True)]
        return torch.tensor(lengths + [0] * (6 - len(lengths)))


class Dropped(Net):
    """Layers that are left out at random."""

    def forward(self, x: torch.Tensor, how: list[bool]) -> torch.Tensor:
        for block, stays in zip(self.blocks, how, strict=True):
            x = block(x) if stays else x
        return self.loss(x)

    @staticmethod
    def draw(by: random.Random) -> Any:
        return Coins([by.random() < 0.7 for _ in range(6)])


class Coins(list[bool]):
    """What the coins said; a Python object that shows no key what is in it."""


class Routed(Net):
    """Experts in place of the MLP; the router sends each token to one."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width, 4)
        for block in self.blocks:
            block.mlp = nn.ModuleList(MLP(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor, how: torch.Tensor) -> torch.Tensor:
        how = how.repeat(len(x) // len(how), 1)
        for block in self.blocks:
            normed = block.first(x)
            x = x + block.attention(normed, normed)
            flat, out = block.second(x).flatten(0, 1), torch.zeros_like(x).flatten(0, 1)
            for number, expert in enumerate(block.mlp):
                rows = (how.flatten() == number).nonzero().flatten()
                if len(rows):
                    out = out.index_add(0, rows, expert(flat[rows]))
            x = x + out.view_as(x)
        return self.loss(x)

    @staticmethod
    def draw(by: random.Random) -> torch.Tensor:
        weights = torch.tensor([by.random() ** 3 for _ in range(4)]) + 1e-3
        generator = torch.Generator().manual_seed(by.randrange(1 << 30))
        return torch.multinomial(weights, ROWS * LENGTH, replacement=True, generator=generator).view(
            ROWS, LENGTH
        )


class Cached(Net):
    """Chunks one after the other, each of which attends to all that came before."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width, 3)

    def forward(self, x: torch.Tensor, how: torch.Tensor) -> torch.Tensor:
        caches: list[list[torch.Tensor]] = [[] for _ in self.blocks]
        outs = []
        for chunk in x.chunk(int(how.item()), 1):
            for block, cache in zip(self.blocks, caches, strict=True):
                normed = block.first(chunk)
                cache.append(normed)
                chunk = chunk + block.attention(normed, torch.cat(cache, 1))
                chunk = chunk + block.mlp(block.second(chunk))
            outs.append(chunk)
        return self.loss(torch.cat(outs, 1))

    @staticmethod
    def draw(by: random.Random) -> torch.Tensor:
        return torch.tensor(by.choice([1, 2, 3, 4, 6]))


KINDS: dict[str, Any] = {
    "recycling": Recycling, "packed": Packed, "dropped": Dropped, "routed": Routed, "cached": Cached,
}  # fmt: skip


def batch_of(seed: int, width: int = WIDTH, rows: int = ROWS) -> torch.Tensor:
    """A batch of random rows."""
    return torch.randn(rows, LENGTH, width, generator=torch.Generator().manual_seed(seed))


def draws_of(kind: Any, steps: int, seed: int = 1) -> list[Any]:
    """How each of the steps goes."""
    by = random.Random(seed)
    return [kind.draw(by) for _ in range(steps)]


def run(model: nn.Module, x: torch.Tensor, how: Any) -> list[torch.Tensor | None]:
    """One step; its gradients."""
    model.zero_grad(set_to_none=True)
    model(x, how).backward()
    return [parameter.grad for parameter in model.parameters()]


def same(a: list[torch.Tensor | None], b: list[torch.Tensor | None]) -> bool:
    """Whether all gradients are equal bit by bit."""
    return all(
        x is y is None or (x is not None and y is not None and torch.equal(x, y))
        for x, y in zip(a, b, strict=True)
    )
