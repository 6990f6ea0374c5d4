// What autograd holds in place of a saved tensor: lowtide.run.record.handles.
#pragma once

#include <chrono>
#include <memory>

#include "replay.h"

namespace lowtide {

struct Replays {  // of one step
  double seconds = 0;
  py::object on_unpack;  // called whenever backward asks for an evicted tensor, if it is set
  py::object watch;  // as of lowtide.writes: kept while there are evicted tensors
  long evicted = 0;
  std::shared_ptr<OnDemand> on_demand;

  void keep(py::object one) {
    if (evicted > 0) watch = std::move(one);
  }
  void gone() {
    if (--evicted == 0) watch = py::object();
  }
};

// Python raises autograd's error.
inline void check_version(uint32_t now, uint32_t expected, const Tensor& like, at::IntArrayRef shape) {
  if (now != expected) classes->overwritten(wrapped(like), now, expected, shape.vec());
}

struct Kept {
  Tensor tensor;
  uint32_t version;

  explicit Kept(Tensor kept) : tensor(std::move(kept)), version(version_of(tensor)) {}

  py::object back() const {
    check_version(version_of(tensor), version, tensor, tensor.sizes());
    return wrapped(tensor);
  }
};

class Evicted {
 public:
  Evicted(const Tensor& shown, py::object value, std::shared_ptr<Replays> replays)
      : counter_(shown.unsafeGetTensorImpl()->version_counter()),
        version_(counter_.current_version()),
        value_(std::move(value)),
        geometry_(shown),
        options_(shown.options()),
        replays_(std::move(replays)) {
    add_reader(value_);
    ++replays_->evicted;
    classes->value.evicted.set(value_, py::bool_(true));
  }
  Evicted(const Evicted&) = delete;
  ~Evicted() {
    if (!unpacked_) count_off(value_);
    replays_->gone();
  }

  py::object back() {
    if (replays_->on_unpack) replays_->on_unpack();
    if (replays_->on_demand) replays_->on_demand->relieve();
    if (uint32_t now = counter_.current_version(); now != version_)
      check_version(now, version_, at::empty({0}, options_), geometry_.sizes);
    Tensor base = overwritten_with(value_);
    if (!base.defined()) base = here(value_);
    if (!base.defined()) {
      base = replayed();
      if (replays_->on_demand) replays_->on_demand->relieve();  // for what backward does with it
    }
    if (!unpacked_) {
      unpacked_ = true;
      count_off(value_);
    }
    return wrapped(geometry_.over(base));
  }

 private:
  Tensor replayed() {
    using Clock = std::chrono::steady_clock;
    auto begin = Clock::now();
    Tensor base = Replay(value_, replays_->on_demand).run();
    replays_->seconds += std::chrono::duration<double>(Clock::now() - begin).count();
    return base;
  }

  c10::VariableVersion counter_;
  uint32_t version_;
  py::object value_;
  Geometry geometry_;
  at::TensorOptions options_;
  std::shared_ptr<Replays> replays_;
  bool unpacked_ = false;
};

inline py::object unpack(py::handle packed) {
  if (Kept* kept = Boxed<Kept>::in(packed)) return kept->back();
  if (Evicted* evicted = Boxed<Evicted>::in(packed)) return evicted->back();
  return classes->unpack(packed);
}

}  // namespace lowtide
