"""lowtide makes a PyTorch training step fit in the memory you have, at the least extra time, and proves it.

>>> import lowtide
>>> lowtide.limit_memory  # doctest: +ELLIPSIS
<function limit_memory at ...>

Importing lowtide imports no torch; each name below is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from inspect import Signature, signature
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from lowtide.errors import BudgetError, LowtideError, PlanError, ReplayError, TraceError
from lowtide.version import __version__ as __version__

if TYPE_CHECKING:
    from lowtide import policies
    from lowtide.applying import apply
    from lowtide.compiled.api import compile, compile_options
    from lowtide.extensions.moves.layout import layout
    from lowtide.extensions.moves.speeds import measure_links
    from lowtide.extensions.moves.store.stores import Stores
    from lowtide.extensions.scopes.scope import checkpoint, checkpointing
    from lowtide.extensions.tiles.loss import chunked_loss
    from lowtide.extensions.tiles.tile import tile
    from lowtide.graph import StepGraph
    from lowtide.limits import limit_memory
    from lowtide.meter import Measurement, measure
    from lowtide.plan import make as plan
    from lowtide.plan.data import Chain, Compress, Keep, Offload, Plan, Recompute, Shard
    from lowtide.run.limit.handle import Handle, handle_of
    from lowtide.run.messages import LowtideWarning
    from lowtide.run.profile.trace_step import trace


class _Words:
    """Puts refusals into words. What does that is loaded for the first of them."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("lowtide.extensions.advice.words"), name)


BudgetError.words = cast(Any, _Words())

_HOMES = {
    "lowtide.compiled.api": ("compile", "compile_options"),
    "lowtide.graph": ("StepGraph",),
    "lowtide.limits": ("limit_memory",),
    "lowtide.meter": ("Measurement", "measure"),
    "lowtide.plan.data": ("Chain", "Compress", "Keep", "Offload", "Plan", "Recompute", "Shard"),
    "lowtide.extensions.moves.layout": ("layout",),
    "lowtide.extensions.moves.speeds": ("measure_links",),
    "lowtide.applying": ("apply",),
    "lowtide.run.limit.handle": ("Handle", "handle_of"),
    "lowtide.run.messages": ("LowtideWarning",),
    "lowtide.extensions.scopes.scope": ("checkpoint", "checkpointing"),
    "lowtide.extensions.tiles.tile": ("tile",),
    "lowtide.extensions.moves.store.stores": ("Stores",),
    "lowtide.extensions.tiles.loss": ("chunked_loss",),
}
"""Where the names are that are loaded when they are first used."""

_ROOMS = {"estimate": "lowtide.estimate", "plan": "lowtide.plan", "policies": "lowtide.policies"}
"""Names that are modules; `plan` is a function, too."""

__all__ = [
    "BudgetError",
    "Chain",
    "Compress",
    "Handle",
    "Keep",
    "LowtideError",
    "LowtideWarning",
    "Measurement",
    "Offload",
    "Plan",
    "PlanError",
    "Recompute",
    "ReplayError",
    "Shard",
    "StepGraph",
    "Stores",
    "TraceError",
    "apply",
    "checkpoint",
    "checkpointing",
    "chunked_loss",
    "compile",
    "compile_options",
    "handle_of",
    "layout",
    "limit_memory",
    "measure",
    "measure_links",
    "plan",
    "policies",
    "tile",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(_ROOMS[name])
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    rooms = (name for name, one in globals().items() if isinstance(one, ModuleType) or name.startswith("__"))
    return sorted({*rooms, *_ROOMS, *__all__})


class _Trace(ModuleType):
    """Lets ``lowtide.trace`` be the room and the verb, which runs a step: the room knows nothing of that."""

    def __call__(self, *args: Any, **kwargs: Any) -> StepGraph:
        return import_module("lowtide.run.profile.trace_step").trace(*args, **kwargs)

    @property
    def __signature__(self) -> Signature:
        return signature(import_module("lowtide.run.profile.trace_step").trace)


import_module("lowtide.trace").__class__ = _Trace
