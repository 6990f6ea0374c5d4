// The recorder of a profiled step: it writes operations down, too, as lowtide.trace.tracer.Tracer.add_writer.
// It measures and verifies the first calls of each form (an operation with arguments of the same shapes,
// strides, types and numbers) as lowtide.run.profile.costs does.
#pragma once

#include <torch/csrc/DynamicTypes.h>

#include "recorder.h"
#include "traced.h"

namespace lowtide {

struct ProfilerCalls {  // functions of Python, which do not hold the profiler
  py::object register_storage;  // a tensor's, that is there already: returns the reference to it
  py::object end_storage;       // which has ended
  py::object note_node;         // the operation with that index runs in a backward
  py::object note_meeting;      // and perhaps adds to a first tensor the gradient of another node
  py::object note_others;       // results that are no plain tensors: what was made of plain ones
  py::object note_overwritten;  // a list of tensors
  py::object keep_overwritten;  // what is saved of these, before anything else runs
  py::object note_finding;      // the name of an operation that does not reproduce, and why
  py::object digest;            // of a tensor's first bytes
};

class ProfileRecorder : public Recorder {
 public:
  using Digest = int64_t (*)(const void*, int64_t);

  // Of a profiler in Python: its tracer; collectives under way; writes to what was saved, which are to be
  // looked at; its functions. digest: the address of a function of few bytes of main memory and how many, or
  // 0. Of calls of one form so many `runs` are measured, and run twice, where the tape verifies. meter: says
  // what a call takes, in main memory.
  ProfileRecorder(std::shared_ptr<Tape> tape, std::shared_ptr<Governor> governor, py::object pack,
                  py::object tracer, py::dict begun, py::list written, const ProfilerCalls& profiler,
                  uintptr_t digest, const std::vector<uintptr_t>& meter, Py_ssize_t runs)
      : Recorder(std::move(tape), std::move(governor), std::move(pack), nullptr, false),
        digest_(reinterpret_cast<Digest>(digest)),
        meter_(meter),
        on_cpu_(py::str(tracer.attr("device").attr("type")).equal(py::str("cpu"))),
        runs_(runs),
        parts_(std::make_unique<Parts>(std::move(tracer), std::move(begun), std::move(written), profiler)) {}

  ~ProfileRecorder() override {
    py::gil_scoped_acquire gil;
    pack_hook = py::object();
    parts_.reset();
  }

  py::object pack_hook;  // as autograd calls it

  bool takes(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) override {
    py::gil_scoped_acquire gil;
    Unseen unseen;  // Python copies what replays start from
    absorb();
    Parts& p = *parts_;
    if (PyList_GET_SIZE(p.written.ptr())) p.profiler.keep_overwritten();
    backward_ = torch::autograd::get_current_graph_task_id() != -1;
    forward_ = is_true(traced->tracer.in_forward(p.tracer));
    const Fact& fact = facts.of(op);
    first_ = stack->size() - fact.arguments;
    if (!is_ours(fact, *stack) || !p.is_quiet() || !note_call(op.schema(), *stack)) return false;
    py::object& cost = p.costs[form_];
    if (!cost) cost = traced->cost.type();
    p.cost = cost;
    find_reads(fact, op, *stack);
    bool records = forward_ || (backward_ && c10::GradMode::is_enabled() && governor());
    bool took = records && (forward_ || is_recorded_in_backward(fact))
        ? record(fact, nullptr, op, keys, stack, backward_)
        : run_aside(fact, op, keys, stack);
    p.overwritten.clear();
    p.first.reset();
    second_.clear();
    if (took && forward_) ++ran_[c10::GradMode::is_enabled()];
    return took;
  }

  std::pair<py::object, py::object> hooks() override { return {pack_hook, Recorder::hooks().second}; }

  bool learns() const override { return false; }  // they run twice

  py::object save(const Tensor& tensor) override {  // null, too, where the value was overwritten unseen
    Value* value = tape().replayable(storage_key(tensor));
    return value == nullptr || is_as_written(*value, tensor) ? Recorder::save(tensor) : py::object();
  }

