"""Makes the helpers of this folder, and the one that starts ranks, importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "parallel"))
