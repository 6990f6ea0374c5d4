"""`HostOptimizer`: an optimizer whose state lies on the host, all of it or a part."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal

import torch
from torch import Tensor

from lowtide import budget as budgets
from lowtide.errors import expect
from lowtide.optim import budgeted, checkpoint
from lowtide.optim.background import BackgroundUpdater
from lowtide.optim.clip import clip_
from lowtide.optim.elementwise import kernel_of
from lowtide.optim.errors import OptimError
from lowtide.optim.kernels import check_options
from lowtide.optim.link import Link, link_for
from lowtide.optim.modes import check_modes, fraction_of
from lowtide.optim.pipeline import Task, Updater
from lowtide.optim.placed import PlacedOptimizer
from lowtide.optim.pool import FilePool, Pool
from lowtide.optim.slots import Placement, Slot
from lowtide.optim.stream import GradientStream, sent
from lowtide.optim.tasks import tasks_of
from lowtide.optim.tensors import is_shared, local
from lowtide.optim.undo import Undo, can_undo

Host = Literal["auto", "memory", "disk"]

_WARM_UP_STEPS = 40  # arXiv 2101.06840, section 6.2: delayed updates begin after 40 steps


class HostOptimizer(PlacedOptimizer):
    """An optimizer of `torch.optim` with ``host_fraction`` of its state, and of the update, on the host.

    It works as the optimizer that it wraps, with schedulers, clipping, accumulation, parameter groups,
    gradient scalers and checkpoints. Its ``state_dict`` has the form of the wrapped optimizer's. Each can
    load the other's, at any fraction. Updates do not depend on the fraction: AdamW, Adam and SGD compute as
    `torch.optim` does with ``fused=True``, and all others by their own ``step()``. A tensor is split between
    host and device only at elements where kernels give the same bits. Host fraction 1 is ZeRO-Offload (arXiv
    2101.06840). A fraction between 0 and 1 is Twin-Flow (ZeRO-Offload++).

    16-bit parameters have float32 master weights on the side that updates them (unless ``masters=False``).
    Two bytes a parameter are then sent to the host, and two back. FSDP2's parameters are updated shard by
    shard. PyTorch does not report writes such as ``p.data.copy_``: call `reload_masters` after them. Other
    writes (``load_state_dict``, ``p.copy_``) are noticed.

    Args:
        kind: a class of optimizers that treats every element alone: ``torch.optim.AdamW``, ``Adam``, ``SGD``,
            ``RMSprop``, ``Adagrad``, ``NAdam``, ``RAdam``, ``Adamax``, ``ASGD``, ``Adadelta``, ``Rprop``,
            subclasses of these, or your own class. A test update of two small parameters checks this. Other
            optimizers (``LBFGS``, ``SparseAdam``, ``Muon``, ``Adafactor``) are refused.
        params: parameters, named parameters or groups, as for every optimizer. More may come later.
        host_fraction: share of the trainable elements that the host updates, 0 to 1. ``"auto"`` measures
            speeds at the first step, and takes the fastest share whose state fits ``device_budget``.
        host: ``"memory"`` (page-locked for CUDA) or ``"disk"`` (files without a name, mapped into memory).
            ``"auto"`` is disk where the device is the CPU itself, else memory.
        host_folder: folder for ``"disk"``. The default is the system's folder for temporary files.
        host_limit: largest number of bytes of its state on the host: a number, or text such as ``"8GiB"``.
        device_budget: for ``"auto"``: largest number of bytes of optimizer state on the device. ``None`` is
            0.9 of the free memory.
        stream_gradients: gradients are sent to the host while backward produces them. ``.grad`` is then a
            tensor without memory. Clip with the optimizer's own `clip_grad_norm_`. Updates begin in `step`.
        overlap_update: with ``stream_gradients``, the host updates its copy of a parameter as soon as the
            parameter's gradient arrives. Parameters change in `step`. Run all microbatches except the last
            within `accumulating`. Without ``reversible``, clipping is impossible. If backward then fails, a
            part of the state is already updated: the optimizer raises an error until a checkpoint is loaded.
        delayed: the host's part of an update runs during the next step's forward and backward. Parameters
            get it one step late, which changes training: see `finish`.
        delay_after: number of steps before ``delayed`` begins.
        reversible: the host keeps a copy of the values that the last update replaced. `rollback` puts them
            back. The copy takes as much host memory as the state and all parameters. With ``overlap_update``
            updates are speculative: `clip_grad_norm_` undoes them if it changes the gradients. `zero_grad`
            undoes them if backward failed, or if the norm is not finite.
        masters: whether 16-bit parameters are updated in float32.
        chunk_bytes: size of each of the few buffers for transfers.
        link: transfers to and from the device; the default is made for the device.
        options: arguments of the wrapped optimizer, such as ``lr``.

    Raises:
        OptimError: an optimizer, option or parameter is not supported.

    Example:
        >>> import torch
        >>> from lowtide.optim import HostOptimizer
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = HostOptimizer(torch.optim.AdamW, model.parameters(),
        ...     host_fraction=0.5, host="memory", lr=1e-3)
        >>> model(torch.randn(2, 64)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.host_elements, optimizer.device_elements
        (2080, 2080)
    """

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        params: Any,
        *,
        host_fraction: float | Literal["auto"] = 1.0,
        host: Host = "auto",
        host_folder: str | os.PathLike[str] | None = None,
        host_limit: str | int | None = None,
        device_budget: str | int | None = None,
        stream_gradients: bool = False,
        overlap_update: bool = False,
        delayed: bool = False,
        delay_after: int = _WARM_UP_STEPS,
        reversible: bool = False,
        masters: bool = True,
        chunk_bytes: int = 16 << 20,
        link: Link | None = None,
        **options: Any,
    ) -> None:
        self.kind = kind
        self.kernel = kernel_of(kind, options)
        self.host_fraction = fraction_of(host_fraction)
        self.stream_gradients = stream_gradients
        self.overlap_update = overlap_update
        self.delayed = delayed
        self.delay_after = delay_after
        self.reversible = reversible
        self.balance = None
        check_modes(self, host, device_budget, chunk_bytes)
        self._device_budget = None if device_budget is None else budgets.parse(device_budget)
        self._slots = {}
        self._whole = ""
        self._steps = 0
        self._holding_back = False
        self._opened = False
        several = isinstance(params, Iterable) and not isinstance(params, str | torch.Tensor)
        groups: list[Any] = list(params) if several else []
        expect(
            bool(groups),
            "HostOptimizer(params=)",
            params,
            "model.parameters(), or a list of groups",
            OptimError,
        )
        known = link is None or isinstance(link, Link)
        expect(known, "HostOptimizer(link=)", link, "a lowtide.optim.Link, or None", OptimError)
        folder = host_folder is None or isinstance(host_folder, str | os.PathLike)
        expect(folder, "HostOptimizer(host_folder=)", host_folder, "a folder's path, or None", OptimError)
        super().__init__(groups, self.kernel.defaults)
        device = self._one_device()
        self.link = link if link is not None else link_for(device)
        self.host = host if host != "auto" else "disk" if self.link.direct else "memory"
        limit = None if host_limit is None else budgets.parse(host_limit)
        self._open(host_folder, limit, masters, chunk_bytes)
        self.register_state_dict_post_hook(checkpoint.whole_state)

    # ---- set-up ----------------------------------------------------------------------------------

    def _one_device(self) -> torch.device:
        devices = {local(p).device for group in self.param_groups for p in group["params"]}
        if len(devices) > 1:
            raise OptimError(
                f"the parameters lie on {', '.join(sorted(map(str, devices)))}: make one HostOptimizer for "
                "each device"
            )
        return devices.pop()

    def _open(
        self, folder: str | os.PathLike[str] | None, limit: int | None, masters: bool, chunk_bytes: int
    ) -> None:
        """What depends on the device: memory, buffers, hooks."""
        link, in_memory = self.link, self.host == "memory"
        if folder is not None and in_memory:
            raise OptimError("host_folder= is for host='disk': leave it out, or put the state on disk")
        pool: Pool = link.memory(limit) if in_memory else FilePool(limit, folder)
        own_copies = not link.direct or self.delayed or self.overlap_update
        gradients = pool if link.direct or in_memory else link.memory(limit)
        self._updater = Updater(self.kernel, link, pool, chunk_bytes // 4 // 64 * 64)
        self._placement = Placement(self.kernel, pool, masters, own_copies)
        self._stream = GradientStream(self._updater, gradients, link.direct and in_memory, self)
        self._undo = Undo(self._updater, pool) if self.reversible else None
        self._background = BackgroundUpdater(self._updater, self._stream, self._undo)
        self._opened = True
        if self.stream_gradients:
            self._watch()

    def _watch(self) -> None:
        self._stream.watch(p for group in self.param_groups for p in group["params"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as for every optimizer."""
        check_options(param_group, fused=self.kernel.counts_steps or not self.kernel.temporaries)
        super().add_param_group(param_group)
        if self._opened:
            try:
                self._one_device()
            except OptimError:
                self.param_groups.pop()
                raise
            if self.stream_gradients:
                self._watch()

    @property
    def host_elements(self) -> int:
        """Elements whose state lies on the host, so far."""
        return sum(slot.elements - slot.cut for slot in self._slots.values())

    @property
    def device_elements(self) -> int:
        """Elements whose state lies on the device, so far."""
        return sum(slot.cut for slot in self._slots.values())

    @property
    def host_bytes(self) -> int:
        """Bytes taken on the host: state, masters, gradients and buffers."""
        pools = {self._placement.pool, self._stream.pool, self._updater.staging}
        return sum(pool.used_bytes for pool in pools)

    # ---- placement -------------------------------------------------------------------------------

    def set_host_fraction(self, host_fraction: float) -> None:
        """Move state until the host has this share. With streamed gradients, do not call this between
        backward and `step`.
        """
        fraction = fraction_of(host_fraction)
        if any(slot.pending or sent(p.grad) is not None for p, slot in self._slots.items()):
            raise OptimError(
                "an update is under way: call step() and zero_grad(), and with delayed=True finish(), "
                "before set_host_fraction()"
            )
        checkpoint.move(self, fraction)

    # ---- for planners ----------------------------------------------------------------------------

    def resident_state(self) -> list[Tensor]:
        """The tensors of state that lie in the device's memory."""
        return budgeted.resident_state(self)

    def device_state_bytes(self, host_fraction: float | None = None) -> int:
        """Bytes of state on the device, with state that is not made yet, for this share on the host. The
        default is the present share (0 for ``"auto"``).
        """
        present = 0.0 if self.host_fraction == "auto" else self.host_fraction
        return budgeted.device_state_bytes(self, present if host_fraction is None else host_fraction)

    def step_bytes(self) -> int:
        """The most that `step` allocates on the device beyond the state."""
        return budgeted.step_bytes(self)

    def choose_host_fraction(self, extra_seconds: Callable[[float], float]) -> float:
        """With ``host_fraction="auto"``: set and return the share of least time, ``extra_seconds`` added."""
        with torch.no_grad():
            chosen = budgeted.choose(self, extra_seconds)
        self.set_host_fraction(chosen)
        return chosen

    # ---- the step --------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters that have gradients.

        Args:
            closure: recomputes the loss, as for every optimizer.

        Raises:
            OptimError: the last update did not finish, or a gradient cannot be taken.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update(self.param_groups)
        return loss

    @torch.no_grad()
    def step_subgroup(self, parameters: Tensor | Iterable[Tensor]) -> None:
        """Update some parameters alone, those of them that have gradients, as `step` updates all.

        Calls for subgroups that together are all parameters are bitwise one `step`, in any order. Between two
        calls you can free the gradients of a subgroup, or look at it. Hooks of `step` do not run.

        Args:
            parameters: of this optimizer.

        Raises:
            OptimError: one is not of this optimizer; ``delayed=True``; as of `step`.

        Source: DeepSpeed, ``DeepSpeedCPUAdam.step_subgroup``.
        """
        chosen = self._slots_or_none("step_subgroup", parameters)
        if self.delayed:
            raise OptimError("delayed=True updates all parameters one step late: call step()")
        rows = ([p for p in group["params"] if p in chosen] for group in self.param_groups)
        self._update([{**group, "params": row} for group, row in zip(self.param_groups, rows, strict=True)])

    def _slots_or_none(
        self, function: str, parameters: Tensor | Iterable[Tensor]
    ) -> dict[Tensor, Slot | None]:
        """Parameters of this optimizer, and what is kept for each so far."""
        several = isinstance(parameters, Iterable) and not isinstance(parameters, str)
        found: list[Any] = (
            [parameters] if isinstance(parameters, Tensor) else list(parameters) if several else [0]
        )
        own = {id(p) for group in self.param_groups for p in group["params"]}
        known = all(id(parameter) in own for parameter in found)
        allowed = "parameters of this optimizer, as in model.layers[0].parameters()"
        expect(known, f"{function}(parameters=)", parameters, allowed, OptimError)
        return {parameter: self._slots.get(parameter) for parameter in found}

    def _update(self, groups: list[dict[str, Any]]) -> None:
        """Update the parameters of these groups that have gradients."""
        self._check_whole()
        if self.stream_gradients:
            self._watch()
        with self._or_torn("an update beside backward could not be finished"):
            reason = self._background.finish_early(self.param_groups)
        if reason and self._undo is not None:
            self._take_back(self._undo)
        elif reason:
            self._whole = reason
            self._check_whole()
        self._finish_late()
        device, host = tasks_of(groups, self.slot_of)
        self._steps += 1
        late = self.delayed and self._steps > self.delay_after
        updater, link = self._updater, self.link
        done = [task for task in host if task.slot.updated]
        now = [task for task in host if not task.slot.updated]
        with self._or_torn("the last update was interrupted"):
            link.begin_step()
            for task in (*device, *now):
                if not task.slot.updated:
                    updater.refresh(task.slot)
            if self._undo is not None:
                self._undo.keep(device)
            updater.update_device(device)
            updater.copy_back([(task.slot, task.part) for task in done])
            if self._undo is not None:
                self._undo.keep(now)
            if not late:
                updater.update_host(now)
            link.settle()
            self._commit(device)
            self._commit(done if late else host)
            if late:
                self._background.update_late(now)

    def _commit(self, tasks: list[Task]) -> None:
        """These updates are done."""
        for task in tasks:
            task.part.fresh = False
            task.slot.updated = False
            task.slot.stepped = self._steps
            task.slot.wrote()
            if task.arriving is not None:
                task.arriving.scales = []
            if not task.slot.shown:
                checkpoint.show_state(self, task.slot)

    @contextmanager
    def _or_torn(self, reason: str) -> Iterator[None]:
        """What fails in the block leaves the state half updated. Nothing is under way any more when the error
        leaves: what is loaded into parameters after it stays."""
        before, self._whole = self._whole, reason
        try:
            yield
        except BaseException:
            with suppress(Exception):
                self.link.synchronize()
            raise
        self._whole = before

    def _check_whole(self) -> None:
        if self._whole:
            raise OptimError(
                f"{self._whole}: parameters and state are partly of one step and partly of the next. Load "
                "the last checkpoint into the model and the optimizer (load_state_dict), then go on"
            )

    # ---- updates that are undone -----------------------------------------------------------------

    @torch.no_grad()
    def rollback(self, parameters: Tensor | Iterable[Tensor] | None = None) -> None:
        """Undo the last `step`, or `step_subgroup`: parameters and state have the bytes from before it.

        Gradients stay, and learning rates that a scheduler changed stay changed.

        Args:
            parameters: undo the last update of each of these alone.

        Raises:
            OptimError: the optimizer is not ``reversible``, nothing is there to undo, or somebody else wrote
                to a parameter since its update; nothing has changed then.

        Source: DeepSpeed, ``DeepSpeedCPUAdam.rollback_subgroup``.
        """
        if self._undo is None:
            raise OptimError("rollback() puts back what the host keeps with reversible=True: set it")
        self._check_whole()
        if self._background.early:
            raise OptimError("updates are running beside backward: call step() or zero_grad() first")
        if parameters is None:
            known = [slot for slot in self._slots.values() if slot.stepped == self._steps]
        else:
            known = [
                slot for slot in self._slots_or_none("rollback", parameters).values() if slot is not None
            ]
        slots = [slot for slot in known if can_undo(slot)]
        if not slots:
            raise OptimError(
                "there is no update to undo: none has run, the last one was undone, or a checkpoint was "
                "loaded"
            )
        if written := sum(slot.written_by_others() for slot in slots):
            raise OptimError(
                f"{written} parameters were written to since the update that rollback() would undo: call it "
                "before you write to parameters"
            )
        with self._or_torn("rollback() was interrupted"):
            self.link.begin_step()
            self._undo.put_back((slot, part) for slot in slots for part in slot.parts())
            self._undo.show(slots)
            self.link.settle()
        for slot in slots:
            checkpoint.show_anew(self, slot)

    def _take_back(self, undo: Undo) -> None:
        """Undo the updates that ran beside backward: `step` does them."""
        self._background.quiet()
        early = [slot for slot in self._slots.values() if slot.updated]
        undo.put_back((slot, slot.host) for slot in early if slot.host is not None)
        for slot in early:
            slot.updated = False
            checkpoint.show_anew(self, slot)

    # ---- gradients that arrive -------------------------------------------------------------------

    def gradient_sent(self, slot: Slot) -> None:
        """A gradient has been sent or added to: with ``overlap_update`` its update begins."""
        if not self.overlap_update or self._holding_back:
            return
        if slot.updated and self._undo is not None:
            with torch.no_grad():
                self._take_back(self._undo)
        if slot.updated:
            self._whole = "an update that ran beside backward was never finished by step()"
        self._check_whole()
        self._background.update_early(slot, self._group_of(slot.parameter))

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backward passes in the block are not the last of their step: ``overlap_update`` begins no
        update.
        """
        before, self._holding_back = self._holding_back, True
        try:
            yield
        finally:
            self._holding_back = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, those on the host included.

        Raises:
            OptimError: an update that ran beside backward was not finished by `step`.
        """
        if self._undo is not None:
            with torch.no_grad():
                self._take_back(self._undo)
        if any(slot.updated for slot in self._slots.values()):
            self._background.quiet()
            self._whole = "gradients were cleared after updates had run beside backward, before step()"
            self._check_whole()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the norm of all gradients of this optimizer, wherever they lie; as
        `torch.nn.utils.clip_grad_norm_`.

        From its second call on, norms are gathered as gradients arrive. Gradients on the host are scaled when
        they are used.

        Where ranks share parameters (`lowtide.parallel`, FSDP2) it is a collective, and counts each parameter
        once, as `lowtide.parallel.clip_grad_norm` does.

        Returns:
            The norm before clipping, over all processes that hold a part of the parameters.

        Raises:
            OptimError: updates have begun beside backward.
            ParallelError: a gradient is only this rank's part of a sum.
            RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set; nothing has changed then.
        """
        if self.overlap_update and self._undo is None:
            raise OptimError(
                "overlap_update=True updates before the norm is known: clip with overlap_update=False, or "
                "set reversible=True, with which updates of gradients that are clipped are undone"
            )
        parameters = [p for group in self.param_groups for p in group["params"]]
        if not self.stream_gradients and not any(map(is_shared, parameters)):
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
        self._stream.norm_order = float(norm_type)
        with self._or_torn("an update beside backward could not be finished"):
            self._background.wait_early()
        total, factor = clip_([(p, p.grad) for p in parameters], max_norm, norm_type, error_if_nonfinite)
        if self._undo is not None and self._background.early and not bool(factor == 1.0):
            self._take_back(self._undo)
        return total

    # ---- delayed updates -------------------------------------------------------------------------

    def _finish_late(self) -> None:
        """Wait for the update of the step before, and let the parameters see it."""
        with self._or_torn("a delayed update failed"):
            self._background.wait_late()
        waiting = [slot for slot in self._slots.values() if slot.pending]
        if not waiting:
            return
        written = [slot for slot in waiting if slot.written_by_others()]
        if written:
            raise OptimError(
                f"{len(written)} parameters were written to while their delayed update was under way: call "
                "optimizer.finish() before writing to parameters"
            )
        with self._or_torn("the last update was interrupted"):
            self.link.begin_step()
            self._updater.copy_back([(slot, slot.host) for slot in waiting if slot.host is not None])
            self.link.settle()
        self._show_late()
        for slot in waiting:
            slot.pending = False
            slot.wrote()

    def _show_late(self) -> None:
        for slot in self._slots.values():
            if slot.pending and slot.host is not None:
                slot.host.fresh = False
                checkpoint.show_state(self, slot)

    @torch.no_grad()
    def finish(self) -> None:
        """Apply a delayed update to the parameters now: at the end of training, or before an evaluation.

        Training that continues after this call differs from training without the call.
        """
        self._check_whole()
        self._finish_late()

    # ---- checkpoints -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state in the form of the wrapped optimizer's, with ``master`` for 16-bit parameters.

        Tensors are the live ones, as for every optimizer, except for the one parameter that is split.

        Raises:
            OptimError: the last update did not finish.
        """
        self._check_whole()
        if self._background.early:
            raise OptimError("updates are running beside backward: call step() before state_dict()")
        with self._or_torn("a delayed update failed"):
            self._background.wait_late()
        self._show_late()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this class, or of the wrapped one, gave; at any fraction.

        Raises:
            OptimError: it does not fit these parameters; nothing has changed then.
        """
        whole = isinstance(state_dict, Mapping) and {"state", "param_groups"} <= state_dict.keys()
        allowed = "what state_dict() of this optimizer, or of the wrapped one, returned"
        expect(whole, "load_state_dict(state_dict=)", state_dict, allowed, OptimError)
        self._background.quiet()
        checkpoint.load(self, state_dict)
        if self._undo is not None:
            self._undo.drop(self._slots.values())
        self._whole = ""

    def reload_masters(self) -> None:
        """Copy parameters into master weights and host copies, after writes that PyTorch does not report."""
        self.finish()
        for slot in self._slots.values():
            slot.version = -1

    def close(self) -> None:
        """Remove hooks and end threads. The optimizer cannot be used after this call."""
        self._background.close()
        self._stream.close()
        self.link.close()

    def __getstate__(self) -> dict[str, Any]:
        raise OptimError(
            "a HostOptimizer cannot be pickled or copied: save its state_dict(), and load it into another one"
        )
