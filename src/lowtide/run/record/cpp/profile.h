// The recorder of a profiled step: it writes operations down, too, as lowtide.trace.tracer.Tracer.add_writer.
// Python runs the first calls of each form (an operation with arguments of the same shapes, strides, types
// and numbers), measures and verifies them, and has it learn what their later calls share.
#pragma once

#include <torch/csrc/DynamicTypes.h>

#include <string_view>

#include "recorder.h"

namespace lowtide {

struct Traced {  // the classes of what is written down, and slots of lowtide.trace.tracer.Tracer
  struct OfTracer {
    py::object type;
    Slot in_forward{type, "in_forward"}, closed{type, "closed"}, opaque{type, "opaque"},
        left_bytes{type, "left_bytes"}, known{type, "known"}, handed_out{type, "handed_out"},
        scopes{type, "scopes"}, modules{type, "modules"}, backward_module{type, "backward_module"},
        files{type, "files"}, operations{type, "operations"}, storages{type, "storages"},
        values{type, "values"}, events{type, "events"}, signatures{type, "signatures"};
  } tracer;
  struct OfReference {  // to a storage
    py::object type;
    Slot key{type, "key"}, number{type, "number"}, value{type, "value"}, phase{type, "phase"},
        resized{type, "resized"}, gathered{type, "gathered"};
  } reference;
  struct OfStorage {
    py::object type;
    Slot id{type, "id"}, bytes{type, "bytes"}, kind{type, "kind"}, producer{type, "producer"},
        name{type, "name"};
  } storage;
  struct OfVersion {
    py::object type;
    Slot storage{type, "storage"}, version{type, "version"}, producer{type, "producer"},
        shape{type, "shape"}, dtype{type, "dtype"};
  } version;
  struct OfOperation {
    py::object type;
    Slot name{type, "name"}, reads{type, "reads"}, writes{type, "writes"}, phase{type, "phase"},
        module{type, "module"}, random{type, "random"}, reason{type, "reason"}, source{type, "source"},
        region{type, "region"};
  } operation;
  py::object calling_line;
  py::str op{"op"}, nothing{""};
};
inline Traced* traced = nullptr;  // set once per process

struct ProfilerCalls {  // functions of Python, which do not hold the profiler
  py::object register_storage;  // a tensor's, that is there already: returns the reference to it
  py::object end_storage;       // which has ended
  py::object value_of;          // a tensor that a replay will read
  py::object note_node;         // the operation with that index runs in a backward
  py::object note_meeting;      // and perhaps adds to a first tensor the gradient of another node
  py::object note_overwritten;  // a list of tensors
};

class ProfileRecorder : public Recorder {
 public:
  using Digest = int64_t (*)(const void*, int64_t);

  // Of a profiler in Python: its tape and tracer; collectives under way; its functions. `digest` is the
  // address of a function of bytes and how many; 0 where nothing is verified.
  ProfileRecorder(py::object tape, py::object tracer, py::dict begun, const ProfilerCalls& profiler,
                  uintptr_t digest)
      : Recorder(std::move(tape), py::none(), py::none(), std::make_shared<Program>(true), nullptr),
        digest_(reinterpret_cast<Digest>(digest)),
        parts_(std::make_unique<Parts>(std::move(tracer), std::move(begun), profiler)) {}

  ~ProfileRecorder() override {
    py::gil_scoped_acquire gil;
    parts_.reset();
  }

  std::shared_ptr<Program> program() const { return program_; }

  bool sees_backward() const override { return true; }

