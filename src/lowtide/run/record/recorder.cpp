// The compiled half of the recorder: for the operations that a plan's program names and that need no closer
// look, what lowtide.run.record.recorder and lowtide.run.record.tape do in Python. They stay the reference:
// whatever is not plain here (another operation than the program has next, writes to what is known, random
// numbers, subclasses) goes there. Both halves work on the same objects: the recorder's tables, and the slots
// of LiveValue and Node.

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <structmember.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>
#include <unordered_map>
#include <unordered_set>

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

namespace {

constexpr auto OURS = DispatchKey::Fake;
constexpr auto PYTHON = DispatchKey::TESTING_ONLY_GenericWrapper;  // where Python's kernels stand
const DispatchKeySet BELOW(DispatchKeySet::FULL_AFTER, OURS);

using Clock = std::chrono::steady_clock;

// Names in Python ------------------------------------------------------------------------------------

struct Slot {
  Py_ssize_t offset = 0;
  void find(const py::handle& type, const char* name) {
    offset = reinterpret_cast<PyMemberDescrObject*>(type.attr(name).ptr())->d_member->offset;
  }
  PyObject*& of(PyObject* object) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
  }
  PyObject* operator()(py::handle object) const { return of(object.ptr()); }
  void set(py::handle object, py::object value) const {
    PyObject*& place = of(object.ptr());
    PyObject* before = std::exchange(place, value.release().ptr());
    Py_XDECREF(before);
  }
};

struct Names {
  py::object value_type, node_type, pack, unpack, bring_back, overwritten;
  Slot v_node, v_nbytes, v_extent, v_held, v_version, v_cached, v_readers, v_digest;
  Slot n_func, n_order, n_device, n_exact, n_args, n_kwargs, n_written, n_outputs, n_statistics, n_random,
      n_generator, n_grad, n_claimed, n_waits, n_inputs, n_call;
};
Names* names = nullptr;  // the classes are known once per process

py::object none() { return py::none(); }

PyTypeObject* kind_of(py::handle type) { return reinterpret_cast<PyTypeObject*>(type.ptr()); }

