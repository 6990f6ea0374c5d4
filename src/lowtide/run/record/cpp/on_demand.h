// Copies of saved values go when memory is short: lowtide.run.record.on_demand.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <queue>
#include <unordered_set>

#include "tape.h"

namespace lowtide {

inline void relieve(py::handle on_demand) { classes->relieve(on_demand); }

inline void save_on_demand(py::handle on_demand, py::handle value, const Tensor& tensor) {
  if (classes->value.cached(value) != Py_None) return;
  keep_cached(value, alias_of(tensor));
  note_kept(on_demand, value);
}

// An operation has allocated so much.
inline void wrote(py::handle on_demand, size_t bytes) {
  auto& left = classes->on_demand.left;
  left.set(on_demand, py::int_(PyLong_AsLongLong(left(on_demand)) - static_cast<long long>(bytes)));
}

inline void relieve_if_short(py::handle on_demand) {
  if (PyLong_AsLongLong(classes->on_demand.left(on_demand)) < 0) relieve(on_demand);
}

class Evictions {
 public:
  explicit Evictions(py::dict rates) : rates_(std::move(rates)) {
    other_ = PyFloat_AsDouble(PyDict_GetItem(rates_.ptr(), Py_None));
  }

  void run(const py::list& kept, long long bytes) {
    auto& v = classes->value;
    std::unordered_set<PyObject*> seen;
    py::list left;
    std::vector<py::object> mine;
    long newest = 0;
    for (py::handle one : kept) {
      py::object value = behind(one);
      if (value.is_none() || v.cached(value) == Py_None || !seen.insert(value.ptr()).second) continue;
      left.append(one);
      if (!is_a(v.node(value), classes->node.type) || in_use(value)) continue;
      newest = std::max(newest, order_of(value));
      mine.push_back(std::move(value));
    }
    if (PyList_SetSlice(kept.ptr(), 0, PyList_GET_SIZE(kept.ptr()), left.ptr()) < 0)
      throw py::error_already_set();
    auto price = [&](py::handle value) {
      long age = newest - order_of(value) + 1;
      return seconds(value) / (std::max(1.0, PyLong_AsDouble(v.nbytes(value))) * age);
    };
    using Entry = std::tuple<double, size_t, size_t>;  // its price, its place, how many had gone then
    std::vector<Entry> entries;
    for (size_t at = 0; at < mine.size(); ++at) entries.emplace_back(price(mine[at]), at, 0);
    std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> heap({}, std::move(entries));
    size_t gone = 0;
    while (!heap.empty() && bytes > 0) {
      auto [known, at, asked] = heap.top();
      heap.pop();
      if (double now; asked != gone && (now = price(mine[at])) > known) {
        heap.emplace(now, at, gone);
        continue;
      }
      v.cached.set(mine[at], py::none());
      bytes -= PyLong_AsLongLong(v.nbytes(mine[at]));
      ++gone;
    }
  }

 private:
  static long order_of(py::handle value) {
    return PyLong_AsLong(classes->node.order(classes->value.node(value)));
  }

  struct Owners {  // of a copy, as PyTorch counts them
    size_t tensor, storage;
    explicit Owners(PyObject* copy)
        : tensor(THPVariable_Unpack(copy).use_count()),
          storage(THPVariable_Unpack(copy).storage().use_count()) {}
  };

  static Owners owners_of_unused() {  // a storage that Python has seen may count as its own owner
    Unseen unseen;
    py::object copy = wrapped(at::empty({1}));
    owned(THPStorage_Wrap(THPVariable_Unpack(copy.ptr()).storage()));
    return Owners(copy.ptr());
  }

  static bool in_use(py::handle value) {  // others hold its bytes: the program, or a replay
    static const Owners unused = owners_of_unused();
    PyObject* copy = classes->value.cached(value);
    Owners now(copy);
    return Py_REFCNT(copy) > 1 || now.tensor > unused.tensor || now.storage > unused.storage;
  }

  double seconds(py::handle value) {
    auto& v = classes->value;
    auto& n = classes->node;
    seen_.clear();
    wanted_.assign(1, value.ptr());
    double total = 0;
    while (!wanted_.empty()) {
      PyObject* next = wanted_.back();
      wanted_.pop_back();
      PyObject* node = v.node(next);
      if (!is_a(node, classes->node.type) || !seen_.insert(node).second) continue;
      double bytes = PyLong_AsDouble(v.nbytes(next));
      auto inputs = py::reinterpret_borrow<py::sequence>(n.inputs(node));
      for (py::handle input : inputs) {
        bytes += PyLong_AsDouble(v.nbytes(input));
        if (v.held(input) == Py_None && v.cached(input) == Py_None) wanted_.push_back(input.ptr());
      }
      py::int_ func(reinterpret_cast<uintptr_t>(n.func(node)));
      PyObject* rate = PyDict_GetItem(rates_.ptr(), func.ptr());
      total += bytes * (rate ? PyFloat_AsDouble(rate) : other_);
    }
    return total;
  }

  py::dict rates_;
  double other_;
  std::vector<PyObject*> wanted_;
  ska::flat_hash_set<PyObject*> seen_;
};

inline void evict(const py::list& kept, const py::dict& rates, long long bytes) {
  Evictions(rates).run(kept, bytes);
}

}  // namespace lowtide
