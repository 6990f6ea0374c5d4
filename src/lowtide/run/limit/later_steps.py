"""What a refusal says of later steps: gradients that add up over several steps stand from the second one
on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lowtide.errors import BudgetError
from lowtide.run.limit.optimizer_need import own_share


@contextmanager
def later_steps_told(model: torch.nn.Module) -> Iterator[None]:
    """A budget that is refused in the block, for a step before which no gradients stood, is refused with how
    many bytes of them a later step may hold besides."""
    try:
        yield
    except BudgetError as error:
        waited = [p for p in model.parameters() if p.requires_grad and not hasattr(p, "gradient_slab")]
        missing = sum(own_share(p).nbytes for p in waited)
        if missing:
            error.add(
                f"Where gradients add up over several steps, those after the first take up to {missing:,} "
                "bytes more."
            )
        raise
