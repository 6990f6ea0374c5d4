"""Optimizers: what they keep of a parameter, and what their update needs."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Optimizer = Literal["adam", "adamw", "momentum", "sgd", "adamw-8bit", "paged-adamw", "paged-adamw-8bit"]

_EIGHT_BITS = 1 + Fraction(4, 256)


@dataclass(frozen=True, slots=True)
class Rule:
    """An optimizer.

    Attributes:
        states: values that it keeps of a parameter, a master copy not counted.
        value_bytes: bytes of one; ``None`` for those of `lowtide.estimate.config.Config.state_bytes`.
        copies: copies of a state that ``foreach`` makes for the update: Adam's square root of the second
            moment (`torch.optim.adam._multi_tensor_adam`).
        paged: whether the states are on the host but for the update (unified memory; 2305.14314, Section 3).
    """

    states: int
    value_bytes: Fraction | None = None
    copies: int = 0
    paged: bool = False


OPTIMIZERS: dict[str, Rule] = {
    "adam": Rule(2, copies=1),
    "adamw": Rule(2, copies=1),
    "momentum": Rule(1),
    "sgd": Rule(0),
    "adamw-8bit": Rule(2, _EIGHT_BITS),
    "paged-adamw": Rule(2, paged=True),
    "paged-adamw-8bit": Rule(2, _EIGHT_BITS, paged=True),
}
"""By name. Eight bits: a float32 scale for each block of 256 values (2110.02861, Section 2; bitsandbytes and
torchao)."""
