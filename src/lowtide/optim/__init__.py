"""The optimizer on the host: `HostOptimizer` keeps and updates any fraction of an optimizer's state in main
memory or on disk.

>>> from lowtide.optim import HostOptimizer
>>> HostOptimizer.__name__
'HostOptimizer'
"""

from __future__ import annotations

from lowtide.optim.balance import Balance, Speeds
from lowtide.optim.errors import OptimError
from lowtide.optim.host import HostOptimizer
from lowtide.optim.link import CudaLink, DirectLink, Link

__all__ = [
    "Balance",
    "CudaLink",
    "DirectLink",
    "HostOptimizer",
    "Link",
    "OptimError",
    "Speeds",
]