  bool takes(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) override {
    py::gil_scoped_acquire gil;
    Unseen unseen;  // Python copies what replays start from
    Parts& p = *parts_;
    form_.clear();
    if (python_ran_) from_python();
    backward_ = torch::autograd::get_current_graph_task_id() != -1;
    bool forward = is_true(traced->tracer.in_forward(p.tracer));
    if ((forward && (backward_ || !hooks_.on_top())) || !p.is_quiet()) return false;
    const auto& schema = op.schema();
    first_ = stack->size() - schema.arguments().size();
    tensors_.clear();
    note(&schema);
    note(forward + 2 * backward_);
    for (size_t at = first_; at < stack->size(); ++at) {
      const IValue& argument = (*stack)[at];
      bool where = (argument.isInt() || argument.isNone()) && says_where(schema, at - first_);
      if (where || note_argument(argument, at - first_, 0)) continue;
      form_.clear();
      return false;
    }
    auto found = p.forms.find(form_);
    if (found == p.forms.end()) {
      asked_ = std::this_thread::get_id();
      return false;
    }
    form_.clear();
    p.like = found->second;
    const Operation& known = *program_->next(0, op);
    find_reads(known);
    bool took = forward ? record(known, op, keys, stack) : run_aside(op, keys, stack);
    p.overwritten.clear();
    p.first.reset();
    if (took && forward) ++ran_[c10::GradMode::is_enabled()];
    return took;
  }

  // The call that Python has just run was written down as `operation`, if it wrote anything; all of its form
  // cost the same, and are written down alike. They may add up the gradients of two nodes.
  void learn(py::object operation, py::object cost, bool adds_up) {
    if (!form_.empty() && asked_ == std::this_thread::get_id())
      parts_->forms.emplace(std::exchange(form_, {}), Form{std::move(operation), std::move(cost), adds_up});
  }

  void turn(bool on_now) override {
    form_.clear();
    Recorder::turn(on_now);
  }

 protected:
  py::object value_of(const Tensor& tensor, uintptr_t storage) override {
    auto& v = classes->value;
    py::int_ key(storage);
    if (PyObject* entry = entry_of(replayable_, key)) {
      py::handle value = PyTuple_GET_ITEM(entry, 0);
      bool ours = is_node(v.node(value)) && v.cached(value) == Py_None;
      if (!ours || !is_as_written(value, tensor)) return {};
      return py::reinterpret_borrow<py::object>(value);
    }
    if (py::object value = source_of(key)) return value;
    return parts_->profiler.value_of(wrapped(tensor));
  }

  py::object register_value(const py::object& node, const Tensor& tensor, int64_t extent) override {
    auto& v = classes->value;
    py::int_ key(storage_key(tensor));
    py::object value = new_value(node, tensor);
    extent = std::max(extent, reach(tensor));
    v.extent.set(value, py::int_(extent));
    if (digest_) v.digest.set(value, py::int_(digest_(tensor.storage().data(), extent)));
    if (entry_of(replayable_, key)) PyDict_DelItem(replayable_.ptr(), key.ptr());  // the newest come last
    replayable_[key] = py::make_tuple(value, py::handle(entry_of(parts_->known, key)));
    return value;
  }

  void write_down(const Tensors& results, const Places& places) override {
    Parts& p = *parts_;
    auto& o = traced->operation;
    py::int_ index(PyList_GET_SIZE(p.operations.ptr()));
    c10::SmallVector<py::object, 4> writes;
    for (size_t at : places) {
      if (py::object made = p.register_storage(results[at], index)) writes.push_back(std::move(made));
    }
    for (const Tensor& tensor : p.overwritten) writes.push_back(p.next_version(tensor, index));
    py::object made = fresh(o.type);
    for (const Slot* slot : {&o.name, &o.phase, &o.random, &o.reason, &o.region})
      slot->set(made, py::reinterpret_borrow<py::object>((*slot)(p.like.operation)));
    o.reads.set(made, tuple_of(p.reads));
    o.writes.set(made, tuple_of(writes));
    o.module.set(made, p.module(backward_));
    o.source.set(made, backward_ ? py::object(traced->nothing) : traced->calling_line(p.files));
    p.operations.append(made);
    p.signatures.append(p.like.cost);
    p.events.append(py::make_tuple(traced->op, index));
    if (backward_) p.profiler.note_node(index);
    if (p.first.defined()) p.profiler.note_meeting(index, wrapped(p.first));
    if (!p.overwritten.empty()) {
      py::list overwritten;
      for (const Tensor& tensor : p.overwritten) overwritten.append(wrapped(tensor));
      p.profiler.note_overwritten(overwritten);
    }
  }

 private:
  struct Form {
    py::object operation, cost;
    bool adds_up = false;
  };

