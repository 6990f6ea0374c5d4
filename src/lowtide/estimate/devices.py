"""Accelerators by name: what their makers' data sheets say, as numbers, and the memory that PyTorch sees."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lowtide.errors import expect
from lowtide.estimate.errors import EstimateError, unknown

_GB = 10**9
_WORKSPACE, _HOPPER_WORKSPACE = (8192 + 128) << 10, 32 << 20
"""PyTorch's defaults of CUBLAS_WORKSPACE_CONFIG: ``:4096:2:16:8`` of KiB, and 32 MiB on Hopper."""


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator and its links.

    Attributes:
        name: what it is called.
        flops: peak FLOP/s of dense bfloat16 matrix products.
        memory_bytes: its memory as `torch.cuda.mem_get_info` reports the total: a card of "80 GB" has 79.2
            GiB.
        memory_bandwidth: bytes a second to its memory.
        node: devices in a node, joined by the fast link.
        node_bandwidth: bytes a second that one device sends over the fast link.
        network_bandwidth: bytes a second that one device sends to other nodes.
        host_bandwidth: bytes a second to the host, one direction.
        workspaces_bytes: what PyTorch keeps for cuBLAS from the first product on, for forward's thread and
            for backward's.
        measured: the device of `lowtide.estimate.speed.EFFICIENCIES` whose efficiencies it takes: its own, or
            those of the nearest that runs were published for.
    """

    name: str
    flops: float
    memory_bytes: int
    memory_bandwidth: float
    node: int
    node_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float
    measured: str
    workspaces_bytes: int

    @property
    def grouped(self) -> bool:
        """Whether experts' products are grouped with their adapters' (PyTorch's kernels are for Hopper)."""
        return self.name[0] == "h"


def _device(
    name: str,
    tflops: float,
    gib: float,
    bandwidth: float,
    node: float,
    network: float,
    host: float,
    like: str,
) -> Device:
    one = _HOPPER_WORKSPACE if name[0] == "h" else _WORKSPACE
    memory, links = int(gib * 2**30), (node * _GB, network * _GB, host * _GB)
    return Device(name, tflops * 1e12, memory, bandwidth * _GB, 8, *links, like, 2 * one)


DEVICES = {
    device.name: device
    for device in (
        _device("v100", 125, 31.74, 900, 150, 3.1, 12, "a100"),
        _device("a100-40gb", 312, 39.39, 1555, 300, 25, 25, "a100"),
        _device("a100", 312, 79.15, 2039, 300, 25, 25, "a100"),
        _device("a800", 312, 79.15, 2039, 200, 25, 25, "a100"),
        _device("h100", 989, 79.18, 3350, 450, 50, 50, "h100"),
        _device("h100-96gb", 989, 95.02, 2400, 450, 50, 50, "h100-96gb"),
        _device("h200", 989, 139.80, 4800, 450, 50, 50, "h200"),
        _device("b200", 2250, 178.35, 8000, 900, 50, 50, "b200"),
        _device("rtx4090", 165, 23.64, 1008, 25, 3.1, 25, "a100"),
        _device("l40s", 362, 44.39, 864, 25, 25, 25, "a100"),
    )
}
"""Peaks are dense bfloat16 (float16 on V100); link rates one direction; networks one 25 to 400 Gb/s card a
device. ``h100-96gb`` is Grand Teton's, at 500 W. Memory: totals in PyTorch's own out-of-memory messages."""


def device(name: str, **changes: float) -> Device:
    """The device called ``name``, with some numbers changed.

    >>> device("A100").flops
    312000000000000.0

    Raises:
        EstimateError: there is none of that name, or a number is not positive.
    """
    expect(isinstance(name, str), "device(name=)", name, "a name, as in 'h100'", EstimateError)
    key = name.lower()
    key = key if key in DEVICES else key.removesuffix("-80gb")
    if key not in DEVICES:
        raise unknown("device", name, DEVICES)
    for what, value in changes.items():
        if not value > 0:
            raise EstimateError(f"{what}={value}: a number above 0 is needed")
    return replace(DEVICES[key], **changes)
