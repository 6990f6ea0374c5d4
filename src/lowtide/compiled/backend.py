"""What compiles the graphs that Dynamo captures: AOTAutograd by itself, or Inductor."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from lowtide.compiled.cut import Cutter
from lowtide.compiled.guess import Refused
from lowtide.compiled.partitioner import Partitioner, Report
from lowtide.compiled.stored import Shelf
from lowtide.private import inductor, partitioning

FREES_AT_ONCE: dict[str, Any] = {"allow_buffer_reuse": False}
"""Inductor's setting for all that a budget is held for: by itself it keeps a buffer that nobody reads any
more for the next of its size, however late that one comes. On GPT and Llama (4 x 512) this took 9 and 13 MB
of 85 and 93 at the smallest budget, and no step was measurably faster for it.
"""


def compile_graph(
    module: Any,
    inputs: Any,
    options: dict[str, Any] | None,
    cutter: Cutter | None = None,
    inner: Callable[..., Any] | None = None,
    at_once: bool = False,
) -> Any:
    """A graph as its backend compiles it.

    Args:
        module: Dynamo's graph.
        inputs: its (fake) inputs.
        options: Inductor's settings; ``None`` where graphs run call by call, as ``aot_eager`` runs them.
        cutter: cuts it into forward and backward; ``None`` for PyTorch's own way.
        inner: compiles the halves in place of the backend, told by ``is_backward`` which it is.
        at_once: whether Inductor compiles the backward now, and not when it is first run.
    """
    if options is not None:
        settings = options if cutter is None else {**options, "custom_partitioner_fn": cutter}
        return inductor.compile_with(module, inputs, settings, inner, at_once)
    return inductor.aot_autograd(
        fw_compiler=inner or inductor.boxed_nop,
        bw_compiler=functools.partial(inner, is_backward=True) if inner else inductor.boxed_nop,
        partition_fn=cutter or partitioning.plain_partition,
        keep_inference_input_mutations=True,
    )(module, inputs)


def compile_step(module: Any, inputs: Any, partitioner: Partitioner, report: Report) -> Any:
    """Compile a graph that is a whole step. Where compiled code comes from the disk, so does its plan.

    Fixed sizes are cut as was guessed, where there is a guess and it is good; else looked at before the cut.
    """
    options, hits, before = partitioner.options, inductor.cache_hits(), len(report.planned)
    folder = None if options is None else inductor.cache_folder()
    guessing = options is not None and partitioner.guesses(inputs)
    compiled, texts = None, list[str]()
    with inductor.reading(texts.append):
        if guessing:
            with partitioner.trying() as trial, contextlib.suppress(Refused):
                compiled = compile_graph(module, inputs, options, partitioner, trial.compile, at_once=True)
        if compiled is None:
            texts.clear()
            compiled = compile_graph(module, inputs, options, partitioner, at_once=guessing)
    if options is None or folder is None or not texts:
        return compiled
    shelf, key = Shelf(folder / "lowtide"), partitioner.uuid() + texts[0]  # the forward says what it saves
    if made := report.planned[before:]:
        shelf.keep(key, made)
    elif inductor.cache_hits() > hits:
        known = shelf.find(key)
        if not known:  # the plan of what was found is lost
            anew = {**options, **inductor.UNCACHED}
            return compile_graph(module, inputs, anew, partitioner, at_once=guessing)
        report.planned += known
    return compiled
