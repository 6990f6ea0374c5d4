"""Of every wait and every recorded event (`late_mutations.sites`) a scenario that fails without it."""

from __future__ import annotations

FAILS = {
    "optim/background.py: BackgroundUpdater.wait_early: transfer.wait()": "updated_beside_backward",
    "optim/background.py: BackgroundUpdater.update_late: task.arriving.wait()": "gradients_zeroed_in_place",
    "optim/background.py: BackgroundUpdater.wait_late: self._late.wait()": "updated_late",
    "optim/background.py: BackgroundUpdater.quiet: transfer.wait()": "loaded_while_updating",
    "optim/checkpoint.py: load: optimizer.link.settle()": "updates_that_fail",
    "optim/host.py: HostOptimizer._update: link.settle()": "gradients_streamed",
    "optim/host.py: HostOptimizer.rollback: self.link.settle()": "rolled_back",
    "optim/host.py: HostOptimizer._or_torn: self.link.synchronize()": "updates_that_fail",
    "optim/host.py: HostOptimizer._finish_late: self.link.settle()": "updated_late",
    "optim/link.py: CudaLink.ready: self.streams.mark(self.streams.current())": "gradients_streamed",
    "optim/link.py: CudaLink.begin_step: self.streams.mark(self.streams.current())": "optimizer_on_host",
    "optim/link.py: CudaLink.synchronize: self.streams.synchronize()": "updates_that_fail",
    "optim/pipeline.py: _wait: transfer.wait()": "optimizer_split",
    "optim/pipeline.py: Updater._arrived: transfer.wait()": "optimizer_on_host",
    "optim/pipeline.py: Updater._arrived: arriving.wait()": "updated_beside_backward",
    "optim/pipeline.py: Updater._refresh: self.link.down(near, values).wait()": "optimizer_on_host",
    "optim/slots.py: HostGradient.wait: transfer.wait()": "gradients_streamed",
    "optim/slots.py: HostGradient.rescale: self.wait()": "clipped_then_more",
    "optim/stream.py: GradientStream._memory: slot.gradient.wait()": "gradients_forgotten",
    "optim/stream.py: GradientStream.add: self.link.ready()": "gradients_streamed",
    "optim/stream.py: GradientStream._fetch: before.wait()": "gradients_streamed",
    "optim/stream.py: GradientStream._fetch.add: coming.wait()": "gradients_streamed",
    "optim/stream.py: GradientStream._bound: self._sums.popleft()[0].wait()": "gradients_in_flight",
    "optim/stream.py: GradientStream.zero: held.wait()": "gradients_zeroed_in_place",
    "optim/stream.py: GradientStream._fly: transfer.wait()": "gradients_in_flight",
    "optim/stream.py: GradientStream._fly: transfer.join()": "gradients_in_flight",
    "extensions/moves/engine.py: read_here: part.record_stream(stream)": "offload_into_memory_of_its_own",
    "extensions/moves/store/slab.py: Slab.take: self._streams.order(current, self._streams.mark(reader))": (
        "offload_from_two_streams"
    ),
    "extensions/moves/store/slab.py: Slab.take: self._streams.mark(reader)": "offload_from_two_streams",
    "extensions/moves/engine.py: InTier.settle: writing.join()": "report",
    "extensions/moves/engine.py: InTier.get: reading.join()": "encoded",
    "extensions/moves/engine.py: TransferEngine.out: self._waiting.popleft()[1].settle()": "report",
    "extensions/moves/engine.py: TransferEngine.begin: self._waiting.popleft()[1].settle()": "report_wide",
    "run/record/values.py: _followed: now.wait_stream(before)": "streams_of_the_user",
    "run/record/values.py: _followed: copy.record_stream(now)": "streams_of_the_user",
    "run/record/values.py: here: now.wait_stream(value.stream)": "filled_within_backward",
    "run/record/values.py: here: held.record_stream(now)": "three_streams_of_the_user",
    "extensions/moves/store/disk.py: _Staging.copy: "
    "self._lane.copy([(target, source)], held, [ready]).wait()": ("offload_disk"),
    "extensions/moves/store/host.py: Host.read: lane.streams.mark(lane.streams.current())": "offload_wide",
    "extensions/moves/store/lanes.py: Transfer.wait: self._done.wait()": "offload_disk",
    "extensions/moves/store/lanes.py: Transfer.join: self.wait()": "offload_disk",
    "accelerator.py: Streams.mark: event.record(stream)": "offload_host",
    "accelerator.py: Streams.order: stream.wait_event(event)": "offload_host",
    "accelerator.py: Streams.synchronize: self._module.synchronize(self.device)": "updates_that_fail",
    "extensions/moves/store/lanes.py: StreamLane.copy: self.streams.mark(origin)": "offload_host",
    "extensions/moves/store/lanes.py: StreamLane.copy: self.streams.order(self.stream, event)": (
        "offload_host"
    ),
    "extensions/moves/store/lanes.py: StreamLane.close: self.streams.mark(self.stream).synchronize()": (
        "stores_closed"
    ),
    "extensions/moves/store/lanes.py: StreamLane.close: self.streams.mark(self.stream)": "stores_closed",
    "extensions/moves/store/lanes.py: Queued.__init__: lane.streams.mark(lane.stream)": "offload_host",
    "extensions/moves/store/lanes.py: Queued.wait: self.event.synchronize()": "offload_disk",
    "extensions/moves/store/lanes.py: Queued.join: self._streams.order(current, self.event)": "offload_host",
    "extensions/moves/store/lanes.py: Queued._release: self._streams.order(self._origin, self.event)": (
        "tier_reused"
    ),
    "extensions/moves/store/tier.py: Tier._move: self.streams.mark(self.streams.current())": "offload_disk",
    "extensions/moves/store/tier.py: Tier._move.job: read_from.writing.wait()": "read_at_once",
}

ELSEWHERE = {
    "accelerator.py: synchronize: torch.get_device_module(device.type).synchronize(device)": "it times",
    "accelerator.py: timed_event: event.record(torch.cuda.current_stream(device))": "it times",
    "optim/clip.py: norm_of: stand_in.stream.link.down(elements[:cut], stand_in.device_elements).wait()": (
        "CUDA copies at once into memory that is not page-locked; another device may not"
    ),
    "optim/stream.py: GradientStream.add.finish: one.wait()": "it is over: what went wrong is raised",
    "extensions/moves/engine.py: Gathered.get: gather.join()": (
        "a collective: tests/extensions/moves/test_stores.py"
    ),
}
"""Those that no stream of a single process can show, and why."""
