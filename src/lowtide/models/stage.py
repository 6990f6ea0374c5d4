"""A stage of a model: of a built-in one, some of its layers, with what stands in front of the first and
behind the last. `lowtide.models.hugging_face_stage` has those of Hugging Face.

Parameters keep the names that they have in the whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.models.build import HuggingFaceModel
from lowtide.models.gpt import GPT
from lowtide.models.hugging_face_stage import HuggingFaceStage, anatomy, layers_of
from lowtide.models.llama import Llama
from lowtide.models.presets import ModelError

_FRONT = ("tokens", "positions", "dropout")
_BACK = ("norm", "head")


class ModelStage(nn.Module):
    """From tokens (the first stage) or the stage before's output to the next one's input, or what the loss is
    made of (the last).

    Args:
        model: a GPT or Llama; the stage shares its modules, so that stages made from one model share tied
            weights.
        layers: which of its layers.

    Attributes:
        model: what this stage holds of the model, under the whole model's names.
        context: makes a context for forward and loss, autocast for instance.

    >>> from lowtide.models import preset
    >>> model = GPT(preset("gpt-nano", layers=2))
    >>> stage = ModelStage(model, range(1, 2))
    >>> sorted(stage.model.state_dict())[0].startswith("blocks.1.")
    True
    """

    def __init__(self, model: nn.Module, layers: range) -> None:
        super().__init__()
        if not isinstance(model, (GPT, Llama)):
            raise ModelError(
                f"{type(model).__name__} cannot be cut into stages: choose a built-in model (gpt-... or "
                "llama-...)"
            )
        self.first = layers.start == 0
        self.last = layers.stop == model.config.layers
        self.context: Callable[[], AbstractContextManager[object]] = nullcontext
        held: Any = copy.copy(model)
        held._modules = dict(model._modules)
        held.blocks = nn.ModuleDict({str(layer): model.blocks[layer] for layer in layers})
        for name in (() if self.first else _FRONT) + (() if self.last else _BACK):
            held._modules.pop(name, None)
        self.model: GPT | Llama = held

    def forward(self, x: Tensor) -> Tensor:
        """One micro-batch."""
        with self.context():
            if self.first:
                x = self.model.embed(x)
            x = self.model.run_blocks(x)
            return self.model.norm(x) if self.last else x.contiguous()

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a micro-batch, in the last stage."""
        with self.context():
            return self.model.loss(output, targets)


def layers_of_stage(stage: int, stages: int, layers: int) -> range:
    """Which layers are a stage's: equal numbers, one more for the middle ones where they do not divide, since
    embedding and head cost, too.

    >>> [len(layers_of_stage(stage, 4, 6)) for stage in range(4)]
    [1, 2, 2, 1]
    """
    if layers < stages:
        raise ModelError(
            f"{layers} layers do not fill {stages} stages: use fewer stages or a model of more layers"
        )
    more = layers % stages
    begin = (stages - more) // 2
    sizes = [layers // stages + (begin <= each < begin + more) for each in range(stages)]
    return range(sum(sizes[:stage]), sum(sizes[: stage + 1]))


def cut(model: nn.Module, stages: int, mine: list[int]) -> list[Any]:
    """This process's stages of a model: built-in ones are `ModelStage`s, of Hugging Face's decoders
    `HuggingFaceStage`s.
    """
    if isinstance(model, HuggingFaceModel):
        parts, count = anatomy(model.model), layers_of(model.model)
        return [HuggingFaceStage(model, layers_of_stage(one, stages, count), parts) for one in mine]
    layers: Any = model.config.layers  # type: ignore[union-attr]
    return [ModelStage(model, layers_of_stage(stage, stages, layers)) for stage in mine]


def stage_input(model: nn.Module, batch: int, sequence: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without content (on the meta device) of the shape that travels between stages."""
    if isinstance(model, HuggingFaceModel):
        text: Any = model.model.config.get_text_config()  # type: ignore[operator, union-attr]
        return torch.empty(batch, sequence, text.hidden_size, dtype=dtype, device="meta")
    sharing, width = model.sharing, model.config.width  # type: ignore[union-attr]
    if sharing.context is not None:  # type: ignore[union-attr]
        sequence = sharing.context.own_length(sequence)  # type: ignore[union-attr, operator]
    length = sequence // sharing.size if sharing.sequence_parallel else sequence  # type: ignore[operator]
    return torch.empty(batch, length, width, dtype=dtype, device="meta")  # type: ignore[call-overload]
