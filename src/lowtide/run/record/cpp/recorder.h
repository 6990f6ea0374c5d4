// The recorder of one step. Under a governor each operation of a forward that replays plainly gets a node on
// the tape, whatever the plan. Without a governor, and while the step follows a plan, only those get one that
// the plan runs again (`pass` runs the others). The plan says what goes when autograd saves it, the governor
// what goes when memory is short. What is not plain (random numbers, collectives, writes to what the tape
// does not know) is left to lowtide.run.record.recorder, on the same tape.
#pragma once

#include <torch/csrc/Storage.h>

#include <atomic>
#include <shared_mutex>

#include "hooks.h"
#include "saved.h"

namespace lowtide {

struct Fact {  // about an operation, read off its schema once: lowtide.ops.OpInfo
  py::object name;
  bool plain = false;              // a replay is the same call
  bool ignored = false;            // a view, or it waits for a collective
  bool uninitialized = false;      // its results are memory that nothing has written yet
  bool reads_values = false;       // and shows them: user code may depend on them
  bool of_aten = false;
  std::vector<size_t> writes;      // arguments that it overwrites
  std::vector<size_t> statistics;  // arguments that it overwrites in training
  long training = -1;              // which argument says so; -1 for none
  long dropout = -1;               // which argument is a probability of dropout: random unless that is 0
  std::vector<size_t> loose;       // results that are partly whatever was in memory, where it draws nothing
  size_t arguments = 0;

  bool drops_out(const Stack& stack, size_t first) const {
    return dropout >= 0 && stack[first + static_cast<size_t>(dropout)].toDouble() != 0;
  }
  bool is_loose(size_t result) const { return std::find(loose.begin(), loose.end(), result) != loose.end(); }
};

class Facts {
 public:
  const Fact& of(const OperatorHandle& op) {
    {
      std::shared_lock lock(mutex_);
      if (auto found = facts_.find(op); found != facts_.end()) return *found->second;
    }
    py::gil_scoped_acquire gil;
    const auto& schema = op.schema();
    auto made = std::make_unique<Fact>(functions->facts(schema.name(), schema.overload_name()).cast<Fact>());
    made->arguments = schema.arguments().size();
    std::unique_lock lock(mutex_);
    return *facts_.try_emplace(op, std::move(made)).first->second;
  }

 private:
  std::shared_mutex mutex_;
  std::unordered_map<OperatorHandle, std::unique_ptr<Fact>> facts_;
};
inline Facts& facts = *new Facts;  // about PyTorch, for the life of the process

// A node that runs again reads a tensor: what the plan stores of it has a copy from now on.
inline void keep_read(const std::shared_ptr<Tape>& tape, const Tensor& tensor, Governor* governor) {
  Value* value = tape->replayable(storage_key(tensor));
  if (value == nullptr || value->cached.defined() || value->plan != Plan::Stored) return;
  Tensor copy = tape->natural ? aliased(tensor) : Tensor();
  keep_cached(*value, copy.defined() ? std::move(copy) : alias_of(tensor));
  if (governor != nullptr) governor->list(tape, ValuePtr::reclaim_copy(value));
}

struct Program {  // a plan's: the operations that write something, in order
  struct Operation {
    std::optional<OperatorHandle> op;
    std::string name;
    bool replayed, python;
    std::vector<bool> stored;
  };
  std::vector<Operation> operations;

  void add(const std::string& name, const std::string& overload, bool replayed, bool python,
           std::vector<bool> stored) {
    auto op = c10::Dispatcher::singleton().findSchema({name, overload});
    operations.push_back({op, name, replayed, python, std::move(stored)});
  }
};

class Recorder : public std::enable_shared_from_this<Recorder> {
 public:
  std::atomic<bool> on{false};
  std::atomic<bool> in_forward{false};
  bool compares = false;  // what comes back is compared with the original: Python runs all operations

