// Holds a budget while a step runs: before each operation, backward's too, evicts what is cheapest to bring
// back until the operation fits.
//
// What an operation needs is its results and its scratch. It is guessed from the arguments' shapes, and
// corrected by what its other forms took: PyTorch's meta kernels are Python's, and take longer than the
// operation. A form is the operation with arguments of these shapes, strides, types and whole numbers. On the
// CPU the first call of a form is measured, and stands in place of the guess from then on. On a GPU the guess
// stays. An operation that has not run in any form may copy what it reads.
//
// A value that autograd saves has a copy (Value::cached): most often the program's own storage. Backward asks
// for the oldest last. So a copy is worth the less the fewer seconds bring it back for each of its bytes, and
// the longer nobody will ask for it. A copy is priced anew only where a bound on its price says that it may
// be the cheapest.
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/util/accumulate.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <torch/csrc/Device.h>

#include <chrono>
#include <functional>
#include <mutex>

#include "tape.h"

namespace lowtide {

struct Meter {  // a register of the counting allocator: how it is opened, read and closed; or nulls
  int (*open)() = nullptr;
  int64_t (*peak)(int) = nullptr, (*live)(int) = nullptr;
  void (*close)(int) = nullptr;

  Meter() = default;
  explicit Meter(const std::vector<uintptr_t>& at) {
    if (at.size() != 4) return;
    open = reinterpret_cast<decltype(open)>(at[0]);
    peak = reinterpret_cast<decltype(peak)>(at[1]);
    live = reinterpret_cast<decltype(live)>(at[2]);
    close = reinterpret_cast<decltype(close)>(at[3]);
  }
};

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
      counter_ = reinterpret_cast<int64_t (*)()>(PyLong_AsSize_t(first));
    }
  }

  bool is_cheap() const { return counter_ != nullptr; }

  int64_t operator()() const {
    if (counter_ != nullptr) return counter_() - start_;
    if (!device_) {
      py::gil_scoped_acquire gil;
      return PyLong_AsLongLong(asks_().ptr());
    }
    auto statistics = c10::getDeviceAllocator(device_->type())->getDeviceStats(device_->index());
    return statistics.requested_bytes[0].current - start_;
  }

 private:
  int64_t (*counter_)() = nullptr;  // of the counting allocator
  std::optional<c10::Device> device_;
  int64_t start_ = 0;
  py::object asks_;
};

// ---- forms ----------------------------------------------------------------------------------------

constexpr int64_t GENERATOR_BYTES = 5056;  // the state of a generator of the CPU

struct Form {
  int64_t need_bytes = -1;     // results and scratch: before its first call has ended, what is expected
  double seconds = -1;
  int64_t guessed_bytes = -1;  // from the shapes of its arguments, where it has not run yet

  bool is_new() const { return guessed_bytes >= 0; }
};

class Forms {  // of one limit: what its operations need
 public:
  explicit Forms(const std::vector<uintptr_t>& meter) : meter_(meter) {}

  static uint64_t key_of(const OperatorHandle& op, const Stack& stack, size_t first) {
    uint64_t key = std::hash<c10::OperatorName>{}(op.operator_name());  // the same in every process
    for (size_t at = first; at < stack.size(); ++at) add(key, stack[at]);
    return key;
  }

