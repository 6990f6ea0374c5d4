// Tells tapes before an operation writes to what their replays start from. A dispatch key of lowtide's own is
// let in for that, above autograd: some operations (`torch.library.custom_op`) move version counters before
// their kernels run. Only operations that write have a kernel at it.
#pragma once

#include <mutex>

#include "tape.h"

namespace lowtide {

class Watched {  // the tapes of the process
 public:
  std::atomic<bool> any{false};

  // From here on writes of this thread, and of backwards that it begins, are told to the tape.
  void add(const std::shared_ptr<Tape>& tape) {
    std::lock_guard<std::mutex> guard(mutex_);
    std::erase_if(tapes_, [&](auto& one) { return !one.owner_before(tape) && !tape.owner_before(one); });
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

// The kernel of operations that write, above autograd.
inline void writes(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  static const DispatchKeySet below(DispatchKeySet::FULL_AFTER, WRITES);
  if (!watched.any) {
    c10::impl::tls_set_dispatch_key_included(WRITES, false);
    return op.redispatchBoxed(keys & below, stack);
  }
  const auto& arguments = op.schema().arguments();
  bool swaps = op.schema().name() == "aten::set_";
  {
    py::gil_scoped_acquire gil;
    Unseen unseen;
    at::AutoDispatchBelowADInplaceOrView no_history;
    for (size_t at = 0; at < arguments.size(); ++at) {
      const auto* alias = arguments[at].alias_info();
      if (alias == nullptr || !alias->isWrite()) continue;
      each_tensor((*stack)[stack->size() - arguments.size() + at], [&](const Tensor& tensor, size_t) {
        if (!plain(tensor)) return true;
        watched.each([&](Tape& tape) {
          if (tape.records_here() && tape.replayable(storage_key(tensor))) return;  // the recorder tells it
          tape.before_change(storage_key(tensor), swaps ? Change::Swapped : Change::Written);
        });
        return true;
      });
    }
  }
  op.redispatchBoxed(keys & below, stack);
}

}  // namespace lowtide
