"""A stage of a Hugging Face decoder: some of its layers, with what stands in front of the first and behind
the last.

The model's own forward runs in each stage, so that masks, rotary angles and everything else that it makes are
right. What another stage holds lets its input through, and the stage's input takes the place of what enters
its first layer. What stands in front of the layers and behind them is seen by running a few tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.models.build import HuggingFaceModel
from lowtide.models.common import next_token_loss
from lowtide.models.presets import ModelError
from lowtide.trace.untouched import same_random


@dataclass(frozen=True)
class Anatomy:
    """What a decoder is made of, by the names of its modules.

    Attributes:
        layers: its list of layers.
        front, back: modules with parameters that run in front of the first layer, and behind the last.
        tuples: whether a layer returns a tuple.
    """

    layers: str
    front: tuple[str, ...]
    back: tuple[str, ...]
    tuples: bool


@torch.no_grad()
def anatomy(causal: Any) -> Anatomy:
    """What a Hugging Face causal language model is made of: it runs a few tokens.

    Raises:
        ModelError: it has no list of as many layers as its configuration says, or runs otherwise.
    """
    name, count = type(causal).__name__, layers_of(causal)
    lists = [path for path, m in causal.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not lists:
        raise ModelError(f"{name} cannot be cut into stages: it has no list of {count} layers")
    layers, ran, results = lists[0], list[str](), list[Any]()
    with ExitStack() as hooks, same_random():
        for path, module in causal.named_modules():
            layer = path.startswith(f"{layers}.")
            outermost = path.count(".") == layers.count(".") + 1
            if outermost if layer else any(True for _ in module.parameters(recurse=False)):
                noted = module.register_forward_pre_hook(lambda *_, path=path: ran.append(path))
                hooks.callback(noted.remove)
            if layer and outermost:
                hooks.callback(module.register_forward_hook(lambda *given: results.append(given[2])).remove)
        tokens = torch.zeros(1, 4, dtype=torch.long, device=next(causal.parameters()).device)
        causal(input_ids=tokens, use_cache=False)
    within = [at for at, path in enumerate(ran) if path.startswith(f"{layers}.")]
    if [ran[at] for at in within] != [f"{layers}.{k}" for k in range(count)]:
        raise ModelError(f"{name} cannot be cut into stages: its layers do not run once each, in their order")
    front, back = ran[: within[0]], ran[within[-1] + 1 :]
    return Anatomy(layers, tuple(front), tuple(back), isinstance(results[0], tuple))


def layers_of(causal: Any) -> int:
    """How many layers a decoder has."""
    return causal.config.get_text_config().num_hidden_layers


class _Through(nn.Module):
    """In the place of what another stage holds: lets its first argument through."""

    def __init__(self, tuples: bool = False) -> None:
        super().__init__()
        self._tuples = tuples

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given: Any = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), None))
        if not isinstance(given, Tensor) or given.ndim < 3 or not given.is_floating_point():
            return torch.zeros(())  # an embedding of places, which adds to what enters the layers
        return (given,) if self._tuples else given


class HuggingFaceStage(nn.Module):
    """As `lowtide.models.stage.ModelStage`, of a Hugging Face decoder.

    Args:
        model: a `HuggingFaceModel`; the stage shares its modules.
        layers: which of its layers.
        parts: what the model is made of.

    Attributes:
        model: what this stage holds of the model, under the whole model's names.
        context: makes a context for forward and loss, autocast for instance.
        vocabulary: numbers in a row of logits, which the last stage gives.
    """

    def __init__(self, model: HuggingFaceModel, layers: range, parts: Anatomy) -> None:
        super().__init__()
        causal: Any = model.model
        self.first, self.last = layers.start == 0, layers.stop == layers_of(causal)
        self.context: Callable[[], AbstractContextManager[object]] = nullcontext
        self.vocabulary: int = causal.config.get_text_config().vocab_size
        self._entering: Tensor | None = None
        self._leaving: Any = None
        held = _copy_around(causal, [parts.layers, *parts.front, *parts.back])
        for name in (() if self.first else parts.front) + (() if self.last else parts.back):
            _put(held, name, _Through())
        everyone = list(causal.get_submodule(parts.layers))
        own = [layer if number in layers else _Through(parts.tuples) for number, layer in enumerate(everyone)]
        _put(held, parts.layers, nn.ModuleList(own))
        own[layers.start].register_forward_pre_hook(self._enter, with_kwargs=True)
        own[layers.stop - 1].register_forward_hook(self._leave)
        self.model = copy.copy(model)
        self.model._modules = {"model": held}

    def _enter(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._entering is None:
            return None
        if args:
            return (self._entering, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._entering}

    def _leave(self, layer: Any, args: Any, result: Any) -> None:
        self._leaving = result[0] if isinstance(result, tuple) else result

    def forward(self, x: Tensor) -> Tensor:
        """One micro-batch: tokens in the first stage, logits of the last."""
        try:
            with self.context():
                if self.first:
                    result = self.model.model(input_ids=x, use_cache=False)
                else:
                    self._entering = x
                    result = self.model.model(inputs_embeds=x.detach(), use_cache=False)
            return result.logits if self.last else self._leaving.contiguous()
        finally:
            self._entering = self._leaving = None

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a micro-batch, in the last stage."""
        with self.context():
            return next_token_loss(output, nn.Identity(), targets)


def _copy_around(root: nn.Module, names: list[str]) -> Any:
    """A module of the same modules, of which those that hold one of the named are copies of their own."""
    made = {"": _shallow(root)}
    for name in names:
        path = name.split(".")[:-1]
        for depth in range(1, len(path) + 1):
            here = ".".join(path[:depth])
            if here not in made:
                made[here] = _shallow(root.get_submodule(here))
                made[".".join(path[: depth - 1])]._modules[path[depth - 1]] = made[here]
    return made[""]


def _shallow(module: nn.Module) -> nn.Module:
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


def _put(root: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    root.get_submodule(parent)._modules[last] = module
