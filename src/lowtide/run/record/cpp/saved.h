// What autograd holds in place of a saved tensor.
#pragma once

#include <torch/csrc/autograd/graph_task.h>

#include "replay.h"

namespace lowtide {

struct Step {  // what the handles of one step share
  std::shared_ptr<Tape> tape;
  std::shared_ptr<Governor> governor;
  py::object on_unpack;  // called when another backward asks for a tensor first, if it is set
  int64_t task = -1;     // the backward that asked last
  double seconds = 0;    // of replays
  long handles = 0;

  ~Step() {
    py::gil_scoped_acquire gil;
    on_unpack = py::object();
  }
};

// Python raises autograd's error.
inline void check_version(uint32_t now, uint32_t expected, const Tensor& like, at::IntArrayRef shape) {
  if (now != expected) functions->overwritten(wrapped(like), now, expected, shape.vec());
}

struct SavedKept {
  Tensor tensor;
  uint32_t version;

  explicit SavedKept(Tensor kept)
      : tensor(std::move(kept)), version(static_cast<uint32_t>(version_of(tensor))) {}

  py::object back() const {
    check_version(static_cast<uint32_t>(version_of(tensor)), version, tensor, tensor.sizes());
    return wrapped(tensor);
  }
};

// A saved tensor of a value that a node brings back; it may have a copy.
class SavedEvicted {
 public:
  SavedEvicted(const Tensor& shows, const ValuePtr& value, std::shared_ptr<Step> step)
      : counter_(shows.unsafeGetTensorImpl()->version_counter()),
        version_(counter_.current_version()),
        handles_(Handles::of(value)),
        geometry_(shows),
        options_(shows.options()),
        step_(std::move(step)) {
    value->add_reader();
    ++value->saved;
    ++step_->handles;
  }
  SavedEvicted(const SavedEvicted&) = delete;
  ~SavedEvicted() {
    count_off();
    ValuePtr last = value();
    handles_.reset();
    step_->tape->forget_ended(*last);
    --step_->handles;
  }

  const ValuePtr& value() const { return handles_->value; }
  const Geometry& geometry() const { return geometry_; }
  bool is_behind() const { return counter_.current_version() == version_; }

  Tensor back() {
    step_->tape->absorb();
    if (int64_t task = torch::autograd::get_current_graph_task_id(); task != step_->task) {
      step_->task = task;
      if (step_->on_unpack && task != -1) step_->on_unpack();
    }
    if (uint32_t now = counter_.current_version(); now != version_)
      check_version(now, version_, at::empty({0}, options_), geometry_.sizes);
    Tensor base = value()->shown;
    if (!base.defined()) base = here(value());
    if (!base.defined()) base = replayed();
    if (!torch::autograd::get_current_graph_task_keep_graph() || is_moved()) count_off();
    return geometry_.over(base);
  }

 private:
  bool is_moved() const { return value()->node && value()->node->moved; }

  Tensor replayed() {
    using Clock = std::chrono::steady_clock;
    auto begin = Clock::now();
    Tensor base = Replay(value(), step_->tape, step_->governor).run();
    if (c10::GradMode::is_enabled()) step_->tape->comes_back(base, value());
    step_->seconds += std::chrono::duration<double>(Clock::now() - begin).count();
    return base;
  }

  void count_off() {
    if (std::exchange(done_, true)) return;
    --value()->saved;
    value()->count_off();
  }

  c10::VariableVersion counter_;
  uint32_t version_;
  c10::intrusive_ptr<Handles> handles_;
  Geometry geometry_;
  at::TensorOptions options_;
  std::shared_ptr<Step> step_;
  bool done_ = false;
};

}  // namespace lowtide
