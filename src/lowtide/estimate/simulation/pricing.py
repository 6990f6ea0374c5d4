"""What an operation takes on an accelerator that is not there: by its peaks, at the efficiencies of published
runs.
"""

from __future__ import annotations

from collections.abc import Callable

from lowtide.estimate.devices import Device
from lowtide.estimate.speed import efficiencies
from lowtide.trace.costs.roofline import Roofline
from lowtide.trace.costs.specs import OpCost, OpSpec
from lowtide.trace.costs.timing import estimate

CALL_SECONDS = 5e-6
"""What launching one operation takes at least."""


def pricer(device: Device) -> Callable[[OpSpec], OpCost]:
    """What says an operation's cost on ``device``.

    Products are priced as bfloat16's, attention with its own efficiency, everything else by the bytes that it
    reads and writes.

    Example:
        >>> from lowtide.estimate.devices import device
        >>> callable(pricer(device("h100")))
        True
    """
    known = efficiencies()[device.measured]
    products = Roofline(device.flops * known.products, device.memory_bandwidth, CALL_SECONDS)
    attention = Roofline(device.flops * known.attention, device.memory_bandwidth, CALL_SECONDS)

    def price(spec: OpSpec) -> OpCost:
        return estimate(spec, attention if "attention" in str(spec.func) else products)

    return price