  static bool is_true(PyObject* object) { return PyObject_IsTrue(object) == 1; }

  struct Parts {  // goes where the interpreter's lock is held
    py::object tracer;
    py::dict begun;
    ProfilerCalls profiler;
    py::dict known{of(traced->tracer.known)}, handed_out{of(traced->tracer.handed_out)},
        files{of(traced->tracer.files)};
    py::list scopes{of(traced->tracer.scopes)}, modules{of(traced->tracer.modules)},
        operations{of(traced->tracer.operations)}, storages{of(traced->tracer.storages)},
        values{of(traced->tracer.values)}, events{of(traced->tracer.events)},
        signatures{of(traced->tracer.signatures)};
    std::unordered_map<std::string, Form> forms;
    Form like;  // of the call that runs; so are these: ids of what it reads, what it overwrites, and adds to
    c10::SmallVector<py::object, 4> reads;
    Tensors overwritten;
    Tensor first;

    Parts(py::object tracer, py::dict begun, const ProfilerCalls& profiler)
        : tracer(std::move(tracer)), begun(std::move(begun)), profiler(profiler) {}

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
    py::object register_storage(const Tensor& tensor, const py::int_& index) {
      auto& r = traced->reference;
      auto& s = traced->storage;
      py::int_ key(storage_key(tensor));
      if (entry_of(known, key)) return {};
      auto storage = owned(THPStorage_Wrap(tensor.storage()));
      auto made = owned(PyObject_CallFunctionObjArgs(r.type.ptr(), storage.ptr(), profiler.end_storage.ptr(),
                                                     nullptr));
      auto phase = py::reinterpret_borrow<py::object>(traced->operation.phase(like.operation));
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

  bool run_aside(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {  // it is not recorded
    {
      py::gil_scoped_release others;
      run(op, keys, stack);
    }
    Tensors results = flat_results(*stack, first_);
    Places places = new_among(results);
    if (!places.empty() || !parts_->overwritten.empty()) write_down(results, places);
    return true;
  }

  void find_reads(const Operation& known) {
    Parts& p = *parts_;
    p.reads.clear();
    if (p.like.adds_up) p.first = *tensors_[0].tensor;
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

  // ---- bytes -------------------------------------------------------------------------------------

  static int64_t reach(const Tensor& tensor) {  // lowtide.run.digest.reach
    if (tensor.numel() == 0) return 0;
    int64_t last = tensor.storage_offset();
    for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
    return (last + 1) * tensor.element_size();
  }

  bool is_as_written(py::handle value, const Tensor& tensor) const {
    PyObject* digest = classes->value.digest(value);
    if (!digest_ || digest == Py_None) return true;
    int64_t extent = PyLong_AsLongLong(classes->value.extent(value));
    return digest_(tensor.storage().data(), extent) == PyLong_AsLongLong(digest);
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

  // Whether an argument says where in a tensor the operation writes, not how much: lowtide.ops.
  static bool says_where(const c10::FunctionSchema& schema, size_t at) {
    std::string_view name = schema.arguments()[at].name(), op = schema.name();
    bool places = op.ends_with("_backward") || op.ends_with("_scatter");
    return places && (name == "index" || name == "start" || name == "end");
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
    if (argument.isBool()) return note('b'), note(argument.toBool()), true;
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
    note(tensor.scalar_type());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      note('#');
      form_.append(static_cast<const char*>(tensor.const_data_ptr()), tensor.element_size());
      return true;
    }
    if (!plain(tensor) || !tensor.is_cpu() || tensor.storage().nbytes() > FEW_BYTES) return false;
    note('t');
    note(tensor.sizes());
    note(tensor.strides());
    tensors_.push_back({place, item, &tensor, storage_key(tensor)});
    return true;
  }

  static constexpr size_t FEW_BYTES = 1 << 20;  // of more, threads make a digest sooner

  const Digest digest_;
  std::string form_;  // of a call that Python is about to run
  std::thread::id asked_;
  bool backward_ = false;
  std::unique_ptr<Parts> parts_;
};

}  // namespace lowtide