 protected:
  ValuePtr value_of(const Tensor& tensor, uintptr_t storage) override {  // or null, where Python has to
    Value* value = tape().replayable(storage);
    if (value != nullptr && !is_as_written(*value, tensor)) return {};
    return tape().value_of(tensor);
  }

  int64_t extent_of(const Tensor& tensor) override { return reach(tensor); }

  void registered(Value& value, const Tensor& tensor) override {
    if (!tape().verify) return;
    value.digest = digest_of(tensor, value.extent);
    value.has_digest = true;
  }

  void write_down(const Fact& fact, const Tensors& results, const Places& places) override {
    Parts& p = *parts_;
    auto& o = traced->operation;
    std::vector<Tensor> others = made_of_others(fact, results);
    if (places.empty() && others.empty() && p.overwritten.empty()) return;
    py::int_ index(PyList_GET_SIZE(p.operations.ptr()));
    c10::SmallVector<py::object, 4> writes;
    auto note_made = [&](const Tensor& tensor) {
      if (py::object made = p.register_storage(tensor, phase(), index)) writes.push_back(std::move(made));
    };
    for (size_t at : places) note_made(results[at]);
    for (const Tensor& tensor : others) note_made(tensor);
    for (const Tensor& tensor : p.overwritten) writes.push_back(p.next_version(tensor, index));
    py::object made = fresh(o.type);
    o.name.set(made, fact.name);
    o.phase.set(made, phase());
    o.random.set(made, py::bool_(false));
    o.reason.set(made, forward_ ? traced->nothing : traced->outside);
    o.region.set(made, py::none());
    o.reads.set(made, tuple_of(p.reads));
    o.writes.set(made, tuple_of(writes));
    o.module.set(made, p.module(backward_));
    o.source.set(made, backward_ ? py::object(traced->nothing) : traced->calling_line(p.files));
    p.operations.append(made);
    p.signatures.append(p.cost);
    p.events.append(pair_of(traced->op, index));
    if (backward_) p.profiler.note_node(index);
    if (p.first.defined()) p.profiler.note_meeting(index, wrapped(p.first));
    if (!p.overwritten.empty()) {
      py::list overwritten;
      for (const Tensor& tensor : p.overwritten) overwritten.append(wrapped(tensor));
      p.profiler.note_overwritten(overwritten);
    }
  }

 private:
  static bool is_true(PyObject* object) { return PyObject_IsTrue(object) == 1; }

  struct Parts {  // goes where the interpreter's lock is held
    py::object tracer;
    py::dict begun;
    py::list written;
    ProfilerCalls profiler;
    py::dict known{of(traced->tracer.known)}, handed_out{of(traced->tracer.handed_out)},
        files{of(traced->tracer.files)};
    py::list scopes{of(traced->tracer.scopes)}, modules{of(traced->tracer.modules)},
        operations{of(traced->tracer.operations)}, storages{of(traced->tracer.storages)},
        values{of(traced->tracer.values)}, events{of(traced->tracer.events)},
        signatures{of(traced->tracer.signatures)};
    std::unordered_map<std::string, py::object> costs;  // by form
    // Of the call that runs:
    py::object cost;                        // of its form
    c10::SmallVector<py::object, 4> reads;  // ids of the values that it reads
    Tensors overwritten;
    Tensor first;  // the gradient that it adds another one to, where it may do so in place; else undefined

    Parts(py::object tracer, py::dict begun, py::list written, const ProfilerCalls& profiler)
        : tracer(std::move(tracer)),
          begun(std::move(begun)),
          written(std::move(written)),
          profiler(profiler) {}

    py::object of(const Slot& slot) const { return py::reinterpret_borrow<py::object>(slot(tracer)); }

