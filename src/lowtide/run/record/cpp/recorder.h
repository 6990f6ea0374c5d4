// The recorder of one forward: lowtide.run.record.recorder for the plain operations of a plan's program
// (lowtide.run.record.cpp_recorder says which).
#pragma once

#include <torch/csrc/Storage.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <shared_mutex>
#include <unordered_map>

#include "hooks.h"
#include "saved.h"

namespace lowtide {

enum class Handler { Pass, Record, Python };  // who handles an operation, and how

struct Operation {
  std::optional<OperatorHandle> op;
  Handler handler;
  size_t arguments;                // how many it takes
  std::vector<size_t> writes;      // arguments that it overwrites
  std::vector<size_t> statistics;  // arguments that it overwrites in training
  long training;                   // which argument says so; -1 for none
  std::vector<bool> stored;
  py::object func;
};

struct Program {
  explicit Program(bool any = false) : any(any) {}

  const bool any;  // for steps of any operations: each is there once
  std::deque<Operation> operations;

  const Operation* next(size_t at, const OperatorHandle& op) const {  // or null
    if (any) {
      std::shared_lock lock(mutex);  // Python adds to it
      auto found = places.find(op);
      return found == places.end() ? nullptr : &operations[found->second];
    }
    if (at >= operations.size()) return nullptr;
    const Operation& known = operations[at];
    return known.handler != Handler::Python && *known.op == op ? &known : nullptr;
  }

  void add(const std::string& name, const std::string& overload, int handler, std::vector<size_t> writes,
           std::vector<size_t> statistics, long training, std::vector<bool> stored,
           py::object func) {
    auto op = c10::Dispatcher::singleton().findSchema({name, overload});
    size_t arguments = op ? op->schema().arguments().size() : 0;
    std::unique_lock lock(mutex);
    if (any && op && Handler(handler) != Handler::Python) places.emplace(*op, operations.size());
    operations.push_back({op, op ? Handler(handler) : Handler::Python, arguments, std::move(writes),
                          std::move(statistics), training, std::move(stored), std::move(func)});
  }

 private:
  mutable std::shared_mutex mutex;
  std::unordered_map<OperatorHandle, size_t> places;
};

class Recorder {
 public:
  std::atomic<bool> on{false};

  // Of a recorder in Python: its tape and director, a weak reference to its method `pack`, and what evicts
  // on demand.
  Recorder(py::object tape, py::object director, py::object pack, std::shared_ptr<Program> program,
       std::shared_ptr<OnDemand> on_demand)
      : program_(std::move(program)),
        tape_(std::move(tape)),
        director_(std::move(director)),
        pack_(std::move(pack)) {
    bool tape_fits = PyObject_IsInstance(tape_.ptr(), classes->tape.type.ptr()) == 1;
    if (!tape_fits || !(director_.is_none() || is_a(director_, classes->director.type)))
      throw py::type_error("Recorder(tape=, director=): these are not the classes of `know`");
    replays_->on_demand = std::move(on_demand);
    replayable_ = py::reinterpret_borrow<py::dict>(classes->tape.replayable(tape_));
    sources_ = py::reinterpret_borrow<py::dict>(classes->tape.sources(tape_));
    blank_ = py::reinterpret_borrow<py::dict>(classes->tape.blank(tape_));
  }

  std::shared_ptr<Replays> replays() const { return replays_; }

  Recorder(const Recorder&) = delete;
  virtual ~Recorder() {  // the last owner may be a kernel, which does not hold the interpreter's lock
    py::gil_scoped_acquire gil;
    program_.reset();
    replays_.reset();
    for (py::object* object : {&tape_, &director_, &pack_, static_cast<py::object*>(&replayable_),
                               static_cast<py::object*>(&sources_), static_cast<py::object*>(&blank_)})
      object->release().dec_ref();
  }

  // Whether it is to see the operations of a backward, too.
  virtual bool sees_backward() const { return false; }

