"""Steps inside of PyTorch's own context manager for context parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lowtide.errors import PlanError
from lowtide.private.attention import is_attention_replaced


@contextmanager
def explained() -> Iterator[None]:
    """A step within the block that fails because PyTorch exchanges no attention on its device says what does.

    Raises:
        PlanError: it fails so.
    """
    try:
        yield
    except NotImplementedError as error:
        if "scaled_dot_product" in str(error) and is_attention_replaced():
            raise PlanError(
                "torch.distributed.tensor.experimental.context_parallel exchanges no attention on this "
                "device: leave out that context manager, and call model = "
                "lowtide.parallel.context_parallel(model, mesh) once, in front of limit_memory; the model "
                "then takes whole sequences"
            ) from error
        raise
