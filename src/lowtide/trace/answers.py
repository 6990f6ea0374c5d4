"""What a model asks of its tensors: taken down in one forward on real tensors, and told again in a trace on fake ones, which hold no numbers.

Models look into tensors to decide what to do: how many tokens go to an expert, whether a mask has any zeros, which box belongs to which query.
One forward on real tensors of which nothing is saved shows the answers. No plan could do with less memory: what lives in it at once lives
in every step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide import private
from lowtide.errors import TraceError
from lowtide.ops import asks, has_plain_storage, hidden_statistics, is_mask, masks_of, op_info, tensors_of, written_tensors
from lowtide.trace.chance import Chance, gpus_of, same_random
from lowtide.trace.describe import is_wrapper_type
from lowtide.trace.fake import Unchanged, borrowed

_LOOKS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
"""How Python takes all of a tensor's numbers at once, which no dispatch mode sees."""
_NUMBER = "aten._local_scalar_dense.default"
_TRUES = "how many are true"


def _picked(args: tuple[Any, ...], trues: Sequence[int]) -> tuple[Any, ...]:
    """Arguments of an indexing call on fake tensors with positions in place of each mask: as many as it has true elements."""
    left = deque(trues)
    indices: list[torch.Tensor | None] = []
    for index in args[1]:
        if is_mask(index):
            positions = torch.empty(left.popleft(), dtype=torch.int64, device=index.device)
            indices += [positions] * index.dim()
        else:
            indices.append(index)
    return (args[0], indices, *args[2:])


@dataclass(frozen=True)
class _Shape:
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Shape:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


@dataclass
class Answers:
    """What questions were answered, in their order.

    Attributes:
        said: question and answer: numbers as they are, tensors as shapes.
        known: they have been taken down, and are told.
        missed: a question was met that nobody could answer.
        trues: of masks, by their values' ids: how many elements are true.
    """

    said: deque[tuple[str, Any]] = field(default_factory=deque)
    known: bool = False
    missed: bool = False
    trues: dict[int, int] = field(default_factory=dict)

    def hear(self, question: str, answer: Any) -> None:
        """Take one down."""
        if isinstance(answer, list):  # which fake tensors make number by number
            self.said.extend((_NUMBER, number) for number in pytree.tree_leaves(answer))
            return
        if isinstance(answer, np.ndarray):
            answer = answer.copy()
        self.said.append((question, pytree.tree_map_only(torch.Tensor, _Shape.of, answer)))

    def tell(self, question: str) -> Any:
        """The answer to the next question, ``NotImplemented`` where none is known. Tensors are empty ones.

        Raises:
            TraceError: it was another one.
        """
        if not self.known:
            self.missed = True
            return NotImplemented
        heard, answer = self.said.popleft() if self.said else ("no more", None)
        if heard != question:
            raise TraceError(f"on fake tensors the model asks {question}, where it asked {heard} on real ones")
        return pytree.tree_map_only(_Shape, _Shape.empty, answer)

    def tell_list(self, shape: Sequence[int]) -> Any:
        """The answers to a question for all numbers of a tensor, in lists nested as its shape says; ``NotImplemented`` where none is known."""
        if not shape:
            return self.tell(_NUMBER)
        items = [self.tell_list(shape[1:]) for _ in range(shape[0])]
        return NotImplemented if NotImplemented in items else items

    def pick(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], value_of: Callable[[torch.Tensor], int]
    ) -> tuple[Any, tuple[int, ...]]:
        """The arguments of a call with positions in place of masks, and how many elements of each are true; the same, and nothing, where that
        is not known. Backward meets masks again that the forward has shown.

        Args:
            func, args: the call.
            value_of: from a tensor to the id of the value that it shows now.
        """
        masks = masks_of(func, args)
        values = [value_of(mask) for mask in masks]
        for value in values:
            told = self.tell(_TRUES)
            if told is not NotImplemented:
                self.trues[value] = told
        if not masks or not all(value in self.trues for value in values):
            return args, ()
        trues = tuple(self.trues[value] for value in values)
        return _picked(args, trues), trues

    def end(self) -> None:
        """The forward is over.

        Raises:
            TraceError: not everything was asked.
        """
        if self.said:
            raise TraceError(f"on fake tensors the model does not ask {self.said[0][0]}, as it did on real ones")
        self.known = False


