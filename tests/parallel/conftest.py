"""Makes the helpers of this folder importable, and a text to train on."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text to train on."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(3000)))
    return file
