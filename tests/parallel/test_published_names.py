"""Names, order and defaults of the layers' parameters are those that neuronx-distributed publishes, so that a
call of its layers is one of ours.

What is for its hardware only (``use_spmd_rank``) is left out.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from lowtide import parallel as lp

REQUIRED = inspect.Parameter.empty
LINEAR: list[tuple[str, Any]] = [
    ("dtype", torch.float32),
    ("device", None),
    ("stride", 1),
    ("init_method", None),
    ("sequence_parallel_enabled", False),
    ("sequence_dimension", None),
    ("keep_master_weight", False),
    ("skip_bias_add", False),
    ("pad", False),
]
LAST: list[tuple[str, Any]] = [("tensor_model_parallel_group", None), ("reduce_dtype", torch.float32)]
SIZES: list[tuple[str, Any]] = [("input_size", REQUIRED), ("output_size", REQUIRED), ("bias", True)]
PUBLISHED: dict[type, list[tuple[str, Any]]] = {
    lp.ColumnParallelLinear: [*SIZES, ("gather_output", True), *LINEAR, *LAST],
    lp.RowParallelLinear: [*SIZES, ("input_is_parallel", False), *LINEAR, ("reduce_output", True), *LAST],
    lp.ParallelEmbedding: [
        ("num_embeddings", REQUIRED),
        ("embedding_dim", REQUIRED),
        ("padding_idx", None),
        ("max_norm", None),
        ("norm_type", 2.0),
        ("scale_grad_by_freq", False),
        ("sparse", False),
        ("init_method", torch.nn.init.normal_),
        ("device", None),
        ("dtype", torch.float32),
        ("shard_across_embedding", False),
        ("pad", False),
        ("sequence_parallel_enabled", False),
        ("tensor_model_parallel_group", None),
    ],
    lp.LayerNorm: [
        ("normalized_shape", REQUIRED),
        ("eps", 1e-5),
        ("elementwise_affine", True),
        ("device", None),
        ("dtype", None),
        ("sequence_parallel_enabled", False),
    ],
    lp.RMSNorm: [("hidden_size", REQUIRED), ("eps", 1e-6), ("sequence_parallel_enabled", False)],
}
OURS_BEHIND_THEM: dict[type, list[str]] = {
    lp.ParallelEmbedding: ["sequence_dimension"],
    lp.LayerNorm: ["tensor_model_parallel_group", "bias"],
    lp.RMSNorm: ["device", "dtype", "tensor_model_parallel_group"],
}


@pytest.mark.parametrize("layer", PUBLISHED, ids=lambda layer: layer.__name__)
def test_parameters(layer: type) -> None:
    found = list(inspect.signature(layer).parameters.values())
    published = PUBLISHED[layer]
    assert [(one.name, one.default) for one in found[: len(published)]] == published
    assert all(one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for one in found)
    behind = found[len(published) :]
    assert [one.name for one in behind] == OURS_BEHIND_THEM.get(layer, [])
    assert all(one.default is not REQUIRED for one in behind)