class Looks(TorchFunctionMode):
    """Meets what Python asks of a whole tensor: real ones answer, and fake ones as `Answers` tells. Real ones may be heard.

    Args:
        answers: of the trace.
        unknown: whether nobody knows what is in a real tensor.
        hearing: take the answers down.
    """

    def __init__(self, answers: Answers, unknown: Callable[[torch.Tensor], bool] = lambda _: False, *, hearing: bool = False) -> None:
        super().__init__()
        self._answers = answers
        self._unknown = unknown
        self._hearing = hearing

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call ``func``, or answer for it."""
        kwargs = kwargs or {}
        if func not in _LOOKS:
            return func(*args, **kwargs)
        name, tensor = func.__name__, args[0]
        if self._hearing:
            result = func(*args, **kwargs)
            self._answers.hear(name, result)
            return result
        fake = isinstance(tensor, FakeTensor) or self._unknown(tensor)
        if not fake and not self._answers.known:
            return func(*args, **kwargs)
        told = self._answers.tell_list(tensor.shape) if func is torch.Tensor.tolist else self._answers.tell(name)
        if told is NotImplemented and fake and not isinstance(tensor, FakeTensor):
            raise TraceError("the model asks what is in a tensor that it has written what is fake to")
        return func(*args, **kwargs) if told is NotImplemented or not fake else told


class _Hearing(TorchDispatchMode):
    """Takes down the answers of a forward on real tensors, and what to write back after it."""

    def __init__(self, answers: Answers, chance: Chance) -> None:
        super().__init__()
        private.keep_dynamo_out()
        self._answers = answers
        self._chance = chance
        self._made: set[int] = set()
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled call within stays compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if any(is_wrapper_type(kind) for kind in types):
            return NotImplemented
        info = op_info(func)
        self._keep([*written_tensors(info, args, kwargs), *(args[position] for position in hidden_statistics(info, args))])
        for mask in masks_of(func, args):
            self._answers.hear(_TRUES, int(torch.count_nonzero(mask)))
        result = self._chance.drawn(info, args, private.call(func, args, kwargs))
        given = {private.storage_key(tensor) for tensor in tensors_of([args, kwargs]) if has_plain_storage(tensor)}
        self._made.update({private.storage_key(tensor) for tensor in tensors_of(result) if has_plain_storage(tensor)} - given)
        if asks(func):
            self._answers.hear(info.name, result)
        return result

    def _keep(self, written: Iterable[Any]) -> None:
        """Copy what stood before the forward and is about to be written. An address that the forward got is of nothing that stood before."""
        for tensor in written:
            if isinstance(tensor, torch.Tensor) and has_plain_storage(tensor):
                key = private.storage_key(tensor)
                if key not in self._made and key not in self._before:
                    storage = tensor.untyped_storage()
                    self._before[key] = storage, storage.clone()

    def put_back(self) -> None:
        """Everything that stood before is as it was."""
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()


def hear(forward: Callable[[], object], model: torch.nn.Module, chance: Chance) -> Answers:
    """The answers of one forward on real tensors, which leaves the model and random state as they were.

    Args:
        forward: runs it, loss included.
        model: as of `lowtide.trace.limited.trace_model`.
        chance: what single numbers drawn at random are.

    Raises:
        TraceError: the forward runs a backward inside, for which nothing was saved.
    """
    answers = Answers()
    hearing = _Hearing(answers, chance)
    with ExitStack() as stack:
        stack.callback(torch.clear_autocast_cache)  # of casts that are no part of the step
        stack.enter_context(same_random(gpus_of([model]), [model], chance))
        stack.enter_context(borrowed([model], Unchanged()))
        stack.callback(hearing.put_back)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda _: None, _not_saved))
        stack.enter_context(Looks(answers, hearing=True))
        stack.enter_context(hearing)
        stack.enter_context(torch.enable_grad())
        forward()
    answers.known = True
    return answers


def _not_saved(_: None) -> NoReturn:
    raise TraceError("the forward runs a backward inside, which needs what was not saved")