  Form find(uint64_t key, const OperatorHandle& op, const Stack& stack, size_t first) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      if (auto found = forms_.find(key); found != forms_.end()) return found->second;
    }
    auto [guess, read] = guess_bytes(op, stack, first);
    {
      std::lock_guard<std::mutex> guard(mutex_);
      auto found = ratios_.find(op.operator_name());
      if (guess > 0 && found != ratios_.end())
        return {static_cast<int64_t>(static_cast<double>(guess) * found->second), -1, guess};
    }
    return {guess + read, -1, guess};
  }

  void learn(uint64_t key, const OperatorHandle& op, const Form& form) {
    std::lock_guard<std::mutex> guard(mutex_);
    double& ratio = ratios_.try_emplace(op.operator_name(), 1).first->second;
    if (form.guessed_bytes > 0)
      ratio = std::max(ratio, static_cast<double>(form.need_bytes) / static_cast<double>(form.guessed_bytes));
    auto [known, is_new] = forms_.emplace(key, Form{form.need_bytes, form.seconds});
    if (is_new) return;
    known->second.need_bytes = std::max(known->second.need_bytes, form.need_bytes);
    known->second.seconds = std::min(known->second.seconds, form.seconds);
  }

  // What is known, for a later process: forms with what they need, operations with their ratios.
  using Known = std::pair<std::vector<std::tuple<uint64_t, int64_t, double>>,
                          std::vector<std::tuple<std::string, std::string, double>>>;
  Known known() {
    std::lock_guard<std::mutex> guard(mutex_);
    Known all;
    for (auto& [key, form] : forms_) all.first.emplace_back(key, form.need_bytes, form.seconds);
    for (auto& [op, ratio] : ratios_) all.second.emplace_back(op.name, op.overload_name, ratio);
    return all;
  }

  void know(const Known& all) {
    std::lock_guard<std::mutex> guard(mutex_);
    for (auto& [key, need, seconds] : all.first) forms_.emplace(key, Form{need, seconds});
    for (auto& [name, overload, ratio] : all.second) {
      ratios_.emplace(c10::OperatorName(name, overload), ratio);
    }
  }

  const Meter& meter() const { return meter_; }

 private:
  // What it makes, by its arguments' shapes, and how much it reads.
  static std::pair<int64_t, int64_t> guess_bytes(const OperatorHandle& op, const Stack& stack, size_t first);

  static void mix(uint64_t& key, uint64_t value) {
    key = (key ^ value) * 0x9E3779B97F4A7C15ull;
    key ^= key >> 29;
  }

  static void add(uint64_t& key, const IValue& argument) {
    if (argument.isTensor()) {
      const Tensor& tensor = argument.toTensor();
      if (!tensor.defined()) return mix(key, 1);
      mix(key, 2 + static_cast<uint64_t>(tensor.scalar_type()));
      if (tensor.layout() != at::kStrided || tensor.is_nested()) return mix(key, tensor.numel());
      for (int64_t size : tensor.sizes()) mix(key, static_cast<uint64_t>(size));
      for (int64_t stride : tensor.strides()) mix(key, static_cast<uint64_t>(stride) + 0x517C);
    } else if (argument.isList()) {
      at::ArrayRef<IValue> items = argument.toListRef();
      mix(key, 0x11 + items.size());
      for (const IValue& item : items) add(key, item);
    } else if (argument.isInt()) {
      mix(key, static_cast<uint64_t>(argument.toInt()) + 0x22);
    } else if (argument.isBool()) {
      mix(key, argument.toBool() ? 0x33 : 0x34);
    } else if (argument.isDouble()) {
      mix(key, 0x44);  // a number changes no sizes
    } else {
      mix(key, 0x55);
    }
  }

  std::mutex mutex_;
  ska::flat_hash_map<uint64_t, Form> forms_;
  std::unordered_map<c10::OperatorName, double> ratios_;  // of what was needed to what was guessed
  Meter meter_;
};

// Products and convolutions by the rule of their shapes, lookups by their indices; all else as if it were
// element by element.
inline std::pair<int64_t, int64_t> Forms::guess_bytes(const OperatorHandle& op, const Stack& stack,
                                                      size_t first) {
  c10::SmallVector<const Tensor*, 6> given;
  int64_t most = 0, sum = 0;
  for (size_t at = first; at < stack.size(); ++at) {
    each_tensor(stack[at], [&](const Tensor& tensor, size_t) {
      if (!plain(tensor)) return true;
      given.push_back(&tensor);
      int64_t bytes = tensor.numel() * static_cast<int64_t>(tensor.element_size());
      most = std::max(most, bytes);
      sum += bytes;
      return true;
    });
  }
  for (auto& argument : op.schema().arguments()) {  // the state that it draws from is copied twice
    if (argument.name() == "generator") sum += 2 * GENERATOR_BYTES;
  }
  const std::string& name = op.schema().name();
  size_t count = given.size();
  bool product =
      name == "aten::mm" || name == "aten::addmm" || name == "aten::bmm" || name == "aten::baddbmm";
  if (product && count >= 2) {
    const Tensor &left = *given[count - 2], &right = *given[count - 1];
    if (right.dim() > 0 && right.size(-2) > 0)
      return {left.numel() / std::max<int64_t>(1, left.size(-1)) * right.size(-1) *
                  static_cast<int64_t>(left.element_size()),
              sum};
  }
  if (name == "aten::embedding" && count == 2 && given[0]->dim() == 2)
    return {given[1]->numel() * given[0]->size(1) * static_cast<int64_t>(given[0]->element_size()), sum};
  if (name == "aten::cat" || name == "aten::stack") return {sum, sum};
  if (name == "aten::convolution_backward" && count == 3) {
    // oneDNN pads the channels of each group to a vector of 16, and has what is narrower in float32, too
    const Tensor& weight = *given[2];
    int64_t groups = stack[first + 9].toInt(), item = static_cast<int64_t>(weight.element_size());
    int64_t wide = item < 4 ? item + 4 : item;
    auto padded = [](int64_t channels) { return (channels + 15) / 16 * 16; };
    int64_t kernel = weight.numel() / std::max<int64_t>(1, weight.size(0) * weight.size(1));
    int64_t elements = groups * padded(weight.size(0) / groups) * padded(weight.size(1)) * kernel;
    return {std::max(most, elements * wide), 2 * sum / item * wide};
  }
  c10::DimVector shape;
  int64_t item = 1;
  for (const Tensor* tensor : given) {
    item = std::max<int64_t>(item, static_cast<int64_t>(tensor->element_size()));
    auto sizes = tensor->sizes();
    if (sizes.size() > shape.size()) shape.insert(shape.begin(), sizes.size() - shape.size(), 1);
    for (size_t at = 1; at <= sizes.size(); ++at) {
      int64_t &own = shape[shape.size() - at], other = sizes[sizes.size() - at];
      if (own == 1) own = other;
      else if (other != 1 && other != own) return {most, sum};  // no such operation
    }
  }
  return {c10::multiply_integers(shape) * item, sum};
}

