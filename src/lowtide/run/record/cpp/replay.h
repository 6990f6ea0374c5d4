// Brings back an evicted value: lowtide.run.record.replay.bring_back for calls that C++ recorded.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <algorithm>

#include "on_demand.h"

namespace lowtide {

struct Replaying {  // as lowtide.private.replaying
  Unseen unseen;
  c10::impl::ExcludeDispatchKeyGuard no_cast{c10::autocast_dispatch_keyset};
  at::AutoDispatchBelowADInplaceOrView below;
  c10::AutoGradMode grad{c10::GradMode::is_enabled()};
};

// One replay: the nodes that it runs, and the values that they read and write.
class Replay {
 public:
  Replay(py::handle value, py::handle on_demand) : value_(value), on_demand_(on_demand) {}

  Tensor run() {
    if (!collect(value_.ptr())) return classes->bring_back(value_, on_demand_).cast<Tensor>();
    std::sort(order_.begin(), order_.end());
    order_.erase(std::unique(order_.begin(), order_.end()), order_.end());
    for (auto& [_, node] : order_) {
      for (py::handle input : inputs_of(node)) ++values_[input.ptr()].uses;
    }
    ++values_[value_.ptr()].uses;
    Replaying replaying;
    for (auto& [_, node] : order_) run(node);
    Tensor found = values_[value_.ptr()].made;
    TORCH_CHECK(found.defined(), "a replay did not produce the value asked for: please report this");
    return found;
  }

 private:
  struct Met {
    long uses = 0;  // still to come
    Tensor made;    // kept until the last of them
  };

  static py::tuple inputs_of(py::handle node) {
    return py::reinterpret_borrow<py::tuple>(classes->node.inputs(node));
  }

  // Finds the nodes that have to run; false where Python recorded one of them.
  bool collect(PyObject* value) {
    std::vector<PyObject*> wanted{value};
    while (!wanted.empty()) {
      PyObject* next = wanted.back();
      wanted.pop_back();
      auto [met, is_new] = values_.emplace(next, Met{});
      if (!is_new) continue;
      met->second.made = here(next);
      if (met->second.made.defined()) continue;
      PyObject* node = classes->value.node(next);
      if (call_of(node) == nullptr || classes->value.held(next) != Py_None) return false;
      order_.emplace_back(PyLong_AsLong(classes->node.order(node)), node);
      for (py::handle input : inputs_of(node)) wanted.push_back(input.ptr());
    }
    return true;
  }

  void run(py::handle node) {
    auto& n = classes->node;
    auto& v = classes->value;
    c10::GradMode::set_enabled(n.grad(node) == Py_True);
    py::tuple inputs = inputs_of(node);
    Tensors bases;
    for (py::handle input : inputs) {
      bases.push_back(values_[input.ptr()].made);
      TORCH_CHECK(bases.back().defined(), "a replay lacks an input: please report this");
    }
    if (!on_demand_.is_none()) relieve_if_short(on_demand_);
    Tensors results = call_of(node)->again(bases);
    bases.clear();
    for (py::handle output : py::reinterpret_borrow<py::tuple>(n.outputs(node))) {
      py::object made = behind(PyTuple_GET_ITEM(output.ptr(), 1));
      if (made.is_none()) continue;
      const Tensor& result = results[PyLong_AsSize_t(PyTuple_GET_ITEM(output.ptr(), 0))];
      if (readers_of(made) > 0 && v.cached(made) == Py_None) {
        keep_cached(made, result);
        if (!on_demand_.is_none()) note_kept(on_demand_, made);
      }
      auto met = values_.find(made.ptr());
      if (met != values_.end() && met->second.uses > 0) met->second.made = result;
    }
    if (!on_demand_.is_none()) {
      size_t bytes = 0;
      for (const Tensor& result : results) bytes += result.defined() ? result.storage().nbytes() : 0;
      wrote(on_demand_, bytes);
    }
    results.clear();
    if (n.waits(node) == Py_True) {
      n.waits.set(node, py::bool_(false));
      for (py::handle input : inputs) read(input);
    }
    for (py::handle input : inputs) {
      Met& met = values_[input.ptr()];
      if (--met.uses <= 0) met.made.reset();
    }
  }

  py::handle value_;  // it keeps the values that it depends on alive
  py::handle on_demand_;
  std::vector<std::pair<long, PyObject*>> order_;
  ska::flat_hash_map<PyObject*, Met> values_;
};

}  // namespace lowtide
