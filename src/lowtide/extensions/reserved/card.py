"""The allocator of a card that is here, as it is set and as it stands."""

from __future__ import annotations

import torch

from lowtide import private
from lowtide.meter.reserved import Block, CachingAllocator


def caching_allocator(device: torch.device) -> tuple[CachingAllocator, dict[int, Block]]:
    """A model of a CUDA device's native allocator as it is set and as it stands.

    Returns:
        The model, and its blocks that are handed out, by address.
    """
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    settings, segments = private.cuda_allocator_state(device)
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    model = CachingAllocator(
        capacity=torch.cuda.get_device_properties(device).total_memory,
        expandable_segments=settings["expandable_segments"],
        roundup_power2_divisions=list(settings["roundup_power2_divisions"].values()),
        max_split_bytes=settings["max_split_size"] if settings["max_split_size"] > 0 else None,
        garbage_collection_threshold=settings["garbage_collection_threshold"],
        fraction=fraction if fraction < 1 else None,
    )
    return model, model.resume(segments)
