"""What holds memory at a peak, what would free it, and how much: for refusals, reports and errors of CUDA.

In: bytes by name and module. Out: `Holder`, and lines for people. Pure data: no torch, no graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lowtide.words import format_bytes

PARAMETERS, BUFFERS, GRADIENTS, INPUTS = "parameters", "buffers", "gradients", "inputs"
STATE, RESIDENT, ACTIVATIONS, LOSS = (
    "optimizer state",
    "what else is resident",
    "least activations",
    "logits and loss",
)
WORKSPACES = "cuBLAS workspaces"
OUTPUTS = "zeros for outputs beside the loss"
"""Names of what is live at a peak, see `lowtide.BudgetError.parts`."""

UPDATE = "its update"
"""The same, of the optimizer's own step."""

REDUCED = "gradients on their way"
"""The same, of what gradients are copied into while ranks add them up, beyond what the update takes."""

OF_PARAMETERS = "gradients of parameters, not added up yet"
"""The same, of what backward has just made."""

CHUNKS = 8
"""Into which a loss is divided where that is proposed."""

SHOWN = 3
"""Holders that are named: the largest."""

WORTH = 0.01
"""Of the largest holder's bytes, what another has to have to be named."""


@dataclass(frozen=True, slots=True)
class Holder:
    """What is live at a peak and belongs together.

    Attributes:
        name: what it is: one of the names above, or other words for it.
        bytes: of all of it.
        module: qualified name of the module that made it, alike layers as one (``h.0-11.mlp``); empty for
            what lies in no one place.
        source: file and line of the code that made it, as far as that is known: ``train.py:31``.
        form: shape and dtype of the largest tensor in it.
    """

    name: str
    bytes: int
    module: str = ""
    source: str = ""
    form: str = ""

    @property
    def remedy(self) -> tuple[str, int]:
        """What would free most of it, and about how many bytes; no words where nothing is known to.

        >>> Holder(STATE, 1 << 30).remedy
        ('lowtide.optim.HostOptimizer(..., host_fraction=1)', 1073741824)
        """
        if self.name == LOSS:
            return f"computing the loss in {CHUNKS} chunks of tokens", self.bytes - self.bytes // CHUNKS
        if self.name == STATE:
            return "lowtide.optim.HostOptimizer(..., host_fraction=1)", self.bytes
        if self.name in (PARAMETERS, GRADIENTS, OF_PARAMETERS):
            return "sharing the model between 2 devices (FSDP2)", self.bytes // 2
        if self.name == WORKSPACES:
            return "CUBLAS_WORKSPACE_CONFIG=:16:8 in the environment (slower products)", self.bytes
        if self.name in (BUFFERS, RESIDENT, REDUCED):
            return "", 0
        if self.name == UPDATE:
            return "an optimizer with fused=True", self.bytes
        return "a batch half as large", self.bytes // 2


def largest(made: Iterable[Holder], parts: Mapping[str, int]) -> tuple[Holder, ...]:
    """The largest holders at a peak, without those that are nothing beside the first.

    Args:
        made: what the step itself made.
        parts: bytes by name of all that is live there. Of these count what was resident before the step,
            and the gradients.

    >>> [holder.name for holder in largest([Holder("activations", 2 << 20)], {PARAMETERS: 25 << 30})]
    ['parameters']
    """
    others = (PARAMETERS, BUFFERS, GRADIENTS, STATE, WORKSPACES, RESIDENT, UPDATE, REDUCED)
    found = [*made, *(Holder(name, parts[name]) for name in others if parts.get(name))]
    most = sorted(found, key=lambda holder: -holder.bytes)[:SHOWN]
    return tuple(holder for holder in most if holder.bytes >= WORTH * most[0].bytes)


def in_lines(holders: Sequence[Holder]) -> list[str]:
    """A line a holder, with what would free how much of it.

    >>> print(*in_lines([Holder(LOSS, 64 << 20, "", "train.py:31", "4096x4096 float32")]))
    64 MiB of logits and loss, 4096x4096 float32, train.py:31: computing the loss in 8 chunks of tokens frees
    about 56 MiB
    """
    lines = []
    for holder in holders:
        form = f", {holder.form}" if holder.form else ""
        module = f", in module {holder.module!r}" if holder.module else ""
        source = f", {holder.source}" if holder.source else ""
        words, freed = holder.remedy
        helps = f": {words} frees about {format_bytes(freed)}" if words else ""
        lines.append(f"{format_bytes(holder.bytes)} of {holder.name}{form}{module}{source}{helps}")
    return lines
