"""Makes the helpers of this folder and the benchmarks importable, and a text to train on."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text to train on."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(3000)))
    return file