py::object fresh(PyTypeObject* kind) {
  PyObject* made = kind->tp_alloc(kind, 0);
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

py::object wrapped(const Tensor& tensor) {
  PyObject* made = THPVariable_Wrap(tensor);
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

py::object weak(py::handle object, py::handle callback = py::handle()) {
  PyObject* made = PyWeakref_NewRef(object.ptr(), callback.ptr());
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

py::object behind(py::handle reference) { return py::reinterpret_borrow<py::object>(reference)(); }

PyObject* entry_of(const py::dict& table, uintptr_t key) {  // borrowed, or null
  if (PyDict_GET_SIZE(table.ptr()) == 0) return nullptr;  // as where all stays
  return PyDict_GetItem(table.ptr(), py::int_(key).ptr());
}

// A C++ object that Python holds and does not look into.
template <class T>
struct Boxed {
  PyObject_HEAD
  T content;

  static inline PyTypeObject* type = nullptr;

  static void make_type(const char* name) {
    PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(+[](PyObject* self) {
                              reinterpret_cast<Boxed*>(self)->content.~T();
                              PyTypeObject* kind = Py_TYPE(self);
                              kind->tp_free(self);
                              Py_DECREF(kind);
                            })},
                           {0, nullptr}};
    PyType_Spec spec{name, sizeof(Boxed), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
    type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  }

  template <class... Arguments>
  static py::object of(Arguments&&... arguments) {
    py::object made = fresh(type);
    new (&reinterpret_cast<Boxed*>(made.ptr())->content) T(std::forward<Arguments>(arguments)...);
    return made;
  }

  static T* in(py::handle object) {  // or null
    return Py_TYPE(object.ptr()) == type ? &reinterpret_cast<Boxed*>(object.ptr())->content : nullptr;
  }
};

// Tensors --------------------------------------------------------------------------------------------

uintptr_t storage_key(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
}

const DispatchKeySet STRANGE = DispatchKeySet(
    {DispatchKey::Python, DispatchKey::Conjugate, DispatchKey::Negative, DispatchKey::ZeroTensor,
     DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper, DispatchKey::Functionalize});

bool plain(const Tensor& t) {
  return t.layout() == at::kStrided && !t.is_nested() && !t.is_quantized() && t.has_storage() &&
      !t.is_inference() && (t.key_set() & STRANGE).empty();
}

Tensor alias_of(const Tensor& t) {  // shares the version counter, and knows no history
  auto* impl = t.unsafeGetTensorImpl();
  return Tensor(impl->shallow_copy_and_detach(impl->version_counter(), false));
}

struct Geometry {
  c10::DimVector sizes, strides;
  int64_t offset;
  at::ScalarType dtype;

  explicit Geometry(const Tensor& t)
      : sizes(t.sizes()), strides(t.strides()), offset(t.storage_offset()), dtype(t.scalar_type()) {}

  Tensor over(const Tensor& base) const {
    if (base.scalar_type() != dtype) {
      Tensor empty = at::empty({0}, base.options().dtype(dtype));
      empty.set_(base.storage(), offset, sizes, strides);
      return empty;
    }
    if (base.sizes() == sizes && base.strides() == strides && base.storage_offset() == offset) return base;
    auto made = base.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true);
    made->set_sizes_and_strides(sizes, strides, offset);
    return Tensor(std::move(made));
  }
};

struct Unseen {  // no kernel of ours is asked
  bool before = c10::impl::tls_is_dispatch_key_included(OURS);
  Unseen() { c10::impl::tls_set_dispatch_key_included(OURS, false); }
  ~Unseen() { c10::impl::tls_set_dispatch_key_included(OURS, before); }
};

// Calls ----------------------------------------------------------------------------------------------

// Calls `with` for every tensor in an argument or result, until it says no; whether it never did.
template <class With>
bool each_tensor(const IValue& value, With with) {
  if (value.isTensor()) return !value.toTensor().defined() || with(value.toTensor(), size_t(0));
  if (!value.isTensorList() && !value.isOptionalTensorList()) return true;
  at::ArrayRef<IValue> items = value.toListRef();
  for (size_t item = 0; item < items.size(); ++item) {
    if (!items[item].isTensor() || !items[item].toTensor().defined()) continue;
    if (!with(items[item].toTensor(), item)) return false;
  }
  return true;
}

struct Call {  // an operation with all that it was called with but its tensors
  struct Place {
    size_t argument, item, input;
    Geometry geometry;
  };
  OperatorHandle op;
  Stack arguments;  // empty where tensors belong
  std::vector<Place> places;

  void forget_tensors() {
    for (const Place& place : places) {
      IValue& argument = arguments[place.argument];
      if (argument.isTensorList()) {
        argument = c10::List<Tensor>(std::vector<Tensor>(argument.toListRef().size()));
      } else if (argument.isOptionalTensorList()) {
        std::vector<std::optional<Tensor>> none(argument.toListRef().size());
        argument = c10::List<std::optional<Tensor>>(none);
      } else {
        argument = IValue();
      }
    }
  }

  std::vector<Tensor> again(const std::vector<Tensor>& inputs) const {
    Stack stack = arguments;
    for (IValue& argument : stack) {
      if (argument.isTensorList()) argument = argument.toTensorList().copy();
      else if (argument.isOptionalTensorList()) argument = argument.toOptionalTensorList().copy();
    }
    for (const Place& place : places) {
      IValue& argument = stack[place.argument];
      Tensor tensor = place.geometry.over(inputs[place.input]);
      if (argument.isTensorList()) {
        argument.toTensorList().set(place.item, std::move(tensor));
      } else if (argument.isOptionalTensorList()) {
        argument.toOptionalTensorList().set(place.item, std::move(tensor));
      } else {
        argument = std::move(tensor);
      }
    }
    py::gil_scoped_release others;
    op.callBoxed(stack);
    return flat(stack, 0);
  }

  static std::vector<Tensor> flat(const Stack& stack, size_t from) {
    std::vector<Tensor> found;
    for (size_t at = from; at < stack.size(); ++at) {
      if (stack[at].isTensorList()) {
        for (const Tensor& part : stack[at].toTensorVector()) found.push_back(part);
      } else {
        found.push_back(stack[at].isTensor() ? stack[at].toTensor() : Tensor());
      }
    }
    return found;
  }
};

const Call* call_of(py::handle node) {
  return Py_TYPE(node.ptr()) == kind_of(names->node_type) ? Boxed<Call>::in(names->n_call(node)) : nullptr;
}

// Values ---------------------------------------------------------------------------------------------

py::object new_value(py::object node, const Tensor& shows) {
  auto& n = *names;
  py::object value = fresh(kind_of(n.value_type));
  py::int_ bytes(shows.storage().nbytes());
  n.v_node.set(value, std::move(node));
  n.v_nbytes.set(value, bytes);
  n.v_extent.set(value, bytes);
  n.v_held.set(value, none());
  n.v_version.set(value, py::int_(0));
  n.v_cached.set(value, none());
  n.v_readers.set(value, py::int_(0));
  n.v_digest.set(value, none());
  return value;
}

long readers_of(py::handle value) { return PyLong_AsLong(names->v_readers(value)); }

void add_reader(py::handle value) { names->v_readers.set(value, py::int_(readers_of(value) + 1)); }

void read(py::handle value) {
  long readers = readers_of(value);
  if (readers <= 0) return;
  names->v_readers.set(value, py::int_(readers - 1));
  if (readers == 1) names->v_cached.set(value, none());
}

int64_t version_of(const Tensor& tensor) { return tensor.is_inference() ? 0 : tensor._version(); }

bool is_current(py::handle value) {  // what is held is still what was recorded
  const Tensor& tensor = THPVariable_Unpack(names->v_held(value));
  return version_of(tensor) == PyLong_AsLong(names->v_version(value)) &&
      tensor.storage().nbytes() >= PyLong_AsSize_t(names->v_nbytes(value));
}

// Undefined where the value has to be brought back, or where Python has to say why it cannot be.
Tensor here(py::handle value) {
  if (names->v_held(value) != Py_None) {
    return is_current(value) ? THPVariable_Unpack(names->v_held(value)) : Tensor();
  }
  PyObject* cached = names->v_cached(value);
  return cached != Py_None ? THPVariable_Unpack(cached) : Tensor();
}

// Replaying ------------------------------------------------------------------------------------------

struct Replaying {  // as lowtide.private.replaying
  Unseen unseen;
  c10::impl::ExcludeDispatchKeyGuard no_cast{c10::autocast_dispatch_keyset};
  at::AutoDispatchBelowADInplaceOrView below;
  c10::AutoGradMode grad{c10::GradMode::is_enabled()};
};

Tensor bring_back(py::handle value) {
  auto& n = *names;
  if (Tensor base = here(value); base.defined()) return base;
  std::vector<std::pair<double, py::object>> order;
  std::unordered_map<PyObject*, Tensor> transient;
  std::unordered_map<PyObject*, long> uses;
  std::vector<PyObject*> stack{value.ptr()};
  std::unordered_set<PyObject*> known;
  bool ours = true;
  while (ours && !stack.empty()) {
    PyObject* wanted = stack.back();
    stack.pop_back();
    PyObject* node = n.v_node(wanted);
    if (n.v_held(wanted) != Py_None && !is_current(wanted)) ours = false;
    if (node == Py_None) continue;
    if (Tensor base = here(wanted); base.defined()) {
      if (n.v_held(wanted) == Py_None) transient[wanted] = base;
      continue;
    }
    if (call_of(node) == nullptr) { ours = false; continue; }
    if (!known.insert(node).second) continue;
    order.emplace_back(PyFloat_AsDouble(n.n_order(node)), py::reinterpret_borrow<py::object>(node));
    for (py::handle input : py::reinterpret_borrow<py::list>(n.n_inputs(node))) stack.push_back(input.ptr());
  }
  if (!ours) return n.bring_back(value).cast<Tensor>();
  std::sort(order.begin(), order.end(), [](auto& a, auto& b) { return a.first < b.first; });
  for (auto& [_, node] : order) {
    for (py::handle input : py::reinterpret_borrow<py::list>(n.n_inputs(node))) ++uses[input.ptr()];
  }
  ++uses[value.ptr()];
  Replaying replaying;
  for (auto& [_, node] : order) {
    c10::GradMode::set_enabled(n.n_grad(node) == Py_True);
    py::list inputs = py::reinterpret_borrow<py::list>(n.n_inputs(node));
    std::vector<Tensor> bases;
    for (py::handle input : inputs) {
      auto made = transient.find(input.ptr());
      bases.push_back(made != transient.end() ? made->second : here(input));
      TORCH_CHECK(bases.back().defined(), "a replay lacks an input: please report this");
    }
    std::vector<Tensor> results = call_of(node)->again(bases);
    bases.clear();
    for (py::handle output : py::reinterpret_borrow<py::list>(n.n_outputs(node))) {
      auto pair = py::reinterpret_borrow<py::tuple>(output);
      py::object made = behind(pair[1]);
      if (made.is_none()) continue;
      const Tensor& result = results[pair[0].cast<size_t>()];
      if (readers_of(made) > 0 && n.v_cached(made) == Py_None) n.v_cached.set(made, wrapped(result));
      auto use = uses.find(made.ptr());
      if (use != uses.end() && use->second > 0) transient[made.ptr()] = result;
    }
    results.clear();
    if (n.n_waits(node) == Py_True) {
      n.n_waits.set(node, py::bool_(false));
      for (py::handle input : inputs) read(input);
    }
    for (py::handle input : inputs) {
      if (--uses[input.ptr()] <= 0) transient.erase(input.ptr());
    }
  }
  auto found = transient.find(value.ptr());
  TORCH_CHECK(found != transient.end(), "a replay did not produce the value asked for: please report this");
  return found->second;
}

// What autograd holds --------------------------------------------------------------------------------

struct Replays {  // of one step
  double seconds = 0;
  size_t given_up_bytes = 0;

  void give_up(py::handle value) {
    if (given_up_.insert(value.ptr()).second) given_up_bytes += PyLong_AsSize_t(names->v_nbytes(value));
  }
  void forget(py::handle value) { given_up_.erase(value.ptr()); }  // another may come to lie where it does

 private:
  std::unordered_set<PyObject*> given_up_;
};

struct Packed {
  c10::VariableVersion counter;
  uint32_t version;

  explicit Packed(const Tensor& t)
      : counter(t.unsafeGetTensorImpl()->version_counter()), version(counter.current_version()) {}

  void check(const Tensor& kind, at::IntArrayRef shape) const {  // Python raises what autograd would
    if (counter.current_version() == version) return;
    names->overwritten(wrapped(kind), counter.current_version(), version, shape.vec());
  }
};

struct Kept : Packed {
  Tensor tensor;
  Kept(const Tensor& shown, Tensor tensor) : Packed(shown), tensor(std::move(tensor)) {}
};

struct Evicted : Packed {
  py::object value;
  Geometry geometry;
  at::TensorOptions options;
  std::shared_ptr<Replays> replays;
  bool asked = false;

  Evicted(const Tensor& shown, py::object of, std::shared_ptr<Replays> replays)
      : Packed(shown),
        value(std::move(of)),
        geometry(shown),
        options(shown.options()),
        replays(std::move(replays)) {
    add_reader(value);
    this->replays->give_up(value);
  }
  ~Evicted() {
    replays->forget(value);
    if (!asked) read(value);
  }
  Tensor back() {
    if (counter.current_version() != version) check(at::empty({0}, options), geometry.sizes);
    auto begin = Clock::now();
    Tensor base = bring_back(value);
    replays->seconds += std::chrono::duration<double>(Clock::now() - begin).count();
    if (!asked) {
      asked = true;
      read(value);
    }
    return geometry.over(base);
  }
};

py::object unpack(py::handle packed) {
  if (Kept* kept = Boxed<Kept>::in(packed)) {
    kept->check(kept->tensor, kept->tensor.sizes());
    return wrapped(kept->tensor);
  }
  if (Evicted* evicted = Boxed<Evicted>::in(packed)) return wrapped(evicted->back());
  return names->unpack(packed);
}

// Recording ------------------------------------------------------------------------------------------

enum class Does { Pass, Record, Closer };  // a closer look is Python's

struct Operation {  // of a plan's program
  std::optional<OperatorHandle> op;
  Does does;
  size_t arguments;                // how many it takes
  std::vector<size_t> writes;      // arguments that it overwrites
  std::vector<size_t> statistics;  // arguments that it overwrites in training
  long training, dropout;          // which argument says so, or with which probability it draws; -1 for none
  std::vector<bool> stored;
  bool claimed;
  py::object func;
};

struct Program {
  std::vector<Operation> operations;

  void add(const std::string& name, const std::string& overload, int does, std::vector<size_t> writes,
           std::vector<size_t> statistics, long training, long dropout, std::vector<bool> stored,
           bool claimed, py::object func) {
    auto op = c10::Dispatcher::singleton().findSchema({name, overload});
    size_t arguments = op ? op->schema().arguments().size() : 0;
    operations.push_back({op, op ? Does(does) : Does::Closer, arguments, std::move(writes),
                          std::move(statistics), training, dropout, std::move(stored), claimed,
                          std::move(func)});
  }
};

// A recorder's place among the thread's saved-tensor hooks. While nothing is given up they are taken out:
// autograd saves as in a plain step, and calls nobody. Others' hooks may lie above, and stay there.
class Hooks {
  using Default = at::SavedTensorDefaultHooks;
  using Stack = decltype(at::impl::SavedTensorDefaultHooksTLS::stack);

 public:
  bool in() const { return in_; }

  void found() {  // ours have just been pushed
    const Stack& stack = Default::get_tls_state().stack;
    ours_.emplace(stack.top());
    below_ = stack.size() - 1;
    thread_ = std::this_thread::get_id();
    in_ = true;
  }

  void put_in() {
    if (in_ || !ours_ || std::this_thread::get_id() != thread_) return;
    change([&](Stack& stack) { stack.push(*ours_); });
    in_ = true;
  }

  void end() {  // whoever pushed ours takes them away; they hold the recorder, and it no longer holds them
    put_in();
    ours_.reset();
    in_ = false;
  }

  void take_out() {
    change([](Stack& stack) { stack.pop(); });
    in_ = false;
  }

 private:
  template <class Change>
  void change(Change in_our_place) {
    auto state = Default::get_tls_state();
    Stack above;
    for (; state.stack.size() > below_ + in_; state.stack.pop()) above.push(state.stack.top());
    in_our_place(state.stack);
    for (; !above.empty(); above.pop()) state.stack.push(above.top());
    Default::set_tls_state(state);
  }

  std::optional<Stack::value_type> ours_;
  std::thread::id thread_;
  size_t below_ = 0;
  bool in_ = false;
};

class Core {  // of one recorder
 public:
  std::atomic<bool> on{false};

  Core(py::object recorder, std::shared_ptr<Program> program) : program_(std::move(program)) {
    given_ = recorder.attr("_given");
    held_ = recorder.attr("_held");
    blank_ = recorder.attr("_blank");
    recorder_ = weak(recorder);
  }

  std::shared_ptr<Replays> replays() const { return replays_; }

  bool takes(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    if (at_ >= program_->operations.size()) return false;
    const Operation& known = program_->operations[at_];
    if (known.does == Does::Closer || !(*known.op == op)) return false;
    first_ = stack->size() - known.arguments;
    arguments_.clear();
    for (size_t at = first_; at < stack->size(); ++at) {
      const IValue& argument = (*stack)[at];
      if (argument.isGenerator() && known.does == Does::Record) return false;
      bool fits = each_tensor(argument, [&](const Tensor& tensor, size_t item) {
        if (!plain(tensor)) return false;
        arguments_.push_back({at - first_, item, &tensor, storage_key(tensor)});
        return true;
      });
      if (!fits) return false;
    }
    return known.does == Does::Record ? record(known, op, keys, stack) : pass(known, op, keys, stack);
  }

  void to_python() {
    py::object recorder = behind(recorder_);
    if (passed_) recorder.attr("skip")(passed_);
    passed_ = 0;
    recorder.attr("_order") = order_;
  }

  void from_python() {
    py::object recorder = behind(recorder_);
    at_ = recorder.attr("director").attr("at").cast<size_t>();
    order_ = recorder.attr("_order").cast<long>();
    if (gives_up()) hooks_.put_in();
  }

  void turn(bool on_now) {  // Python takes down what comes while this is off
    if (!on_now) hooks_.put_in();
    on = on_now;
  }

  void hooks_found() { hooks_.found(); }
  void hooks_end() { hooks_.end(); }

  py::object pack(py::object object) {
    auto type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
    const Tensor& tensor = THPVariable_Unpack(object.ptr());
    PyObject** dict = _PyObject_GetDictPtr(object.ptr());
    bool ours = type == THPVariableClass || type == ParameterClass;
    if (!ours || !plain(tensor) || (dict && *dict && PyDict_Size(*dict))) {
      return behind(recorder_).attr("pack")(object);
    }
    if (type == ParameterClass) return Boxed<Kept>::of(tensor, tensor);
    if (PyObject* entry = entry_of(given_, storage_key(tensor))) {
      auto value = py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(entry, 0));
      return Boxed<Evicted>::of(tensor, std::move(value), replays_);
    }
    return Boxed<Kept>::of(tensor, tensor.is_leaf() ? tensor : alias_of(tensor));
  }

 private:
  struct Argument {
    size_t position, item;
    const Tensor* tensor;  // until the operation has run
    uintptr_t key;
  };

  bool gives_up() const { return PyDict_GET_SIZE(given_.ptr()) != 0; }

  bool is_known(uintptr_t key) const {
    return entry_of(given_, key) || entry_of(held_, key) || entry_of(blank_, key);
  }

  void run(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    Unseen unseen;
    op.redispatchBoxed(keys & BELOW, stack);
  }

  bool is_new(const Tensor& result) const {
    if (!plain(result)) return false;
    uintptr_t key = storage_key(result);
    return std::none_of(arguments_.begin(), arguments_.end(), [key](auto& one) { return one.key == key; });
  }

  bool pass(const Operation& known, const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    bool trains = !known.statistics.empty() &&
        (known.training < 0 || (*stack)[first_ + known.training].toBool());
    if (!known.writes.empty() || trains) {
      py::gil_scoped_acquire gil;
      for (auto& one : arguments_) {
        auto among = [&](const std::vector<size_t>& places) {
          return std::find(places.begin(), places.end(), one.position) != places.end();
        };
        if ((among(known.writes) || (trains && among(known.statistics))) && is_known(one.key)) return false;
      }
    }
    run(op, keys, stack);
    bool wrote = !known.writes.empty();
    for (size_t at = first_; at < stack->size() && !wrote; ++at) {
      each_tensor((*stack)[at],
                  [&](const Tensor& result, size_t) { return !(wrote = wrote || is_new(result)); });
    }
    if (wrote) {
      ++at_;
      ++passed_;
    }
    if (hooks_.in() && !gives_up()) hooks_.take_out();
    return true;
  }

  // The value that a tensor shows now, or null where Python has to look.
  py::object value_of(const Tensor& tensor, uintptr_t key) {
    auto& n = *names;
    if (PyObject* entry = entry_of(given_, key)) {
      PyObject* value = PyTuple_GET_ITEM(entry, 0);
      bool ours = Py_TYPE(n.v_node(value)) == kind_of(n.node_type);
      return ours ? py::reinterpret_borrow<py::object>(value) : py::object();
    }
    if (PyObject* reference = entry_of(held_, key)) {
      py::object value = behind(reference);
      if (!value.is_none() && n.v_held(value) != Py_None &&
          version_of(THPVariable_Unpack(n.v_held(value))) == PyLong_AsLong(n.v_version(value))) {
        return value;
      }
    }
    py::object value = new_value(none(), tensor);
    Tensor alias = alias_of(tensor);
    n.v_version.set(value, py::int_(alias._version()));
    n.v_held.set(value, wrapped(alias));
    held_[py::int_(key)] = weak(value);
    return value;
  }

  bool record(const Operation& known, const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    if (known.dropout >= 0) {
      const IValue& chance = (*stack)[first_ + known.dropout];
      if (!chance.isDouble() || chance.toDouble() != 0.0) return false;
    }
    auto& n = *names;
    py::gil_scoped_acquire gil;
    if (blank_.size()) return false;
    py::object boxed = Boxed<Call>::of(Call{op, Stack(stack->begin() + first_, stack->end()), {}});
    Call* call = Boxed<Call>::in(boxed);
    py::list inputs;
    for (auto& one : arguments_) {
      bool number = one.tensor->unsafeGetTensorImpl()->is_wrapped_number();
      if (number && call->arguments[one.position].isTensor()) continue;
      py::object value = value_of(*one.tensor, one.key);
      if (!value) return false;
      size_t input = 0;
      while (input < inputs.size() && inputs[input].ptr() != value.ptr()) ++input;
      if (input == inputs.size()) inputs.append(value);
      call->places.push_back({one.position, one.item, input, Geometry(*one.tensor)});
    }
    call->forget_tensors();
    {
      py::gil_scoped_release others;
      run(op, keys, stack);
    }
    std::vector<Tensor> results = Call::flat(*stack, first_);
    std::vector<size_t> places;
    std::vector<uintptr_t> new_keys;
    for (size_t at = 0; at < results.size(); ++at) {
      if (!results[at].defined() || !is_new(results[at])) continue;
      uintptr_t key = storage_key(results[at]);
      if (std::find(new_keys.begin(), new_keys.end(), key) != new_keys.end()) continue;
      new_keys.push_back(key);
      places.push_back(at);
    }
    if (places.empty()) return true;
    if (places.size() != known.stored.size()) {  // it is another operation than the plan's
      py::object director = behind(recorder_).attr("director");
      for (const char* count : {"departed", "missed"})
        director.attr(count) = director.attr(count).cast<long>() + 1;
    }
    ++at_;
    ++passed_;
    py::object node = fresh(kind_of(n.node_type));
    n.n_func.set(node, known.func);
    n.n_order.set(node, py::int_(order_++));
    n.n_exact.set(node, py::bool_(true));
    n.n_device.set(node, none());
    for (Slot* slot : {&n.n_args, &n.n_written}) slot->set(node, py::list());
    n.n_kwargs.set(node, py::dict());
    n.n_statistics.set(node, py::tuple());
    for (Slot* slot : {&n.n_random, &n.n_generator}) slot->set(node, none());
    n.n_grad.set(node, py::bool_(c10::GradMode::is_enabled()));
    n.n_claimed.set(node, py::bool_(known.claimed));
    n.n_waits.set(node, py::bool_(true));
    n.n_call.set(node, std::move(boxed));
    for (py::handle input : inputs) {
      add_reader(input);
      PyObject* writer = n.v_node(input);
      if (writer != Py_None && n.n_exact(writer) != Py_True) n.n_exact.set(node, py::bool_(false));
    }
    n.n_inputs.set(node, std::move(inputs));
    py::list outputs;
    bool same = places.size() == known.stored.size();
    for (size_t at = 0; at < places.size(); ++at) {
      if (same && known.stored[at]) continue;
      outputs.append(py::make_tuple(places[at], weak(give(node, results[places[at]]))));
    }
    n.n_outputs.set(node, std::move(outputs));
    if (gives_up()) hooks_.put_in();
    return true;
  }

  py::object give(const py::object& node, const Tensor& tensor) {
    static PyMethodDef forget = {"forget", [](PyObject* self, PyObject*) -> PyObject* {
      PyObject* table = PyTuple_GET_ITEM(self, 0);
      if (PyDict_DelItem(table, PyTuple_GET_ITEM(self, 1))) PyErr_Clear();
      Py_RETURN_NONE;
    }, METH_O, nullptr};
    py::int_ key(storage_key(tensor));
    py::object entry = py::make_tuple(given_, key);
    auto callback = py::reinterpret_steal<py::object>(PyCFunction_New(&forget, entry.ptr()));
    auto storage = py::reinterpret_steal<py::object>(THPStorage_Wrap(tensor.storage()));
    py::object value = new_value(node, tensor);
    given_[key] = py::make_tuple(value, weak(storage, callback));
    return value;
  }

  std::shared_ptr<Program> program_;
  std::shared_ptr<Replays> replays_ = std::make_shared<Replays>();
  py::object recorder_;
  py::dict given_, held_, blank_;
  Hooks hooks_;
  size_t at_ = 0, first_ = 0;
  long passed_ = 0, order_ = 0;
  c10::SmallVector<Argument, 8> arguments_;
};