  // Runs an operation, or returns false where Python has to.
  virtual bool takes(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    if (python_ran_) from_python();
    const Operation* next = program_->next(at_, op);
    if (next == nullptr) return false;
    const Operation& known = *next;
    first_ = stack->size() - known.arguments;
    tensors_.clear();
    for (size_t at = first_; at < stack->size(); ++at) {
      const IValue& argument = (*stack)[at];
      if (argument.isGenerator() && known.handler == Handler::Record) return false;
      bool fits = each_tensor(argument, [&](const Tensor& tensor, size_t item) {
        if (!plain(tensor)) return false;
        tensors_.push_back({at - first_, item, &tensor, storage_key(tensor)});
        return true;
      });
      if (!fits) return false;
    }
    bool grad = c10::GradMode::is_enabled();
    bool records = known.handler == Handler::Record;
    bool took = records ? record(known, op, keys, stack) : pass(known, op, keys, stack);
    if (took) ++ran_[grad];
    return took;
  }

  std::pair<long, long> ran() const { return {ran_[0], ran_[1]}; }

  void to_python() {  // it runs the next operation, and may evict values
    if (!python_ran_) {
      if (!director_.is_none()) classes->director.at.set(director_, py::int_(at_));
      classes->tape.order.set(tape_, py::int_(order_));
    }
    hooks_.put_in();
    python_ran_ = true;
  }

  virtual void turn(bool on_now) {  // while this is off, Python runs everything
    if (on && !on_now) to_python();
    on = on_now;
  }

  void hooks_found() { hooks_.found(); }
  void hooks_end() { hooks_.end(); }

  py::object pack(PyObject* object) {
    const Tensor& tensor = THPVariable_Unpack(object);
    auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    PyObject** attributes = _PyObject_GetDictPtr(object);
    bool ours = type == THPVariableClass || type == ParameterClass;
    if (!ours || !plain(tensor) || (attributes && *attributes && PyDict_Size(*attributes))) {
      return pack_()(py::handle(object));
    }
    if (type == THPVariableClass) {
      if (PyObject* entry = entry_of(replayable_, py::int_(storage_key(tensor)))) {
        auto value = py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(entry, 0));
        if (on_demand()) on_demand()->save(value, tensor);
        return Boxed<Evicted>::of(tensor, std::move(value), replays_);
      }
    }
    return Boxed<Kept>::of(tensor.is_leaf() ? tensor : alias_of(tensor));
  }

 protected:
  using Places = c10::SmallVector<size_t, 4>;

  struct TensorArgument {  // a tensor among the arguments
    size_t argument, item;
    const Tensor* tensor;  // valid until the operation has run
    uintptr_t key;
  };

  void from_python() {
    py::gil_scoped_acquire gil;
    if (!director_.is_none()) at_ = PyLong_AsSize_t(classes->director.at(director_));
    order_ = PyLong_AsLong(classes->tape.order(tape_));
    python_ran_ = false;
  }

  OnDemand* on_demand() const { return replays_->on_demand.get(); }

  bool evicts_any() const { return PyDict_GET_SIZE(replayable_.ptr()) != 0; }

