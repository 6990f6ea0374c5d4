// Evicts only when memory is short: for a model whose steps run other operations each time, where no plan
// knows what comes.
//
// Each operation is recorded. A value that autograd saves stays cached, as a replayed one does
// (LiveValue.cached). Before an operation of the forward, and where backward asks for a saved tensor, the
// recorder checks whether memory is short. If it is, the cached copies are dropped that are cheapest to bring
// back, for their bytes and for how long nobody will need them: backward asks for the oldest last. A value
// without its copy is an evicted one, and is replayed. A value is priced anew only where a bound on its price
// says that it may be the cheapest.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <functional>

#include "tape.h"

namespace lowtide {

// How many bytes are live, above those at the step's start: Peak.live_source.
class Live {
 public:
  explicit Live(py::object source) {
    if (!PyTuple_Check(source.ptr())) {
      asks_ = std::move(source);
      return;
    }
    PyObject *first = PyTuple_GET_ITEM(source.ptr(), 0), *second = PyTuple_GET_ITEM(source.ptr(), 1);
    start_ = PyLong_AsLongLong(second);
    if (THPDevice_Check(first)) {
      device_ = reinterpret_cast<THPDevice*>(first)->device;
    } else {
      counter_ = reinterpret_cast<int64_t (*)(int)>(PyLong_AsSize_t(first));
    }
  }

  int64_t operator()() const {
    if (counter_ != nullptr) return counter_(static_cast<int>(start_));
    if (!device_) return PyLong_AsLongLong(asks_().ptr());
    auto statistics = c10::getDeviceAllocator(device_->type())->getDeviceStats(device_->index());
    return statistics.requested_bytes[0].current - start_;
  }

 private:
  int64_t (*counter_)(int) = nullptr;  // of a register of the counting allocator
  std::optional<c10::Device> device_;
  int64_t start_ = 0;
  py::object asks_;
};

// Decides which cached copies are dropped when memory is short; one serves one step. All of it runs under the
// interpreter's lock.
class OnDemand {
 public:
  // live: how many bytes are live, above those at the step's start. room_bytes: how many may be when an
  // operation begins. rates: seconds of an operation for each byte that it reads or writes, by the `id` of
  // the operation; of those not in it, under None. learn: called with each operation that begins in Python.
  OnDemand(py::object live, int64_t room_bytes, const py::dict& rates, py::object learn)
      : live_(std::move(live)), room_(room_bytes), learn_(std::move(learn)) {
    for (auto [func, rate] : rates) {
      if (func.is_none()) other_ = PyFloat_AsDouble(rate.ptr());
      else rates_[PyLong_AsSize_t(func.ptr())] = PyFloat_AsDouble(rate.ptr());
    }
  }

  void save(py::handle value, const Tensor& tensor) {  // autograd saves a tensor of the value
    if (classes->value.cached(value) != Py_None) return;
    keep_cached(value, alias_of(tensor));
    cheaper_ |= readers_of(value) > 0;
    copies_.push_back({weak(value)});
  }

  void note_cached(py::handle value) {  // the value has a cached copy now
    cheaper_ = true;
    copies_.push_back({weak(value)});
  }

  void operation_begins(py::handle func) {
    if (!learn_.is_none()) learn_(func);
    relieve_if_short();
  }

  void note_allocated(int64_t bytes) { left_ -= bytes; }

  void relieve_if_short() {
    if (left_ < 0) relieve();
  }

  void relieve() {  // counts the live bytes, and drops copies if they are too many
    left_ = room_ - live_();
    if (left_ >= 0) return;
    evict((room_ >> MORE) - left_);
    left_ = room_ - live_();
  }

  void evict(int64_t bytes) {  // drops the cheapest copies until so many bytes are free
    std::vector<py::object> values = living();
    long newest = 0;
    for (auto& one : copies_) newest = std::max(newest, one.order);
    auto price = [&](const Copy& one) { return one.seconds / (one.bytes * (newest - one.order + 1)); };
    heap_.clear();
    for (size_t at = 0; at < copies_.size(); ++at) heap_.push_back({price(copies_[at]), at, 0});
    std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
    size_t gone = 1;
    while (!heap_.empty() && bytes > 0) {
      std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
      auto [known, at, asked] = heap_.back();
      heap_.pop_back();
      py::handle value = values[at];
      if (classes->value.cached(value) == Py_None || (asked == 0 && in_use(value))) continue;
      if (asked != gone) {  // less is known than what it takes now
        copies_[at].seconds = seconds(value);
        if (double now = price(copies_[at]); now > known) {
          heap_.push_back({now, at, gone});
          std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
          continue;
        }
      }
      classes->value.cached.set(value, py::none());
      bytes -= static_cast<int64_t>(copies_[at].bytes);
      ++gone;
    }
  }

 private:
  struct Copy {
    py::object reference;  // weak, to the value
    double bytes = 0, least = 0;
    double seconds = 0;  // to bring it back, at least
    long order = 0;
  };
  using Priced = std::tuple<double, size_t, size_t>;  // its least price, its place, how many had gone then
  static constexpr int MORE = 7;

  // The values that have a copy; the others are taken out.
  std::vector<py::object> living() {
    auto& v = classes->value;
    std::vector<py::object> values;
    size_t left = 0;
    for (auto& one : copies_) {
      py::object value = behind(one.reference);
      if (value.is_none() || v.cached(value) == Py_None || !is_node(v.node(value))) continue;
      if (one.bytes == 0) {
        one.bytes = std::max(1.0, PyLong_AsDouble(v.nbytes(value)));
        one.order = PyLong_AsLong(classes->node.order(v.node(value)));
        one.seconds = one.least = own_seconds(value, v.node(value));
      } else if (cheaper_) {
        one.seconds = one.least;
      }
      if (&copies_[left] != &one) copies_[left] = std::move(one);
      ++left;
      values.push_back(std::move(value));
    }
    copies_.resize(left);
    cheaper_ = false;
    return values;
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

  // Of the operation alone that writes it.
  double own_seconds(py::handle value, PyObject* node) {
    RecordedCall* call = call_of(node);
    if (call != nullptr && call->seconds >= 0) return call->seconds;
    double bytes = PyLong_AsDouble(classes->value.nbytes(value));
    each_input(node, [&](PyObject* input) { bytes += PyLong_AsDouble(classes->value.nbytes(input)); });
    auto rate = rates_.find(reinterpret_cast<uintptr_t>(classes->node.func(node)));
    double seconds = bytes * (rate == rates_.end() ? other_ : rate->second);
    if (call != nullptr) call->seconds = seconds;
    return seconds;
  }

  double seconds(py::handle value) {
    auto& v = classes->value;
    seen_.clear();
    wanted_.assign(1, value.ptr());
    double total = 0;
    while (!wanted_.empty()) {
      PyObject* next = wanted_.back();
      wanted_.pop_back();
      PyObject* node = v.node(next);
      if (!is_node(node) || !seen_.insert(node).second) continue;
      total += own_seconds(next, node);
      each_input(node, [&](PyObject* input) {
        if (v.held(input) == Py_None && v.cached(input) == Py_None) wanted_.push_back(input);
      });
    }
    return total;
  }

  Live live_;
  int64_t room_, left_ = 0;
  py::object learn_;
  ska::flat_hash_map<uintptr_t, double> rates_;
  double other_ = 0;
  std::vector<Copy> copies_;
  bool cheaper_ = false;  // what some values take may have become less
  std::vector<Priced> heap_;
  std::vector<PyObject*> wanted_;
  ska::flat_hash_set<PyObject*> seen_;
};

}  // namespace lowtide
