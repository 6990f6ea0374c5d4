"""The file of kept plans: lines of JSON, which nothing of is executed.

| line | what it is |
|---|---|
| 1 | `Head`: the format, who made the file (lowtide, torch, device, model), a digest of all that follows |
| 2 | `Common`: what holds for all steps; and of each step the key, in the order of the lines that follow |
| 3, 4, ... | a step each (`step_text`): its graph, its facts, and its plan |

A file is written whole, under another name, and then renamed. One that is damaged, or that another version,
device or model has made, is not read past its first line.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lowtide import accelerator
from lowtide.errors import LowtideError
from lowtide.graph import StepGraph
from lowtide.plan.data import Plan
from lowtide.run.limit.entry import Entry, Facts, Kind
from lowtide.run.limit.key import Members, StepKey
from lowtide.version import __version__

_FORMAT = 1


class NotUsed(LowtideError):
    """Why kept plans cannot be used."""


class KeptKey(NamedTuple):
    """The key of a step (`StepKey`), as it is in every process.

    Attributes:
        shapes: of the key.
        others: a digest of all else in the key.
    """

    shapes: tuple[tuple[int, ...], ...]
    others: str


@dataclass(frozen=True)
class Common:
    """What holds for all steps of a file.

    Attributes:
        budget: as it was given.
        budget_bytes: the one number that it has come to.
        plain_bytes: the plain peak of the largest step that was planned.
        findings: operations that do not reproduce, with the reason.
        forms: what the operations need (``Forms`` of ``run/record/cpp/governor.h``).
        extensions: what each extension of the limit keeps, by name.
        keys: of the steps.
    """

    budget: str | int | None
    budget_bytes: int | None
    plain_bytes: int
    findings: dict[str, str]
    forms: Sequence[Any]
    extensions: dict[str, Any]
    keys: Sequence[KeptKey] = field(default=())


def maker_of(model: torch.nn.Module, device: torch.device) -> dict[str, str]:
    """Who makes a file: the versions; the device; the settings of PyTorch by which operations reproduce or
    not; and a digest of the model, from the classes of its modules, and names, shapes and dtypes of its
    parameters and buffers.
    """
    parts = [f"{name}:{type(module).__qualname__}" for name, module in model.named_modules()]
    for named in (model.named_parameters, model.named_buffers):
        parts += [f"{name}:{tuple(one.shape)}:{one.dtype}" for name, one in named(remove_duplicate=False)]
    on_cpu = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    cudnn = torch.backends.cudnn
    settings = {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn.deterministic": cudnn.deterministic,
        "cudnn.benchmark": cudnn.benchmark,
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
    }
    return {
        "lowtide": __version__,
        "torch": torch.__version__,
        "device": f"cpu ({on_cpu})" if device.type == "cpu" else accelerator.name_of(device),
        "settings": ", ".join(f"{name}={value}" for name, value in settings.items()),
        "model": _digest("\n".join(parts)),
    }


def key_of(key: StepKey, members: Members, others: Iterable[Any]) -> KeptKey:
    """The key of a step that begins.

    Args:
        key: of the step.
        members: of the model now.
        others: what extensions have in the key.
    """
    trains, has_gradient, _ = members.parameter_states()
    parts = (
        *(key.inputs, key.structure, key.autocast),
        *(members.training, trains, has_gradient if any(has_gradient) else b""),
        *([(one.dtype, one.nbytes) for one in members.parameters], list(others)),
    )
    return KeptKey(key.shapes, _digest(repr(parts)))


# ---- a step ------------------------------------------------------------------------------------------


def step_text(
    entry: Entry, plan: Plan | None, program: str, policy: Any, budget: str | int | None
) -> str | None:
    """A step and its plan as a line; ``None`` where a later forward of the step has a key of another kind,
    which is not written down.

    Args:
        entry: of the step.
        plan: of the step, for this policy and budget, if there is one.
        program: which of `PlanBook.verified` it runs; empty where it was not verified.
        policy, budget: of the limit.
    """
    assert entry.graph is not None
    alike = entry.key._replace(shapes=(), inputs=(), structure="", gradients=0)
    if any(
        key._replace(shapes=(), inputs=(), structure="", gradients=0) != alike for key in entry.later_keys
    ):
        return None
    row = {
        "graph": entry.graph.to_json(),
        "borrowed": entry.borrowed,
        "spans": entry.forward_spans,
        "later": [(key.shapes, _plain(key.inputs), key.structure) for key in entry.later_keys],
        "facts": asdict(entry.facts),
        "listened": entry.listened,
        "listens": entry.kind.listens,
        "recorded": entry.kind.recorded,
        "program": program,
        "policy": _policy_name(policy),
        "budget": budget,
        "plan": None if plan is None else json.loads(plan.to_json()),
    }
    return json.dumps(row, separators=(",", ":"))


def read_step(
    text: str, key: StepKey, policy: Any, budget: str | int | None
) -> tuple[Entry, str, Plan | None]:
    """The entry of a step, without a plan; its verified program; and its plan, or ``None`` where that is for
    another policy or budget.

    Args:
        text: as `step_text` made it.
        key: of the step, in this process.
        policy, budget: of the limit.

    Raises:
        NotUsed: it is no such text.
    """
    try:
        row = json.loads(text)
        kind = Kind(listens=row["listens"], recorded=row["recorded"])
        entry = Entry(
            key,
            kind,
            graph=StepGraph.from_json(row["graph"]),
            borrowed=row["borrowed"],
            forward_spans=tuple((begin, end) for begin, end in row["spans"]),
            later_keys=tuple(
                key._replace(shapes=_tuples(shapes), inputs=_from_plain(inputs), structure=structure)
                for shapes, inputs, structure in row["later"]
            ),
            facts=Facts(**row["facts"]),
            listened=row["listened"],
        )
        is_ours = row["policy"] is not None and (row["policy"], row["budget"]) == (policy, budget)
        plan = Plan.from_json(json.dumps(row["plan"])) if is_ours and row["plan"] is not None else None
        return entry, row["program"], plan
    except (KeyError, TypeError, ValueError, AttributeError, LowtideError) as error:
        raise NotUsed(f"a step cannot be read ({type(error).__name__}: {error})") from None


def _policy_name(policy: Any) -> str | None:
    """A policy's name; none for a function, of which nobody knows whether it is the same in another
    process.
    """
    return policy if isinstance(policy, str) else None


def _plain(item: Any) -> Any:
    """Part of a key, as JSON has it: dtypes and layouts by their names."""
    if isinstance(item, tuple):
        return [_plain(one) for one in item]
    return {"torch": str(item).removeprefix("torch.")} if type(item).__module__ == "torch" else item


def _from_plain(item: Any) -> Any:
    """What `_plain` was given."""
    if isinstance(item, list):
        return tuple(_from_plain(one) for one in item)
    if isinstance(item, dict):
        found = getattr(torch, item["torch"])
        if not isinstance(found, torch.dtype | torch.layout):
            raise ValueError(f"torch.{item['torch']} is no dtype")
        return found
    return item


def _tuples(shapes: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(shape) for shape in shapes)


# ---- a file ------------------------------------------------------------------------------------------


def write(path: Path, maker: Mapping[str, str], common: Common, steps: Iterable[str]) -> None:
    """Write a file whole.

    Raises:
        OSError: it cannot be written.
    """
    body = "\n".join([json.dumps(asdict(common), separators=(",", ":")), *steps])
    head = {"format": _FORMAT, "made_by": maker, "sha256": _digest(body, whole=True)}
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        whole.write_text(f"{json.dumps(head)}\n{body}", encoding="utf-8")
        whole.replace(path)
    finally:
        whole.unlink(missing_ok=True)


def read(path: Path, maker: Mapping[str, str]) -> tuple[Common, list[str]]:
    """What `write` wrote: what holds for all steps, and the text of each.

    Raises:
        NotUsed: the file is another one, or damaged.
        FileNotFoundError: there is none.
    """
    try:
        first, _, body = path.read_text(encoding="utf-8").partition("\n")
        head = json.loads(first)
        version, made_by, digest = head["format"], dict(head["made_by"]), head["sha256"]
    except FileNotFoundError:
        raise
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise NotUsed(f"it cannot be read ({type(error).__name__})") from None
    if version != _FORMAT:
        raise NotUsed(f"its format is {version!r}, and this version of lowtide reads {_FORMAT}")
    for name, ours in maker.items():
        if made_by.get(name) != ours:
            other = "another model" if name == "model" else f"{name} {made_by.get(name)}, not {ours}"
            raise NotUsed(f"it is of {other}")
    if _digest(body, whole=True) != digest:
        raise NotUsed("it is incomplete or was changed")
    try:
        common, *steps = body.split("\n")
        row = json.loads(common)
        row["keys"] = [KeptKey(_tuples(shapes), others) for shapes, others in row["keys"]]
        found = Common(**row)
    except (KeyError, TypeError, ValueError) as error:
        raise NotUsed(f"it cannot be read ({type(error).__name__}: {error})") from None
    if len(found.keys) != len(steps):
        raise NotUsed("its steps are not those that it names")
    return found, steps


def _digest(text: str, whole: bool = False) -> str:
    digest = hashlib.sha256(text.encode()).hexdigest()
    return digest if whole else digest[:16]
