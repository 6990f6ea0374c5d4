"""Whether there are other ranks: asked of every model, so that the files on them are loaded where there are.

Seen in PyTorch 2.11 to 2.13.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


def may_shard() -> bool:
    """Whether a model may be sharded in this process: it has a process group."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


def is_schedule(item: Any) -> bool:
    """Whether this is a schedule of a pipeline."""
    module: Any = sys.modules.get("torch.distributed.pipelining.schedules")  # imported, if there is one
    return module is not None and isinstance(item, module._PipelineSchedule)
