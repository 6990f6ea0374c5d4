"""Fit the efficiencies of `lowtide.estimate.speed` to some published runs, and say how far off every run is.

python -m benchmarks estimate_published

Which runs are fitted to was decided before any error was looked at, by model, number of devices or release:
the column ``use``. Written are ``src/lowtide/estimate/efficiency.json``, the result file, and the tables in
docs/estimate.md.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide.estimate import Config, configure, estimate
from lowtide.estimate.devices import Device, device
from lowtide.estimate.fitted import fitted
from lowtide.estimate.speed import Efficiency, priced, step_time, step_work

ROOT = Path(__file__).parent.parent
PUBLISHED = ROOT / "tests" / "estimate" / "published"
FITTED = ROOT / "src" / "lowtide" / "estimate" / "efficiency.json"
DOCS = ROOT / "docs" / "estimate.md"
SOURCES = {
    "2205.05198": "arXiv 2205.05198, Table 5",
    "mosaicml": "MosaicML llm-foundry, scripts/train/benchmarking",
    "torchtitan": "torchtitan, docs/performance.md and benchmarks/",
    "nvidia": "NVIDIA NeMo and Megatron-Bridge, performance summaries",
    "fms_fsdp": "IBM fms-fsdp, README",
    "litgpt": "lightning-thunder pull requests 940 and 1528 (LitGPT)",
    "internlm": "InternLM, doc/en/train_performance.md",
    "kempner": "KempnerForge, benchmarks/mfu_scaling and benchmarks/weak_scaling_160gpu",
    "deepspeed": "BigScience, Megatron-DeepSpeed before BLOOM (tr11-176B-ml/chronicles-prequel.md)",
}
MEMORY_WITHIN, SPEED_WITHIN = 0.05, 0.15
BOUNDS = {
    "products": (0.65, 0.3, 0.95),
    "attention": (0.4, 0.1, 0.95),
    "eager_passes": (8.0, 1.0, 14.0),
    "fused_passes": (3.0, 1.0, 12.0),
    "float8": (1.7, 1.0, 2.0),  # the ratio of the peaks
    "flash_3": (1.5, 1.0, 1.75),  # arXiv 2407.08608: up to 1.75 in backward, which is most of it
    "links": (0.8, 0.3, 0.95),
    "interference": (0.3, 0.001, 1.0),
    "exposed": (0.3, 0.02, 1.0),
}
"""Where the fit begins, and what it stays near where no run tells; the least and the most."""


HELD = {
    "experts": 0.7,
    "rowwise": 0.72,
    "ceiling": 1.02,
    "launch": 0.0034,
    "alone": 0.0013,
    "turn": 0.04,
    "collective": 0.0005,
}
FLASH_2: dict[str, float] = {"b200": 0.63, "h100": 0.63, "h200": 0.63}
"""What ``estimate_runs`` fits, to runs of 2026: for all devices, and by device."""


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
        source, name: where it is from, and what it is called there.
        fit: whether the efficiencies are fitted to it; the others test them.
        device: the accelerator, by its name in `lowtide.estimate.devices`.
        network: gigabytes a second of one device to other nodes, where they are not the device's usual ones.
        config: what was run.
        tokens_per_second: of one device; ``None`` where not published.
        memory_gib: peak of PyTorch's memory on one device; ``None`` where not published.
        allocated: whether that is what was allocated, not what was reserved.
    """

    source: str
    name: str
    fit: bool
    device: str
    config: Config
    tokens_per_second: float | None
    memory_gib: float | None
    allocated: bool = False
    network: float | None = None

    @property
    def kind(self) -> Device:
        """The accelerator."""
        return device(self.device, **({"network_bandwidth": self.network * 1e9} if self.network else {}))

    @property
    def tokens(self) -> float:
        """Tokens of a step on one device."""
        return self.config.global_batch * self.config.seq / self.config.devices

    def predicted_speed(self) -> float:
        """Tokens a second on one device."""
        return self.tokens / step_time(self.config, self.kind).total

    def predicted_memory(self) -> float:
        """Reserved or allocated GiB of the device that needs most."""
        found = estimate(self.config)
        # torchtitan's run_train.sh sets expandable segments
        return (found.total_bytes if self.allocated else found.reserved_expandable_bytes) / 2**30


def settings(text: str) -> dict[str, Any]:
    """The settings in ``seq=8192 dp=8 compile``.

    >>> settings("seq=8192 compile loss=torch")
    {'seq': 8192, 'compile': True, 'loss': 'torch'}
    """
    found: dict[str, Any] = {}
    for part in text.split():
        name, given, value = part.partition("=")
        found[name] = (int(value) if value.isdigit() else value) if given else True
    return found


