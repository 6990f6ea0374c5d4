"""What `torch.compile` asks to compile a graph: Inductor or AOTAutograd with a partitioner, and what the disk
keeps of both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowtide.compiled.partitioner import Partitioner, Report
from lowtide.compiled.stored import Shelf, key_of, sizes_of
from lowtide.private import inductor
from lowtide.traced import wishes_of

Backend = Callable[..., Any]


def call_by_call(partitioner: Partitioner) -> Backend:
    """Graphs run call by call, as ``aot_eager`` runs them."""
    return inductor.aot_autograd(
        fw_compiler=inductor.boxed_nop, partition_fn=partitioner, keep_inference_input_mutations=True
    )


def generated(partitioner: Partitioner, report: Report, options: dict[str, Any]) -> Backend:
    """Graphs run as Inductor compiles them. Where compiled code comes from the disk, so does its plan."""

    def backend(module: Any, inputs: Any) -> Any:
        own = partitioner.wishing(wishes_of(module))
        settings = {**options, "custom_partitioner_fn": own}
        folder = inductor.cache_folder()
        if folder is None:
            return inductor.compile_with(module, inputs, settings)
        shelf, key, hits = (
            Shelf(folder / "lowtide"),
            key_of(module, inputs, own.uuid()),
            inductor.cache_hits(),
        )
        report.take_fresh()
        compiled = inductor.compile_with(module, inputs, settings)
        planned, sizes = report.take_fresh()
        if planned:
            shelf.keep(key, sizes, planned)
        elif inductor.cache_hits() > hits:
            known = shelf.find(key, sizes_of(inputs))
            if not known:  # the plan of what was found is lost
                return inductor.compile_with(module, inputs, {**settings, "force_disable_caches": True})
            report.planned += known
        return compiled

    return backend
