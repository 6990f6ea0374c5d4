"""Context parallelism: ranks that share every sequence of a batch (docs/parallel.md).

In: a model, and a process group or mesh. Out: the model, for whole sequences of which each rank works on its
part. Begin with `share.py`; `ring.py` is the attention, `operations.py` what autograd sees of it.
"""

from lowtide.parallel.context.share import context_parallel, gather_sequence, shard_sequence

__all__ = ["context_parallel", "gather_sequence", "shard_sequence"]