    // No scope is open, no collective is under way, and no code runs whose operations nobody sees.
    bool is_quiet() const {
      auto& t = traced->tracer;
      return !PyList_GET_SIZE(scopes.ptr()) && !PyDict_GET_SIZE(begun.ptr()) && !is_true(t.closed(tracer)) &&
          !is_true(t.opaque(tracer)) && !is_true(t.left_bytes(tracer));
    }

    py::object module(bool backward) const {  // its name
      if (backward) return of(traced->tracer.backward_module);
      Py_ssize_t depth = PyList_GET_SIZE(modules.ptr());
      if (!depth) return traced->nothing;
      return py::reinterpret_borrow<py::object>(PyList_GET_ITEM(modules.ptr(), depth - 1));
    }

    py::object storage_of(const Tensor& tensor) const {
      if (PyObject* found = entry_of(known, py::int_(storage_key(tensor))))
        return py::reinterpret_borrow<py::object>(found);
      return profiler.register_storage(wrapped(tensor));
    }

    py::object value_of(const Tensor& tensor) const {  // its id
      if (PyObject* found = entry_of(handed_out, py::int_(storage_key(tensor))))
        return py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(found, 0));
      return py::reinterpret_borrow<py::object>(traced->reference.value(storage_of(tensor)));
    }

    // Notes a storage that an operation has made; the id of its value, or null where it is known.
    py::object register_storage(const Tensor& tensor, const py::object& phase, const py::int_& index) {
      auto& r = traced->reference;
      auto& s = traced->storage;
      py::int_ key(storage_key(tensor));
      if (entry_of(known, key)) return {};
      if (!tensor.is_cpu())  // its bytes are none of the step's
        return py::reinterpret_borrow<py::object>(
            traced->reference.value(profiler.register_storage(wrapped(tensor), index)));
      auto storage = owned(THPStorage_Wrap(tensor.storage()));
      auto made = owned(PyObject_CallFunctionObjArgs(r.type.ptr(), storage.ptr(), profiler.end_storage.ptr(),
                                                     nullptr));
      py::int_ number(PyList_GET_SIZE(storages.ptr()));
      py::object whole = fresh(s.type);
      s.id.set(whole, number);
      s.bytes.set(whole, py::int_(tensor.storage().nbytes()));
      s.kind.set(whole, phase);
      s.producer.set(whole, index);
      s.name.set(whole, traced->nothing);
      storages.append(whole);
      r.key.set(made, key);
      r.number.set(made, number);
      r.phase.set(made, phase);
      r.resized.set(made, py::bool_(false));
      r.gathered.set(made, py::bool_(false));
      known[key] = made;
      return new_version(tensor, made, py::int_(0), index);
    }

    py::object next_version(const Tensor& tensor, const py::int_& index) {
      py::object storage = storage_of(tensor);
      auto before = PyLong_AsSsize_t(traced->reference.value(storage));
      long version = PyLong_AsLong(traced->version.version(PyList_GET_ITEM(values.ptr(), before)));
      return new_version(tensor, storage, py::int_(version + 1), index);
    }

