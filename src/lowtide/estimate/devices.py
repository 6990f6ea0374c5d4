"""Accelerators by name: what their makers' data sheets say, as numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lowtide.estimate.errors import EstimateError, unknown

_GB = 10**9


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator and its links.

    Attributes:
        name: what it is called.
        flops: peak FLOP/s of dense bfloat16 matrix products.
        memory_bytes: its memory as the driver reports it (an "80 GB" card has 80 GiB less what is reserved).
        memory_bandwidth: bytes a second to its memory.
        node: devices in a node, joined by the fast link.
        node_bandwidth: bytes a second that one device sends over the fast link.
        network_bandwidth: bytes a second that one device sends to other nodes.
        host_bandwidth: bytes a second to the host, one direction.
    """

    name: str
    flops: float
    memory_bytes: int
    memory_bandwidth: float
    node: int
    node_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float


def _device(
    name: str, tflops: float, gb: int, bandwidth: float, node: float, network: float, host: float
) -> Device:
    return Device(name, tflops * 1e12, gb * _GB, bandwidth * _GB, 8, node * _GB, network * _GB, host * _GB)


DEVICES = {
    device.name: device
    for device in (
        _device("v100", 125, 32, 900, 150, 3.1, 12),
        _device("a100-40gb", 312, 40, 1555, 300, 25, 25),
        _device("a100", 312, 80, 2039, 300, 25, 25),
        _device("h100", 989, 80, 3350, 450, 50, 50),
        _device("h200", 989, 141, 4800, 450, 50, 50),
        _device("b200", 2250, 180, 8000, 900, 50, 50),
        _device("rtx4090", 165, 24, 1008, 25, 3.1, 25),
        _device("l40s", 362, 48, 864, 25, 25, 25),
    )
}
"""Peaks are dense bfloat16 (float16 on V100); link rates one direction; networks one 25 to 400 Gb/s card a
device.
"""


def device(name: str, **changes: float) -> Device:
    """The device called ``name``, with some numbers changed.

    >>> device("A100").flops
    312000000000000.0
    """
    key = name.lower().removesuffix("-80gb") if name.lower() != "a100-40gb" else "a100-40gb"
    if key not in DEVICES:
        raise unknown("device", name, DEVICES)
    for what, value in changes.items():
        if not value > 0:
            raise EstimateError(f"{what}={value}: a number above 0 is needed")
    return replace(DEVICES[key], **changes)