// Autograd calls these between two kernels.
PyObject* packed(PyObject* packer, PyObject* tensor) {
  HANDLE_TH_ERRORS
  auto& core = *Boxed<std::shared_ptr<Core>>::in(packer);
  return core->pack(py::reinterpret_borrow<py::object>(tensor)).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* unpacked(PyObject*, PyObject* packed) {
  HANDLE_TH_ERRORS
  return unpack(packed).release().ptr();
  END_HANDLE_TH_ERRORS
}

template <PyCFunction function>
py::object hook(const char* name, const py::object& self) {
  static PyMethodDef definition = {name, function, METH_O, nullptr};
  return py::reinterpret_steal<py::object>(PyCFunction_New(&definition, self.ptr()));
}

thread_local std::weak_ptr<Core> current;

void kernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  std::shared_ptr<Core> core = current.lock();
  if (!core || !core->on || torch::autograd::get_current_graph_task_id() != -1) {
    core.reset();
  } else if (core->takes(op, keys, stack)) {
    return;
  }
  if (core) {
    py::gil_scoped_acquire gil;
    core->to_python();
  }
  try {
    op.callBoxedForDispatchKey(PYTHON, *stack);
  } catch (...) {
    if (core) {
      py::gil_scoped_acquire gil;
      core->from_python();
    }
    throw;
  }
  if (core) {
    py::gil_scoped_acquire gil;
    core->from_python();
  }
}

