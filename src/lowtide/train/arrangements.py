"""Which arrangements of processes the options of a run may ask for."""

from __future__ import annotations

from lowtide import native
from lowtide.errors import LowtideError
from lowtide.train.errors import OptionError, require
from lowtide.train.settings import Settings

DEFAULT_SCHEDULE = "1f1b"
BACKENDS = ("inductor", "aot_eager")


def check_compile(
    compiled: bool, backend: str | None, policy: str | None, device: str, loss_chunks: int | None
) -> None:
    """Refuse what a compiled step cannot do.

    Raises:
        OptionError: with what to do.
    """
    require(compiled or backend is None, "compile-backend", backend, "nothing is compiled: pass --compile")
    if not compiled:
        return
    require(backend in (None, *BACKENDS), "compile-backend", backend, f"choose {' or '.join(BACKENDS)}")
    require(
        policy in (None, "auto", "optimal"),
        "policy",
        policy,
        ("with --compile, the --budget alone decides what is recomputed: leave out --policy, or --compile"),
    )
    chunked = "compiled code computes its loss at once: leave it out with --compile"
    require(loss_chunks in (None, 1), "loss-chunks", loss_chunks, chunked)
    if backend != "aot_eager" and device == "cpu":
        try:
            native.compiler()
        except native.BuildError as error:
            raise OptionError(f"--compile: {error}, or pass --compile-backend aot_eager") from error


def check_compiled_run(options: Settings) -> None:
    """Refuse what does not go with a compiled step in a run.

    Raises:
        OptionError: with what to do.
    """
    what = "compiled code is not planned for the microbatches of a pipeline: leave out --pp"
    require(options.pp == 1, "compile", "", f"{what}, or this")
    require(options.budget is not None, "compile", "", "it needs a budget: pass --budget, 100% for all")
    require(
        options.optimizer_host_fraction is None,
        "optimizer-host-fraction",
        options.optimizer_host_fraction,
        ("the budget of a compiled step does not count moved optimizer state: leave it out with --compile"),
    )
    require(
        options.report is None,
        "report",
        options.report,
        "a report shows operations, and a compiled step has none: leave it out with --compile",
    )


def check_context(options: Settings) -> None:
    """Refuse what does not go with shared sequences, before processes wait for each other.

    Raises:
        OptionError: with what to do.
    """
    exchanges = ("ring", "all-to-all", "auto")
    exchange = options.cp_exchange
    require(exchange in exchanges, "cp-exchange", exchange, f"choose one of {', '.join(exchanges)}")
    if options.cp == 1:
        require(exchange == "auto", "cp-exchange", exchange, "nothing is exchanged: pass --cp 2 or more")
        return
    stages = "the stages of a Hugging Face model do not share sequences: leave out --pp"
    require(options.pp == 1 or options.spec().config is not None, "cp", options.cp, f"{stages}, or this")


def check_sharding(options: Settings) -> None:
    """Refuse what does not go with shared parameters, before processes wait for each other.

    Raises:
        OptionError: with what to do.
    """
    name, copies = "shard-parameters", options.dp_replicate
    if not options.shard_parameters:
        what = "it needs --shard-parameters: pass that, too"
        require(copies == 1, "dp-replicate", copies, what)
        return
    require(
        options.dp * options.cp > 1,
        name,
        "",
        "it shards parameters, gradients and optimizer state among the --dp ranks: pass --dp 2 or more",
    )
    require(
        options.pp == 1,
        name,
        "",
        "every microbatch of a pipeline would gather the stage again: leave out --pp, or this",
    )
    require(
        options.dp % copies == 0 and copies < options.dp * options.cp,
        "dp-replicate",
        copies,
        f"it divides the --dp {options.dp} ranks into groups of two or more",
    )
    require(
        options.policy is not None or options.budget is not None,
        name,
        "",
        "it needs a budget or a policy: pass --budget, or a --policy such as keep_all or full",
    )


def fills_pipeline(schedule: str | None, ranks: int, micro_batches: int) -> bool:
    """Whether a step of so many micro-batches fills a pipeline.

    >>> fills_pipeline(None, 2, 1), fills_pipeline("1f1b", 2, 2), fills_pipeline("interleaved", 2, 3)
    (False, True, False)
    """
    from lowtide.parallel.pipeline import schedule_kind  # takes seconds, which most runs do without

    kind = schedule_kind(schedule or DEFAULT_SCHEDULE)
    least = ranks * (2 if kind.v_shaped else 1)
    return micro_batches >= least and (kind.stages == 1 or micro_batches % ranks == 0)


def check_pipeline(options: Settings) -> None:
    """Refuse what a pipeline cannot do, before processes wait for each other.

    Raises:
        OptionError: with what to do.
    """
    from lowtide.parallel.pipeline import schedule_kind  # takes seconds, which most runs do without

    try:
        kind = schedule_kind(options.schedule or DEFAULT_SCHEDULE)
    except LowtideError as error:
        raise OptionError(f"--{error}") from error
    micro, ranks = options.grad_accum, options.pp
    if kind.stages > 1:
        require(
            micro % ranks == 0,
            "grad-accum",
            micro,
            f"it is the number of the pipeline's microbatches, and --schedule {options.schedule} needs "
            f"a multiple of --pp {ranks}",
        )
    least = ranks * (2 if kind.v_shaped else 1)
    require(
        micro >= least,
        "grad-accum",
        micro,
        (
            f"it is the number of the pipeline's microbatches, and --pp {ranks} needs {least}: give {least} "
            "or more"
        ),
    )
    spec = options.spec()
    what = (
        "a pipeline cuts a Hugging Face model between its blocks, and cannot split its layers: leave out --tp"
    )
    require(spec.config is not None or options.tp == 1, "tp", options.tp, f"{what}, or --pp")
    stages = ranks * kind.stages
    few = f"{options.model} has {spec.layers} layers, which do not fill {stages} stages"
    require(spec.layers >= stages, "pp", ranks, few)
    moving = options.policy in ("offload", "mixed", "compress")
    why = "a pipeline moves and compresses nothing: choose a policy that recomputes (optimal, full)"
    require(not moving, "policy", options.policy, why)
    require(
        not options.compare, "compare", "", "the comparison is of one process's step: leave it out with --pp"
    )
