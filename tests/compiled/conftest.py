"""Makes tests independent of what was compiled before."""

from collections.abc import Iterator

import pytest
import torch._inductor.config

from lowtide.private import inductor


@pytest.fixture(autouse=True)
def own_code() -> Iterator[None]:
    """No graph was compiled before, here or on the disk: on a warm cache nobody plans, and the handle has no
    plan. Kernels of the same text are compiled once. The same random numbers each time.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch._inductor.config.patch(inductor.UNCACHED):
        yield
    torch._dynamo.reset()