void let_in(const std::vector<std::pair<std::string, std::string>>& overloads) {
  static auto& libraries = *new std::unordered_map<std::string, torch::Library>;
  for (const auto& [space, name] : overloads) {
    auto library =
        libraries.try_emplace(space, torch::Library::IMPL, space, std::nullopt, __FILE__, __LINE__).first;
    library->second.impl(name.c_str(),
                         torch::dispatch(OURS, torch::CppFunction::makeFromBoxedFunction<&kernel>()));
  }
}

// What a model is made of, as lowtide.run.limit.key finds it -----------------------------------------

py::object taken(PyObject* made) {  // a new reference
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

// Modules, parameters and buffers; or None where a module is not an ordinary one.
py::object members(const py::object& model) {
  static PyObject* const tables[] = {PyUnicode_InternFromString("_parameters"),
                                     PyUnicode_InternFromString("_buffers"),
                                     PyUnicode_InternFromString("_modules")};
  py::list found[] = {py::list(), py::list(), py::list()};
  py::list& modules = found[2];
  modules.append(model);
  std::unordered_set<PyObject*> seen{model.ptr()};
  for (size_t at = 0; at < modules.size(); ++at) {
    py::object own = taken(PyObject_GenericGetDict(modules[at].ptr(), nullptr));
    for (size_t kind = 0; kind < 3; ++kind) {
      PyObject* table = PyDict_GetItemWithError(own.ptr(), tables[kind]);
      if (table == nullptr || !PyDict_Check(table)) return none();
      PyObject *name, *item;
      for (Py_ssize_t place = 0; PyDict_Next(table, &place, &name, &item);) {
        if (item != Py_None && (kind != 2 || seen.insert(item).second)) found[kind].append(py::handle(item));
      }
    }
  }
  return py::make_tuple(modules, found[0], found[1]);
}

// Of each parameter whether it is trainable and has a gradient; then all their types, and all their bytes.
py::tuple standing(const py::list& parameters) {
  py::tuple trainable(parameters.size()), gradients(parameters.size()), sizes(2 * parameters.size());
  for (size_t at = 0; at < parameters.size(); ++at) {
    py::handle one = parameters[at];
    size_t other = parameters.size() + at;
    if (Py_TYPE(one.ptr()) == reinterpret_cast<PyTypeObject*>(ParameterClass)) {
      const Tensor& tensor = THPVariable_Unpack(one.ptr());
      trainable[at] = py::bool_(tensor.requires_grad());
      gradients[at] = py::bool_(tensor.grad().defined());
      sizes[at] = py::handle(reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type())));
      sizes[other] = py::int_(tensor.nbytes());
    } else {
      trainable[at] = one.attr("requires_grad");
      // PyTorch warns of who asks for the gradient of what was computed
      gradients[at] = py::bool_(one.attr("is_leaf").cast<bool>() && !one.attr("grad").is_none());
      sizes[at] = one.attr("dtype");
      sizes[other] = one.attr("nbytes");
    }
  }
  return py::make_tuple(trainable, gradients, sizes);
}