// ---- the governor ---------------------------------------------------------------------------------

struct Excess {  // an operation that did not fit
  std::string operation;
  int64_t need_bytes = 0, above_bytes = 0;
  bool first_call = false;
  std::string where;
};

class Governor {
 public:
  // live: how many bytes are live, above those at the step's start. room: how many may be. share: of the most
  // that a plain step would have had so far: the room grows with that; or 0. open: nothing else is known of
  // the budget yet. widens: the room grows in this step; else it is only noted what it would be. resident:
  // live at the step's start, and part of the budget.
  Governor(py::object live, int64_t room, double share, bool open, bool widens, int64_t resident,
           std::shared_ptr<Forms> forms)
      : live_(std::move(live)),
        forms_(std::move(forms)),
        room_(room),
        wished_(room),
        resident_(resident),
        share_(share),
        open_(open),
        widens_(widens) {}
  Governor(const Governor&) = delete;

  const std::shared_ptr<Forms>& forms() const { return forms_; }
  int64_t wished() const { return wished_; }  // the room as it grows with the share
  // Another step begins while this one may be asked for what it saved: both have the smaller budget. A step
  // whose budget is not known yet has none, and was above none.
  void join(int64_t limit, int64_t own_bytes) {
    int64_t budget = open_ ? limit : std::min(room_ + resident_, limit);
    if (open_) excess.reset();
    resident_ += own_bytes;
    room_ = budget - resident_;
    share_ = 0;
    open_ = false;
    joint_ = true;
  }
  bool is_joint() const { return joint_; }
  // So many bytes were there when the step started, as is found out now.
  void count(int64_t bytes) {
    resident_ += bytes;
    room_ -= bytes;
    wished_ -= bytes;
    outside_ += bytes;
    if (open_ || (excess && !excess->operation.empty())) return;
    excess.reset();  // it may have been above before this was known
    note_excess("", outside_, std::max<int64_t>(0, live() - room_), true);
  }
  bool has_widened() const { return widened_; }
  int64_t limit() const { return room_ + resident_; }
  bool is_open() const { return open_; }  // the budget is not known yet
  int64_t live() const { return live_(); }
  long evicted() const { return gone_; }
  std::optional<Excess> excess;  // the largest
  long replayed = 0;             // operations
  long searches = 0;             // for what is cheapest

  void follow(const std::shared_ptr<Tape>& tape) { tapes_.push_back(tape); }

  // Runs an operation after making room for it.
  template <class Run>
  double operator()(const OperatorHandle& op, const Stack& stack, size_t first, Run run) {
    uint64_t key = Forms::key_of(op, stack, first);
    Form form = forms_->find(key, op, stack, first);
    want(form.need_bytes, op, !form.is_new());
    if (form.is_new()) return learn(key, form, op, run);
    run();
    if (live_.is_cheap()) {
      int64_t above = live() - room_;
      if (above > 0) note_excess(op.schema().name(), form.need_bytes, above, false);
    }
    return form.seconds;
  }

