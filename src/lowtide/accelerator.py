"""What lowtide asks of an accelerator beyond tensors: streams and events, page-locked memory, free memory,
random numbers.

One kind is known, CUDA. Outside this file only what is CUDA's own names it: its allocator (`lowtide.meter`),
what PyTorch hides (`lowtide.private`), what users type.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Event, Tensor

KIND = "cuda"


def is_accelerator(device: torch.device) -> bool:
    """Whether the device is an accelerator.

    >>> is_accelerator(torch.device("cuda:1")), is_accelerator(torch.device("cpu"))
    (True, False)
    """
    return device.type == KIND


def is_on(tensor: Tensor, device: torch.device) -> bool:
    """Whether a tensor is on the device, or on one of its kind where ``device`` has no index.

    >>> x = torch.ones(1)
    >>> is_on(x, torch.device("cpu")), is_on(x, torch.device("cuda"))
    (True, False)
    """
    own = tensor.device
    return own == device or (own.type == device.type and device.index is None)


def is_present() -> bool:
    """Whether this process sees an accelerator."""
    return torch.cuda.is_available()


def is_used() -> bool:
    """Whether this process has used an accelerator."""
    return torch.cuda.is_initialized()


def all_devices() -> list[torch.device]:
    """The accelerators that this process sees."""
    return [torch.device(KIND, at) for at in range(torch.cuda.device_count())] if is_present() else []


def current_device() -> torch.device:
    """The accelerator that this thread uses where code names none."""
    return torch.device(KIND, torch.cuda.current_device())


def current_stream(device: torch.device) -> Any:
    """The stream on which this thread computes on an accelerator; ``None`` where there are none."""
    return None if device.type in ("cpu", "meta") else torch.accelerator.current_stream(device)


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream. A build without CUDA cannot be asked."""
    built = torch.backends.cuda.is_built() and torch.cuda.is_initialized()
    return built and torch.cuda.is_current_stream_capturing()


def as_current(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which an accelerator is this thread's current one, which code that names none uses."""
    return torch.cuda.device(device) if is_accelerator(device) and is_present() else nullcontext()


def name_of(device: torch.device) -> str:
    """The device's name, as its maker has it."""
    return torch.cuda.get_device_name(device)


# ---- memory --------------------------------------------------------------------------------------------


def orders_by_one_queue() -> bool:
    """Whether this machine's cards begin kernels of several streams in the order of their launches only
    where there is one hardware queue: NVIDIA's before Blackwell.
    """
    return torch.version.cuda is not None and torch.cuda.get_device_capability()[0] < 10


def may_start_late() -> bool:
    """Whether a product that is launched behind a collective may take the whole card before it: where cards
    order by one queue (`orders_by_one_queue`), and there are several.
    """
    return orders_by_one_queue() and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1"


def free_bytes(device: torch.device) -> int:
    """What this process may still take of the device: what is left, within the part of it that
    ``torch.cuda.set_per_process_memory_fraction`` allows.
    """
    free, total = torch.cuda.mem_get_info(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    allowed = int(torch.cuda.get_per_process_memory_fraction(index) * total)
    return max(0, min(free, allowed - torch.cuda.memory_reserved(device))) if allowed < total else free


def unused_bytes(device: torch.device) -> int:
    """What PyTorch's allocator holds of the device without a tensor in it."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def empty_cache() -> None:
    """Give back what PyTorch's allocators hold without a tensor in it."""
    torch.cuda.empty_cache()


def allocator() -> str:
    """Which allocator PyTorch uses: ``native``, or another; ``none`` where no device is there."""
    return torch.cuda.get_allocator_backend() if torch.cuda.is_available() else "none"


def lock_pages(address: int, count: int, device: torch.device) -> Any:
    """Page-lock main memory, so that transfers run beside computing. Returns a function that unlocks it.

    Locking and unlocking run with ``device`` current: a new thread's current device is the first one, and
    setting up CUDA there would take half a gigabyte for each rank.

    Raises:
        MemoryError: the system refuses.
    """
    runtime: Any = torch.cuda.cudart()
    with as_current(device):
        code = int(runtime.cudaHostRegister(address, count, 0))
    if code:
        raise MemoryError(
            f"CUDA refuses to page-lock {count:,} bytes (error {code}): the limit on locked memory "
            "(ulimit -l) may be too low"
        )

    def unlock() -> None:
        with as_current(device):
            runtime.cudaHostUnregister(address)

    return unlock


# ---- time and random numbers ---------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Return when the device has done all that is queued on it; at once for a CPU."""
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize(device)


def timed_event(device: torch.device) -> Any:
    """An event on the current stream that knows when it came (``elapsed_time``)."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def random_state(device: torch.device) -> Tensor:
    """The state of the device's random number generator."""
    return torch.get_device_module(device.type).get_rng_state(device)


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Set what `random_state` reads."""
    torch.get_device_module(device.type).set_rng_state(state, device)


# ---- streams -------------------------------------------------------------------------------------------


class Streams:
    """The streams and events of one accelerator.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device.type)

    def new(self) -> Any:
        """A stream beside the computing one."""
        return self._module.Stream(self.device)

    def current(self) -> Any:
        """The stream on which this thread computes now."""
        return self._module.current_stream(self.device)

    def mark(self, stream: Any) -> Event:
        """An event after all that is queued on ``stream`` now."""
        event = self._module.Event()
        event.record(stream)
        return event

    def order(self, stream: Any, event: Event) -> None:
        """What is queued on ``stream`` from now on comes after ``event``."""
        stream.wait_event(event)

    def copy(self, stream: Any, target: Tensor, source: Tensor) -> None:
        """Copy on ``stream``; the program goes on."""
        with self._module.stream(stream):
            target.copy_(source, non_blocking=True)

    def synchronize(self) -> None:
        """Return when the device has done all that is queued on it."""
        self._module.synchronize(self.device)


def streams_of(device: torch.device) -> Streams | None:
    """The streams of an accelerator; ``None`` for a CPU, which has none."""
    return None if device.type == "cpu" else Streams(device)
