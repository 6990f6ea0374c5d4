"""The optimizer on the host: `HostOptimizer` keeps and updates any fraction of an optimizer's state in main
memory or on disk.

In: parameters, and their gradients as backward makes them. Out: updated parameters. Begin with `host.py`;
`pipeline.py` updates in chunks, `link.py` moves bytes to and from the device. Of an optimizer on the host a
limit knows ``device_state_bytes``, ``step_bytes``, ``host_fraction`` and ``choose_host_fraction`` alone.

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