  // The same for one that Python runs, with operations of its own around it.
  template <class Run>
  void run_special(const OperatorHandle& op, const Stack& stack, size_t first, bool learns, Run run) {
    uint64_t key = Forms::key_of(op, stack, first) ^ 0x5;
    Form form = forms_->find(key, op, stack, first);
    learns = learns && form.is_new();
    want(form.need_bytes, op, !learns);
    if (learns) learn(key, form, op, run);
    else run();
  }

  void want(int64_t need, const OperatorHandle& op, bool is_known) {
    ++ran_;
    if (share_ > 0) widen();
    if (!live_.is_cheap()) {  // between two looks live bytes rise by what operations need, at most
      left_ -= need;
      if (left_ >= 0) return;
    } else if (live() + need <= room_) {
      return;
    }
    int64_t above = relieve(need);
    bool is_told = is_known || !live_.is_cheap();  // else its call is measured first
    if (above > 0 && is_told) note_excess(op.schema().name(), need, above, !is_known);
  }

  void want(int64_t need) {  // of what is no operation of its own
    if (live() + need > room_) relieve(need);
  }

  // Evicts until so many bytes are free. Returns how many are missing then. Where the budget is not known
  // yet, the room grows once that takes more than twice what the step has run.
  int64_t relieve(int64_t need) {
    py::gil_scoped_acquire gil;
    for (auto& tape : tapes_) {
      if (auto alive = tape.lock()) alive->absorb();
    }
    if (open_ && replayed + walked_ / WALKED > 2 * (ran_ - replayed)) room_ += room_ / 16;
    int64_t above = live() + need - room_;
    if (above > 0 && (!nothing_free_ || ++since_ >= PATIENCE)) {
      since_ = 0;
      for (int64_t most : {room_ / 4, std::numeric_limits<int64_t>::max()}) {
        while (above > 0 && evict(above + (room_ >> MORE), most)) above = live() + need - room_;
      }
      nothing_free_ = above > 0;  // until there is another copy, or some operations later: owners let go
    }
    left_ = -above;
    return above;
  }

  // Autograd saves a tensor of a value: it has a copy from now on.
  void list(const std::shared_ptr<Tape>& tape, const ValuePtr& value) {
    nothing_free_ = false;
    if (std::exchange(value->listed, true)) return;
    copies_.push_back({WeakValue(value), tape, static_cast<double>(std::max<int64_t>(1, value->nbytes)),
                       value->node->order, value->node->seconds, value->node->seconds});
  }

  void changed() {  // a copy has come back
    nothing_free_ = false;
    cheaper_ = true;
  }

  void note_excess(const std::string& operation, int64_t need, int64_t above, bool first_call) {
    if (excess && above <= excess->above_bytes) return;
    py::gil_scoped_acquire gil;
    excess = Excess{operation, need, above, first_call, functions->where().cast<std::string>()};
  }

  void widen() {
    int64_t now = live_(), missing = 0;
    for (auto& tape : tapes_) {
      if (auto alive = tape.lock()) missing += alive->ledger->missing_bytes;
    }
    most_ = std::max(most_, now + missing);
    auto most = static_cast<double>(most_ + resident_);
    int64_t room = static_cast<int64_t>(share_ * most) - resident_;
    if (room <= wished_) return;
    wished_ = room;
    if (widens_) room_ = std::max(room_, room);
    widened_ = true;
  }

 private:
  struct Copy {
    WeakValue value;
    std::weak_ptr<Tape> tape;
    double bytes, order;
    double seconds, least;  // to bring it back, at least
  };
  using Priced = std::tuple<double, size_t, size_t>;  // its least price, its place, how many had gone then
  static constexpr int MORE = 7, PATIENCE = 4, WALKED = 64;  // nodes are walked past while one runs