  void run(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    static const DispatchKeySet below(DispatchKeySet::FULL_AFTER, OURS);
    Unseen unseen;
    op.redispatchBoxed(keys & below, stack);
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
  virtual void run_recorded(const OperatorHandle& op, DispatchKeySet keys, Stack* stack,
                            const TensorArgument*) {
    py::gil_scoped_release others;
    run(op, keys, stack);
  }

  // Whether a second run of an operation gave the results of the first, and the same updated target. Only a
  // profiled step makes one.
  virtual bool reproduces(const Operation&, const Tensors&, const Tensor&) { return true; }

  // An operation has run, and wrote something.
  virtual void write_down(const Tensors&, const Places&) {}

  // ---- operations that are not recorded ----------------------------------------------------------

  bool pass(const Operation& known, const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    bool trains = !known.statistics.empty() &&
        (known.training < 0 || (*stack)[first_ + known.training].toBool());
    if (overwrites_known(known.writes) || (trains && overwrites_known(known.statistics))) return false;
    run(op, keys, stack);
    bool wrote = !known.writes.empty();
    for (size_t at = first_; at < stack->size() && !wrote; ++at) {
      each_tensor((*stack)[at], [&](const Tensor& result, size_t) { return !(wrote = is_new(result)); });
    }
    if (wrote) ++at_;
    if (hooks_.in() && !evicts_any()) hooks_.take_out();
    return true;
  }

  bool overwrites_known(const std::vector<size_t>& arguments) const {
    if (arguments.empty()) return false;
    py::gil_scoped_acquire gil;
    for (auto& one : tensors_) {
      if (std::find(arguments.begin(), arguments.end(), one.argument) == arguments.end()) continue;
      py::int_ key(one.key);
      if (entry_of(replayable_, key) || entry_of(sources_, key) || entry_of(blank_, key)) return true;
    }
    return false;
  }

  // ---- operations that are recorded --------------------------------------------------------------

  bool record(const Operation& known, const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    py::gil_scoped_acquire gil;
    if (blank_.size()) return false;
    const TensorArgument* target = target_of(known);
    if (target == nullptr && !known.writes.empty()) return false;
    const Tensor updated = target == nullptr ? Tensor() : *target->tensor;
    c10::SmallVector<py::object, 4> inputs;
    py::object call = Boxed<RecordedCall>::of(op);
    if (!describe(*Boxed<RecordedCall>::in(call), *stack, inputs)) return false;
    if (on_demand()) on_demand()->relieve_if_short();
    run_recorded(op, keys, stack, target);
    Tensors results = flat_results(*stack, first_);
    Places places = new_among(results);
    if (places.empty() && target == nullptr) return true;
    bool again = reproduces(known, results, updated);
    write_down(results, places);
    if (!again) {
      if (target != nullptr) update(py::none(), updated, false);
      return true;
    }
    if (on_demand()) {
      for (size_t at : places) on_demand()->note_allocated(results[at].storage().nbytes());
    }
    bool same = places.size() + (target != nullptr) == known.stored.size();
    if (!same && !program_->any) skips();
    ++at_;
    py::object node = new_node(known.func, order_++, std::move(call));
    reads(node, inputs);
    c10::SmallVector<py::object, 4> outputs;
    for (size_t at = 0; at < places.size(); ++at) {
      if (same && known.stored[at]) continue;
      outputs.push_back(pair_of(py::int_(places[at]), weak(register_value(node, results[places[at]], 0))));
    }
    classes->node.outputs.set(node, tuple_of(outputs));
    if (target != nullptr) update(node, updated, !same || !known.stored.back());
    if (evicts_any()) hooks_.put_in();
    return true;
  }

  // What the call overwrites, if its value is recomputable; or null.
  const TensorArgument* target_of(const Operation& known) const {
    const TensorArgument* target = nullptr;
    for (auto& one : tensors_) {
      if (known.writes.empty() || one.argument != known.writes[0]) continue;
      if (target != nullptr) return nullptr;  // a list
      target = &one;
    }
    bool found = target != nullptr && entry_of(replayable_, py::int_(target->key));
    return found ? target : nullptr;
  }

  // The call has overwritten a value: from here on its tensor shows another.
  void update(const py::object& node, const Tensor& tensor, bool evicts) {
    py::int_ key(storage_key(tensor));
    auto old = py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(entry_of(replayable_, key), 0));
    if (on_demand()) classes->value.cached.set(old, py::none());
    PyDict_DelItem(replayable_.ptr(), key.ptr());
    if (!evicts) return;
    auto read = py::reinterpret_borrow<py::tuple>(classes->node.inputs(node));
    size_t place = 0;
    while (PyTuple_GET_ITEM(read.ptr(), place) != old.ptr()) ++place;
    py::object made = register_value(node, tensor, PyLong_AsLongLong(classes->value.extent(old)));
    classes->node.updated.set(node, py::make_tuple(pair_of(py::int_(place), weak(made))));
  }