    py::object new_version(const Tensor& tensor, py::handle storage, py::object version, py::object index) {
      auto& v = traced->version;
      py::object made = fresh(v.type);
      auto* dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type()));
      v.storage.set(made, py::reinterpret_borrow<py::object>(traced->reference.number(storage)));
      v.version.set(made, std::move(version));
      v.producer.set(made, std::move(index));
      v.shape.set(made, py::tuple(py::cast(tensor.sizes().vec())));
      v.dtype.set(made, py::reinterpret_borrow<py::object>(dtype));
      py::int_ id(PyList_GET_SIZE(values.ptr()));
      values.append(made);
      traced->reference.value.set(storage, id);
      return id;
    }
  };

  const py::object& phase() const { return backward_ ? traced->backward : traced->forward; }

  // Whether a call is written down here. In the forward Python writes down what user code asks for values,
  // and what may depend on more than its arguments, so that each call of it is verified.
  bool is_ours(const Fact& fact, const Stack& stack) const {
    if (!on_cpu_ || fact.ignored || fact.drops_out(stack, first_)) return false;
    if (!forward_) return fact.plain || fact.uninitialized;
    return fact.plain && !fact.reads_values && (fact.of_aten || !tape().verify) && !backward_ && is_on_top();
  }

  // Whether nothing that it overwrites is unknown to the tape.
  bool is_recorded_in_backward(const Fact& fact) const {
    return fact.plain && (fact.writes.empty() || target_of(fact) != nullptr);
  }

  bool run_aside(const Fact& fact, const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    run_measured(true, op, keys, stack);  // it is not recorded
    Tensors results = flat_results(*stack, first_);
    write_down(fact, results, new_among(results));
    return true;
  }

  // What a call made beside plain tensors, as Python takes it apart.
  std::vector<Tensor> made_of_others(const Fact& fact, const Tensors& results) {
    py::list others;
    for (const Tensor& result : results) {
      if (result.defined() && !plain(result)) others.append(wrapped(result));
    }
    if (!PyList_GET_SIZE(others.ptr())) return {};
    return parts_->profiler.note_others(fact.name, others).cast<std::vector<Tensor>>();
  }

  // Whether autograd's engine may call: it adds the gradients of two nodes.
  bool may_be_meeting(const OperatorHandle& op, const Stack& stack) const {
    static const OperatorHandle& add =
        *new OperatorHandle(c10::Dispatcher::singleton().findSchemaOrThrow("aten::add", "Tensor"));
    if (!backward_ || op != add || tensors_.size() != 2) return false;
    return stack.back().isInt() && stack.back().toInt() == 1;  // as it is by default
  }

  void find_reads(const Fact& known, const OperatorHandle& op, const Stack& stack) {
    Parts& p = *parts_;
    p.reads.clear();
    p.overwritten.clear();  // an operation may have failed
    p.first.reset();
    if (may_be_meeting(op, stack)) p.first = *tensors_[0].tensor;
    c10::SmallVector<long, 4> ids;
    for (auto& one : tensors_) {
      bool written = std::find(known.writes.begin(), known.writes.end(), one.argument) != known.writes.end();
      if (written) p.overwritten.push_back(*one.tensor);
      py::object value = p.value_of(*one.tensor);
      long id = PyLong_AsLong(value.ptr());
      if (std::find(ids.begin(), ids.end(), id) != ids.end()) continue;
      ids.push_back(id);
      p.reads.push_back(std::move(value));
    }
  }

  // ---- measured and verified ----------------------------------------------------------------------

  // Runs a call of the present form, and adds what it took to the form's costs, if they have too few runs:
  // lowtide.run.profile.costs.CostMeter.measure.
  template <class Call>
  void measure(bool warm, Call call) {
    const auto& c = traced->cost;
    py::handle cost = parts_->cost, cold = c.cold(cost), warms = c.warm(cost);
    bool is_first = !PyList_GET_SIZE(warms.ptr());
    warm = warm && (!is_first || PyList_GET_SIZE(cold.ptr()));
    py::handle runs = warm ? warms : cold;
    if (PyList_GET_SIZE(runs.ptr()) >= runs_) {
      py::gil_scoped_release others;
      call();
      return;
    }
    double seconds = 0;
    int64_t scratch = 0;
    {
      py::gil_scoped_release others;
      Measured measured(meter_);
      call();
      seconds = measured.seconds();
      scratch = measured.scratch_bytes() + number_bytes_;
    }
    py::reinterpret_borrow<py::list>(runs).append(seconds);
    if (!warm && !is_first) return;
    int64_t most = warm && is_first ? 0 : PyLong_AsLongLong(c.scratch(cost));
    c.scratch.set(cost, py::int_(std::max(most, scratch)));
  }

  double run_measured(bool warm, const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    return run_governed(op, stack, [&] { measure(warm, [&] { run_below(op, keys, stack); }); });
  }

  // The arguments of a second run are noted before the first, with a copy of what that overwrites.
  double run_recorded(const OperatorHandle& op, DispatchKeySet keys, Stack* stack,
                      const TensorArgument* target) override {
    second_.clear();
    if (tape().verify && PyLong_AsLong(traced->cost.reproduced(parts_->cost)) < runs_) {
      second_.assign(stack->begin() + static_cast<std::ptrdiff_t>(first_), stack->end());
      if (target != nullptr) {
        const Tensor& now = *target->tensor;
        second_[target->argument] = at::empty_strided(now.sizes(), now.strides(), now.options()).copy_(now);
      }
    }
    return run_measured(false, op, keys, stack);
  }

  bool reproduces(const OperatorHandle& op, const Fact& known, const Tensors& results,
                  const Tensor& updated) override {
    if (second_.empty()) return true;
    Tensor copy = updated.defined() ? second_[known.writes[0]].toTensor() : Tensor();
    if (governor() && !has_room(op)) {  // what was never seen to reproduce stays
      second_.clear();
      return PyLong_AsLong(traced->cost.reproduced(parts_->cost)) > 0;
    }
    std::string why;
    try {
      Replaying replaying;
      measure(true, [&] { op.callBoxed(second_); });
      Tensors again = flat_results(second_, 0);
      bool same = again.size() == results.size() && (!copy.defined() || same_bytes(updated, copy));
      for (size_t at = 0; same && at < results.size(); ++at) {
        if (known.is_loose(at)) continue;
        same = results[at].defined() == again[at].defined() &&
            (!results[at].defined() || same_bytes(results[at], again[at]));
      }
      if (!same) why = "a second run with equal inputs gave other bytes";
    } catch (const c10::Error& error) {
      why = std::string("its second run raised RuntimeError: ") + error.what_without_backtrace();
    }
    second_.clear();
    if (why.empty()) {
      const Slot& reproduced = traced->cost.reproduced;
      reproduced.set(parts_->cost, py::int_(PyLong_AsLong(reproduced(parts_->cost)) + 1));
      return true;
    }
    parts_->profiler.note_finding(known.name, why);
    return false;
  }

  bool has_room(const OperatorHandle& op) {  // for a second run
    if (governor()->is_open()) return true;
    Form form = governor()->forms()->find(Forms::key_of(op, second_, 0), op, second_, 0);
    return governor()->relieve(form.need_bytes) <= 0;
  }

  static bool same_bytes(const Tensor& a, const Tensor& b) {  // lowtide.run.tensor_bytes.same_bytes
    if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
    bool dense = a.strides() == b.strides() && a.is_non_overlapping_and_dense();
    auto in_order = [&](const Tensor& all) {
      return dense ? all.as_strided({all.numel()}, {1}) : all.contiguous().view({-1});
    };
    Tensor one = in_order(a), other = in_order(b);
    if (one.nbytes() > FEW_BYTES) return at::equal(one.view(at::kByte), other.view(at::kByte));
    return one.numel() == 0 || !std::memcmp(one.const_data_ptr(), other.const_data_ptr(), one.nbytes());
  }

  // ---- bytes -------------------------------------------------------------------------------------

  static int64_t reach(const Tensor& tensor) {  // lowtide.run.tensor_bytes.reach
    if (tensor.numel() == 0) return 0;
    int64_t last = tensor.storage_offset();
    for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
    return (last + 1) * tensor.element_size();
  }

  int64_t digest_of(const Tensor& tensor, int64_t extent) const {
    bool few = digest_ != nullptr && tensor.is_cpu() && extent <= FEW_BYTES;
    if (few) return digest_(tensor.storage().data(), extent);
    return parts_->profiler.digest(wrapped(tensor), extent).cast<int64_t>();
  }

  bool is_as_written(const Value& value, const Tensor& tensor) const {
    return !tape().verify || !value.has_digest || digest_of(tensor, value.extent) == value.digest;
  }

  bool is_on_top() const {  // our hooks are the innermost
    auto& pairs = at::SavedTensorDefaultHooks::get_tls_state().stack;
    return !pairs.empty() && pairs.top().first.ptr(getPyInterpreter()) == pack_hook.ptr();
  }

  // ---- forms -------------------------------------------------------------------------------------

  template <class T>
  void note(const T& number) {
    form_.append(reinterpret_cast<const char*>(&number), sizeof(number));
  }

  void note(at::IntArrayRef numbers) {
    note(numbers.size());
    form_.append(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(int64_t));
  }

  // Notes the form of a call; false where there is more to it than is noted here.
  bool note_call(const c10::FunctionSchema& schema, const Stack& stack) {
    tensors_.clear();
    form_.clear();
    number_bytes_ = 0;
    note(&schema);
    for (size_t at = first_; at < stack.size(); ++at) {
      const IValue& argument = stack[at];
      bool whole = argument.isInt() || argument.isNone();
      if (whole && says_where(schema, at - first_)) continue;
      if (!note_argument(argument, at - first_, 0)) return false;
    }
    return true;
  }

  // Whether an argument says where in a tensor the operation writes, not how much: the tables of
  // lowtide.ops.
  static bool says_where(const c10::FunctionSchema& schema, size_t at) {
    const std::string &name = schema.arguments()[at].name(), &op = schema.name();
    auto writes_part = [&](const std::string& end) { return op.ends_with(end); };
    const auto& names = traced->says_where;
    return std::find(names.begin(), names.end(), name) != names.end() &&
        std::any_of(traced->writes_part.begin(), traced->writes_part.end(), writes_part);
  }

  // Adds an argument to the form; false where there is more to it than is noted here.
  bool note_argument(const IValue& argument, size_t place, size_t item) {
    if (argument.isTensor()) return note_tensor(argument.toTensor(), place, item);
    if (argument.isList()) {
      at::ArrayRef<IValue> items = argument.toListRef();
      note('[');
      note(items.size());
      for (size_t at = 0; at < items.size(); ++at) {
        if (!note_argument(items[at], place, at)) return false;
      }
      return true;
    }
    if (argument.isNone()) return note('-'), true;
    if (argument.isInt()) return note('i'), note(argument.toInt()), true;
    if (argument.isDouble()) return note('d'), note(argument.toDouble()), true;
    if (argument.isBool()) return note(argument.toBool() ? '1' : '0'), true;
    if (argument.isComplexDouble()) return note('c'), note(argument.toComplexDouble()), true;
    if (argument.isDevice()) return note('D'), form_.append(argument.toDevice().str()), true;
    if (!argument.isString()) return false;
    note('s');
    note(argument.toStringView().size());
    form_.append(argument.toStringView());
    return true;
  }

  bool note_tensor(const Tensor& tensor, size_t place, size_t item) {
    if (!tensor.defined()) return note('_'), true;
    note(static_cast<char>(tensor.scalar_type()));
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      note('#');
      form_.append(static_cast<const char*>(tensor.const_data_ptr()), tensor.element_size());
      number_bytes_ += static_cast<int64_t>(tensor.storage().nbytes());
      return true;
    }
    if (!plain(tensor) || !tensor.is_cpu()) return false;
    note('t');
    note(tensor.sizes());
    note(tensor.strides());
    tensors_.push_back({place, item, &tensor, storage_key(tensor)});
    return true;
  }

  static constexpr size_t FEW_BYTES = 1 << 20;  // of more, threads make a digest sooner

  const Digest digest_;
  const Meter meter_;
  const bool on_cpu_;  // the step runs there
  const Py_ssize_t runs_;
  std::string form_;          // of the call that runs
  int64_t number_bytes_ = 0;  // of tensors in place of numbers (`x * 0.5`), which PyTorch made for the call
  Stack second_;      // the arguments of its second run
  bool forward_ = false, backward_ = false;
  std::unique_ptr<Parts> parts_;
};

}  // namespace lowtide
