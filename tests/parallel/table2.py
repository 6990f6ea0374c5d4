"""Table 2 of arXiv 2205.05198: bytes of activations that a transformer layer keeps for backward, per rank,
and how they are measured here.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from recomputed import Recomputed
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.models.gpt import Block
from lowtide.models.presets import ModelConfig
from lowtide.models.shared import Sharing
from lowtide.trace.fake import FakeTracer

# Table 3: heads, width, micro-batch size; the sequence is 2048 in all of them.
MODELS = {"22B": (64, 6144, 4), "175B": (96, 12288, 1), "530B": (128, 20480, 1), "1T": (160, 25600, 1)}
SEQUENCE = 2048
STATISTICS = 2  # norms a layer, each of which keeps a mean and a reciprocal standard deviation of every token


@dataclass(frozen=True)
class Row:
    """One row: its formula in units of s*b*h bytes, and how the layer runs.

    Attributes:
        name: as the paper prints it.
        formula: from t and 5as/h to bytes over s*b*h.
        sequence_parallel: whether the layer is.
        recompute: nothing, the attention's core ("selective"), or the layer.
        one_rank: the row is for one rank only.
    """

    name: str
    formula: Callable[[int, float], float]
    sequence_parallel: bool = False
    recompute: str = ""
    one_rank: bool = False


ROWS = [
    Row("no parallelism", lambda t, core: 34 + core, one_rank=True),
    Row("tensor parallel (baseline)", lambda t, core: 10 + 24 / t + core / t),
    Row("tensor + sequence parallel", lambda t, core: 34 / t + core / t, sequence_parallel=True),
    Row("tensor parallel + selective recompute", lambda t, core: 10 + 24 / t, recompute="selective"),
    Row(
        "tensor + sequence parallel + selective recompute",
        lambda t, core: 34 / t,
        sequence_parallel=True,
        recompute="selective",
    ),
    Row("full activation recomputation", lambda t, core: 2, recompute="full"),
]


class Storages(TorchDispatchMode):
    """Every storage that an operation made and that is still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.alive.setdefault(
                    storage._cdata,
                    weakref.ref(storage, lambda _, key=storage._cdata: self.alive.pop(key, None)),
                )
        return result

    def bytes(self, *apart: Tensor) -> int:
        """Their bytes, those of the tensors ``apart`` excepted."""
        excepted = {tensor.untyped_storage()._cdata for tensor in apart}
        found = {key: reference() for key, reference in list(self.alive.items())}
        return sum(
            storage.nbytes() for key, storage in found.items() if storage is not None and key not in excepted
        )


class ScopedTrace(FakeTracer):
    """A trace that knows which operations ran in a checkpointing scope."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.scoped: set[int] = set()

    @contextmanager
    def scope(self, director: Any) -> Iterator[None]:
        """Note which operations run in it."""
        start = len(self.operations)
        with super().scope(director):
            yield
        self.scoped.update(range(start, len(self.operations)))

    def kept_storages(self) -> set[int]:
        """Storages that stay for backward: of saved values that no scope evicts, and those from outside the
        scopes that the replay of the others reads."""
        stay = {saved.value for saved in self.saved if not saved.forced}
        open_, replayed = [saved.value for saved in self.saved if saved.forced], set()
        while open_:
            value = open_.pop()
            producer = self.values[value].producer
            if producer not in self.scoped or value in stay:
                stay.add(value)
            elif producer not in replayed:
                replayed.add(producer)
                open_ += self.operations[producer].reads
        return {self.values[value].storage for value in stay}


def traced_bytes(module: nn.Module, x: Tensor) -> int:
    """As `kept_bytes`, of fake tensors, by a trace that knows what checkpointing scopes evict."""
    tracer = ScopedTrace(module)
    with tracer.recording(), tracer.forward():
        out = module(x)
        kept = tracer.kept_storages()
        apart = {tracer.number_of(out), tracer.number_of(x)}
        tracer.close()
    assert out.requires_grad
    made = [tracer.storages[number] for number in kept - apart]
    return (
        sum(storage.bytes for storage in made if storage.kind != "parameter") + x.untyped_storage().nbytes()
    )


def layer(heads: int, width: int, row: Row, group: Any) -> nn.Module:
    """The paper's layer: unfused attention, dropout in three places."""
    config = ModelConfig("gpt", 1, width, heads, 4 * width, heads, dropout=0.1, fused_attention=False)
    block = Block(config, Sharing(group, row.sequence_parallel))
    if row.recompute == "selective":
        block.attention.core = Recomputed(block.attention.core)  # type: ignore[assignment]
    return Recomputed(block) if row.recompute == "full" else block


def kept_bytes(
    module: nn.Module, x: Tensor, around: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> int:
    """Bytes that stay alive after forward for the sake of backward: everything that the layer made and holds,
    and its input, without its output (the next layer's input) and without parameters."""
    with around(), Storages() as storages:
        out = module(x)
        made, before = storages.bytes(out, x, *module.parameters()), None
        while made != before:  # Gloo's thread lets go of a tensor a moment after its collective is done
            time.sleep(0.02)
            made, before = storages.bytes(out, x, *module.parameters()), made
    assert out.requires_grad
    return made + x.untyped_storage().nbytes()


def statistics_bytes(sequence: int, batch: int, row: Row, t: int, element: int) -> int:
    """Means and reciprocal standard deviations that the layer's two norms keep."""
    if row.recompute == "full":
        return 0
    tokens = sequence * batch // (t if row.sequence_parallel else 1)
    return STATISTICS * 2 * tokens * element