  // Records the call about to be made and the values that it reads; false where Python has to.
  bool describe(RecordedCall& call, const Stack& stack, c10::SmallVector<py::object, 4>& inputs) {
    call.arguments.reserve(stack.size() - first_);
    for (size_t at = first_; at < stack.size(); ++at) call.add(stack[at]);
    call.places.reserve(tensors_.size());
    for (auto& one : tensors_) {
      if (is_number(stack[first_ + one.argument])) continue;
      py::object value = value_of(*one.tensor, one.key);
      if (!value) return false;
      size_t input = 0;
      while (input < inputs.size() && inputs[input].ptr() != value.ptr()) ++input;
      if (input == inputs.size()) inputs.push_back(std::move(value));
      call.places.push_back({one.argument, one.item, input, Geometry(*one.tensor)});
    }
    return true;
  }

  // The present value of a tensor, or null where Python has to find it.
  virtual py::object value_of(const Tensor& tensor, uintptr_t storage) {
    auto& v = classes->value;
    py::int_ key(storage);
    if (PyObject* entry = entry_of(replayable_, key)) {
      PyObject* value = PyTuple_GET_ITEM(entry, 0);
      bool ours = is_node(v.node(value));
      return ours ? py::reinterpret_borrow<py::object>(value) : py::object();
    }
    if (py::object value = source_of(key)) return value;
    py::object value = held_value(tensor);
    sources_[key] = weak(value);
    return value;
  }

  // Of a storage that replays start from the value, if it was not written since; or null.
  py::object source_of(const py::int_& key) const {
    if (PyObject* reference = entry_of(sources_, key)) {
      py::object value = behind(reference);
      if (!value.is_none() && classes->value.held(value) != Py_None && is_as_recorded(value)) return value;
    }
    return {};
  }

  void skips() {  // another operation ran in place of the program's
    auto& skipped = classes->director.skipped;
    skipped.set(director_, py::int_(PyLong_AsLong(skipped(director_)) + 1));
  }

  void reads(const py::object& node, c10::SmallVector<py::object, 4>& inputs) {
    auto& n = classes->node;
    for (const py::object& input : inputs) {
      add_reader(input);
      PyObject* writer = classes->value.node(input);
      if (writer != Py_None && n.exact(writer) != Py_True) n.exact.set(node, py::bool_(false));
    }
    RecordedCall& call = *call_of(node);
    call.inputs = tuple_of(inputs);
    call.waits = true;
    n.inputs.set(node, call.inputs);
  }

  // Registers the value of a tensor as recomputable by the node that wrote it, for as long as its storage
  // lives. The number, which only a profiled step uses, is the extent: bytes of the storage that were
  // written.
  virtual py::object register_value(const py::object& node, const Tensor& tensor, int64_t) {
    py::int_ key(storage_key(tensor));
    auto callback = function_of<&forget>("forget", pair_of(replayable_, key));
    py::object value = new_value(node, tensor);
    replayable_[key] = pair_of(value, weak(owned(THPStorage_Wrap(tensor.storage())), callback));
    return value;
  }

  static PyObject* forget(PyObject* self, PyObject*) {
    if (PyDict_DelItem(PyTuple_GET_ITEM(self, 0), PyTuple_GET_ITEM(self, 1))) PyErr_Clear();
    Py_RETURN_NONE;
  }

  std::shared_ptr<Program> program_;
  std::shared_ptr<Replays> replays_ = std::make_shared<Replays>();
  py::object tape_, director_, pack_;
  py::dict replayable_, sources_, blank_;
  Hooks hooks_;
  bool python_ran_ = false;
  size_t at_ = 0, first_ = 0;  // places: in the program; of the first argument on the stack
  long order_ = 0;
  long ran_[2] = {0, 0};  // how many operations it ran: without gradients, with them
  c10::SmallVector<TensorArgument, 8> tensors_;
};

}  // namespace lowtide
