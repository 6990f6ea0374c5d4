"""`torch.cuda` over two devices in main memory whose streams run late and out of order (late_device.cpp),
in a build of PyTorch without CUDA. `load` comes before torch is first imported, in a process of its own.
Seconds mean nothing there.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TOTAL = 8 << 30
_PROPERTIES = SimpleNamespace(
    name="late streams", major=9, minor=0, total_memory=TOTAL, multi_processor_count=1
)


NATIVE: Any = None
"""The device's library, once it is loaded."""


def load() -> None:
    """Load the device that ``LATE_DEVICE`` names, before torch."""
    global NATIVE
    libraries = Path(str(importlib.util.find_spec("torch").origin)).parent / "lib"  # type: ignore[union-attr]
    for name in ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(libraries / name), mode=ctypes.RTLD_GLOBAL)  # the device is linked with c10 alone
    NATIVE = ctypes.CDLL(os.environ["LATE_DEVICE"])
    NATIVE.late_count.restype = NATIVE.late_moments.restype = ctypes.c_int64
    NATIVE.late_count.argtypes = [ctypes.c_char_p, ctypes.c_int]
    NATIVE.late_fault.restype = ctypes.c_char_p
    NATIVE.late_moment.restype, NATIVE.late_moment.argtypes = ctypes.c_double, [ctypes.c_int64, ctypes.c_int]
    NATIVE.late_begin.argtypes = [ctypes.c_uint64]
    NATIVE.late_lock.argtypes, NATIVE.late_unlock.argtypes = (
        [ctypes.c_void_p, ctypes.c_int64],
        [ctypes.c_void_p],
    )
    _install()


def count(what: str, device: int = 0) -> int:
    """``ran`` jobs, ``faults``, bytes ``requested``, ``allocated``, ``reserved``, or ``most_`` of them."""
    return NATIVE.late_count(what.encode(), device)


def faults() -> list[str]:
    """What streams read too early, or too late."""
    return [NATIVE.late_fault(i).decode() for i in range(count("faults"))]


def _at(device: Any = None) -> int:
    import torch

    if isinstance(device, int):
        return device
    index = torch.device(device).index if device is not None else None
    return NATIVE.late_device() if index is None else index


def _exchange(index: int) -> int:
    before = NATIVE.late_device()
    if index >= 0:
        NATIVE.late_set_device(index)
    return before


def _stats(device: Any = None) -> dict[str, Any]:
    at = _at(device)
    kinds = {"requested_bytes": "requested", "allocated_bytes": "allocated", "reserved_bytes": "reserved"}
    return {
        key: {"all": {"current": count(kind, at), "peak": count(f"most_{kind}", at)}}
        for key, kind in {**kinds, "active_bytes": "allocated"}.items()
    }


def _snapshot(*_: Any) -> dict[str, Any]:
    traces: list[list[dict[str, Any]]] = [[], []]
    for i in range(NATIVE.late_moments()):
        device, size, seconds = (NATIVE.late_moment(i, what) for what in range(3))
        action = "alloc" if size > 0 else "free_requested"
        traces[int(device)].append({"action": action, "size": abs(int(size)), "time_us": seconds * 1e6})
    return {"device_traces": traces, "segments": [], "allocator_settings": {}}


locked_on: set[int] = set()
"""The devices that were current where pages were locked or unlocked: the runtime sets up each of them."""


class _Runtime:
    """Of CUDA's runtime what locks pages."""

    def cudaHostRegister(self, address: int, count: int, _: int) -> int:
        locked_on.add(NATIVE.late_device())
        NATIVE.late_lock(address, count)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        locked_on.add(NATIVE.late_device())
        NATIVE.late_unlock(address)
        return 0


def _synchronize(device: Any = None) -> None:
    import torch

    torch.accelerator.synchronize(_at(device))


def _record_history(enabled: Any = "all", **_: Any) -> None:
    NATIVE.late_record(int(enabled is not None))


def _install() -> None:
    """Put these devices in the place of what needs a build with CUDA."""
    import torch

    c: Any = torch.cuda
    c.is_available = c.is_initialized = lambda: True
    c.init = c._lazy_init = lambda: None
    c._is_in_bad_fork = lambda: False
    c._sleep = lambda cycles: None
    c.device_count = lambda: 2
    c.current_device = lambda: NATIVE.late_device()  # a function of ctypes has no hash
    c.set_device = lambda device: NATIVE.late_set_device(_at(device))
    c.synchronize = _synchronize
    c.empty_cache = lambda: NATIVE.late_empty_cache()
    c.get_device_properties = lambda device=None: _PROPERTIES
    c.get_device_capability = lambda device=None: (9, 0)
    c.get_device_name = lambda device=None: _PROPERTIES.name
    c.is_bf16_supported = lambda *a, **k: True
    for kind in ("allocated", "reserved"):
        setattr(c, f"memory_{kind}", lambda device=None, kind=kind: count(kind, _at(device)))
        setattr(c, f"max_memory_{kind}", lambda device=None, kind=kind: count(f"most_{kind}", _at(device)))
    c.memory_stats_as_nested_dict = _stats
    c.reset_peak_memory_stats = lambda device=None: NATIVE.late_reset_peak(_at(device))
    c.mem_get_info = lambda device=None: (TOTAL - count("reserved", _at(device)), TOTAL)
    c.get_allocator_backend = lambda: "native"
    c.get_per_process_memory_fraction = lambda device=None: 1.0
    c.is_current_stream_capturing = lambda: False
    c.Stream = lambda device=None, priority=0: torch.Stream(torch.device("cuda", _at(device)))
    c.Event = lambda enable_timing=False, **_: torch.Event("cuda", enable_timing=enable_timing)
    c.current_stream = lambda device=None: torch.accelerator.current_stream(_at(device))
    c.default_stream = lambda device=None: torch.Stream(
        stream_id=0, device_index=_at(device), device_type=torch.device("cuda").type
    )
    c.stream = lambda stream: stream
    c.set_stream = torch.accelerator.set_stream
    c.get_rng_state = lambda device="cuda": torch.get_rng_state()  # one generator for all
    c.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)
    c.manual_seed_all = lambda seed: None
    c._exchange_device = c._maybe_exchange_device = _exchange
    c.cudart = _Runtime
    c.memory._record_memory_history, c.memory._snapshot = _record_history, _snapshot
    from torch.cuda import random

    random.get_rng_state, random.set_rng_state = c.get_rng_state, c.set_rng_state
    native: Any = torch._C
    native._cuda_isHistoryEnabled, native._cuda_memorySnapshot = lambda: False, _snapshot
    native._cuda_attach_out_of_memory_observer = lambda observer: None
    from lowtide.meter.cuda import CudaPeak

    CudaPeak.live_source = lambda self: lambda: self.live_bytes  # the device has no statistics for C++
