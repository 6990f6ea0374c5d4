"""The helpers of this folder can be imported by its tests; one thread, as the other folders have it."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent))
