"""What a plan depends on outside the step: the size of encoded values, and how fast tiers, codecs and groups
are. The planner takes both as plain data.

This is the one file of the planner that imports the stores. They import PyTorch, so each function loads them
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from lowtide.errors import expect
from lowtide.plan.data import Compress, Link, Moving, Shard, decision_of, form_and_tier
from lowtide.progress import current

if TYPE_CHECKING:
    import torch

    from lowtide.store.codec import Codec
    from lowtide.store.stores import Stores
else:
    Codec = object  # for annotations: the class itself loads PyTorch


def codec_named(name: str, own: Sequence[Codec] = ()) -> Codec:
    """The codec of that name, one of ``own`` or of lowtide's."""
    from lowtide.store.codec import codec_named as find

    return find(name, own)


def encoded_bytes(codec: Codec, elements: int, dtype: str) -> int:
    """The most bytes that a value of so many elements takes in a codec."""
    import torch

    from lowtide.store.codec import Form

    return codec.encoded_bytes(Form(elements, getattr(torch, dtype, torch.uint8)))


def codecs_behind(name: str) -> tuple[str, ...]:
    """The codecs that a name may come to mean."""
    return ("mask", "positive") if name == "auto" else (name,)


@lru_cache(maxsize=64)
def link_speeds(way: Moving, own: tuple[Codec, ...], device: str) -> dict[str, Link]:
    """How fast the tier or codec of a decision is, measured once in a process."""
    from lowtide.store.stores import Stores

    return measure_links(way, stores=Stores(codecs=own), device=device)


def measure_links(
    *ways: str | Moving,
    stores: Stores | None = None,
    device: str | torch.device = "cpu",
) -> dict[str, Link]:
    """How fast the tiers, codecs and groups of some decisions are here, by moving a few megabytes.

    Args:
        ways: decisions, or their short names.
        stores: with the groups and codecs that ``ways`` name. Where there is a group, all its ranks have to
            call this, and all get the same.
        device: the device that values leave.

    Returns:
        The speed of each by its name, as ``links=`` of the policies takes them.

    Raises:
        PlanError: a tier cannot be opened, or a group or codec is missing.

    Example:
        >>> sorted(measure_links("int8"))
        ['int8']
    """
    from lowtide.meter.main_memory import device_of
    from lowtide.store.speeds import measure_codec, measure_group, measure_tier
    from lowtide.store.stores import Stores

    given = stores is None or isinstance(stores, Stores)
    expect(given, "measure_links(stores=)", stores, "lowtide.Stores(...), or None")
    place = device_of(device)
    found: dict[str, Link] = {}
    current().say("timing transfers")
    with Stores() as own:
        known = stores or own
        for decision in map(decision_of, ways):
            first, then = form_and_tier(decision)
            if isinstance(first, Compress):
                for name in codecs_behind(first.codec):
                    if name not in found:
                        found[name] = measure_codec(known.codec(name), place)
            elif isinstance(first, Shard) and first.group not in found:
                found[first.group] = measure_group(known.group(first.group, first.size), place)
            if then is not None and then.tier not in found:
                found[then.tier] = measure_tier(own.tier(then.tier, then.path, place), place)
    return found
