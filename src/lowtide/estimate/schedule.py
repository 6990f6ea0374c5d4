"""How many micro-batches a pipeline stage holds at once: 1F1B and interleaved 1F1B (arXiv 2104.04473, as used
by arXiv 2205.05198, Section 4.2.3).

The closed forms stand beside a walk through the schedule itself, which the tests hold against them.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Literal

from lowtide.estimate.config import Config


def layers_in_flight(config: Config, stage: int) -> Fraction:
    """Layers times micro-batches whose activations a stage holds at its fullest moment.

    1F1B: min(p - stage, n) micro-batches of L/p layers. Interleaved: min(pm + p - 1 - 2 stage, nm) chunks of
        L/(pm) layers, which for the first
    stage is L (1 + (p-1)/(pm)) (2205.05198, Section 4.2.3).

    >>> from lowtide.estimate.settings import configure
    >>> config = configure("175b", as_published=True)
    >>> layers_in_flight(config, 0) / 96 == 1 + Fraction(7, 8 * 3)
    True
    """
    p, m, n = config.pp, config.interleave, config.micro_batches
    if m == 1:
        return Fraction(min(p - stage, n) * config.stage_layers)
    return min(p * m + p - 1 - 2 * stage, n * m) * Fraction(config.model.layers, p * m)


def micro_batches_in_flight(config: Config, stage: int) -> Fraction:
    """The same in whole micro-batches of the stage: layers in flight over the stage's layers."""
    return layers_in_flight(config, stage) / config.stage_layers


Turn = tuple[Literal["forward", "backward"], int, int]
"""forward or backward, the micro-batch, the model chunk on the stage."""


def turns(config: Config, stage: int) -> Iterator[Turn]:
    """What a stage does in a step, in order: warm-up forwards, then one forward and one backward in turn,
    then the backwards left.

    >>> from lowtide.estimate.settings import configure
    >>> config = configure("gpt2", pp=2, global_batch=3)
    >>> [f"{kind[0]}{batch}" for kind, batch, chunk in turns(config, 0)]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    p, m, n = config.pp, config.interleave, config.micro_batches
    count = n * m
    warm = p - stage - 1 if m == 1 else 2 * (p - stage - 1) + (m - 1) * p
    warm = min(warm, count)

    def place(index: int, backward: bool) -> tuple[int, int]:
        """Micro-batch and chunk of the ``index``-th turn: p micro-batches of each chunk before the next
        chunk.
        """
        if m == 1:
            return index, 0
        group, rest = divmod(index, p * m)
        chunk = rest // p
        return group * p + rest % p, m - 1 - chunk if backward else chunk

    for index in range(warm):
        yield "forward", *place(index, backward=False)
    for index in range(count - warm):
        yield "forward", *place(warm + index, backward=False)
        yield "backward", *place(index, backward=True)
    for index in range(count - warm, count):
        yield "backward", *place(index, backward=True)


def most_chunks_held(config: Config, stage: int) -> int:
    """The most (micro-batch, chunk) pairs between their forward and their backward, by walking through
    `turns`.
    """
    held = most = 0
    for kind, _, _ in turns(config, stage):
        held += 1 if kind == "forward" else -1
        most = max(most, held)
    return most


def bubble_share(config: Config) -> Fraction:
    """Idle time of a pipeline over its busy time: (p-1)/(nm) (arXiv 2104.04473, Section 2.2).

    >>> from lowtide.estimate.settings import configure
    >>> bubble_share(configure("gpt2", pp=4, global_batch=12))
    Fraction(1, 4)
    """
    return Fraction(config.pp - 1, config.micro_batches * config.interleave)
