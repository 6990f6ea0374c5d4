"""The rows, most important first: parts, each a few rows that share a process.

A part's ``open`` prepares what its rows share, and returns the function that measures a row by its name.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.rows import AS_PER_BLOCK, ROOT, Measure, Row, Unmeasured, Where


@dataclass(frozen=True)
class Part:
    """Rows that share a process.

    Attributes:
        name: what the table calls it.
        rows: names of its rows, most important first.
        open: prepares, and returns what measures a row.
        limit_seconds: what preparing, and then each row, may take.
        environment: variables of the process, beside those that are there.
        on_host: bytes go to main memory and come back, so without a card models are tiny, and compute.
    """

    name: str
    rows: tuple[str, ...]
    open: Callable[[Where], Measure]
    limit_seconds: float = 90.0
    environment: Mapping[str, str] = field(default_factory=dict)
    on_host: bool = False


def doctor(where: Where) -> Measure:
    """`lowtide doctor` as it stands, and how long the C++ files take to compile."""

    def measure(name: str) -> Row:
        if name == "C++ recorder":
            from lowtide.interception import cpp_module

            begin = time.perf_counter()
            cpp_module()
            return {"compiled": True, "build_seconds": time.perf_counter() - begin}
        done = _run("-m", "lowtide", "doctor")
        found = done.stdout.splitlines()
        marked = [line for line in found if line.startswith(("note", "PROBLEM"))]
        return {"exit_code": done.returncode, "marked": marked, "text": found, "errors": done.stderr[-2000:]}

    return measure


def card_tests(where: Where) -> Measure:
    """The tests that need a card."""

    def measure(name: str) -> Row:
        if where.device == "cpu":
            raise Unmeasured("needs a CUDA device")
        if not where.card:
            raise Unmeasured("make cuda-build runs them where operations compute")
        from tempfile import TemporaryDirectory

        with TemporaryDirectory() as folder:
            report = Path(folder) / "tests.xml"
            done = _run("-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={report}")
            if not report.exists():
                raise RuntimeError(
                    f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}"
                )
            return _counted(report)

    return measure


def _counted(report: Path) -> Row:
    """What a JUnit report says: how many passed, and which did not, with the first line of why."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = {}
    for case in cases:
        for trouble in (*case.iter("failure"), *case.iter("error")):
            failed[case.get("name", "")] = (trouble.get("message") or "").strip().partition("\n")[0][:500]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"passed": len(cases) - len(failed) - skipped, "skipped": skipped, "failures": failed}


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def training(family: str, compiled: bool) -> Callable[[Where], Measure]:
    """Steps of a model: plain, checkpointed per block, within budgets."""

    def prepare(where: Where) -> Measure:
        from benchmarks.gpu.training import Contest

        return Contest(family, compiled, where).row

    return prepare


def deterministic(where: Where) -> Measure:
    """Gradients where PyTorch is told to repeat its own: flash attention's backward does not otherwise."""
    if not where.card:
        raise Unmeasured("gradients need a card")
    from benchmarks.gpu.training import deterministic_row

    return lambda name: deterministic_row(name, where)


def kinds(where: Where) -> Measure:
    """Convolutions, recurrences, kernels of one's own, other attentions."""
    from benchmarks.gpu.kinds import kind_row

    return lambda name: kind_row(name, where)


def expandable(where: Where) -> Measure:
    """What is reserved with expandable segments."""
    from benchmarks.gpu.kinds import expandable_row

    return lambda name: expandable_row(name, where)


def optimizer(where: Where) -> Measure:
    """What AdamW takes, and a limit that counts it."""
    from benchmarks.gpu.training import optimizer_row

    return lambda name: optimizer_row(name, where)