  // pack: a weak reference to the method of the recorder in Python. program: of the plan, or null. smaller:
  // the step is smaller than the one that was planned for, so that its plan is a hint.
  Recorder(std::shared_ptr<Tape> tape, std::shared_ptr<Governor> governor, py::object pack,
           std::shared_ptr<Program> program, bool smaller)
      : program_(std::move(program)), pack_(std::move(pack)), smaller_(smaller && governor) {
    step_->tape = std::move(tape);
    step_->governor = std::move(governor);
    if (step_->governor) step_->governor->follow(step_->tape);
  }
  Recorder(const Recorder&) = delete;
  virtual ~Recorder() {  // the last owner may be a kernel, which does not hold the interpreter's lock
    py::gil_scoped_acquire gil;
    step_.reset();
    pack_ = py::object();
  }

  const std::shared_ptr<Step>& step() const { return step_; }
  Tape& tape() const { return *step_->tape; }
  Governor* governor() const { return step_->governor.get(); }

  // ---- the plan's program ----

  bool follows() const { return program_ != nullptr && !departed_; }
  bool departed() const { return departed_; }
  void depart() {
    if (program_ == nullptr) return;
    departed_ = true;
    ++extra_;
  }
  long extra() const { return extra_; }  // operations that the program does not have
  size_t at() const { return at_; }
  void advance() { ++at_; }
  void set_program(std::shared_ptr<Program> program, bool smaller) {  // of the next forward
    program_ = std::move(program);
    smaller_ = smaller && governor() != nullptr;
    departed_ = false;
    at_ = 0;
  }
  bool strict() const { return follows() && !smaller_; }

  const Program::Operation* next() const {  // or null
    return follows() && at_ < program_->operations.size() ? &program_->operations[at_] : nullptr;
  }

  // What the plan says of a value of the next operation, by its place.
  Plan plan_of(const Program::Operation* known, size_t place, size_t writes) const {
    if (known == nullptr || known->stored.size() != writes) return governor() ? Plan::None : Plan::Evicted;
    if (known->stored[place] || !known->replayed) return Plan::Stored;
    return smaller_ ? Plan::EvictedFirst : Plan::Evicted;
  }

  // ---- operations ----

  virtual bool takes(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    Unseen unseen;  // what is copied, too, of a value that the operation overwrites
    bool backward = torch::autograd::get_current_graph_task_id() != -1;
    bool records = backward ? c10::GradMode::is_enabled() && governor() : in_forward.load();
    absorb();
    if (compares) return false;
    const Fact& fact = facts.of(op);
    first_ = stack->size() - fact.arguments;
    if (!records || fact.ignored) return aside(fact, op, keys, stack);
    py::gil_scoped_acquire gil;
    if (!find_tensors(*stack)) return false;
    const Program::Operation* known = backward ? nullptr : next();
    if (known != nullptr && !(known->op && *known->op == op)) known = nullptr;
    if ((known != nullptr && known->python) || !fact.plain) return false;
    if (fact.drops_out(*stack, first_)) return false;
    bool node = governor() || program_ == nullptr || departed_ || (known != nullptr && known->replayed);
    bool took = node ? record(fact, known, op, keys, stack, backward) : pass(fact, known, op, keys, stack);
    if (took) ++ran_[c10::GradMode::is_enabled()];
    return took;
  }

  virtual bool learns() const { return true; }  // what special operations need

  std::pair<long, long> ran() const { return {ran_[0], ran_[1]}; }

  virtual void turn(bool on_now) { on = on_now; }

  // ---- saved tensors ----

  py::object pack(PyObject* object) {
    const Tensor& tensor = THPVariable_Unpack(object);
    auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    PyObject** attributes = _PyObject_GetDictPtr(object);
    bool ours = type == THPVariableClass || type == ParameterClass;
    if (!ours || !plain(tensor) || (attributes && *attributes && PyDict_Size(*attributes))) {
      py::object python = pack_();
      if (python.is_none()) return Boxed<SavedKept>::of(tensor.is_leaf() ? tensor : alias_of(tensor));
      return python(py::handle(object));
    }
    if (type == THPVariableClass) {
      if (py::object handle = save(tensor)) return handle;
    }
    return Boxed<SavedKept>::of(tensor.is_leaf() ? tensor : alias_of(tensor));
  }