void know(py::object value_type, py::object node_type, py::object unpack, py::object bring_back,
          py::object overwritten) {
  auto& n = *(names = new Names);
  n.value_type = value_type;
  n.node_type = node_type;
  n.unpack = unpack;
  n.bring_back = bring_back;
  n.overwritten = overwritten;
  for (auto& [slot, name] : std::vector<std::pair<Slot*, const char*>>{{&n.v_node, "node"},
                                                                       {&n.v_nbytes, "nbytes"},
                                                                       {&n.v_extent, "extent"},
                                                                       {&n.v_held, "held"},
                                                                       {&n.v_version, "version"},
                                                                       {&n.v_cached, "cached"},
                                                                       {&n.v_readers, "readers"},
                                                                       {&n.v_digest, "digest"}}) {
    slot->find(value_type, name);
  }
  for (auto& [slot, name] : std::vector<std::pair<Slot*, const char*>>{
           {&n.n_func, "func"}, {&n.n_order, "order"}, {&n.n_device, "device"}, {&n.n_exact, "exact"},
           {&n.n_args, "args"}, {&n.n_kwargs, "kwargs"}, {&n.n_written, "written"}, {&n.n_outputs, "outputs"},
           {&n.n_statistics, "statistics"}, {&n.n_random, "random_state"}, {&n.n_generator, "generator"},
           {&n.n_grad, "grad"}, {&n.n_claimed, "claimed"}, {&n.n_waits, "waits"}, {&n.n_inputs, "_inputs"},
           {&n.n_call, "call"}}) {
    slot->find(node_type, name);
  }
}

}  // namespace

