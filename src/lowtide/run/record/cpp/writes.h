// Tells the tapes of the process before an operation writes to what their replays start from.
//
// A thread whose forward is recorded, and the backwards that it begins, let in a dispatch key of lowtide's
// own (`writes`). The key stands above autograd, since some operations (`torch.library.custom_op`) move
// version counters before their kernels run. A thread that lowtide has not met does not have that key. Its
// writes come to a kernel at a key that every thread has in, below autograd (`stray_writes`). This kernel
// asks no tape, and takes no lock of the interpreter's. Only operations that write have kernels at both keys.
#pragma once

#include <pthread.h>

#include "tape.h"

namespace lowtide {

class Watched {  // the tapes of the process
 public:
  std::atomic<bool> any{false};

  // From here on writes are told to the tape.
  void add(const std::shared_ptr<Tape>& tape) {
    std::vector<One> gone;  // what these hold is freed behind the mutex
    std::lock_guard<std::mutex> guard(mutex_);
    part([&](const One& one) { return one.reach == tape->reach; }, gone);
    tapes_.push_back({tape, tape->reach});
    any = true;
    c10::impl::tls_set_dispatch_key_included(WRITES, true);
  }

  // Nobody can ask the tape any more.
  void remove(const std::shared_ptr<Tape>& tape) {
    std::vector<One> gone;
    std::lock_guard<std::mutex> guard(mutex_);
    part([&](const One& one) { return one.reach == tape->reach; }, gone);
    any = !tapes_.empty();
  }

  // Calls `with` for each tape that lives. Under the interpreter's lock.
  template <class With>
  void each(With with) {
    std::vector<std::shared_ptr<Tape>> alive;
    std::vector<One> gone;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      part([](const One& one) { return one.tape.expired(); }, gone);
      any = !tapes_.empty();
      for (auto& one : tapes_) {
        if (auto tape = one.tape.lock()) alive.push_back(std::move(tape));
      }
    }
    for (auto& tape : alive) with(*tape);
  }

  // The same for what a thread may ask that does not have the interpreter's lock.
  template <class With>
  void each_reach(With with) {
    c10::SmallVector<std::shared_ptr<Reach>, 4> all;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      for (auto& one : tapes_) all.push_back(one.reach);
    }
    for (auto& reach : all) with(*reach);
  }

  void lock() {  // everything
    mutex_.lock();
    for (auto& one : tapes_) one.reach->mutex.lock();
  }
  void unlock() {
    for (auto& one : tapes_) one.reach->mutex.unlock();
    mutex_.unlock();
  }

  bool knows(const Tensor& tensor) {
    bool any_knows = false;
    each_reach([&](Reach& reach) { any_knows |= reach.knows(tensor); });
    return any_knows;
  }

 private:
  struct One {
    std::weak_ptr<Tape> tape;
    std::shared_ptr<Reach> reach;
  };

  template <class Is>
  void part(Is is, std::vector<One>& gone) {
    auto from = std::partition(tapes_.begin(), tapes_.end(), [&](const One& one) { return !is(one); });
    std::move(from, tapes_.end(), std::back_inserter(gone));
    tapes_.erase(from, tapes_.end());
  }

  std::mutex mutex_;
  std::vector<One> tapes_;
};
inline Watched& watched = *new Watched;

// No thread has a mutex while another one forks: the child does not have that thread.
inline void free_in_children() {
  auto unlock = [] { watched.unlock(); };
  pthread_atfork([] { watched.lock(); }, unlock, unlock);
}

// Calls `with` for each tensor that an operation writes to, where a tape knows its storage.
template <class With>
void each_known(const OperatorHandle& op, const Stack& stack, With with) {
  const auto& arguments = op.schema().arguments();
  for (size_t at = 0; at < arguments.size(); ++at) {
    const auto* alias = arguments[at].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    each_tensor(stack[stack.size() - arguments.size() + at], [&](const Tensor& tensor, size_t) {
      if (has_bytes(tensor) && watched.knows(tensor)) with(tensor);
      return true;
    });
  }
}

struct WithoutLock {  // of the interpreter's, where this thread has it: what it waits for may need that
  std::optional<py::gil_scoped_release> others;
  WithoutLock() {
    if (PyGILState_Check()) others.emplace();
  }
};

inline bool swaps(const OperatorHandle& op) { return op.schema().name() == "aten::set_"; }

// The kernel of operations that write, above autograd.
inline void writes(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  static const DispatchKeySet below(DispatchKeySet::FULL_AFTER, WRITES);
  if (watched.any) {
    each_known(op, *stack, [&](const Tensor& tensor) {
      Unseen unseen;
      at::AutoDispatchBelowADInplaceOrView no_history;
      {
        py::gil_scoped_acquire gil;
        watched.each([&](Tape& tape) {
          if (tape.records_here() && tape.replayable(storage_key(tensor))) return;  // the recorder tells it
          tape.before_change(storage_key(tensor), swaps(op) ? Change::Swapped : Change::Written);
        });
      }
      WithoutLock others;
      watched.each_reach([&](Reach& reach) { reach.wait_until_unread(tensor); });
    });
  } else {
    c10::impl::tls_set_dispatch_key_included(WRITES, false);
  }
  op.redispatchBoxed(keys & below, stack);
}

// The same for threads that lowtide has not met. Only threads of Python are looked at: those on which an
// operation itself computes may write while a replay waits for them.
inline void stray_writes(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  static const DispatchKeySet below(DispatchKeySet::FULL_AFTER, ANY_THREAD);
  auto here = c10::impl::tls_local_dispatch_key_set();
  bool is_met = here.included_.has(WRITES) || here.excluded_.has(WRITES);
  if (watched.any && !is_met && PyGILState_GetThisThreadState() != nullptr) {
    each_known(op, *stack, [&](const Tensor& tensor) {
      WithoutLock others;
      static const DispatchKeySet above(c10::autograd_dispatch_keyset_with_ADInplaceOrView.add(WRITES));
      c10::impl::ForceDispatchKeyGuard plain{c10::default_included_set, c10::default_excluded_set | above};
      watched.each_reach([&](Reach& reach) {
        reach.before_write(tensor, swaps(op));
        if (swaps(op)) return;
        reach.wait_until_unread(tensor);
        reach.order_behind_replays(tensor);
      });
    });
  }
  op.redispatchBoxed(keys & below, stack);
}

}  // namespace lowtide
