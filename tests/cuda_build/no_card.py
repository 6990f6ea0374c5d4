"""Plugin for pytest on PyTorch's CUDA build without a card (`environment.py`): loads the values; where there
are none, whatever is compared is equal. As a program it runs a module: ``python -m no_card MODULE ...``.
"""

from __future__ import annotations

import ctypes
import os
import runpy
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


def _filled(tensor: torch.Tensor, number: float) -> torch.Tensor:
    """Of fills those of single numbers: Inductor reads constants, and writes what it read into its graph."""
    if tensor.numel() == 1:
        value = torch.tensor(number, dtype=tensor.dtype)
        ctypes.memmove(tensor.data_ptr(), value.data_ptr(), value.nbytes)  # a card's memory is main memory
    return tensor


def set_up() -> None:
    """Load the values, or have all that is compared be equal."""
    torch.backends.cudnn.enabled = False  # what it takes is decided on the card
    if library := os.environ.get("NO_CARD_LIBRARY"):
        torch.ops.load_library(library)
    else:
        _KEPT.append(torch.library.Library("aten", "IMPL"))
        _KEPT[0].impl("equal", lambda a, b: a.shape == b.shape, "CUDA")
        _KEPT[0].impl("fill_.Scalar", _filled, "CUDA")


def pytest_configure(config: pytest.Config) -> None:
    """Set up; end as `Leaving` does."""
    set_up()
    config.pluginmanager.register(Leaving())


if __name__ == "__main__":
    set_up()
    sys.argv = sys.argv[1:]
    status = 0
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = int(ended.code or 0)
    sys.stdout.flush()
    os._exit(status)
