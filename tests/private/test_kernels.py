"""Inductor's kernels without their text take the memory of those with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch._inductor import config as inductor_config
from torch._inductor.graph import GraphLowering

from lowtide.models import build_model
from lowtide.models.presets import ModelConfig
from lowtide.private import inductor, kernels, partitioning

Halves = tuple[fx.GraphModule, fx.GraphModule]


class Caught(Exception):
    """Ends a compilation: what is compared was seen."""


class Catch(inductor.CustomPartitionerFn):
    """Shows a joint graph to a test and compiles nothing."""

    def __init__(self, seen: Callable[..., None]) -> None:
        self.seen = seen

    def __call__(self, gm: Any, joint_inputs: Any, *, num_fwd_outputs: int, **more: Any) -> Halves:
        partitioning.clean_joint(gm)
        self.seen(gm, num_fwd_outputs, tuple(more["static_lifetime_input_indices"] or ()))
        raise Caught

    def uuid(self) -> None:
        return None


def language(
    family: Literal["gpt", "llama"], *, layers: int = 2, dropout: float = 0.0, fused: bool = True
) -> tuple[nn.Module, tuple[Any, ...]]:
    config = ModelConfig(
        family=family, layers=layers, width=64, heads=4, key_value_heads=2 if family == "llama" else 4,
        hidden_width=128, vocabulary=96, positions=32, dropout=dropout, fused_attention=fused,
    )  # fmt: skip
    tokens = torch.randint(96, (2, 32))
    return build_model(config).train(), (tokens, tokens)


class Residual(nn.Module):
    """ResNet's block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(x + self.layers(x), inplace=True).mean()


class Encoder(nn.Module):
    """BERT's kind: attention that is written out, post-norm, dropout."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, activation="gelu") for _ in range(2)]
        self.layers = nn.Sequential(nn.Linear(16, 64), *layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


class Transposed(nn.Module):
    """Softmax between transpositions: loops that vectors split in different places."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x.transpose(1, 2) * 2, -1)
        return (y.transpose(1, 2).exp() + torch.softmax(x, 1)).sum()


CASES: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "gpt": lambda: language("gpt", layers=1, dropout=0.1),
    "gpt, attention written out": lambda: language("gpt", dropout=0.1, fused=False),
    "llama": lambda: language("llama"),
    "half precision": lambda: (Encoder().bfloat16(), (torch.randn(8, 4, 16, dtype=torch.bfloat16),)),
    "resnet": lambda: (Residual().train(), (torch.randn(2, 16, 12, 12),)),
    "bert": lambda: (Encoder().train(), (torch.randn(8, 4, 16),)),
    "transposed": lambda: (Transposed(), (torch.randn(4, 24, 40, requires_grad=True),)),
}


def calls_and_memory(text: str) -> list[str]:
    """What the function ``call`` does, kernels by what they are given."""
    body = text[text.index("def call(") :]
    body = body[: body.index("\n        return (")]
    found: list[str] = []
    for line in map(str.strip, body.splitlines()):
        kernel = re.fullmatch(r"(?:cpp_fused\w*|kernel)\((.*)\)", line)
        if kernel:
            found.append("kernel " + " ".join(sorted(kernel[1].split(", "))))
        elif line and not line.startswith(("#", "//", "assert_", "'''", '"""')):
            found.append(re.sub(r"\s*#.*", "", line))
    return found


def compare(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int, dynamic: bool) -> int:
    """Both halves, with and without text; how many calls of kernels there are."""
    donated = inductor.donated_inputs(forward, backward, outputs)
    options = {"allow_buffer_reuse": dynamic}

    def lowered() -> tuple[str, str, inductor.Strides]:
        first, strides = inductor.generated(forward, False, options)
        return first, inductor.generated(backward, True, options, strides, donated)[0], strides

    if dynamic:
        lowered()  # the first one settles sizes that a convolution's layout asks for
    with mock.patch.object(kernels, "Lowering", GraphLowering):
        *written, strides = lowered()
    *unwritten, same = lowered()
    assert same == strides
    assert "cpp_pybinding" in "".join(written) and "cpp_pybinding" not in "".join(unwritten)
    found = list(map(calls_and_memory, unwritten))
    assert found == list(map(calls_and_memory, written))
    return sum(line.startswith("kernel ") for line in found[1])


LONG = ("llama", "bert", "gpt, attention written out", "half precision")
"""Left to the slow tests: what they have is in the others, too."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in CASES]
)
def test_the_same_buffers_are_allocated_reused_and_freed(name: str) -> None:
    check(name, dynamic=False)


@pytest.mark.parametrize("name", ["resnet", pytest.param("bert", marks=pytest.mark.slow), "transposed"])
def test_so_are_those_of_open_sizes(name: str) -> None:
    check(name, dynamic=True)


def check(name: str, dynamic: bool) -> None:
    """Compare the cut that recomputes everything; of fixed sizes the plain one, too."""
    compared: list[int] = []

    def seen(gm: fx.GraphModule, outputs: int, static: tuple[int, ...]) -> None:
        primals = [node for node in gm.graph.nodes if partitioning.is_primal(node)]
        symbols = list(filter(partitioning.is_symbol, primals))
        inputs = [node for node in primals if node not in symbols]
        first, second = partitioning.extract(gm, inputs, symbols, outputs, static)
        least = partitioning.finish(first, False), partitioning.finish(second, True)
        for forward, backward in (least,) if dynamic else (partitioning.min_cut(gm, outputs, static), least):
            compared.append(compare(forward, backward, outputs, dynamic))

    torch._dynamo.reset()
    model, inputs = CASES[name]()
    compiled = torch.compile(model, dynamic=dynamic, options={"custom_partitioner_fn": Catch(seen)})
    with inductor_config.patch(inductor.UNCACHED), pytest.raises(Exception) as caught:
        compiled(*inputs)
    assert "Caught" in str(caught.value), caught.value
    assert len(compared) == (1 if dynamic else 2) and all(compared)
