"""PyTorch's undocumented functions, one file for an area: lowtide calls them here alone.

In: tensors, modules, operations. Out: what PyTorch knows of them but does not document. Nothing here imports
the rest of lowtide. Each file says in which versions it was seen to work, and has a test in `tests/private`
that fails when a name moves. Outside are `lowtide.parallel.pipelining`, a subclass of a class that PyTorch
may change, and attributes that torch's own users read: ``_version``, ``_base``, ``_parameters``,
``_buffers``, ``_modules``.
"""

from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only

from lowtide.private.autograd import (
    at_backward_end,
    below_autograd,
    in_backward,
    in_custom_backward,
    node_key,
    replaying,
    set_grad_enabled,
    torch_checkpoint,
)
from lowtide.private.dispatch import (
    OpOverload,
    OpOverloadPacket,
    TorchDispatchMode,
    all_operation_names,
    all_schemas,
    answers_itself,
    call,
    defined_operations,
    has_kernel_at,
    has_thread_object,
    include_key,
    is_key_included,
    is_transformed,
    kernel_library,
    keys_below,
    let_higher_order_operators_pass,
    mode_stack,
    no_torch_function,
    redispatch,
    schema_of,
    set_thread_object,
    similar_overloads,
    thread_object,
    without_dispatch_modes,
    without_torch_function,
    without_torch_functions,
)
from lowtide.private.distributed import (
    assert_on_device,
    collectives,
    distributed_like,
    fake_store,
    is_distributed,
    local_tensor,
    process_group_named,
    wait_for_collective,
    wait_for_work,
)
from lowtide.private.dynamo import (
    Compiling,
    compile_forward,
    compile_in_place,
    compile_settings,
    compiled_call,
    counted_apart,
    is_compiled,
    keep_dynamo_out,
    out_of_dynamo,
    recompile_limit_hits,
    room_for_backends,
    skipped_by_dynamo,
    uncompiled,
    uncut_by_ddp,
)
from lowtide.private.fake import (
    FakeTensor,
    FakeTensorMode,
    fake_mode,
    foreach_takes_fakes,
    has_foreach,
    is_fake,
    is_fake_mode_active,
    without_fake_mode,
)
from lowtide.private.fsdp import (
    called_by,
    gathered,
    is_first_fsdp,
    is_root,
    is_unit,
    may_shard,
    own_call,
    process_groups,
    settings,
    units,
    unsharded_gradients,
)
from lowtide.private.hooks import forward_pre_hooks, load_post_hooks, load_pre_hooks, replicate_by
from lowtide.private.measuring import (
    blas_workspace_bytes,
    cpu_device_type,
    cuda_allocator_state,
    cuda_history_events,
    is_capturing,
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
    lazy_clone,
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