  // Evicts copies for so many bytes, the cheapest first: of those that bring at most so many bytes of others
  // back on the way. Whether any went.
  bool evict(int64_t bytes, int64_t most_missing) {
    ++searches;
    std::vector<ValuePtr> values = living();
    double newest = 0;
    for (auto& one : copies_) newest = std::max(newest, one.order);
    auto price = [&](const Copy& one, const Value& value) {
      double age = newest - one.order + 1;
      double first = value.plan == Plan::EvictedFirst ? 1e-6 : 1;
      return first * one.seconds / (one.bytes * age);
    };
    heap_.clear();
    for (size_t at = 0; at < copies_.size(); ++at) heap_.push_back({price(copies_[at], *values[at]), at, 0});
    std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
    size_t gone = 1;
    while (!heap_.empty() && bytes > 0) {
      std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
      auto [known, at, asked] = heap_.back();
      heap_.pop_back();
      Value& value = *values[at];
      Copy& copy = copies_[at];
      if (!value.has_copy() || value.shown.defined() || in_use(value.cached)) continue;
      auto tape = copy.tape.lock();
      if (!tape) continue;
      if (asked != gone) {  // less is known than what it takes now
        Closure closure = tape->closure(value);
        walked_ += closure.nodes;
        bool gains = closure.possible && value.nbytes > closure.pins_bytes &&
            closure.missing_bytes <= std::max(most_missing, 2 * value.nbytes);
        if (!gains) continue;
        copy.seconds = closure.seconds;
        if (double now = price(copy, value); now > known) {
          heap_.push_back({now, at, gone});
          std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
          continue;
        }
      }
      tape->give_up(value);
      bytes -= value.nbytes;
      ++gone;
      ++gone_;
    }
    return gone > 1;
  }

  // The values that have a copy; the others are taken out.
  std::vector<ValuePtr> living() {
    std::vector<ValuePtr> values;
    values.reserve(copies_.size());
    size_t left = 0;
    for (auto& one : copies_) {
      ValuePtr value = one.value.lock();
      if (!value) continue;
      if (!value->cached.defined() || !value->node) {
        value->listed = false;
        continue;
      }
      if (cheaper_) one.seconds = one.least;
      if (&copies_[left] != &one) copies_[left] = std::move(one);
      ++left;
      values.push_back(std::move(value));
    }
    copies_.erase(copies_.begin() + static_cast<std::ptrdiff_t>(left), copies_.end());
    cheaper_ = false;
    return values;
  }

  static bool in_use(const Tensor& copy) {  // others hold its bytes: the program, or a replay
    static const long seen = owners_of_seen();
    if (owners_of_bytes(copy.storage()) > 1) return true;
    auto* storage = copy.storage().unsafeGetStorageImpl();
    return held_by_others(copy.unsafeGetTensorImpl(), copy.use_count(), seen) ||
        held_by_others(storage, copy.storage().use_count(), seen);
  }

  template <class T>
  static PyObject* object_of(T* one) {  // of Python, or null
    if constexpr (requires { one->pyobj_slot()->load_pyobj(); }) return one->pyobj_slot()->load_pyobj();
    else return one->pyobj_slot()->_unchecked_untagged_pyobj();
  }

  template <class T>
  static bool held_by_others(T* one, size_t owners, long seen) {
    PyObject* object = object_of(one);
    if (object == nullptr) return owners > 1;
    return Py_REFCNT(object) > 1 || static_cast<long>(owners) > seen;
  }

  static long owners_of_seen() {  // what Python has seen once may count as its own owner
    Unseen unseen;
    Tensor copy = at::empty({1});
    wrapped(copy);
    return static_cast<long>(copy.use_count());
  }

  template <class Run>
  double learn(uint64_t key, Form form, const OperatorHandle& op, Run run) {
    const Meter& meter = forms_->meter();
    int mark = meter.open != nullptr && live_.is_cheap() ? meter.open() : -1;
    auto begin = std::chrono::steady_clock::now();
    try {
      run();
    } catch (...) {
      if (mark >= 0) meter.close(mark);
      throw;
    }
    form.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (mark >= 0) {
      int64_t peak = meter.peak(mark), left = meter.live(mark);
      meter.close(mark);
      if (int64_t above = live() - left + peak - room_; above > 0)
        note_excess(op.schema().name(), peak, above, peak > form.need_bytes);
      form.need_bytes = peak;
    } else {
      form.need_bytes = form.guessed_bytes;
    }
    forms_->learn(key, op, form);
    return form.seconds;
  }

  Live live_;
  std::shared_ptr<Forms> forms_;
  int64_t room_, wished_, resident_, outside_ = 0, left_ = 0, most_ = 0;
  double share_;
  bool open_, widens_, widened_ = false, joint_ = false;
  std::vector<std::weak_ptr<Tape>> tapes_;
  std::vector<Copy> copies_;
  bool cheaper_ = false, nothing_free_ = false;  // what some values take may be less
  int since_ = 0;
  long gone_ = 0, ran_ = 0, walked_ = 0;  // copies; operations; nodes, in search of what to evict
  std::vector<Priced> heap_;
};

}  // namespace lowtide
