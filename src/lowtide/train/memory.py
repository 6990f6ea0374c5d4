"""How much memory a run uses, and how much there is."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Literal

import torch

from lowtide import accelerator, meter
from lowtide.budget import format_bytes
from lowtide.models import ModelSpec, build_model
from lowtide.train.errors import OptionError

BYTES_PER_PARAMETER = 16
"""Parameter, gradient and AdamW's two moments, each in float32."""


class RunMeter:
    """Watches everything that PyTorch allocates on a device from the moment it is entered: enter it before
    the model is built.

    What nobody refers to any more is collected at entry: freed later, it would count against what the run
    allocates. Where memory cannot be counted cheaply (on a CPU without a C++ compiler) every number is
    ``None``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._whole = meter.peak(device) if meter.measurable(device) else None

    def __enter__(self) -> RunMeter:
        if self._whole is not None:
            gc.collect()
            self._whole.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._whole is not None:
            self._whole.__exit__(kind, error, trace)

    @contextmanager
    def block(self) -> Iterator[BlockPeak]:
        """The peak of a block of code, in bytes of everything alive and not only what the block added."""
        result = BlockPeak()
        if self._whole is None:
            yield result
            return
        before = self._whole.live_bytes
        with meter.peak(self._device) as block:
            yield result
        result.bytes = before + block.peak_bytes


class BlockPeak:
    """Filled in when a `RunMeter.block` has ended."""

    bytes: int | None = None


def training_bytes(spec: ModelSpec) -> int:
    """Bytes of a model's parameters, gradients and optimizer state: what training needs before the first
    activation.
    """
    if spec.config is not None:
        return spec.config.parameters() * BYTES_PER_PARAMETER
    with torch.device("meta"):
        return (
            sum(parameter.numel() for parameter in build_model(replace(spec, pretrained=False)).parameters())
            * BYTES_PER_PARAMETER
        )


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a device, or ``None`` where the system does not say."""
    if accelerator.is_accelerator(device):
        return accelerator.free_bytes(device)
    return meter.free_main_memory()


def check_room(
    spec: ModelSpec,
    device: torch.device,
    shared_by: int = 1,
    host_fraction: float | Literal["auto"] | None = None,
) -> None:
    """Refuse a model whose weights, gradients and optimizer state on the device alone do not fit, before
    anything is allocated.

    Raises:
        OptionError: they do not.
    """
    needed, free = training_bytes(spec) // shared_by, free_bytes(device)
    moved = 1.0 if host_fraction == "auto" else host_fraction or 0.0
    needed -= int(needed * moved / 2)  # AdamW's moments are half of it
    if free is not None and needed > free:
        raise OptionError(
            f"--model {spec.name}: parameters, gradients and optimizer state take {format_bytes(needed)}, "
            f"and {format_bytes(free)} are free: "
            "choose a smaller model (lowtide plan plans this one without allocating it)"
        )