  // A handle of a tensor whose value has a node; or null.
  virtual py::object save(const Tensor& tensor) {
    Value* shown = tape().replayable(storage_key(tensor));
    if (shown == nullptr) return {};
    ValuePtr value = ValuePtr::reclaim_copy(shown);
    py::object handle = Boxed<SavedEvicted>::of(tensor, value, step_);
    keep_or_evict(tensor, value);
    return handle;
  }

  virtual std::pair<py::object, py::object> hooks();  // pack and unpack, as autograd calls them

 protected:
  void absorb() {  // what threads that lowtide has not met have left
    if (!tape().reach->has_left()) return;
    py::gil_scoped_acquire gil;
    tape().absorb();
  }

  using Places = c10::SmallVector<size_t, 4>;

  struct TensorArgument {  // a tensor among the arguments
    size_t argument, item;
    const Tensor* tensor;  // valid until the operation has run
    uintptr_t key;
  };

  void keep_or_evict(const Tensor& tensor, const ValuePtr& value) {
    value->crosses |= value->run != tape().run;
    if (value->cached.defined()) return;
    if (value->plan == Plan::Evicted && tape().evict(*value)) return;
    Tensor copy = tape().natural ? aliased(tensor) : Tensor();
    keep_cached(*value, copy.defined() ? std::move(copy) : alias_of(tensor));
    value->came_back();
    if (governor()) governor()->list(step_->tape, value);
  }

  // Runs an operation within the budget; how long one of its form takes.
  double run_governed(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    return run_governed(op, stack, [&] { run_below(op, keys, stack); });
  }

  template <class Run>
  double run_governed(const OperatorHandle& op, const Stack* stack, Run run) {
    if (!governor()) return run(), 0;
    return (*governor())(op, *stack, first_, run);
  }

  bool find_tensors(const Stack& stack) {  // false where one is not plain
    tensors_.clear();
    for (size_t at = first_; at < stack.size(); ++at) {
      const IValue& argument = stack[at];
      if (argument.isGenerator()) return false;
      bool fits = each_tensor(argument, [&](const Tensor& tensor, size_t item) {
        if (!plain(tensor)) return false;
        tensors_.push_back({at - first_, item, &tensor, storage_key(tensor)});
        return true;
      });
      if (!fits) return false;
    }
    return true;
  }

  // An operation that nobody records: of backward, or of the program outside of its model.
  bool aside(const Fact& fact, const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    if (in_forward && !fact.writes.empty()) {  // of a backward inside the forward
      py::gil_scoped_acquire gil;
      for (size_t at : fact.writes) {
        each_tensor((*stack)[first_ + at], [&](const Tensor& tensor, size_t) {
          if (has_bytes(tensor)) tape().before_change(storage_key(tensor));
          return true;
        });
      }
    }
    run_governed(op, keys, stack);
    return true;
  }

  bool is_new(const Tensor& result) const {
    if (!result.defined() || !plain(result)) return false;
    uintptr_t key = storage_key(result);
    return std::none_of(tensors_.begin(), tensors_.end(), [key](auto& one) { return one.key == key; });
  }

  // Positions of the results on storages that no argument has, one for each.
  Places new_among(const Tensors& results) const {
    Places places;
    for (size_t at = 0; at < results.size(); ++at) {
      auto same = [&](size_t place) { return results[place].is_alias_of(results[at]); };
      if (is_new(results[at]) && std::none_of(places.begin(), places.end(), same)) places.push_back(at);
    }
    return places;
  }

  // Runs an operation that will be recorded. It may overwrite a target.
  virtual double run_recorded(const OperatorHandle& op, DispatchKeySet keys, Stack* stack,
                              const TensorArgument*) {
    py::gil_scoped_release others;
    return run_governed(op, keys, stack);
  }

  // Whether a second run of an operation gave the results of the first, and the same updated target. Only a
  // profiled step makes one.
  virtual bool reproduces(const OperatorHandle&, const Fact&, const Tensors&, const Tensor&) { return true; }

