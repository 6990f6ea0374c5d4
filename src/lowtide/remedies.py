"""What holds memory at a peak, what would free it, and how much: for refusals, reports and errors of CUDA.

In: bytes by name and module. Out: `Holder`, and lines for people. Pure data: no torch, no graph. Here alone
the facts of a `lowtide.BudgetError` become a text: `in_short`, `what_to_do`, and `in_lines` of the `largest`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lowtide.words import SIZES, format_bytes

PARAMETERS, BUFFERS, GRADIENTS, INPUTS = "parameters", "buffers", "gradients", "inputs"
STATE, RESIDENT, ACTIVATIONS, LOSS = (
    "optimizer state",
    "what else is resident",
    "least activations",
    "logits and loss",
)
WORKSPACES = "cuBLAS workspaces"
OUTPUTS = "zero gradients of outputs other than the loss"
"""Names of what is live at a peak, see `lowtide.BudgetError.parts`."""

SCORES = "attention scores"
"""Name of what softmax makes of the products of queries and keys, and of those, with their gradients."""

UPDATE = "temporary copies of its update"
"""Name of what the optimizer's own step allocates, among these."""

REDUCED = "gradients on their way"
"""Name of what gradients are copied into while ranks add them up, beyond what the update takes."""

OF_PARAMETERS = "gradients of parameters, not added up yet"
"""Name of gradients that backward has just made."""

FREE, OTHERS = "left free", "others"
"""Names of what the smallest budget has beyond what is live at the peak, and of what is too small to name."""

CHUNKS = 8
"""Chunks into which the loss is divided where that is proposed."""

SHOWN = 3
"""How many holders are named, the largest first."""

WORTH = 0.05
"""Share of the largest holder's bytes that another has to have to be named."""


_ORDER = (PARAMETERS, BUFFERS, GRADIENTS, STATE, WORKSPACES, RESIDENT, INPUTS, OUTPUTS, LOSS, ACTIVATIONS)

_WHOLE = (PARAMETERS, BUFFERS, GRADIENTS, STATE, WORKSPACES, RESIDENT, UPDATE, REDUCED)
"""What no step makes: holders of their own, whoever made the rest."""

_SMALL = 1 / 200
"""Share of the smallest budget from which on an item of it has a name."""

_LITTLE = 0.1
"""Share of a peak up to which sharing the model among devices is hardly worth its exchanges."""

