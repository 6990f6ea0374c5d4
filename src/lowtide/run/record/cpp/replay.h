// Brings back an evicted value: lowtide.run.record.replay.bring_back. Python runs the nodes that it recorded.
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
  Replay(py::handle value, std::shared_ptr<OnDemand> on_demand)
      : value_(value), on_demand_(std::move(on_demand)) {}

  Tensor run() {
    Tensor found = run_here();
    return found.defined() ? found : classes->bring_back(value_, py::cast(on_demand_)).cast<Tensor>();
  }

  Tensor run_here() {  // undefined where Python has to
    if (!collect(value_.ptr())) return {};
    std::sort(order_.begin(), order_.end());
    order_.erase(std::unique(order_.begin(), order_.end()), order_.end());
    for (auto& [_, node] : order_) {
      each_input(node, [&](PyObject* input) { ++values_[input].uses; });
    }
    ++values_[value_.ptr()].uses;
    Replaying replaying;
    for (auto& [_, node] : order_) run(node);
    Tensor found = values_[value_.ptr()].made;
    TORCH_CHECK(found.defined(), "a replay did not produce the value asked for: please report this");
    return found;
  }

 private:
  struct Known {
    long uses = 0;  // still to come
    Tensor made;    // kept until the last of them
  };

  // Finds the nodes that have to run; false where Python has to: a value was moved, or an error is raised.
  bool collect(PyObject* value) {
    std::vector<PyObject*> wanted{value};
    while (!wanted.empty()) {
      PyObject* next = wanted.back();
      wanted.pop_back();
      auto [known, is_new] = values_.emplace(next, Known{});
      if (!is_new) continue;
      known->second.made = here(next);
      if (known->second.made.defined()) continue;
      PyObject* node = classes->value.node(next);
      if (!is_node(node) || classes->value.held(next) != Py_None) return false;
      order_.emplace_back(PyLong_AsLong(classes->node.order(node)), node);
      each_input(node, [&](PyObject* input) { wanted.push_back(input); });
    }
    return true;
  }

  void run(py::handle node) {
    c10::GradMode::set_enabled(classes->node.grad(node) == Py_True);
    Tensors bases;
    each_input(node.ptr(), [&](PyObject* input) {
      bases.push_back(values_[input].made);
      TORCH_CHECK(bases.back().defined(), "a replay lacks an input: please report this");
    });
    if (on_demand_) on_demand_->relieve_if_short();
    if (call_of(node) != nullptr) run_again(node, bases);
    else run_in_python(node, bases);
    bases.clear();
    if (RecordedCall* call = call_of(node)) call->drop_inputs();
    else classes->drop_inputs(node);
    each_input(node.ptr(), [&](PyObject* input) {
      Known& known = values_[input];
      if (--known.uses <= 0) known.made.reset();
    });
  }

  void run_again(py::handle node, Tensors& bases) {
    auto& n = classes->node;
    auto inputs = py::reinterpret_borrow<py::tuple>(n.inputs(node));
    auto updated = py::reinterpret_borrow<py::tuple>(n.updated(node));
    for (py::handle one : updated) {
      size_t place = PyLong_AsSize_t(PyTuple_GET_ITEM(one.ptr(), 0));
      bases[place] = own_copy(PyTuple_GET_ITEM(inputs.ptr(), place), bases[place], call_of(node)->waits);
    }
    Tensors results = call_of(node)->again(bases);
    for (py::handle one : updated)
      keep(PyTuple_GET_ITEM(one.ptr(), 1), bases[PyLong_AsSize_t(PyTuple_GET_ITEM(one.ptr(), 0))]);
    for (py::handle output : py::reinterpret_borrow<py::tuple>(n.outputs(node))) {
      keep(PyTuple_GET_ITEM(output.ptr(), 1), results[PyLong_AsSize_t(PyTuple_GET_ITEM(output.ptr(), 0))]);
    }
    if (on_demand_) {
      for (const Tensor& result : results) {
        if (result.defined()) on_demand_->note_allocated(result.storage().nbytes());
      }
    }
  }

  void run_in_python(py::handle node, const Tensors& bases) {
    py::list given, alone;
    size_t at = 0;
    each_input(node.ptr(), [&](PyObject* input) {
      given.append(wrapped(bases[at++]));
      alone.append(py::bool_(is_alone(input, classes->node.waits(node) == Py_True)));
    });
    for (py::handle pair : py::list(classes->run_node(node, given, alone))) {
      const Tensor& result = THPVariable_Unpack(PyTuple_GET_ITEM(pair.ptr(), 1));
      keep(PyTuple_GET_ITEM(pair.ptr(), 0), result);
      if (on_demand_) on_demand_->note_allocated(result.storage().nbytes());
    }
  }

  // Whether nobody else waits for the bytes of a value that a call overwrites. One that runs a second time is
  // counted off already: `waits` is false, and a reader that is left is another.
  bool is_alone(py::handle value, bool waits) {
    bool nobody = classes->value.held(value) == Py_None && readers_of(value) <= (waits ? 1 : 0);
    return nobody && values_[value.ptr()].uses <= 1;
  }

  // What a call may overwrite in place of a value: its bytes where nobody else waits for them, or a copy.
  Tensor own_copy(py::handle value, const Tensor& base, bool waits) {
    if (is_alone(value, waits)) return base;
    int64_t bytes = base.storage().nbytes();
    if (on_demand_) on_demand_->note_allocated(bytes);
    return at::empty({0}, base.options().dtype(at::kByte)).set_(base.storage(), 0, {bytes}, {1}).clone();
  }

  // Keeps what was written while its value has readers.
  void keep(py::handle reference, const Tensor& result) {
    if (reference.is_none()) return;
    py::object made = behind(reference);
    if (made.is_none()) return;
    if (readers_of(made) > 0 && classes->value.cached(made) == Py_None) {
      keep_cached(made, result);
      if (on_demand_) on_demand_->note_cached(made);
    }
    auto known = values_.find(made.ptr());
    if (known != values_.end() && known->second.uses > 0) known->second.made = result;
  }

  py::handle value_;  // it keeps the values that it depends on alive
  std::shared_ptr<OnDemand> on_demand_;
  std::vector<std::pair<long, PyObject*>> order_;
  ska::flat_hash_map<PyObject*, Known> values_;
};

}  // namespace lowtide
