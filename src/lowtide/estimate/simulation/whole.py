"""Hugging Face models as transformers builds them, in the shape that a trace wants: tokens and targets in,
the loss out.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from lowtide.models import build_model, model_spec


class Whole(nn.Module):
    """A whole causal language model as one piece."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy."""
        return self.model(tokens, targets).loss


def hugging_face_builder(name: str) -> Callable[[], nn.Module]:
    """What builds the model of ``hf:TYPE[:key=value,...]`` or of a ``config.json``.

    Raises:
        ModelError: the name or the configuration is not understood.
    """
    spec = model_spec(name)
    return lambda: Whole(build_model(spec))
