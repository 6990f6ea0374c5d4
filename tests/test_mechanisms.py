"""Each way to intercept PyTorch is used by the files that the design page names for it, and by no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "lowtide"
MECHANISMS = {
    "dispatch modes": r"\(TorchDispatchMode\)|\(TorchFunctionMode\)|\(FakeTensorMode\)",
    "saved-tensor hooks": r"saved_tensors_hooks\(|SavedTensorDefaultHooks::push_hooks",
    "module hooks": r"register_(module_)?(full_)?(forward|backward)(_pre)?_hook|register_module_forward",
    "gradient and node hooks": r"\.register_(pre)?hook\(|register_post_accumulate|register_multi_grad",
    "engine callbacks": r"queue_callback\(",
    "kernels at dispatch keys": r"torch\.library\.Library\(|torch::Library\b|fallthrough_kernel",
    "replaced attributes": r"UntypedStorage\.\w+ = |_UNTYPED\.\w+ = |setattr\((torch|_?C|inductor)|"
    r"\.is_fake_tensor = ",
}


def uses() -> dict[str, list[str]]:
    """For each mechanism the files that use it."""
    texts = {
        str(file.relative_to(SOURCE)): file.read_text(encoding="utf-8")
        for file in sorted(SOURCE.rglob("*"))
        if file.suffix in (".py", ".h", ".cpp")
    }
    return {
        name: [file for file, text in texts.items() if re.search(pattern, text)]
        for name, pattern in MECHANISMS.items()
    }


def named() -> dict[str, list[str]]:
    """The same, as the design page has it."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    part = page.partition("## What intercepts PyTorch")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", part, re.MULTILINE)
    return {name: sorted(re.findall(r"`([^`]+)`", files)) for name, files in rows if name in MECHANISMS}


def test_each_mechanism_is_used_where_the_design_says() -> None:
    assert named() == {name: sorted(files) for name, files in uses().items()}
