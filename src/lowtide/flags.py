"""Flags that several commands share: a model, a step of it, and how to meet a budget; which of them were
given, and files that are written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from lowtide.errors import LowtideError

Dtype = Literal["fp32", "bf16"]
Model = Annotated[
    str,
    typer.Option(
        help="A preset (gpt-nano ... gpt3-175b, llama-nano ... llama3-70b, mixtral-8x7b, gpt-oss-20b), "
        "hf:TYPE[:key=value,...], a Hugging Face config.json or its folder, or a name on the hub."
    ),
]
Script = Annotated[
    str | None,
    typer.Argument(
        metavar="FILE.py:FUNCTION",
        help="A function of your own script, in place of --model: FILE.py:FUNCTION or "
        "package.module:function. It returns (model, args), (model, args, kwargs), or a function that "
        "runs a step; an optimizer may be the last element.",
        show_default=False,
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        help="Peak memory of a step: 600MiB; 60% (of the plain step's peak); min (the smallest that works); "
        "or auto (the device's free memory, less a tenth). [default: the larger of 60% and min; no "
        "budget with --policy]"
    ),
]
PolicyName = Annotated[
    str | None,
    typer.Option(
        help="How to meet the budget: auto (the default: optimal on a CPU; on a GPU it also moves values to "
        "main memory), optimal (recomputes), mixed (also moves and compresses values), keep_all, full, sqrt, "
        "selective, offload or compress."
    ),
]
HostBudget = Annotated[
    str | None,
    typer.Option(
        help="The most that auto and mixed move to main memory, such as 8GiB. [default: a quarter of what is "
        "free]"
    ),
]
Tiles = Annotated[
    Literal["auto"] | None,
    typer.Option(
        help="auto: if no plan fits otherwise, MLPs, norms and the loss run in pieces of the tokens."
    ),
]
PlanSeconds = Annotated[
    float | None,
    typer.Option(
        help="About how many seconds a search for a plan may take. A short search may find a slower plan. "
        "[default: half a minute for a preset; while training and for a script 0.7 s or ten plain steps, "
        "whichever is more]"
    ),
]
Batch = Annotated[int, typer.Option(help="Sequences in a microbatch.")]
Seq = Annotated[int, typer.Option(help="Tokens in a sequence.")]
DtypeOption = Annotated[Dtype, typer.Option(help="fp32, or bf16 (autocast with float32 weights).")]
PlanDtype = Annotated[
    Dtype | None,
    typer.Option(
        help="fp32, or bf16 (autocast with float32 weights). [default: bf16 if --device names a GPU such as "
        "h100, else fp32]"
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
PlanDevice = Annotated[
    str,
    typer.Option(
        help="cpu, cuda or cuda:N; or a GPU of lowtide estimate (a100, h100, h200, b200, ...): the plan then "
        "uses the times of that GPU, and this machine needs none."
    ),
]
Dropout = Annotated[float | None, typer.Option(help="Dropout probability of a built-in model.")]
Unfused = Annotated[
    bool,
    typer.Option(
        "--unfused-attention",
        help="Built-in models: attention in separate operations, not in the fused kernel.",
    ),
]
LossChunks = Annotated[
    int | None,
    typer.Option(
        help="Built-in models: number of chunks of tokens in which the loss is computed, without all logits."
    ),
]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile/--no-compile", help="Compile the step within the budget (torch.compile, one graph)."
    ),
]
CompileBackend = Annotated[
    str | None, typer.Option(help="Backend of --compile: inductor or aot_eager. [default: inductor]")
]


def budget_asked(budget: str | None, policy: str | None) -> str | None:
    """The budget asked for; 60 % of the plain peak where neither a budget nor a policy says what is
    wanted.
    """
    return "60%" if budget is None and policy in (None, "auto", "optimal", "mixed") else budget


def given_options(context: typer.Context) -> list[str]:
    """The parameters that the command line (or the environment) says something about."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]


def write_text(path: Path, text: str) -> None:
    """Write a file.

    Raises:
        LowtideError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LowtideError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