  // An operation has run.
  virtual void write_down(const Fact&, const Tensors&, const Places&) {}

  // How many bytes of a result's storage were written; only a profiled step needs it.
  virtual int64_t extent_of(const Tensor& tensor) { return static_cast<int64_t>(tensor.storage().nbytes()); }

  virtual void registered(Value&, const Tensor&) {}

  virtual ValuePtr value_of(const Tensor& tensor, uintptr_t) { return tape().value_of(tensor); }

  // ---- operations that are not recorded ----

  bool pass(const Fact& fact, const Program::Operation* known, const OperatorHandle& op, DispatchKeySet keys,
            Stack* stack) {
    bool trains = !fact.statistics.empty() &&
        (fact.training < 0 || (*stack)[first_ + static_cast<size_t>(fact.training)].toBool());
    if (overwrites_known(fact.writes) || (trains && overwrites_known(fact.statistics))) return false;
    {
      py::gil_scoped_release others;
      run_governed(op, keys, stack);
    }
    bool wrote = !fact.writes.empty();
    for (size_t at = first_; at < stack->size() && !wrote; ++at) {
      each_tensor((*stack)[at], [&](const Tensor& result, size_t) { return !(wrote = is_new(result)); });
    }
    if (wrote && known != nullptr) ++at_;
    else if (wrote) depart();
    return true;
  }

  bool overwrites_known(const std::vector<size_t>& arguments) const {
    if (arguments.empty()) return false;
    for (auto& one : tensors_) {
      if (std::find(arguments.begin(), arguments.end(), one.argument) == arguments.end()) continue;
      if (tape().shown(one.key) || tape().is_blank(one.key)) return true;
    }
    return false;
  }

  // ---- operations that are recorded ----

  bool record(const Fact& fact, const Program::Operation* known, const OperatorHandle& op,
              DispatchKeySet keys, Stack* stack, bool backward) {
    if (tape().any_blank()) {
      for (auto& one : tensors_) {
        if (tape().is_blank(one.key)) return false;
      }
    }
    const TensorArgument* target = target_of(fact);
    if (target == nullptr && !fact.writes.empty()) return false;
    const Tensor updated = target == nullptr ? Tensor() : *target->tensor;
    auto node = c10::make_intrusive<Node>();
    node->call.emplace(RecordedCall{op});
    if (!describe(*node, *stack)) return false;
    ValuePtr old = target == nullptr ? ValuePtr() : ValuePtr::reclaim_copy(tape().shown(target->key));
    bool pins = !governor() || (known != nullptr && known->replayed && !smaller_);
    if (pins) pin(*node);  // before the call takes its arguments off the stack
    if (target != nullptr) tape().before_update(*old, *target->tensor);
    node->seconds = run_recorded(op, keys, stack, target);
    Tensors results = flat_results(*stack, first_);
    Places places = new_among(results);
    bool wrote = !places.empty() || target != nullptr;
    bool again = wrote && reproduces(op, fact, results, updated);
    write_down(fact, results, places);
    if (!wrote) return true;
    if (known != nullptr) ++at_;
    else if (!backward) depart();
    if (!again) {
      if (target != nullptr) tape().forget(storage_key(updated));
      for (size_t at : places) tape().source(results[at], true);
      return true;
    }
    size_t writes = places.size() + (target != nullptr);
    node->order = tape().order++;
    node->grad = c10::GradMode::is_enabled();
    for (size_t at = 0; at < places.size(); ++at) {
      const Tensor& result = results[places[at]];
      int64_t extent = fact.is_loose(places[at]) ? 0 : extent_of(result);
      ValuePtr made = tape().registered(node, result, extent, plan_of(known, at, writes));
      registered(*made, result);
      node->outputs.emplace_back(static_cast<uint32_t>(places[at]), WeakValue(made));
    }
    if (target != nullptr) {
      size_t place = 0;
      while (node->inputs[place].get() != old.get()) ++place;
      int64_t extent = std::max(old->extent, extent_of(updated));
      ValuePtr made = tape().registered(node, updated, extent, plan_of(known, places.size(), writes));
      registered(*made, updated);
      if (governor() && made->cached.defined()) governor()->list(step_->tape, made);
      node->updated.emplace_back(static_cast<uint32_t>(place), WeakValue(made));
    }
    return true;
  }

