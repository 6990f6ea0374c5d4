"""What a collective holds beside its result while it runs: Gloo moves through buffers of its own, and a
step's peak may stand in one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide import private

if TYPE_CHECKING:
    from lowtide.trace.costs import OpSpec


def staging_bytes(spec: OpSpec) -> int:
    """Bytes that Gloo allocates for a functional collective of CPU tensors beyond the result, from its start
    until it has ended.

    An all-gather lands in one flat tensor and is copied from there to the result. A reduce-scatter sums a
    copy of its input. An all-reduce works in the result. Collectives of tensors on a device move through
    buffers that NCCL keeps for the whole run: 0.

    >>> import torch
    >>> from lowtide.trace.costs import OpSpec
    >>> staging_bytes(OpSpec(torch.ops.aten.relu.default, (), {}, 64))
    0
    """
    tensors = spec.tensors()
    if spec.func.namespace != "_c10d_functional" or not tensors or tensors[0].device.type != "cpu":
        return 0
    name = private.schema_of(spec.func).name.removeprefix("_c10d_functional::")
    return {"all_gather_into_tensor": spec.output_bytes, "reduce_scatter_tensor": spec.input_bytes()}.get(
        name, 0
    )
