"""What Python does for the values of a tape (``Value`` of ``cpp/tape.h``) where C++ asks: streams of an
accelerator, storages that were emptied and filled again, and the errors of a replay that cannot begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lowtide import private
from lowtide.accelerator import current_stream
from lowtide.errors import ReplayError
from lowtide.interception import without_modes
from lowtide.run.tensor_bytes import fingerprint

FILLED_OTHERWISE = (
    "a tensor of {nbytes} bytes that a recomputation starts from was freed after its forward "
    "(storage.resize_) and filled again with other bytes, so this step's gradients would be wrong: fill it "
    "with what it held, or keep that region with lowtide.policies.keep_all"
)


def fingerprint_of(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """A fingerprint of a tensor whose storage is about to be emptied."""
    with without_modes(), private.replaying():
        return fingerprint(tensor, nbytes)


def unpack(packed: Any) -> torch.Tensor:
    """The tensor for what Python packed."""
    return packed if isinstance(packed, torch.Tensor) else packed.unpack()


def raise_overwritten(like: torch.Tensor, version: int, expected: int, shape: Sequence[int]) -> None:
    """Raise autograd's own error for a saved tensor that was overwritten."""
    kind = like.type().removeprefix("torch.")
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [torch.{kind} {list(shape)}] is at version {version}; expected version "
        f"{expected} instead. Hint: enable anomaly detection to find the operation that failed to "
        "compute its gradient, with torch.autograd.set_detect_anomaly(True)."
    )


def here(value: Any) -> torch.Tensor:
    """A tensor on the bytes of a value that is held or has a copy, for this thread's stream.

    Raises:
        ReplayError: the bytes have been overwritten or freed since.
    """
    held = value.held
    if held is None:
        copy = value.cached
        if copy is not None:
            return _followed(value, copy)
        raise ReplayError(
            "a tensor that a recomputation starts from is gone or was modified after the forward pass: hold "
            "it until backward, write to a copy, or keep that region with lowtide.policies.keep_all"
        )
    if private.version(held) != value.version:
        raise ReplayError(
            "a tensor that a recomputation starts from was modified by an in-place operation after the "
            f"forward pass (version {private.version(held)}, expected {value.version}, shape "
            f"{tuple(held.shape)}): write to a copy, or keep that region with "
            "lowtide.policies.keep_all"
        )
    if held.untyped_storage().nbytes() < value.nbytes:
        if weight := private.weight_in(held.untyped_storage()):
            raise ReplayError(
                f"a recomputation reads the sharded weight {weight!r}, which is not gathered now: FSDP "
                "had it whole here in the step that was profiled. Do not reshard its unit, or change "
                "what FSDP gathers ahead, within a step; or keep that region with "
                "lowtide.policies.keep_all"
            )
        raise ReplayError(
            f"a tensor of {value.nbytes} bytes that a recomputation starts from was resized to "
            f"{held.untyped_storage().nbytes()} bytes after the forward pass, and backward needs it "
            "before it is filled again: fill it earlier, or keep that region with "
            "lowtide.policies.keep_all"
        )
    if not _is_filled_again(value, held):
        raise ReplayError(FILLED_OTHERWISE.format(nbytes=value.nbytes))
    now = current_stream(held.device)
    if value.stream is not None and now != value.stream:
        # user code orders the streams that read it in forward; a replay may run on another
        if value.is_copy:
            now.wait_stream(value.stream)
        held.record_stream(now)
    return held


def _is_filled_again(value: Any, held: torch.Tensor) -> bool:
    """Whether a held value has the bytes that it had when it was emptied, if it was. User code does not wait
    for a GPU: other bytes fail there, as an assertion of the device.
    """
    if value.emptied is None:
        return True
    with without_modes(), private.replaying():
        same = (fingerprint(held, value.nbytes) == value.emptied).all()
        if same.is_cpu:
            if not bool(same):
                return False
        else:
            private.assert_on_device(same, FILLED_OTHERWISE.format(nbytes=value.nbytes))
    value.emptied = None
    return True


def _followed(value: Any, copy: torch.Tensor) -> torch.Tensor:
    """The copy, which the current stream may read: after the stream that had it last, and before its memory
    is used again.
    """
    now, before = current_stream(copy.device), value.stream
    if now != before and before is not None:
        now.wait_stream(before)
        copy.record_stream(now)
        value.stream = now
    return copy
