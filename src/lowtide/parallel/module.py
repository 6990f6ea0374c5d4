"""What the parallel layers have in common: parameters that the ranks share, made, marked and described."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.parallel.errors import ParallelError
from lowtide.parallel.given import check_counts, check_dtypes, check_made
from lowtide.parallel.gradients import Marker
from lowtide.parallel.groups import TensorGroup, tensor_group
from lowtide.parallel.mappings import check_sequence_dimension
from lowtide.parallel.partition import Partition, initialize
from lowtide.parallel.saved import share_saved, take_own, watch_optimizers
from lowtide.parallel.shared import mark_shared

InitMethod = Callable[[Tensor], Any]


class ParallelModule(nn.Module):
    """A module whose parameters are cut, or whose gradients are partial.

    Attributes:
        group: the ranks.
        partitions: which part of each parameter this rank holds, by the parameter's name in this module.
        partial: names of the parameters whose gradient on one rank is a part of a sum.
    """

    group: TensorGroup
    partitions: dict[str, Partition]
    partial: tuple[str, ...]

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = tensor_group(group)
        self.partitions = {}
        self.partial = ()
        watch_optimizers()
        self.register_forward_pre_hook(_mark_shared)
        self.register_state_dict_post_hook(share_saved)
        self.register_load_state_dict_pre_hook(take_own)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Parameter) and name in self.__dict__.get("partitions", ()):
            mark_shared(value, self.partitions[name])  # FSDP2 replaces parameters so

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.mark_shared()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        applied = super()._apply(fn, recurse)
        self.mark_shared()
        return applied

    def mark_shared(self) -> None:
        """Mark the parameters of which this rank holds a part, as they are now: copies and what was unfrozen,
        too.
        """
        for name, where in self.partitions.items():
            parameter = self._parameters.get(name)
            if parameter is not None:
                mark_shared(parameter, where)

    def _mark(self) -> None:
        """Mark the parameters whose gradients are partial, and keep them marked."""
        if self.partial:
            Marker(self, self.partial, self.group)

    def _fill(
        self, name: str, where: Partition, init_method: InitMethod, dtype: torch.dtype, device: Any
    ) -> Tensor | None:
        """Make the parameter ``name`` with this rank's part; returns the whole one."""
        parameter = nn.Parameter(torch.empty(where.local_shape, dtype=dtype, device=device))
        self.partitions[name] = where
        self.register_parameter(name, parameter)
        mark_shared(parameter, where)
        return None if parameter.device.type == "meta" else initialize(parameter, where, init_method)

    def _make(
        self,
        weight: Partition,
        bias: Partition | None,
        init_method: InitMethod | None,
        keep_master_weight: bool,
        device: Any,
    ) -> None:
        """Make and mark the weight and the bias of a layer that has a ``dtype`` and a ``master_weight``, as
        `torch.nn` fills them by default.
        """
        dtype: torch.dtype = self.dtype  # type: ignore[assignment]
        check_made(type(self).__name__, dtype, device, init_method)
        whole = self._fill("weight", weight, init_method or default_weight, dtype, device)
        if keep_master_weight and whole is not None:
            self.master_weight = whole.to(dtype)
        if bias is None:
            self.register_parameter("bias", None)
        else:
            inputs = math.prod(weight.shape[1:])
            bound = 1 / math.sqrt(inputs) if inputs else 0.0
            self._fill("bias", bias, lambda b: nn.init.uniform_(b, -bound, bound), dtype, device)
        self._mark()


def _mark_shared(module: Any, args: Any) -> None:
    module.mark_shared()


class ParallelLinear(ParallelModule):
    """What the two layers share: making parameters, and describing themselves."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        group: Any,
        input_size: int,
        output_size: int,
        dtype: torch.dtype,
        sequence_parallel_enabled: bool,
        sequence_dimension: int | None,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        name = type(self).__name__
        check_counts(name, 0, input_size=input_size, output_size=output_size)
        check_dtypes(name, dtype=dtype, reduce_dtype=reduce_dtype)
        super().__init__(group)
        self.input_size = input_size
        self.output_size = output_size
        self.dtype = dtype
        self.sequence_parallel_enabled = sequence_parallel_enabled
        if sequence_dimension is not None and not sequence_parallel_enabled:
            raise ParallelError(
                f"sequence_dimension={sequence_dimension} does nothing without "
                "sequence_parallel_enabled=True: leave one out"
            )
        self.sequence_dimension = (
            check_sequence_dimension(sequence_dimension or 0) if sequence_parallel_enabled else None
        )
        self.reduce_dtype = check_reduce_dtype(reduce_dtype, dtype)
        self.master_weight: Tensor | None = None

    def reset_parameters(self, weight: InitMethod | None = None, bias: InitMethod | None = None) -> None:
        """Initialize again: the whole parameters are drawn on every rank, and each keeps its part.

        Args:
            weight, bias: fill a whole parameter in place; ``None`` is what ``nn.Linear`` does.
        """
        initialize(self.weight, self.partitions["weight"], weight or default_weight)
        if self.bias is not None:
            bound = 1 / math.sqrt(self.input_size) if self.input_size else 0.0
            initialize(
                self.bias, self.partitions["bias"], bias or (lambda b: nn.init.uniform_(b, -bound, bound))
            )

    def extra_repr(self) -> str:
        parts = [
            f"{self.input_size}, {self.output_size}",
            f"bias={self.bias is not None}",
            f"rank {self.group.rank} of {self.group.size}",
        ]
        if self.sequence_parallel_enabled:
            parts.append(f"sequence_dimension={self.sequence_dimension}")
        return ", ".join(parts)


def default_weight(weight: Tensor) -> None:
    """What ``nn.Linear`` does to its weight."""
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


def check_reduce_dtype(reduce_dtype: torch.dtype | None, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype itself.

    Raises:
        ParallelError: it is narrower than the parameters', so that it would not be used.
    """
    if reduce_dtype is None or reduce_dtype is torch.float32:
        return reduce_dtype
    if torch.promote_types(reduce_dtype, dtype) is not reduce_dtype:
        raise ParallelError(
            f"reduce_dtype={reduce_dtype} is narrower than dtype={dtype}: sums over ranks are never made in "
            "fewer bits than the tensors have; choose a wider one or leave it out"
        )
    return reduce_dtype