_MOST_SMALLER = 0.9
"""The most by which a smaller batch is proposed, as a share: a smaller one is hardly worth training on."""


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
        known_remedy: as `remedy`, where more is known than the name says.
    """

    name: str
    bytes: int
    module: str = ""
    source: str = ""
    form: str = ""
    known_remedy: tuple[str, int] = ("", 0)

    @property
    def remedy(self) -> tuple[str, int]:
        """What would free most of it, and about how many bytes; no words where nothing is known to.

        >>> Holder(STATE, 1 << 30).remedy
        ('lowtide.optim.HostOptimizer(..., host_fraction=1)', 1073741824)
        """
        if self.known_remedy[0]:
            return self.known_remedy
        if self.name == LOSS:
            return f"computing the loss in {CHUNKS} chunks of tokens", self.bytes - self.bytes // CHUNKS
        if self.name == SCORES:
            return "scaled_dot_product_attention with a fused kernel", self.bytes
        if self.name == STATE:
            return "lowtide.optim.HostOptimizer(..., host_fraction=1)", self.bytes
        if self.name in (PARAMETERS, GRADIENTS, OF_PARAMETERS):
            return "sharding them over twice as many devices (FSDP2)", self.bytes // 2
        if self.name == WORKSPACES:
            return "CUBLAS_WORKSPACE_CONFIG=:16:8 in the environment (slower products)", self.bytes
        if self.name in (BUFFERS, RESIDENT, REDUCED, UPDATE):
            return "", 0
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
    made = tuple(made)
    named = {holder.name for holder in made}
    found = [*made, *(Holder(name, parts[name]) for name in _WHOLE if name not in named and parts.get(name))]
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


def in_short(
    budget_bytes: int, smallest_bytes: int, parts: Mapping[str, int], subject: str = "", policy: str = ""
) -> str:
    """What a step takes that is above its budget, in a line.

    Args:
        budget_bytes: the budget.
        smallest_bytes: what would do.
        parts: what is live at the peak of the plan that needs it, in bytes by name.
        subject: what the budget is too small for, where that is not forward and backward.
        policy: the policy that cannot meet it, where another may.

    Example:
        >>> parts = {PARAMETERS: 6 << 30, GRADIENTS: 6 << 30, ACTIVATIONS: 1000 << 20}
        >>> in_short(12 << 30, 13 << 30, parts)
        'the budget of 12 GiB is too small: parameters 6, gradients 6, least activations 0.98, others 0.02 \
take 13 GiB'
        >>> in_short(12 * 10**9, 13 << 30, {PARAMETERS: 13 << 30})
        'the budget of 12 GB (11.17 GiB) is too small: parameters 13 take 13 GiB'
    """
    unit = _unit(smallest_bytes)
    items = {name: parts[name] for name in (*filter(parts.__contains__, _ORDER), *parts) if parts[name]}
    items[FREE] = max(0, smallest_bytes - sum(items.values()))
    items[OTHERS] = sum(count for count in items.values() if count < _SMALL * smallest_bytes)
    named = {
        name: count for name, count in items.items() if count >= _SMALL * smallest_bytes or name == OTHERS
    }
    shares = _hundredths(named, SIZES[unit], math.ceil(100 * smallest_bytes / SIZES[unit]))
    words = [f"{name} {share / 100:g}" for name, share in shares.items() if share]
    needed = rounded_up(smallest_bytes).replace(unit, f" {unit}")
    takes = f"{', '.join(words)} take {needed}" if parts else f"at least {needed} are needed"
    budget = _below(budget_bytes, smallest_bytes)
    if budget_bytes % 10**6 == 0 and budget_bytes % SIZES["MiB"]:  # as it was written
        written, size = ("GB", 10**9) if budget_bytes >= 10**9 else ("MB", 10**6)
        budget = f"{budget_bytes / size:g} {written} ({budget})"
    subject = subject or (f"the policy {policy!r}" if policy else "")
    return f"the budget of {budget} is too small{f' for {subject}' if subject else ''}: {takes}"


def _hundredths(items: Mapping[str, int], unit: int, total: int) -> dict[str, int]:
    """Bytes in hundredths of a unit. Each is rounded down or up, so that they add up to ``total``.

    >>> _hundredths({"a": 333, "b": 333, "c": 334}, 1000, 100)
    {'a': 33, 'b': 33, 'c': 34}
    """
    found = {name: 100 * count // unit for name, count in items.items()}
    most = sorted(items, key=lambda name: 100 * items[name] % unit, reverse=True)
    for name in most[: max(0, total - sum(found.values()))]:
        found[name] += 1
    return found


def what_to_do(
    budget_bytes: int,
    smallest_bytes: int,
    parts: Mapping[str, int],
    policy: str = "",
    plain_peak_bytes: int | None = None,
    holders: Sequence[Holder] = (),
) -> list[str]:
    """What to do about a budget that is too small, any one of these: give more, or free the bytes that are
    missing, by what is live at the peak.

    Args:
        budget_bytes, smallest_bytes, parts, policy: as of `in_short`.
        plain_peak_bytes: the smallest budget is also told as a share of this.
        holders: those that hold most, as they are listed.
    """
    share = (
        f", {math.ceil(1000 * smallest_bytes / plain_peak_bytes) / 10:g}% of the plain step's peak"
        if plain_peak_bytes
        else ""
    )
    found = [
        f"give a budget of {rounded_up(smallest_bytes)} or more ({smallest_bytes} bytes{share}), the "
        "smallest that works"
    ]
    missing_bytes, given = max(1, smallest_bytes - budget_bytes), _below(budget_bytes, smallest_bytes)
    if policy:
        found.append("use the policy 'optimal', which finds the least memory that it can")
    loss, state = parts.get(LOSS, 0), parts.get(STATE, 0)
    activations = parts.get(ACTIVATIONS, 0) + parts.get(INPUTS, 0) + loss
    if missing_bytes <= _MOST_SMALLER * activations:
        found.append(
            f"make the batch or the sequences at least {math.ceil(100 * missing_bytes / activations)} % "
            f"smaller, and give the budget as {given.replace(' ', '')} (a percentage would be of the smaller "
            "step)"
        )
    if parts.get(OUTPUTS, 0) > missing_bytes:
        found.append(
            "compile a module that returns the loss alone (leave out logits, set use_cache=False): "
            "torch.compile makes zeros for the gradient of every other output"
        )
    if loss > missing_bytes:
        found.append(
            "compute the loss in chunks of tokens, so that its logits never exist as a whole (gradients then "
            "differ in rounding): lowtide.chunked_loss(model), unless torch.compile is around the whole model"
        )
    if state > missing_bytes:
        share = math.ceil(100 * missing_bytes / state) / 100
        optimizer = f"lowtide.optim.HostOptimizer(..., host_fraction={share:g})"
        found.append(f"keep {share:.0%} or more of the optimizer's state on the host: {optimizer}")
    known: dict[str, int] = {}
    for holder in holders:
        words, freed = holder.remedy
        if holder.known_remedy[0] or holder.name == SCORES:
            known[words] = known.get(words, 0) + freed
    for words, freed in known.items():
        if freed > missing_bytes:
            found.insert(0, f"use {words}, which frees about {format_bytes(freed)}")
    if len(found) == 1:
        found += _when_no_one_thing_is_enough(missing_bytes, activations, parts, holders)
    return found


def _when_no_one_thing_is_enough(
    missing_bytes: int, activations: int, parts: Mapping[str, int], holders: Sequence[Holder]
) -> list[str]:
    """What to do where nothing that is proposed above frees what is missing by itself: what holds most comes
    first.
    """
    found: list[str] = []
    shared = parts.get(PARAMETERS, 0) + parts.get(GRADIENTS, 0) + parts.get(STATE, 0)
    buffers, total = parts.get(BUFFERS, 0), sum(parts.values())
    if activations > max(shared, buffers):
        square = " (attention scores with the square of the sequences' length)" * _has_scores(holders)
        found.append(
            f"make the batch and the sequences smaller: {format_bytes(activations)} grow with "
            f"them{square}, and {format_bytes(missing_bytes)} are missing"
        )
    if buffers > max(shared, activations):
        found.append(f"make the buffers smaller: they are {format_bytes(buffers)}")
    if sum(holder.remedy[1] for holder in holders) >= missing_bytes:
        found.append(f"combine several of the remedies below: {format_bytes(missing_bytes)} are missing")
    if shared > _LITTLE * total:
        found.append("split the model among devices (FSDP2, lowtide.parallel) or train a smaller one")
    return found


def _has_scores(holders: Sequence[Holder]) -> bool:
    return any(holder.name == SCORES for holder in holders)


def rounded_up(count: int) -> str:
    """A budget of at least so many bytes, as people write it.

    >>> rounded_up(5_067_477)
    '4.84MiB'
    """
    unit = _unit(count)
    return f"{math.ceil(100 * count / SIZES[unit]) / 100:g}{unit}"


def _below(budget_bytes: int, smallest_bytes: int) -> str:
    """A budget in the unit of the smallest one, rounded down: so it is shown below what is needed.

    >>> _below(5_860_000, 8_689_291)
    '5.58 MiB'
    """
    unit = _unit(smallest_bytes)
    if budget_bytes < SIZES[unit] / 10:
        return format_bytes(budget_bytes)
    return f"{budget_bytes * 100 // SIZES[unit] / 100:g} {unit}"


def _unit(count: int) -> str:
    """The unit for a count of bytes and others beside it."""
    return "GiB" if count >= 1 << 30 else "MiB" if count >= 1 << 20 else "KiB"
