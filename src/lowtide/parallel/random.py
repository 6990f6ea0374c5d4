"""Two streams of random numbers in a tensor-parallel group: one that all ranks share, and one of each rank's
own.

What every rank holds (the residual stream without sequence parallelism) must be dropped alike on all of them;
what they share out (a piece of the sequence, a rank's attention heads) must not be. The shared stream is
PyTorch's own generator, seeded alike on every rank. `RandomTracker.per_rank` switches to a stream that is
*derived* from the shared one and the rank: there is no second state to save, and whatever puts the generator
back (a recomputation by lowtide or by ``torch.utils.checkpoint``, a resumed run) puts both streams back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import broadcast

from lowtide.interception import without_modes
from lowtide.meter.resident import device_of
from lowtide.parallel.errors import ParallelError
from lowtide.parallel.given import check_input, check_numbers
from lowtide.parallel.groups import TensorGroup, tensor_group


class RandomTracker:
    """The random streams of one rank.

    Args:
        group: see `lowtide.parallel.tensor_group`.
        device: whose generator.

    Example:
        >>> tracker = RandomTracker()
        >>> with tracker.per_rank():
        ...     mask = torch.rand(3) < 0.9
    """

    def __init__(self, group: Any = None, device: torch.device | str = "cpu") -> None:
        self.group: TensorGroup = tensor_group(group)
        self.device = device_of(device)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Random numbers in the block are the same on every rank, if the streams were the same before. This
        is what holds outside, too.
        """
        yield

    @contextmanager
    def per_rank(self) -> Iterator[None]:
        """Random numbers in the block are this rank's own. The shared stream moves on by one step, alike on
        every rank.

        In a group of one the block draws from the shared stream as if it were not there.
        """
        if self.group.size == 1 or self.device.type == "meta":
            yield
            return
        with _stream(self.device, self.group.rank + 1):
            yield

    def synchronize(self) -> None:
        """Make every rank's shared stream that of the group's first rank. A collective: every rank calls
        it.
        """
        if self.group.size == 1:
            return
        state = _get(self.device).clone()
        on_device = state.to(self.device)
        broadcast(on_device, self.group.global_rank(0), group=self.group.process_group)
        _set(self.device, on_device.cpu())


class ParallelDropout(nn.Module):
    """Dropout for replicated and for sharded tensors; its mask takes one byte an element.

    Args:
        probability: of an element to be dropped.
        sharded: the input is this rank's own part (a shard of the sequence, its heads), so each rank draws
            its own mask. Without it the input is the same on every rank, and so is the mask.
        group: see `lowtide.parallel.tensor_group`.

    Raises:
        ParallelError: the probability is not in [0, 1).

    >>> ParallelDropout(0.5, sharded=True).eval()(torch.ones(2)).tolist()
    [1.0, 1.0]
    """

    def __init__(self, probability: float, sharded: bool = False, group: Any = None) -> None:
        super().__init__()
        check_numbers("ParallelDropout", 0, probability=probability)
        if not probability < 1.0:
            raise ParallelError(
                f"probability={probability}: a probability of at least 0 and below 1 is needed"
            )
        self.probability = probability
        self.sharded = sharded
        self.group = tensor_group(group)

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements in training mode, scaling the others up."""
        check_input(self, x)
        if not self.training or self.probability == 0.0:
            return x
        if not self.sharded:
            return torch.native_dropout(x, self.probability, True)[0]
        if torch.compiler.is_compiling() and self.group.size > 1:
            return torch.ops.lowtide.dropout_of_rank(x, self.probability, self.group.rank + 1)[0]
        with RandomTracker(self.group, x.device).per_rank():
            return torch.native_dropout(x, self.probability, True)[0]

    def extra_repr(self) -> str:
        return f"{self.probability}, sharded={self.sharded}"


@contextmanager
def _stream(device: torch.device, stream: int) -> Iterator[None]:
    """Random numbers in the block are of a stream of that number. The shared one moves on by one step."""
    with without_modes():
        state = _get(device)
        _seed(device, state, stream)
    try:
        yield
    finally:
        with without_modes():
            _seed(device, state, 0)


# dropout of a rank's own as one operation, since compiled code has no way to change streams
torch.library.define(
    "lowtide::dropout_of_rank",
    "(Tensor x, float probability, int stream) -> (Tensor, Tensor)",
    tags=(torch.Tag.nondeterministic_seeded,),
)


@torch.library.impl("lowtide::dropout_of_rank", "default")
def _dropout_of_rank(x: Tensor, probability: float, stream: int) -> tuple[Tensor, Tensor]:
    with _stream(x.device, stream):
        return torch.native_dropout(x, probability, True)


@torch.library.register_fake("lowtide::dropout_of_rank")
def _like(x: Tensor, probability: float, stream: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _keep_mask(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.scale = 1 / (1 - inputs[1])
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None, None]:
    return torch.ops.aten.native_dropout_backward(gradient, *ctx.saved_tensors, ctx.scale), None, None


torch.library.register_autograd("lowtide::dropout_of_rank", _backward, setup_context=_keep_mask)


def _generator(device: torch.device) -> Any:
    return torch if device.type == "cpu" else torch.get_device_module(device.type)


def _get(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else _generator(device).get_rng_state(device)


def _set(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        _generator(device).set_rng_state(state, device)


def _seed(device: torch.device, state: Tensor, stream: int) -> None:
    """Seed the generator from a state and the number of a stream."""
    digest = hashlib.blake2b(
        state.numpy().tobytes(), digest_size=8, salt=stream.to_bytes(8, "little")
    ).digest()
    seed = int.from_bytes(digest, "little") >> 1
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        with torch.get_device_module(device.type).device(device):
            torch.get_device_module(device.type).manual_seed(seed)
