"""What users hold: the public names with their parameters, what handles have, and plan files.

`public_names.txt` is what was promised. A line may be added; one that goes or changes is a break, to be
said in CHANGELOG.md. ``python tests/test_public.py`` writes it anew.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lowtide
from lowtide.compiled.compiled_handle import CompiledHandle

HERE = Path(__file__).parent
PROMISED = HERE / "public_names.txt"
HANDLE = """budget_bytes graph kept make_report measured_peak_bytes optimizer_bytes paused plan plannings
plans prepare prepare_all remove report set_budget set_optimizer"""
OLD_PLAN = HERE / "plan" / "plan_of_0_2_0.json"


def parameters(function: Any) -> str:
    """The parameters of a function, as they are called, without types."""
    shown = [
        p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(function).parameters.values()
    ]
    return str(inspect.Signature(shown))


def members(name: str, kind: type) -> Iterator[str]:
    """The public attributes of a class, its own and inherited."""
    if not issubclass(kind, Exception):
        yield f"{name}{parameters(kind)}" if kind is not lowtide.Handle else name  # users make none
    for member in sorted(dir(kind)):
        if member.startswith("_") or (issubclass(kind, Exception) and hasattr(Exception, member)):
            continue
        found = inspect.getattr_static(kind, member)
        found = getattr(found, "__func__", found)
        yield f"{name}.{member}{parameters(found) if inspect.isfunction(found) else ''}"


def public_names() -> list[str]:
    """A line for each name, and for each attribute of a class."""
    lines: list[str] = []
    for name in sorted(lowtide.__all__):
        found = getattr(lowtide, name)
        if inspect.isclass(found):
            lines += members(name, found)
        else:
            lines.append(f"{name}{parameters(found) if name != 'policies' else ''}")
    lines += [f"policies.{name}" for name in sorted(lowtide.policies.__all__)]
    return lines


def test_what_was_promised_is_there() -> None:
    promised = PROMISED.read_text().splitlines()
    assert promised and not set(promised) - set(public_names())


def test_a_handle_has_its_attributes() -> None:
    for kind in (lowtide.Handle, CompiledHandle):
        assert set(HANDLE.split()) <= set(dir(kind))


def test_a_plan_of_0_2_0_loads_and_has_the_same_json() -> None:
    text = OLD_PLAN.read_text()
    plan = lowtide.Plan.from_json(text)
    assert plan.replayed and plan.predicted_peak_bytes < plan.plain_peak_bytes
    old, new = json.loads(text), json.loads(plan.to_json())
    assert old["format"] == new["format"]
    assert {name: new[name] for name in old} == old, "a field may be added, and none goes or changes"
    assert lowtide.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("damage", [b"{}", b'{"format": 4}', b"no plan"])
def test_a_damaged_plan_is_refused(damage: bytes) -> None:
    with pytest.raises(lowtide.PlanError):
        lowtide.Plan.from_json(damage.decode())


if __name__ == "__main__":
    PROMISED.write_text("\n".join(public_names()) + "\n")
