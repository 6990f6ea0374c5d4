// A recorder's saved-tensor hooks among those of its thread.
#pragma once

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/PyInterpreter.h>

#include <optional>
#include <thread>

namespace lowtide {

// While nothing is evicted they are removed, so that autograd calls no hook. Hooks of others above them stay.
class Hooks {
  using Default = at::SavedTensorDefaultHooks;
  using Pairs = decltype(at::impl::SavedTensorDefaultHooksTLS::stack);

 public:
  bool in() const { return in_; }

  bool on_top() const {  // of this thread's
    const Pairs& pairs = Default::get_tls_state().stack;
    auto* interpreter = getPyInterpreter();
    return ours_ && !pairs.empty() && pairs.top().first.ptr(interpreter) == ours_->first.ptr(interpreter);
  }

  void found() {  // ours have just been pushed
    const Pairs& pairs = Default::get_tls_state().stack;
    ours_.emplace(pairs.top());
    below_ = pairs.size() - 1;
    thread_ = std::this_thread::get_id();
    in_ = true;
  }

  void put_in() {
    if (in_ || !ours_ || std::this_thread::get_id() != thread_) return;
    change([&](Pairs& pairs) { pairs.push(*ours_); });
    in_ = true;
  }

  void take_out() {
    if (!in_) return;
    change([](Pairs& pairs) { pairs.pop(); });
    in_ = false;
  }

  void end() {  // Python pops ours; they hold the recorder, which must not hold them then
    put_in();
    ours_.reset();
    in_ = false;
  }

 private:
  template <class Change>
  void change(Change in_our_place) {
    auto state = Default::get_tls_state();
    Pairs above;
    for (; state.stack.size() > below_ + in_; state.stack.pop()) above.push(state.stack.top());
    in_our_place(state.stack);
    for (; !above.empty(); above.pop()) state.stack.push(above.top());
    Default::set_tls_state(state);
  }

  std::optional<Pairs::value_type> ours_;
  std::thread::id thread_;
  size_t below_ = 0;
  bool in_ = false;
};

}  // namespace lowtide
