"""Makes the helpers of this folder, the one that starts ranks, and the benchmarks importable."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "parallel", HERE.parent.parent):
    sys.path.insert(0, str(folder))
