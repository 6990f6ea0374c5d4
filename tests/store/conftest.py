"""Makes this folder's helpers, the models of `tests/families`, and the helper that starts ranks,
importable.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "families"))
sys.path.insert(0, str(Path(__file__).parent.parent / "parallel"))
