// Which storages a tape knows, for threads that lowtide has not met (a prefetch thread). Such a thread does
// not ask the tape: that takes the interpreter's lock, and the thread may hold another that the lock's owner
// waits for. Before the thread writes to a storage that replays start from, it leaves a copy of the bytes
// here, and waits for the replays that read them. The tape takes the copy before it acts next
// (`Tape::absorb`).
//
// All of this is under a mutex of its own. A thread that has the mutex locks nothing else, and neither makes
// nor frees a tensor.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/flat_hash_map.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <unordered_set>

#include "call.h"

namespace lowtide {

inline c10::Stream stream_of(const Tensor& tensor) {  // on which this thread computes
  return c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device());
}

inline bool has_streams(const Tensor& tensor) { return !tensor.is_cpu() && !tensor.is_meta(); }

inline const void* address_of(const Tensor& tensor) {  // of its storage's bytes
  return tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
}

inline Tensor own_bytes(const Tensor& tensor) {  // over a copy of its storage
  c10::InferenceMode tracked(false);
  int64_t bytes = static_cast<int64_t>(tensor.storage().nbytes());
  Tensor all = at::empty({0}, tensor.options().dtype(at::kByte)).set_(tensor.storage(), 0, {bytes}, {1});
  Tensor copy = all.clone();
  return Geometry(tensor).over(copy);
}

inline Tensor apart(const Tensor& tensor) {  // over the same storage, with a version counter of its own
  c10::InferenceMode tracked(false);
  return Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), false));
}

using Addresses = std::vector<const void*>;

struct Known {  // a storage that shows a value
  enum State : uint8_t { Intact, Copying, Written };
  using WeakTarget = c10::weak_intrusive_ptr<c10::intrusive_ptr_target>;

  const WeakTarget value;
  const c10::VariableVersion counter;  // of a source, and its version; inference tensors have none
  const uint32_t version;
  std::atomic<bool> is_needed;  // somebody may start from the bytes
  std::atomic<State> state{Intact};

  Known(WeakTarget value, bool is_needed, c10::VariableVersion counter = {c10::VariableVersion::DISABLED},
        uint32_t version = 0)
      : value(std::move(value)), counter(std::move(counter)), version(version), is_needed(is_needed) {}

  bool is_unchanged() const { return !counter.enabled() || counter.current_version() == version; }
};
using KnownPtr = std::shared_ptr<Known>;

struct Left {  // by a thread that writes to a storage
  uintptr_t storage;
  KnownPtr known;
  bool swaps;   // a tensor gets another storage: this one keeps its bytes
  Tensor copy;  // undefined where nobody needs the bytes
  std::optional<c10::Stream> stream;  // that has made the copy
};

class Reach {  // of one tape
 public:
  std::mutex mutex;

  void enter(uintptr_t storage, const KnownPtr& known) {
    std::lock_guard guard(mutex);
    known_.insert_or_assign(storage, known);
  }

  void leave(uintptr_t storage) {
    std::lock_guard guard(mutex);
    known_.erase(storage);
  }

  void clear() {
    std::lock_guard guard(mutex);
    known_.clear();
  }

  // Whether the tape knows the storage of a tensor, or replays read it. Waits while another thread copies it.
  bool knows(const Tensor& tensor) {
    std::unique_lock lock(mutex);
    auto found = known_.find(storage_key(tensor));
    if (found == known_.end()) return reading_.count(address_of(tensor)) != 0;
    KnownPtr known = found->second;
    changed_.wait(lock, [&] { return known->state != Known::Copying; });
    return true;
  }

  // The tape starts from a source from now on; false where that is overwritten.
  bool needs(Known& known) {
    std::lock_guard guard(mutex);
    known.is_needed = true;
    return known.state != Known::Written;
  }

  bool has_left() const { return any_; }

  std::vector<Left> take() {
    std::lock_guard guard(mutex);
    any_ = false;
    return std::exchange(left_, {});
  }

  // A thread that lowtide has not met is about to write to a tensor, or to give it another storage.
  void before_write(const Tensor& tensor, bool swaps) {
    std::exception_ptr failed;
    uintptr_t storage = storage_key(tensor);
    std::unique_lock lock(mutex);
    auto found = known_.find(storage);
    if (found == known_.end()) return;
    Left left{storage, found->second, swaps, {}, {}};
    Known& known = *left.known;
    if (known.state != Known::Intact) {
      changed_.wait(lock, [&] { return known.state != Known::Copying; });
      return;
    }
    if (known.is_needed && known.is_unchanged()) {
      known.state = Known::Copying;
      lock.unlock();
      try {
        left.copy = swaps ? apart(tensor) : own_bytes(tensor);
        if (has_streams(tensor)) left.stream = stream_of(tensor);
      } catch (...) {
        failed = std::current_exception();
      }
      lock.lock();
    }
    known.state = Known::Written;
    left_.push_back(std::move(left));
    any_ = true;
    changed_.notify_all();
    lock.unlock();
    if (failed) std::rethrow_exception(failed);
  }

  // ---- replays ----

  // A replay begins to read bytes at these addresses, on these streams. False where a thread has left
  // something, so that other bytes may have to be read.
  bool begins_reading(const Addresses& addresses, const std::vector<c10::Stream>& streams) {
    std::lock_guard guard(mutex);
    if (any_) return false;
    reading_.insert(addresses.begin(), addresses.end());
    for (c10::Stream one : streams) {
      if (std::find(streams_.begin(), streams_.end(), one) == streams_.end()) streams_.push_back(one);
    }
    return true;
  }

  void ends_reading(const Addresses& addresses) {
    {
      std::lock_guard guard(mutex);
      for (const void* one : addresses) reading_.erase(reading_.find(one));
    }
    changed_.notify_all();
  }

  // Waits until no replay reads a tensor's bytes. Without the interpreter's lock.
  void wait_until_unread(const Tensor& tensor) {
    std::unique_lock lock(mutex);
    changed_.wait(lock, [&] { return !reading_.count(address_of(tensor)); });
  }

  // On an accelerator: this thread's stream waits for what replays have enqueued.
  void order_behind_replays(const Tensor& tensor) {
    if (!has_streams(tensor)) return;
    std::unique_lock lock(mutex);
    std::vector<c10::Stream> streams = streams_;
    lock.unlock();
    for (c10::Stream one : streams) {
      if (one.device() != tensor.device() || one == stream_of(tensor)) continue;
      c10::Event read(one.device_type());
      read.record(one);
      read.block(stream_of(tensor));
    }
  }

 private:
  std::condition_variable changed_;
  ska::flat_hash_map<uintptr_t, KnownPtr> known_;
  std::vector<Left> left_;
  std::atomic<bool> any_{false};
  std::unordered_multiset<const void*> reading_;
  std::vector<c10::Stream> streams_;  // on which replays have run
};

}  // namespace lowtide
