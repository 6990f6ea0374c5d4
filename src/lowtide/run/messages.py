"""A limited model's one-line description, its warnings, and what a profiled forward cannot do."""

from __future__ import annotations

import sys
import warnings

import torch

from lowtide import budget as budgets
from lowtide.errors import TraceError
from lowtide.plan.data import Plan
from lowtide.words import count_text

ABANDONED = (
    "a step of this limited model ran without the limit, because a variable still held the result of "
    "an earlier forward whose backward has not run (the loss of a step that ended with an error, "
    "perhaps). Delete that result (del loss). lowtide profiles the next step that begins without it"
)
"""The warning of a forward that began while an earlier step was unfinished, ran as part of that step without
a plan, and through which a backward runs now.
"""

CO_LIMITED = (
    "several limited models take part in one step: each has a plan for its own part, and all of them "
    "are held to the smallest of their budgets. For one plan, put one limit on a module that runs all "
    "of them"
)
"""The warning of a limited model that takes part in a step of another one."""

UNREACHED = (
    "the forward of this limited model returned no tensor that backward begins from (it is a "
    "generator, runs backward itself, or stores the tensors of the loss elsewhere): lowtide does not "
    "compare the peak of its steps with the budget. Return the tensors from which the loss is computed"
)
"""The warning of a forward from which no backward can begin."""

CHECKPOINTING_OFF = (
    "the gradient checkpointing of this model is off while its limit is on: lowtide decides what is "
    "recomputed. handle.remove() turns it on again"
)
"""The line that says what a limit does to a model whose modules have a flag for checkpointing."""

LEAST = (
    "no plan for steps of this kind fits the budget: they run with the plan of the smallest peak, "
    "because other ranks wait for this one."
)
UNMEASURED = (
    "the memory of this limited model cannot be measured while its steps run: a step above the budget "
    "would not be noticed. On a CPU the meter needs a C++ compiler (apt-get install g++, or name one "
    "in CXX); lowtide doctor shows what is missing"
)
"""The warning of a limit whose steps cannot be measured."""


class LowtideWarning(UserWarning):
    """Something that a user should know and that is no error: an operation that does not reproduce, a plan
    made again.
    """


def warn(text: str, each_time: bool = False) -> None:
    """Warn. The warning points at the innermost caller outside lowtide, PyTorch and `contextlib`.

    Args:
        text: what is said.
        each_time: say it again where the same was said before. Python's filters show a text once for each
            line of code unless they are told otherwise.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "lowtide",
        "torch",
        "contextlib",
    ):
        frame = frame.f_back
    # what was shown before is noted with the caller's module, or in a registry that nobody reads again
    noted = {} if each_time else frame.f_globals.setdefault("__warningregistry__", {})
    name = frame.f_globals.get("__name__", "<string>")
    warnings.warn_explicit(text, LowtideWarning, frame.f_code.co_filename, frame.f_lineno, name, noted)


class Once:
    """Warns of each thing once: in a text, by itself or with a name where its words vary."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, what: str, text: str = "") -> None:
        if what not in self._said:
            self._said.add(what)
            warn(text or what)


def above_budget(
    took: int, limit: int, excess: tuple[str, int, int, bool, str] | None, recorded: bool = True
) -> tuple[str, str]:
    """The warning of a step that took more than its budget, with what it is about, which is said once.

    Args:
        took, limit: bytes.
        excess: the operation that did not fit, what it needs, by how much it did not fit, whether it was the
            first call with arguments of these shapes, and where it was called; ``None`` where none was seen.
            Without a name, what was read there was found to have been there before the step.
        recorded: the step's operations were recorded.
    """
    size, above = budgets.format_bytes(took), budgets.format_bytes(took - limit)
    text = f"a step took {size}, {above} above the budget of {budgets.format_bytes(limit)}: "
    if excess is None and not recorded:
        held = (
            "lowtide did not record it, because earlier steps of its kind were a tenth below the budget; "
            "it records and holds later ones"
        )
        return held, f"{text}{held} while they run"
    if excess is None:
        held = "the program itself holds more, or a thread freed its buffers late"
        return held, f"{text}no operation needed that much; {held}"
    name, need, _, first, where = excess
    name, at = name.replace("::", "."), f" in {where}" if where else ""
    if not name:
        held = "the program holds more than the model and the inputs of the forward"
        return held, (
            f"{text}{held}: {budgets.format_bytes(need)}, which lowtide learned when an operation read it{at}"
        )
    if first:
        why = "which is not known before the first call with arguments of these shapes"
        return f"{name} first", f"{text}{name}{at} needs {budgets.format_bytes(need)}, {why}"
    why = "and nothing was left to evict"
    return name, f"{text}{name}{at} needs {budgets.format_bytes(need)}, {why}"


def own_checkpointing(model: torch.nn.Module) -> str:
    """The warning for a model that runs parts of itself under ``torch.utils.checkpoint``."""
    # of Hugging Face models: from 5.23 on, before
    names = ("activation_checkpointing", "gradient_checkpointing")
    modules = list(model.modules())
    has = [name for name in names if any(hasattr(module, f"{name}_disable") for module in modules)]
    if has:
        how = f"call model.{has[0]}_disable(), and pass {has[0]}=False to a Trainer (TRL's default is True)"
    elif any(hasattr(module, "set_grad_checkpointing") for module in modules):
        how = "call model.set_grad_checkpointing(False)"
    elif any(map(is_wrapped, modules)):
        how = "leave apply_activation_checkpointing out"
    else:
        how = "call the blocks without torch.utils.checkpoint.checkpoint"
    return (
        "this limited model calls torch.utils.checkpoint, and recomputes those regions under every "
        f"budget. Turn these checkpoints off, because lowtide decides what is recomputed: {how}"
    )


def is_wrapped(module: torch.nn.Module) -> bool:
    """Whether a module is PyTorch's wrapper that runs another one under ``torch.utils.checkpoint``."""
    return type(module).__name__ == "CheckpointWrapper"  # importing it loads torch.distributed


def limit_line(model: torch.nn.Module, budget: str | int | None, kinds: int, latest: Plan | None) -> str:
    """The model, its budget, how many kinds of steps are planned, and the latest plan's peak."""
    given = budgets.format_bytes(budget) if isinstance(budget, int) else budget
    words = ["no budget" if given is None else f"budget {given}", "nothing planned yet"]
    if kinds:
        words[1] = f"{count_text(kinds, 'kind')} of steps planned"
    if latest is not None:
        words.append(f"latest predicted peak {budgets.format_bytes(latest.predicted_peak_bytes)}")
    return f"<lowtide.Handle of {type(model).__name__}: {', '.join(words)}>"


def unsupported_forward(error: BaseException) -> TraceError | None:
    """What to raise in place of an error of a profiled forward; ``None`` for the error itself."""
    if isinstance(error, RuntimeError) and "support saved tensor hooks" in str(error):
        return TraceError(
            "the model's forward takes gradients with torch.func (grad, vjp, jacrev, hessian), under "
            "which PyTorch allows no hooks on saved tensors: use torch.autograd.grad(..., "
            "create_graph=True) there, or put limits on other modules, which do not contain this call"
        )
    if "HigherOrderOp" in type(error).__name__:
        return TraceError(
            "the model's forward calls torch.cond or another higher-order operator on its submodules, "
            "which PyTorch cannot compile with hooks on them: put limits on other modules, which do "
            "not contain this call"
        )
    return None
