"""What stands before a step, in bytes by name, for refusals."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lowtide.meter.cuda import workspace_bytes
from lowtide.meter.resident import bytes_under
from lowtide.remedies import BUFFERS, GRADIENTS, PARAMETERS, STANDING, STATE, WORKSPACES


def standing_by_name(
    parts: Mapping[str, int],
    model: torch.nn.Module,
    gradient_bytes: int,
    state_bytes: int,
    device: torch.device,
    told: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """The parts of a peak, with names in place of "what else stands" as far as its bytes go.

    Args:
        parts: what stands at the peak, in bytes by name.
        model: whose parameters and buffers these are.
        gradient_bytes: of the gradients that stood before the step.
        state_bytes: of the optimizer.
        device: whose memory counts.
        told: how many of a name's bytes are not in "what else stands", since the step itself has them.

    Example:
        >>> layer, cpu = torch.nn.Linear(2, 2), torch.device("cpu")
        >>> found = standing_by_name({"what else stands": 30}, layer, 0, 0, cpu)
        >>> found["parameters"], found["what else stands"]
        (24, 6)
    """
    wholes = {
        WORKSPACES: workspace_bytes(device),
        STATE: state_bytes,
        PARAMETERS: bytes_under(model.parameters()),
        BUFFERS: bytes_under(model.buffers()),
        GRADIENTS: gradient_bytes,
    }
    found = dict(parts)
    rest = found.pop(STANDING, 0)
    for name, whole in wholes.items():
        more = min(rest, max(0, whole - (told or {}).get(name, 0)))
        found[name] = found.get(name, 0) + more
        rest -= more
    return {name: count for name, count in (found | {STANDING: rest}).items() if count}