PYBIND11_MODULE(lowtide_recorder, m) {
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const py::error_already_set&) {
      throw;
    } catch (const py::builtin_exception&) {
      throw;
    } catch (...) {
      torch::translate_exception_to_python(std::current_exception());
    }
  });
  Boxed<Call>::make_type("lowtide_recorder.Call");
  Boxed<Kept>::make_type("lowtide_recorder.Kept");
  Boxed<Evicted>::make_type("lowtide_recorder.Evicted");
  Boxed<std::shared_ptr<Core>>::make_type("lowtide_recorder.Packer");
  py::class_<Replays, std::shared_ptr<Replays>>(m, "Replays")
      .def_readonly("seconds", &Replays::seconds)
      .def_readonly("given_up_bytes", &Replays::given_up_bytes);
  py::class_<Program, std::shared_ptr<Program>>(m, "Program").def(py::init<>()).def("add", &Program::add);
  py::class_<Core, std::shared_ptr<Core>>(m, "Core")
      .def(py::init<py::object, std::shared_ptr<Program>>())
      .def_property(
          "on", [](Core& core) { return core.on.load(); }, [](Core& core, bool on) { core.turn(on); })
      .def("hooks_found", &Core::hooks_found)
      .def("hooks_end", &Core::hooks_end)
      .def_property_readonly("replays", &Core::replays)
      .def_property_readonly("pack", [](std::shared_ptr<Core> core) {
        return hook<&packed>("pack", Boxed<std::shared_ptr<Core>>::of(std::move(core)));
      });
  m.def("activate", [](std::shared_ptr<Core> core) { current = core; });
  m.def("know", &know);
  m.def("let_in", &let_in);
  m.def("members", &members);
  m.def("standing", &standing);
  m.attr("unpack") = hook<&unpacked>("unpack", none());
  m.def("again", [](py::handle call, const std::vector<Tensor>& inputs) {
    return Boxed<Call>::in(call)->again(inputs);
  });
}
