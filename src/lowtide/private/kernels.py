"""Inductor's C++ kernels without their text: only which buffers each one reads, writes, keeps to itself and
updates in place, so that a graph's allocations come out as if the kernels had been written.

What decides is Inductor's own: fusion, order, the kernels' arguments. Left out is what the text alone needs:
arithmetic, vectors, loops. Other devices' kernels are written out. Seen in PyTorch 2.11 to 2.13.
"""

# pyright: reportPrivateImportUsage=false, reportIncompatibleMethodOverride=false
from __future__ import annotations

import functools
from typing import Any

import sympy
import torch
from torch._inductor import config as inductor_config
from torch._inductor.codegen import cpp
from torch._inductor.codegen.common import CSEProxy
from torch._inductor.codegen.cpp_utils import LocalBufferContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.symbol import SymT, free_symbol_is_type

UNWRITTEN = {"size_asserts": False, "alignment_asserts": False, "benchmark_harness": False}
"""Settings of Inductor that add text, and no memory."""

ZERO = sympy.S.Zero
INDIRECT = sympy.Symbol("tmp0", integer=True)
"""An index that was read from memory, as kernels name it."""


class Accesses(cpp.CppKernel):
    """A kernel that knows its buffers, and has no text."""

    overrides: Any = cpp.CppOverrides

    def load(self, name: str, index: Any) -> Any:
        self.args.input(name)
        return self.cse.newvar(dtype=torch.float32)

    def store(self, name: str, index: Any, value: Any, mode: Any = None) -> None:
        self.args.output(name)

    def store_reduction(self, name: str, index: Any, value: Any) -> None:
        self.args.output(name)

    def take(self, node: Any) -> None:
        """Take down what a node's body does to buffers."""
        body, proxy = node._body, CSEProxy(self, self.overrides())
        context, value = V.local_buffer_context, self.cse.newvar(dtype=torch.float32)
        local = context.global_to_local if isinstance(context, LocalBufferContext) else {}
        self.current_node = node
        for block in (body.root_block, *body.subblocks.values()):
            for call in block.graph.nodes:
                if call.target == "reduction":
                    self.is_reduction = True
                if call.target not in ("load", "load_seed", "store", "store_reduction"):
                    continue
                given = dict(zip(("name", "index", "value", "mode"), call.args[1:], strict=False))
                given |= call.kwargs
                name = given["name"]
                if name in local:  # an array on a thread's stack
                    continue
                if call.target == "store":
                    proxy.store(name, ZERO, value, given.get("mode"))
                elif call.target == "store_reduction":
                    proxy.store_reduction(name, ZERO, value)
                else:
                    index = body.indexing_exprs[given["index"].args[0]] if call.target == "load" else ZERO
                    proxy.load(name, INDIRECT if free_symbol_is_type(index, SymT.INDIRECT) else ZERO)
        known = body.var_ranges.keys() | body.indirect_var_ranges.keys()
        for expression in body.indexing_exprs.values():
            if expression.free_symbols - known:
                self.rename_indexing(expression)  # a size that is open is an argument
        self.current_node = None


class Proxy(cpp.CppKernelProxy):
    """A group of nodes that are one loop nest."""

    def codegen_nodes(self, nodes: list[Any]) -> None:
        """As Inductor does for the scalar kernel, which alone decides about buffers."""
        sizes = [node.group[1] for node in nodes]
        group, reduced = max(sizes, key=lambda one: len(one[1]))
        self.set_ranges(group, reduced)
        whole = ((group, reduced), ((*group, *reduced), ()))
        with self.kernel_group.new_kernel(Accesses) as kernel:
            kernel.set_ranges(group, reduced)
            for node, size in zip(nodes, sizes, strict=True):
                node.decide_inplace_update()
                node.mark_run()
                if size in whole:
                    kernel.take(node)
                else:
                    with kernel.write_to_suffix():
                        kernel.take(node)
        V.graph.removed_buffers |= kernel.removed_buffers
        V.graph.inplaced_to_remove |= kernel.inplaced_to_remove
        self.loop_nest = cpp.LoopNest.build(kernel)
        if self.kernel_group.compares_loops and self.picked_vec_isa and self.itervars:
            self._tile(nodes, sizes)

    def _tile(self, nodes: list[Any], sizes: list[Any]) -> None:
        """Split the loops as vectors would have it: nests that are split otherwise share no outer loop."""
        self.legalize_lowp_fp_dtype(nodes)
        self.data_type_propagation(nodes)
        bodies = [functools.partial(_body, node) for node in nodes]
        with inductor_config.patch(inplace_buffers=False):
            factors, places, *_ = cpp.TilingSelect().select_tiling(bodies, sizes)  # statistics from 2.13 on
        for place in places:
            self.loop_nest.tile(place, factor=factors[0])


def _body(node: Any, *index: Any) -> Any:
    return node._body(*index)


class Group(cpp.KernelGroup):
    """The nodes that one call runs."""

    compares_loops = False

    def finalize_kernel(self, new_kernel: Any, nodes: list[Any]) -> None:
        self.scheduled_nodes += nodes

    def codegen_group(self, name: Any = None) -> str:
        self.stack.close()
        return "kernel" if self.scheduled_nodes else ""


class Scheduling(cpp.CppScheduling):
    """Calls kernels that are not there."""

    kernel_proxy_cls = Proxy

    def reset_kernel_group(self) -> None:
        self.kernel_group = Group()

    def codegen_outer_loop_node(self, node: Any) -> None:
        self.kernel_group.compares_loops = True
        super().codegen_outer_loop_node(node)
        self.kernel_group.compares_loops = False

    def define_kernel(self, src_code: str, nodes: Any, kernel_args: Any = None) -> str:
        return "kernel"

    def codegen_comment(self, node_schedule: Any, kernel_name: str | None = None) -> None:
        return None


class Lowering(GraphLowering):
    """Inductor's lowering of a graph; text is written for what calls kernels, and not for C++ kernels."""

    def _update_scheduler(self) -> None:
        super()._update_scheduler()
        scheduler: Any = self.scheduler
        for device, backend in scheduler.backends.items():
            if type(backend) is cpp.CppScheduling:
                scheduler.backends[device] = Scheduling(scheduler)
        if self.device_types <= {"cpu"}:  # what CUDA graphs would be given
            scheduler.get_graph_partition_symbol_inputs = lambda partition, inputs: OrderedSet()
