"""What a profiled forward cannot do, where PyTorch says so: in users' words."""

from __future__ import annotations

from lowtide.errors import TraceError


def refusal_of(error: BaseException) -> TraceError | None:
    """What to raise in place of an error of a profiled forward; ``None`` for the error itself."""
    if isinstance(error, RuntimeError) and "support saved tensor hooks" in str(error):
        return TraceError(
            "the model's forward takes gradients with torch.func (grad, vjp, jacrev, hessian), under which "
            "PyTorch allows no hooks on saved tensors: use torch.autograd.grad(..., create_graph=True) "
            "there, or put the limit on the modules around it"
        )
    if "HigherOrderOp" in type(error).__name__:
        return TraceError(
            "the model's forward calls torch.cond or another higher-order operator on its submodules, which "
            "PyTorch compiles, and not with hooks on them: put the limit on the modules around it"
        )
    return None
