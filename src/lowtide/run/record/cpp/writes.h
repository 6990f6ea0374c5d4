// Tells the tapes of the process before an operation writes to what their replays start from.
//
// A thread whose forward is recorded, and the backwards that it begins, let in a dispatch key of lowtide's
// own (`writes`). The key stands above autograd, since some operations (`torch.library.custom_op`) move
// version counters before their kernels run. A thread that lowtide has not met cannot have the key in. Its
// writes come to a kernel at a key that every thread has in, below autograd (`stray_writes`). At both keys
// only operations that write have a kernel.
#pragma once

#include <c10/core/Event.h>

#include <chrono>
#include <mutex>
#include <thread>

#include "tape.h"

namespace lowtide {

class Watched {  // the tapes of the process
 public:
  std::atomic<bool> any{false};

  // From here on writes are told to the tape.
  void add(const std::shared_ptr<Tape>& tape) {
    std::lock_guard<std::mutex> guard(mutex_);
    std::erase_if(tapes_, [&](auto& one) { return one.expired() || one.lock() == tape; });
    tapes_.push_back(tape);
    any = true;
    c10::impl::tls_set_dispatch_key_included(WRITES, true);
  }

  // Calls `with` for each tape that lives. Under the interpreter's lock.
  template <class With>
  void each(With with) {
    std::vector<std::shared_ptr<Tape>> alive;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      std::erase_if(tapes_, [](auto& one) { return one.expired(); });
      any = !tapes_.empty();
      for (auto& one : tapes_) {
        if (auto tape = one.lock()) alive.push_back(std::move(tape));
      }
    }
    for (auto& tape : alive) with(*tape);
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<Tape>> tapes_;
};
inline Watched& watched = *new Watched;

// A replay that is under way has read the bytes of a value, which it started from. Another thread waits.
inline void wait_for_replays(Tape& tape, uintptr_t storage) {
  for (Value* value = tape.shown(storage); value && value->replays > 0; value = tape.shown(storage)) {
    py::gil_scoped_release others;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

// What has been enqueued on the stream of a value may read its bytes yet: this thread's stream waits.
inline void wait_for_stream(const Value* value, const Tensor& tensor) {
  if (value == nullptr || !value->stream || !has_streams(tensor)) return;
  if (*value->stream == stream_of(tensor)) return;
  c10::Event read(tensor.device().type());
  read.record(*value->stream);
  read.block(stream_of(tensor));
}

inline void tell(const OperatorHandle& op, const Stack& stack, bool is_stray) {
  const auto& arguments = op.schema().arguments();
  Change how = op.schema().name() == "aten::set_" ? Change::Swapped : Change::Written;
  py::gil_scoped_acquire gil;
  Unseen unseen;
  at::AutoDispatchBelowADInplaceOrView no_history;
  for (size_t at = 0; at < arguments.size(); ++at) {
    const auto* alias = arguments[at].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    each_tensor(stack[stack.size() - arguments.size() + at], [&](const Tensor& tensor, size_t) {
      if (!has_bytes(tensor)) return true;
      watched.each([&](Tape& tape) {
        if (is_stray) wait_for_replays(tape, storage_key(tensor));
        wait_for_stream(tape.shown(storage_key(tensor)), tensor);
        if (tape.records_here() && tape.replayable(storage_key(tensor))) return;  // the recorder tells it
        tape.before_change(storage_key(tensor), how);
      });
      return true;
    });
  }
}

// The kernel of operations that write, above autograd.
inline void writes(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  static const DispatchKeySet below(DispatchKeySet::FULL_AFTER, WRITES);
  if (watched.any) tell(op, *stack, false);
  else c10::impl::tls_set_dispatch_key_included(WRITES, false);
  op.redispatchBoxed(keys & below, stack);
}

// The same for threads that lowtide has not met. Only threads of Python are looked at: a kernel's own threads
// may write while who waits for them holds the interpreter's lock.
inline void stray_writes(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  static const DispatchKeySet below(DispatchKeySet::FULL_AFTER, ANY_THREAD);
  if (watched.any) {
    auto here = c10::impl::tls_local_dispatch_key_set();
    bool is_met = here.included_.has(WRITES) || here.excluded_.has(WRITES);
    if (!is_met && PyGILState_GetThisThreadState() != nullptr) tell(op, *stack, true);
  }
  op.redispatchBoxed(keys & below, stack);
}

}  // namespace lowtide