def read(source: str) -> list[Run]:
    """The runs of one source."""
    if source == "2205.05198":
        return _paper()
    with open(PUBLISHED / f"runs_{source}.csv", encoding="utf-8", newline="") as file:
        return [
            Run(
                source,
                row["run"],
                row["use"] == "fit",
                row["device"],
                configure(row["model"], **settings(row["settings"])),
                float(row["tokens_per_second"]) if row["tokens_per_second"] else None,
                float(row["memory_gib"]) if row["memory_gib"] else None,
                row["memory_kind"] == "allocated",
                float(row["network"]) if row.get("network") else None,
            )
            for row in csv.DictReader(file)
        ]


def _paper() -> list[Run]:
    """Table 5 of arXiv 2205.05198: seconds of an iteration, twice for each of four models."""
    ways: dict[str, dict[str, Any]] = {
        "full_recompute_iter_s": dict(recompute="full"),
        "present_work_iter_s": dict(recompute="selective", sequence_parallel=True),
    }
    found = []
    with open(PUBLISHED / "2205.05198_table5_e2e.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            for column, way in ways.items():
                config = configure(row["model"], as_published=True, **way)
                speed = config.global_batch * config.seq / config.devices / float(row[column])
                name = f"{row['model']} {column.removesuffix('_iter_s').replace('_', ' ')}"
                found.append(
                    Run("2205.05198", name, row["model"] in ("22B", "175B"), "a100", config, speed, None)
                )
    return found


def fit(runs: Iterable[Run], names: list[str]) -> dict[str, Efficiency]:
    """The efficiencies of the devices ``names`` with the least robust squared logarithmic error over the
    runs, every source weighing alike.
    """
    from scipy.optimize import least_squares

    timed = [run for run in runs if run.fit and run.tokens_per_second]
    share = {source: sum(run.source == source for run in timed) for source in {run.source for run in timed}}
    works = [
        (
            step_work(run.config, run.kind),
            run.tokens / run.tokens_per_second,
            1 / math.sqrt(share[run.source]),
        )
        for run in timed
        if run.tokens_per_second
    ]
    common = [
        name for name in Efficiency.__slots__ if name not in ("products", "attention", "flash_2", *HELD)
    ]

    def unpack(values: Any) -> dict[str, Efficiency]:
        numbers = [math.exp(value) for value in values]
        shared = dict(zip(common, numbers, strict=False)) | HELD
        found = {}
        for name in names:
            at = len(common) + 2 * names.index(name)
            found[name] = Efficiency(
                products=numbers[at], attention=numbers[at + 1], flash_2=FLASH_2.get(name, 0.0), **shared
            )
        return found

    def residuals(values: Any) -> list[float]:
        known = unpack(values)
        off = [
            math.log(told / priced(work, known[work.device.measured]).total) * weight
            for work, told, weight in works
        ]
        anchored = [0.02 * (value - start) for value, start in zip(values, first, strict=True)]
        return off + anchored  # what no run tells apart stays where it was

    limits = [BOUNDS[name] for name in (*common, *("products", "attention") * len(names))]
    first, lower, upper = ([math.log(value) for value in column] for column in zip(*limits, strict=True))
    best = least_squares(residuals, first, bounds=(lower, upper), loss="soft_l1", f_scale=0.05)
    return unpack(best.x)


def fit_reserve(runs: Iterable[Run]) -> dict[str, float]:
    """What PyTorch reserves over what it allocates: for gathered (ZeRO-3) weights by torchtitan's runs over
    the estimate, for the rest as nanotron's runs print both.
    """
    gathered = [
        run.memory_gib / (max(stage.cached_bytes for stage in estimate(run.config).stages) / 2**30) - 1
        for run in runs
        if run.fit and run.memory_gib is not None and run.config.zero == 3
    ]
    with open(PUBLISHED / "reserved_nanotron.csv", encoding="utf-8", newline="") as file:
        plain = [
            float(row["reserved_mib"]) / float(row["allocated_mib"]) - 1
            for row in csv.DictReader(file)
            if row["use"] == "fit"
        ]
    return {"gathered": round(statistics.median(gathered), 4), "plain": round(statistics.median(plain), 4)}


def rows(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """Each run, what was published beside what is predicted."""
    found = []
    for run in runs:
        row: dict[str, Any] = {"source": run.source, "run": run.name, "device": run.device, "fit": run.fit}
        if run.tokens_per_second is not None:
            ours = run.predicted_speed()
            row |= {"tokens_per_second": run.tokens_per_second, "predicted_tokens_per_second": round(ours, 1)}
            row["speed_off"] = round(ours / run.tokens_per_second - 1, 4)
        if run.memory_gib is not None:
            ours = run.predicted_memory()
            row |= {"reserved_gib": run.memory_gib, "predicted_reserved_gib": round(ours, 2)}
            row["memory_off"] = round(ours / run.memory_gib - 1, 4)
        found.append(row)
    return found


def summary(data: list[dict[str, Any]]) -> list[list[str]]:
    """A row of the docs' table for each source and device: how many runs are within the marks."""
    lines = []
    for source, title in SOURCES.items():
        kinds = dict.fromkeys(row["device"] for row in data if row["source"] == source)
        for kind in kinds:
            here = [row for row in data if row["source"] == source and row["device"] == kind]
            lines.append([title, kind, *_hits(here)])
    return [*lines, ["all", "", *_hits(data)]]


def _hits(here: list[dict[str, Any]]) -> list[str]:
    """Speeds fitted to and tested on, and memories tested on, within the marks."""
    cells = []
    for fit_to in (True, False):
        speeds = [row["speed_off"] for row in here if row["fit"] == fit_to and "speed_off" in row]
        cells.append(_within(speeds, SPEED_WITHIN))
    memory = [row["memory_off"] for row in here if not row["fit"] and "memory_off" in row]
    return [*cells, _within(memory, MEMORY_WITHIN)]


def _within(off: list[float], mark: float) -> str:
    if not off:
        return "-"
    worst = max(off, key=abs)
    return f"{sum(abs(value) <= mark for value in off)} of {len(off)}, worst {100 * worst:+.0f} %"


def misses(data: list[dict[str, Any]]) -> list[list[str]]:
    """The runs to test on that are beyond the marks."""
    lines = []
    for row in data:
        if row["fit"]:
            continue
        if abs(row.get("speed_off", 0)) > SPEED_WITHIN:
            ours, theirs = row["predicted_tokens_per_second"], row["tokens_per_second"]
            lines.append(
                [_name(row), f"{theirs:.0f} tokens/s", f"{ours:.0f}", f"{100 * row['speed_off']:+.0f} %"]
            )
        if abs(row.get("memory_off", 0)) > MEMORY_WITHIN:
            ours, theirs = row["predicted_reserved_gib"], row["reserved_gib"]
            lines.append(
                [_name(row), f"{theirs:.1f} GiB", f"{ours:.1f}", f"{100 * row['memory_off']:+.0f} %"]
            )
    return lines


def _name(row: dict[str, Any]) -> str:
    return f"{row['source']}: {row['run']} ({row['device']})"


def write_docs(data: list[dict[str, Any]]) -> None:
    """The tables in docs/estimate.md, between their marks."""
    heads = {
        "published": ["source", "device", "fitted to: speed within 15 %", "tested on: speed within 15 %",
                      "tested on: memory within 5 %"],
        "misses": ["run", "published", "predicted", "off"],
    }  # fmt: skip
    text = DOCS.read_text(encoding="utf-8")
    for name, lines in (("published", summary(data)), ("misses", misses(data))):
        table = [heads[name], ["---"] * len(heads[name]), *lines]
        block = "\n".join(f"| {' | '.join(cells)} |" for cells in table)
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, rest = text.split(start, 1)
        text = f"{before}{start}\n{block}\n{end}{rest.split(end, 1)[1]}"
    DOCS.write_text(text, encoding="utf-8")


def main() -> None:
    """Fit, and write the efficiencies, the result file and the tables."""
    from benchmarks.common import save

    runs = [run for source in SOURCES for run in read(source)]
    found = fit(runs, sorted({device(run.device).measured for run in runs}))
    one = next(iter(found.values()))
    common = [name for name in Efficiency.__slots__ if name not in ("products", "attention", "flash_2")]
    data = {
        "sources": list(SOURCES.values()),
        "common": {name: round(getattr(one, name), 4) for name in common},
        "devices": {
            name: {
                part: round(getattr(own, part), 4)
                for part in ("products", "attention", *(("flash_2",) if name in FLASH_2 else ()))
            }
            for name, own in found.items()
        },
        "reserved": fit_reserve(runs),
    }
    FITTED.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    fitted.cache_clear()
    found_rows = rows(runs)
    save("estimate_published", found_rows, efficiencies=data)
    write_docs(found_rows)
    for line in (*summary(found_rows), *misses(found_rows)):
        print("  ".join(line))


if __name__ == "__main__":
    main()