  // A node that a plan runs again counts among the readers of what it reads from now on.
  void pin(Node& node) {
    for (auto& one : tensors_) keep_read(step_->tape, *one.tensor, governor());
    tape().pin(node, tape().run);
  }

  // What the call overwrites, if its value is recomputable; or null.
  const TensorArgument* target_of(const Fact& fact) const {
    const TensorArgument* target = nullptr;
    for (auto& one : tensors_) {
      if (fact.writes.empty() || one.argument != fact.writes[0]) continue;
      if (target != nullptr) return nullptr;  // a list
      target = &one;
    }
    return target != nullptr && tape().replayable(target->key) ? target : nullptr;
  }

  // Records the call about to be made and the values that it reads; false where Python has to.
  bool describe(Node& node, const Stack& stack) {
    RecordedCall& call = *node.call;
    call.arguments.reserve(stack.size() - first_);
    for (size_t at = first_; at < stack.size(); ++at) call.add(stack[at]);
    call.places.reserve(tensors_.size());
    for (auto& one : tensors_) {
      if (is_number(stack[first_ + one.argument])) continue;
      ValuePtr value = value_of(*one.tensor, one.key);
      if (!value) return false;
      size_t input = 0;
      while (input < node.inputs.size() && node.inputs[input].get() != value.get()) ++input;
      if (input == node.inputs.size()) {
        node.exact &= !value->node || value->node->exact;
        node.inputs.push_back(std::move(value));
      }
      call.places.push_back({one.argument, one.item, input, Geometry(*one.tensor)});
    }
    return true;
  }

  std::shared_ptr<Program> program_;
  std::shared_ptr<Step> step_ = std::make_shared<Step>();
  py::object pack_;
  bool smaller_ = false, departed_ = false;
  long extra_ = 0;
  size_t at_ = 0, first_ = 0;  // places: in the program; of the first argument on the stack
  long ran_[2] = {0, 0};  // how many operations it ran: without gradients, with them
  c10::SmallVector<TensorArgument, 8> tensors_;
};

using Packer = Boxed<std::shared_ptr<Recorder>>;

inline thread_local std::weak_ptr<Recorder> current;  // the one that is on for this thread

void push_hooks_of(Recorder& recorder);

// Where autograd makes a graph of this backward, what that saves may be evicted, too: until the node has run.
inline void save_backward() {
  if (!c10::GradMode::is_enabled() || torch::autograd::get_current_graph_task_id() == -1) return;
  auto recorder = current.lock();
  if (recorder && recorder->on && recorder->governor()) push_hooks_of(*recorder);
}

// Autograd calls these between two kernels.
inline PyObject* packed(PyObject* packer, PyObject* tensor) {
  HANDLE_TH_ERRORS
  Unseen unseen;
  return (*Packer::in(packer))->pack(tensor).release().ptr();
  END_HANDLE_TH_ERRORS
}

inline PyObject* unpacked(PyObject*, PyObject* handle) {
  HANDLE_TH_ERRORS
  Unseen unseen;
  save_backward();
  if (SavedKept* kept = Boxed<SavedKept>::in(handle)) return kept->back().release().ptr();
  if (SavedEvicted* evicted = Boxed<SavedEvicted>::in(handle)) {
    return wrapped(evicted->back()).release().ptr();
  }
  return functions->unpack(py::handle(handle)).release().ptr();
  END_HANDLE_TH_ERRORS
}

inline std::pair<py::object, py::object> Recorder::hooks() {
  static const auto& back = *new py::object(function_of<&unpacked>("unpack", py::none()));
  return {function_of<&packed>("pack", Packer::of(shared_from_this())), back};
}

inline void push_hooks_of(Recorder& recorder) {
  auto [pack, unpack] = recorder.hooks();
  push_hooks(pack, unpack);
}

}  // namespace lowtide
