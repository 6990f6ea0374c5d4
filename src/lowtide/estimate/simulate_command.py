"""The command ``lowtide simulate``: torch is imported when it runs, not before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from lowtide.estimate import command as options
from lowtide.estimate.command import option, parse_recompute, refuse_zero, with_flags
from lowtide.estimate.errors import EstimateError
from lowtide.progress import mute, working

Stages = Annotated[
    str | None,
    option("Pipeline stages: 0, or 0,3,7, or all. [default: the first, one inside, the last]", "--stage"),
]


_SHARED = """model layers hidden heads kv_heads ffn vocab mlp norm positions bias tied seq micro_batch
global_batch tp sequence_parallel pp interleave dp zero ep recompute attention dropout dtype gradient_dtype
loss loss_chunks unfused_mlp keep_output_tensors tiles head_chunks cp cp_exchange offload_activations
offload_weights offload_optimizer"""


@with_flags(*_SHARED.split())
def simulate_command(
    given: dict[str, Any],
    as_published: options.AsPublished = False,
    config: options.ConfigFile = None,
    stage: Stages = None,
    policy: Annotated[
        str | None,
        option("What to recompute, chosen by a policy of lowtide.plan: keep_all, full, sqrt or selective."),
    ] = None,
    budget: Annotated[
        str | None, option("Memory of each stage (40GiB): lowtide makes a plan for each stage within it.")
    ] = None,
    device: Annotated[
        str | None, option("Device whose speed the plans of --budget use. [default: a100]")
    ] = None,
    fresh_gradients: Annotated[
        bool, typer.Option("--fresh-gradients", help="No gradients exist before the first backward.")
    ] = False,
    scratch: Annotated[
        bool,
        typer.Option(
            "--scratch",
            help="Also count the memory that kernels allocate while they run. Each operation runs once "
            "on this machine: for small shapes.",
        ),
    ] = False,
    transformers: Annotated[
        bool,
        typer.Option(
            "--transformers",
            help="Trace the model that transformers builds from a Hugging Face configuration (--tp 1 "
            "--pp 1).",
        ),
    ] = False,
    json_out: options.Json = False,
    plot: Annotated[
        Path | None, option("Draw the memory timeline into this file (needs matplotlib).")
    ] = None,
) -> None:
    """Trace a training step of any size on fake tensors, and print the closed form beside the trace.

    One rank of each pipeline stage is traced. This needs no GPU.
    """
    from rich.console import Console

    from lowtide.estimate.devices import device as find_device
    from lowtide.estimate.settings import configure, read_config

    if policy is not None and budget is not None:
        raise EstimateError("--policy and --budget choose in two ways what stays: give one")
    if device is not None and budget is None:
        raise EstimateError(
            "--device without --budget changes nothing here: it is for the speeds that plans weigh"
        )
    refuse_zero(given)
    given["recompute"] = parse_recompute(given.get("recompute"))
    model = given.pop("model", None)
    if as_published:
        given["as_published"] = True
    found = read_config(config, model=model, **given) if config is not None else configure(model, **given)
    stages = chosen_stages(stage, found.pp)
    build = _transformers(model) if transformers else None

    from lowtide.estimate.simulation import simulate

    console = Console()
    with mute() if json_out else working("simulating", "simulated"):
        result = simulate(
            found, stages=stages, policy=policy, budget=budget,
            device=find_device(device) if device else None, fresh_gradients=fresh_gradients,
            scratch=scratch, build=build,
        )  # fmt: skip
    if plot is not None:
        from lowtide.estimate.simulation.render import plot_timeline

        plot_timeline(result, plot)
    if json_out:
        typer.echo(json.dumps(result.to_json(), indent=1))
        return
    from lowtide.estimate.simulation.render import report

    console.print(report(result))


def chosen_stages(text: str | None, pp: int) -> list[int]:
    """The stages that ``--stage`` names.

    >>> chosen_stages(None, 64), chosen_stages("0,3", 8), chosen_stages("all", 3)
    ([0, 1, 63], [0, 3], [0, 1, 2])
    """
    if text is None:
        return sorted({0, min(1, pp - 1), pp - 1})
    if text == "all":
        return list(range(pp))
    try:
        stages = [int(part) for part in text.split(",")]
    except ValueError:
        stages = [-1]
    if not all(0 <= stage < pp for stage in stages):
        raise EstimateError(
            f"--stage={text!r}: give stages from 0 to {pp - 1}, as in 0 or 0,{pp - 1}, or all"
        )
    return stages


def _transformers(model: str | None) -> Callable[[], Any]:
    """What builds a Hugging Face configuration's own model."""
    if model is None:
        raise EstimateError(
            "--transformers needs --model, a Hugging Face config.json or hf:TYPE[:key=value,...]"
        )
    from lowtide.estimate.simulation.whole import hugging_face_builder

    return hugging_face_builder(model)
