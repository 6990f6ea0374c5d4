"""Let code that goes another way when it sees a fake tensor go the way that it goes on real ones, for the length of a trace.

- `torch.nn.functional.one_hot` compares fake numbers with all classes, and looks for the largest and smallest of real ones, which it then marks
  among zeros. Source: ``one_hot`` in ATen/native/Onehot.cpp.
- A number in a text is written as its value, and a fake one as a tensor. Source: ``Tensor.__format__`` in torch/_tensor.py.
- ``module.to(dtype)`` hands a real parameter new data, and swaps a fake one for another, which fails once a forward has used it. Source:
  ``Module._apply`` in torch/nn/modules/module.py.
- Libraries ask ``torch._subclasses.FakeTensor`` whether they are being exported, and look into masks only where they are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lowtide import private
from lowtide.trace.answers import Answers
from lowtide.trace.seam import Seam

_UNCHECKED = ("cuda", "mps", "xla", private.own_backend())
"""Devices on which nobody looks whether one-hot numbers are in range."""


class Alike(TorchFunctionMode):
    """Puts functions in place of those that PyTorch writes otherwise for fake tensors.

    Args:
        answers: of the trace.
    """

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self._answers = answers

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call ``func``, or what it comes to on real tensors."""
        kwargs = kwargs or {}
        if func is functional.one_hot:
            return self._one_hot(*args, **kwargs)
        if func is torch.Tensor.__format__ and type(args[0]) is FakeTensor and args[0].dim() == 0:
            return format(args[0].item(), *args[1:])
        return func(*args, **kwargs)

    def _one_hot(self, tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
        if not isinstance(tensor, FakeTensor) or tensor.dtype != torch.int64 or (num_classes < 1 and num_classes != -1):
            return functional.one_hot(tensor, num_classes)
        device = tensor.device
        if tensor.numel() == 0:
            shape = (*tensor.shape, num_classes)
            return functional.one_hot(tensor, num_classes) if num_classes == -1 else torch.empty(shape, dtype=torch.int64, device=device)
        if device.type not in _UNCHECKED:
            bounds = torch.aminmax(tensor)
            if num_classes == -1 or self._answers.known:  # where nobody has asked the real ones, none has to be told that they are in range
                bounds.min.item()
                most = int(bounds.max.item())
                num_classes = most + 1 if num_classes == -1 else num_classes
        elif num_classes == -1:
            num_classes = int(tensor.max().item()) + 1
        zeros = torch.zeros((*tensor.shape, num_classes), dtype=torch.int64, device=device)
        return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)


@contextmanager
def _replaced() -> Iterator[None]:
    own = torch.nn.Module._apply

    @wraps(own)
    def _apply(self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> torch.nn.Module:
        traced = any(item is not None and private.is_traced(item) for item in self._parameters.values())
        return _converted(self, fn, recurse) if traced else own(self, fn, recurse)

    torch.nn.Module._apply = _apply  # type: ignore[method-assign]
    try:
        with private.fakes_untold():
            yield
    finally:
        torch.nn.Module._apply = own  # type: ignore[method-assign]


_SEAM = Seam(_replaced)


def passing_for_real() -> AbstractContextManager[None]:
    """In the block, fakes of traces are converted as real tensors are, and nobody outside PyTorch is told that they are fake."""
    return _SEAM.open()


def _converted(self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool) -> torch.nn.Module:
    """``Module._apply``, which hands the fakes of a trace new data as it does real parameters."""
    own = {key: item for key, item in self._parameters.items() if item is not None and private.is_traced(item)}
    if recurse:
        for module in self.children():
            module._apply(fn)
    overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
    for key, parameter in own.items():
        grad = parameter.grad
        with torch.no_grad():
            applied = fn(parameter)
        if overwrite:
            self._parameters[key] = torch.nn.Parameter(applied, parameter.requires_grad)
            self._parameters[key].grad = fn(grad) if grad is not None else None  # type: ignore[union-attr]
            continue
        private.set_fake_data(parameter, applied)
        if grad is not None:
            with torch.no_grad():
                private.set_fake_data(grad, fn(grad))
    for key, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[key] = fn(buffer)
    return self
