"""What one step has to update, and where each gradient lies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from lowtide.optim.pipeline import Task
from lowtide.optim.slots import Slot
from lowtide.optim.stream import sent
from lowtide.optim.tensors import check_gradient, flat_gradient, local


def tasks_of(
    groups: Iterable[dict[str, Any]], slot_of: Callable[[Tensor], Slot]
) -> tuple[list[Task], list[Task]]:
    """What there is to update on the device, and on the host in the order in which gradients arrive.

    Args:
        groups: of parameters, some with gradients.
        slot_of: a parameter's slot.

    Raises:
        OptimError: a gradient cannot be taken; nothing has changed then.
    """
    device: list[Task] = []
    host: list[Task] = []
    for group in groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            check_gradient(gradient)
            slot, stand_in, held = slot_of(parameter), sent(gradient), None
            if stand_in is not None:
                held = stand_in.stream.current(stand_in)
                on_device, on_host = stand_in.device_elements, held.elements
            else:
                elements = flat_gradient(local(gradient), local(parameter))
                on_device, on_host = elements[: slot.cut], elements[slot.cut :]
            if slot.device is not None:
                assert on_device is not None
                device.append(Task(slot, slot.device, group, on_device))
            if slot.host is not None:
                host.append(Task(slot, slot.host, group, on_host, held))
    return device, host[::-1]
