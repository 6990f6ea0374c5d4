"""The limit of a model that FSDP may shard, before or after it was put on.

The hooks of FSDP's root belong to the step: they gather the weights, and begin and end it. So the limit takes
the place of the root's whole call. Of any other model it replaces the forward, as `Limiter` does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lowtide.private import fsdp, skipped_by_dynamo
from lowtide.run.limit.limiter import Limiter

UNCALLED = (
    "the forward of this limited model was called without its module hooks, which gather the weights "
    "of FSDP: such steps run without the limit. Call model(...), and call limit_memory after "
    "torch.distributed.init_process_group"
)
"""The warning of a forward that is called past the hooks of FSDP's root."""


class ShardedLimiter(Limiter):
    """Replaces ``model.forward``, and of FSDP's root the whole call."""

    __slots__ = ()

    @property
    def own_step(self) -> Callable[..., Any]:
        """What runs in a step: the model's own forward; of FSDP's root the whole call."""
        return partial(fsdp.own_call, self.model) if fsdp.is_root(self.model) else self.forward

    def install(self) -> None:
        """Take the place of the model's forward, and of its call."""
        super().install()
        fsdp.called_by(self.model, self.enter)

    def uninstall(self) -> None:
        """Give the model its own forward and call back."""
        fsdp.called_by(self.model, None)
        super().uninstall()

    @skipped_by_dynamo
    def enter(self, *args: Any, **kwargs: Any) -> Any:
        """A call of the model, hooks and all: those of FSDP's root belong to the step."""
        limits = fsdp.is_root(self.model) and not self.is_off()
        return self.limited(args, kwargs) if limits else fsdp.own_call(self.model, *args, **kwargs)

    def is_limited(self) -> bool:
        """Whether a call of the model's forward is one within the limit: not past the hooks of FSDP's root,
        whose calls `enter` gets.
        """
        if self.is_off():
            return False
        past_hooks = fsdp.is_root(self.model)
        if past_hooks:
            self.warn_once(UNCALLED)
        return not past_hooks