def offload(where: Where) -> Measure:
    """Long sequences whose saved values wait in main memory."""
    from benchmarks import long_sequence
    from benchmarks.gpu.training import flash_alone
    from lowtide import measure_links

    flash_alone()
    tokens, width = (128, 64) if where.small else (16384, 2048)
    tier = "host" if where.device == "cuda" else "disk"

    def measure(name: str) -> Row:
        links = measure_links(tier, device=where.device)
        rows = long_sequence.rows_of(
            tokens, width, where.device, links, 2 if where.small else long_sequence.LAYERS, where.seconds
        )
        link = links[tier]
        speeds = {"write": link.write_bytes_per_second, "read": link.read_bytes_per_second}
        return {"tokens": tokens, "tier": tier, "bytes_per_second": speeds, "contenders": rows}

    return measure


def layer(where: Where) -> Measure:
    """A layer as one of eight ranks computes it: plain, recomputed in full, selectively."""
    from benchmarks import layer_times

    shape = layer_times.SMOKE if where.small else layer_times.shape_on(where.device)
    return lambda name: {"layers": layer_times.layer_rows(shape, where.device, where.seconds, least=3)}


def host_optimizer(where: Where) -> Measure:
    """Whole training steps whose optimizer is on the host."""
    from benchmarks.gpu.host import HostSteps

    return HostSteps(where).row


def long_context(where: Where) -> Measure:
    """A 4B model on the longest sequence that one card holds."""
    from benchmarks.gpu.long_context import long_row

    return lambda name: long_row(name, where)


LONG = ("save_on_cpu", "recomputing", "tiles", "moves", "all")
"""Ways to hold a long sequence: checkpointing per block with `save_on_cpu`, and budgets."""

BUDGETS = (AS_PER_BLOCK, "60 %", "min", "80 %")
RECOMPUTING = f"{AS_PER_BLOCK}, recomputing"
"""The same budget, where nothing moves to main memory."""

CONTENDERS = ("plain", "per block", AS_PER_BLOCK, RECOMPUTING, *BUDGETS[1:])
COMPILED = ("plain", "60 %", "min", "80 %", "per block", AS_PER_BLOCK)
COMPILED_TOO = ("plain", "60 %", "per block", "min")
"""The same where each compiles for half a minute, for two models within ten minutes."""

OTHERWISE = ("60 %, regional", "60 %, max-autotune")
"""Other ways to compile, beside the plain step as `torch.compile` makes it by default."""

ATTENTIONS = (
    "GPT, flash, dropout",
    "GPT, efficient attention",
    "GPT, efficient, dropout",
    "GPT, math, dropout",
)
KINDS = ("convolutions, cudnn.benchmark", "LSTM", "Triton kernel", *ATTENTIONS)

UPDATES = ("on the device", "gradients streamed", "after backward", "one step late")

EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}

PARTS = (
    Part("doctor", ("doctor", "C++ recorder"), doctor, 150),
    Part("tests", ("tests/gpu",), card_tests, 150),
    Part("GPT, eager", CONTENDERS, training("gpt", False)),
    Part("GPT, compiled", COMPILED, training("gpt", True), 200),
    Part("Llama, compiled", COMPILED_TOO, training("llama", True), 200),
    Part("Llama, eager", CONTENDERS, training("llama", False)),
    Part("deterministic, eager", ("GPT 60 %", "Llama 60 %", "GPT min", "Llama min"), deterministic),
    Part("kinds of models", KINDS, kinds),
    Part("AdamW", ("default", "fused", "one by one", "GPT 60 %, AdamW counted"), optimizer),
    Part("offload", ("long sequence",), offload, 120, on_host=True),
    Part("22B layer", ("plain, full, selective",), layer, 120),
    Part("optimizer on the host", UPDATES, host_optimizer, on_host=True),
    Part("expandable segments", ("60 %", "min"), expandable, environment=EXPANDABLE),
    Part("GPT, compiled otherwise", OTHERWISE, training("gpt", True), 200),
    Part("long context", LONG, long_context, 400, on_host=True),
)


def part(name: str) -> Part:
    """The part of that name."""
    return next(one for one in PARTS if one.name == name)
