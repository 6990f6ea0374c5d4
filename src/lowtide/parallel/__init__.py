"""Tensor, sequence and context parallelism on ``torch.distributed`` (docs/parallel.md).

In: a process group or mesh, and layers or a whole model (`parallelize`). Out: layers whose weights and
activations the ranks share. The names are neuronx-distributed's; the memory is that of arXiv 2205.05198,
table 2. Begin with `layers.py`; `pipeline.py` has pipelines.

```python
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
shared = dict(sequence_parallel_enabled=True, tensor_model_parallel_group=mesh)
up = ColumnParallelLinear(64, 256, gather_output=False, **shared)
down = RowParallelLinear(256, 64, input_is_parallel=True, **shared)
loss = down(torch.nn.functional.gelu(up(piece))).sum()  # piece: this rank's part of the sequence
loss.backward()
allreduce_sequence_parallel_gradients(optimizer)
optimizer.step()
```
"""

from lowtide.parallel.checkpoint import (
    load_checkpoint,
    load_whole_state_dict,
    save_checkpoint,
    sharded_state_dict,
    whole_state_dict,
)
from lowtide.parallel.context import context_parallel, gather_sequence, shard_sequence
from lowtide.parallel.convolution import InputChannelParallelConv2d, OutputChannelParallelConv2d
from lowtide.parallel.embedding import ParallelEmbedding
from lowtide.parallel.errors import ParallelError, ParallelWarning
from lowtide.parallel.gradients import (
    allreduce_sequence_parallel_gradients,
    mark_partial_gradient,
    mark_partial_gradients,
    move_model_to_device,
    partial_gradients,
)
from lowtide.parallel.grads import clip_grad_norm, get_grad_norm
from lowtide.parallel.groups import TensorGroup, tensor_group
from lowtide.parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    SharedHeadsLinear,
    column_parallel,
)
from lowtide.parallel.loss import (
    from_parallel_logits_to_logprobs,
    parallel_cross_entropy,
    parallel_linear_cross_entropy,
)
from lowtide.parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from lowtide.parallel.norms import LayerNorm, RMSNorm
from lowtide.parallel.pad import get_number_of_extra_heads, pad_model
from lowtide.parallel.parallelize import parallelize
from lowtide.parallel.random import ParallelDropout, RandomTracker

__all__ = [
    "ColumnParallelLinear",
    "InputChannelParallelConv2d",
    "LayerNorm",
    "OutputChannelParallelConv2d",
    "ParallelDropout",
    "ParallelEmbedding",
    "ParallelError",
    "ParallelWarning",
    "RMSNorm",
    "RandomTracker",
    "RowParallelLinear",
    "SharedHeadsLinear",
    "TensorGroup",
    "allreduce_sequence_parallel_gradients",
    "clip_grad_norm",
    "column_parallel",
    "context_parallel",
    "copy_to_tensor_model_parallel_region",
    "from_parallel_logits_to_logprobs",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "gather_sequence",
    "get_grad_norm",
    "get_number_of_extra_heads",
    "load_checkpoint",
    "load_whole_state_dict",
    "mark_partial_gradient",
    "mark_partial_gradients",
    "move_model_to_device",
    "pad_model",
    "parallel_cross_entropy",
    "parallel_linear_cross_entropy",
    "parallelize",
    "partial_gradients",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "save_checkpoint",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "shard_sequence",
    "sharded_state_dict",
    "tensor_group",
    "whole_state_dict",
]
