"""PyTorch's undocumented functions, one file for an area: lowtide calls them here alone.

In: tensors, modules, operations. Out: what PyTorch knows of them but does not document. Nothing here imports
the rest of lowtide. Each file says in which versions it was seen to work, and has a test in `tests/private`
that fails when a name moves. Outside are `lowtide.parallel.pipelining`, a subclass of a class that PyTorch
may change, and attributes that torch's own users read: ``_version``, ``_base``, ``_parameters``,
``_buffers``, ``_modules``.
"""

import importlib
import sys
import typing

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from lowtide.private.dispatch import (
    OpOverload,
    OpOverloadPacket,
    TorchDispatchMode,
    all_operation_names,
    all_schemas,
    answers_itself,
    at_backward_end,
    below_autograd,
    call,
    defined_operations,
    dispatch_key,
    exclude_key,
    forward_pre_hooks,
    has_kernel_at,
    has_thread_object,
    in_backward,
    in_custom_backward,
    include_key,
    is_key_excluded,
    is_key_included,
    is_transformed,
    kernel_library,
    keys_below,
    let_higher_order_operators_pass,
    load_post_hooks,
    load_pre_hooks,
    mode_stack,
    no_torch_function,
    node_key,
    redispatch,
    replaying,
    replicate_by,
    saving,
    schema_of,
    set_grad_enabled,
    set_thread_object,
    similar_overloads,
    thread_object,
    torch_checkpoint,
    without_dispatch_modes,
    without_torch_function,
    without_torch_functions,
)
from lowtide.private.dynamo import (
    Compiling,
    compiled_among,
    compiled_call,
    is_compiled,
    keep_dynamo_out,
    out_of_dynamo,
    skipped_by_dynamo,
)
from lowtide.private.fake import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    fake_mode,
    foreach_takes_fakes,
    has_foreach,
    is_fake,
    is_fake_mode_active,
    real_for_transformers,
    without_fake_log,
    without_fake_mode,
)
from lowtide.private.measuring import (
    blas_workspace_bytes,
    cpu_device_type,
    cuda_allocator_state,
    cuda_history_events,
    is_cuda_history_recorded,
    is_profiler_enabled,
    occupy_gpu,
    on_cuda_out_of_memory,
    record_cuda_history,
    stop_cuda_history,
    take_blas_workspaces,
)
from lowtide.private.storages import (
    base_of,
    before_storage_resizes,
    borrowed_storage,
    carrier_of,
    conjugate_view,
    is_zero_tensor,
    knows_storage_data,
    lender_of,
    negative_view,
    sparse_parts,
    storage_address,
    storage_data,
    storage_key,
    storage_use_count,
    stored_elements,
    unseen_alias,
    unshare,
    version,
    version_witness,
    versioned_alias,
    wrapper_of,
)

if typing.TYPE_CHECKING:
    from lowtide.private.compiling import (
        compile_forward,
        compile_in_place,
        compile_settings,
        counted_apart,
        recompile_limit_hits,
        room_for_backends,
        uncompiled,
        uncut_by_ddp,
    )
    from lowtide.private.distributed import (
        assert_on_device,
        collectives,
        distributed_like,
        fake_store,
        forget_last_step,
        has_new_buckets,
        is_distributed,
        local_tensor,
        make_buffers,
        own_part,
        process_group_named,
        process_group_of,
        replicated_by,
        stages_of,
        wait_for_collective,
        wait_for_work,
    )
    from lowtide.private.fsdp import (
        around_units,
        called_by,
        gathered,
        is_first_fsdp,
        is_root,
        is_sharded,
        is_unit,
        own_call,
        process_groups,
        settings,
        units,
        unsharded_gradients,
        weight_in,
    )

_LATER = ("compiling", "distributed", "fsdp")
"""Files that are loaded when a name of theirs is first used: a process without ranks, which compiles nothing,
needs none.
"""


def may_shard() -> bool:
    """Whether a model may be sharded in this process: it has a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_schedule(item: object) -> bool:
    """Whether this is a schedule of a pipeline."""
    module: typing.Any = sys.modules.get(
        "torch.distributed.pipelining.schedules"
    )  # imported, if there is one
    return module is not None and isinstance(item, module._PipelineSchedule)


def __getattr__(name: str) -> typing.Any:
    if name.startswith("_"):
        raise AttributeError(name)
    for file in (importlib.import_module(f"{__name__}.{file}") for file in _LATER):
        if hasattr(file, name):
            return getattr(file, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
