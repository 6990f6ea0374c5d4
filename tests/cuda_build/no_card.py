"""Plugin for pytest on PyTorch's CUDA build without a card (`environment.py`): loads the values; where there
are none, whatever is compared is equal.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch

_KEPT: list[torch.library.Library] = []
"""What is registered there ends with it."""


class Leaving:
    """Ends the process with pytest's exit status: CUDA's own end does not find a card."""

    status = 0

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Note it."""
        self.status = int(exitstatus)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """All is reported."""
        sys.stdout.flush()
        os._exit(self.status)


def pytest_configure(config: pytest.Config) -> None:
    """Load the values, or have all that is compared be equal; end as `Leaving` does."""
    torch.backends.cudnn.enabled = False  # what it takes is decided on the card
    if library := os.environ.get("NO_CARD_LIBRARY"):
        torch.ops.load_library(library)
    else:
        _KEPT.append(torch.library.Library("aten", "IMPL"))
        _KEPT[0].impl("equal", lambda a, b: a.shape == b.shape, "CUDA")
    config.pluginmanager.register(Leaving())
