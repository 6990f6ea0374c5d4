// The executor: it records the operations of a step, evicts what autograd saves, and brings it back.
//
//   recorder.h   the operations of a step, and its saved tensors
//   listen.h     the operations of a step that is written down: lowtide.run.profile
//   traced.h     what these are written down as, and what measures them
//   saved.h      what autograd holds in place of a saved tensor
//   replay.h     brings evicted values back
//   governor.h   evicts values when memory is short
//   tape.h       values, and the nodes that wrote them, made of call.h and python.h
//   reach.h      which storages a tape knows, for threads that lowtide has not met
//   settings.h   PyTorch's settings, under which an operation runs again
//   share.h      storages over the same bytes
//   hooks.h      saved-tensor hooks
//   writes.h     what is about to be overwritten

#include <torch/library.h>

#include <unordered_map>

#include "listen.h"
#include "writes.h"

namespace lowtide {
namespace {

constexpr auto PYTHON = DispatchKey::TESTING_ONLY_GenericWrapper;  // the key of Python's kernels

thread_local int64_t current_task = -1;  // the backward for which `current` was looked up

// Autograd may run a backward on threads of its own, which share Python's state of the thread that began it.
std::shared_ptr<Recorder> recorder_here() {
  std::shared_ptr<Recorder> recorder = current.lock();
  if (recorder && recorder->on) return recorder;
  int64_t task = torch::autograd::get_current_graph_task_id();
  if (task == -1 || task == current_task) return nullptr;
  current_task = task;
  py::gil_scoped_acquire gil;
  py::object found = functions == nullptr ? py::none() : functions->current();
  if (found.is_none()) return nullptr;
  recorder = found.cast<std::shared_ptr<Recorder>>();
  current = recorder;
  return recorder->on ? recorder : nullptr;
}

void kernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  size_t count = op.schema().arguments().size();
  if (is_tracing() || std::ranges::any_of(torch::jit::last(*stack, count), is_abstract)) {
    Unseen unseen;
    return run_below(op, keys, stack);
  }
  if (std::shared_ptr<Recorder> recorder = recorder_here()) {
    if (recorder->takes(op, keys, stack)) return;
    if (recorder->governor() != nullptr) {
      recorder->governor()->run_special(op, *stack, stack->size() - count, recorder->learns(), [&] {
        op.callBoxedForDispatchKey(PYTHON, *stack);
      });
      return;
    }
  }
  op.callBoxedForDispatchKey(PYTHON, *stack);
}

std::pair<std::string, std::string> parted(const std::string& name) {
  size_t dot = name.find('.');
  if (dot == std::string::npos) return {name, std::string()};
  return {name.substr(0, dot), name.substr(dot + 1)};
}

void let_in(const std::vector<std::pair<std::string, std::string>>& overloads) {
  static auto& libraries = *new std::unordered_map<std::string, torch::Library>;
  for (const auto& [space, name] : overloads) {
    auto library =
        libraries.try_emplace(space, torch::Library::IMPL, space, std::nullopt, __FILE__, __LINE__).first;
    library->second.impl(name.c_str(),
                         torch::dispatch(OURS, torch::CppFunction::makeFromBoxedFunction<&kernel>()));
    auto [base, overload] = parted(name);
    auto op = c10::Dispatcher::singleton().findSchema({space + "::" + base, overload});
    if (!op || !op->schema().is_mutable()) continue;
    library->second.impl(name.c_str(),
                         torch::dispatch(WRITES, torch::CppFunction::makeFromBoxedFunction<&writes>()));
    if (op->hasKernelForDispatchKey(ANY_THREAD)) continue;
    auto stray = torch::CppFunction::makeFromBoxedFunction<&stray_writes>();
    library->second.impl(name.c_str(), torch::dispatch(ANY_THREAD, std::move(stray)));
  }
}

// ---- for what Python records ----------------------------------------------------------------------

NodePtr special_node(Tape& tape, py::object special, std::vector<ValuePtr> inputs, bool grad) {
  auto node = c10::make_intrusive<Node>();
  node->special = std::move(special);
  node->order = tape.order++;
  node->grad = grad;
  for (auto& value : inputs) {
    auto is_it = [&](auto& one) { return one == value; };
    bool known = std::any_of(node->inputs.begin(), node->inputs.end(), is_it);
    if (known) continue;
    node->exact &= !value->node || value->node->exact;
    node->inputs.push_back(value);
  }
  return node;
}

void start_from(const std::shared_ptr<Tape>& tape, const NodePtr& node, const std::vector<Tensor>& tensors,
                const std::shared_ptr<Governor>& governor) {
  for (const Tensor& tensor : tensors) keep_read(tape, tensor, governor.get());
  tape->pin(*node, tape->run);
}

ValuePtr wrote(Tape& tape, const NodePtr& node, const Tensor& tensor, int64_t extent, int plan) {
  ValuePtr made = tape.registered(node, tensor, extent, static_cast<Plan>(plan));
  node->outputs.emplace_back(static_cast<uint32_t>(node->outputs.size()), WeakValue(made));
  return made;
}

// Bytes of the storages of tensors and of their gradients, each once, on devices of one type. Those that are
// no plain tensors are returned for Python to ask.
std::pair<int64_t, py::list> resident_bytes(const py::iterable& tensors, c10::DeviceType device) {
  ska::flat_hash_set<uintptr_t> seen;
  int64_t bytes = 0;
  py::list others;
  auto add = [&](const Tensor& tensor) {
    if (!plain(tensor)) return false;
    if (tensor.device().type() == device && seen.insert(storage_key(tensor)).second)
      bytes += static_cast<int64_t>(tensor.storage().nbytes());
    return true;
  };
  for (py::handle item : tensors) {
    if (!THPVariable_Check(item.ptr())) continue;
    const Tensor& tensor = THPVariable_Unpack(item.ptr());
    if (!add(tensor)) others.append(item);
    if (!tensor.is_leaf()) continue;
    const Tensor& gradient = tensor.grad();
    if (gradient.defined() && !add(gradient)) others.append(wrapped(gradient));
  }
  return {bytes, others};
}

py::object or_none(const Tensor& tensor) { return tensor.defined() ? wrapped(tensor) : py::none(); }

}  // namespace
}  // namespace lowtide

PYBIND11_MODULE(lowtide_recorder, m) {
  using namespace lowtide;
  using namespace py::literals;
  Boxed<SavedKept>::make_type("lowtide_recorder.SavedKept");
  Boxed<SavedEvicted>::make_type("lowtide_recorder.SavedEvicted");
  Packer::make_type("lowtide_recorder.Packer");
  free_in_children();

  py::class_<Value, ValuePtr>(m, "Value")
      .def_readonly("nbytes", &Value::nbytes)
      .def_readonly("version", &Value::version)
      .def_readonly("extent", &Value::extent)
      .def_property_readonly("node", [](const Value& value) { return value.node; })
      .def_property("digest",
                    [](const Value& value) -> py::object {
                      return value.has_digest ? py::object(py::int_(value.digest)) : py::none();
                    },
                    [](Value& value, std::optional<int64_t> digest) {
                      value.has_digest = digest.has_value();
                      value.digest = digest.value_or(0);
                    })
      .def_property_readonly("held", [](const Value& value) { return or_none(value.held); })
      .def_property_readonly("cached", [](const Value& value) { return or_none(value.cached); })
      .def_property("emptied", [](const Value& value) { return or_none(value.emptied); },
                    [](Value& value, std::optional<Tensor> print) { value.emptied = print.value_or(Tensor()); })
      .def_property("stream",
                    [](const Value& value) -> py::object {
                      return value.stream ? owned(THPStream_Wrap(*value.stream)) : py::none();
                    },
                    [](Value& value, std::optional<c10::Stream> stream) { value.stream = stream; })
      .def_property_readonly("is_source", &Value::is_source)
      .def_property_readonly("is_copy", &Value::is_copy)
      .def_property_readonly("is_shown", [](const Value& value) { return value.shown.defined(); });
  py::class_<Node, NodePtr>(m, "Node")
      .def_readwrite("exact", &Node::exact)
      .def_readwrite("moved", &Node::moved)
      .def_readwrite("order", &Node::order)
      .def_readwrite("collective", &Node::collective)
      .def_property_readonly("special",
                             [](const Node& node) { return node.special ? node.special : py::none(); })
      .def_property_readonly("name", [](const Node& node) -> std::string {
        if (!node.call) return node.special ? py::str(node.special.attr("name")).cast<std::string>() : "";
        const auto& schema = node.call->op.schema();
        auto space = schema.getNamespace();
        auto base = schema.name().substr(schema.name().find("::") + 2);
        std::string overload = schema.overload_name().empty() ? "default" : schema.overload_name();
        std::string named = space ? std::string(space->data(), space->size()) : "";
        return named + "." + base + "." + overload;
      })
      .def_property_readonly("inputs", [](const Node& node) {
        return std::vector<ValuePtr>(node.inputs.begin(), node.inputs.end());
      });
  py::class_<Tape, std::shared_ptr<Tape>>(m, "Tape")
      .def(py::init<bool>(), "verify"_a = false)
      .def_readwrite("unit", &Tape::unit)
      .def_readwrite("run", &Tape::run)
      .def_readwrite("natural", &Tape::natural)
      .def_property("single_rank", [](const Tape& tape) { return tape.ledger->single_rank; },
                    [](Tape& tape, bool single) { tape.ledger->single_rank = single; })
      .def("gather", [](Tape& tape, uintptr_t key) { tape.gathered[key] = true; })
      .def("is_gathered", [](const Tape& tape, uintptr_t key) { return tape.gathered.count(key) != 0; })
      .def("replayable", [](Tape& tape, uintptr_t key) -> ValuePtr {
        Value* value = tape.replayable(key);
        return value == nullptr ? ValuePtr() : ValuePtr::reclaim_copy(value);
      })
      .def("replayables", [](Tape& tape) {
        std::vector<ValuePtr> found;
        tape.each_shown([&](uintptr_t, Value& value) {
          if (value.node) found.push_back(ValuePtr::reclaim_copy(&value));
        });
        return found;
      })
      .def("value_of", &Tape::value_of)
      .def("source", &Tape::source, "tensor"_a, "made_here"_a = false)
      .def("hold", [](Tape& tape, Value& value) { tape.hold(value); })
      .def("spoil", [](Tape& tape, Value& value) { tape.spoil(value); })
      .def("note_blank", &Tape::note_blank)
      .def("is_blank", &Tape::is_blank)
      .def_property_readonly("any_blank", [](Tape& tape) { return tape.any_blank(); })
      .def("forget", &Tape::forget)
      .def("forget_all", &Tape::forget_all)
      .def("forget_made", &Tape::forget_made)
      .def("end", [](const std::shared_ptr<Tape>& tape) {
        tape->forget_all();
        watched.remove(tape);
      })
      .def("forget_unasked", &Tape::forget_unasked)
      .def("forget_ended", py::overload_cast<>(&Tape::forget_ended))
      .def("before_update",
           [](Tape& tape, const Tensor& tensor) {
             if (Value* old = tape.replayable(storage_key(tensor))) {
               ValuePtr alive = ValuePtr::reclaim_copy(old);
               tape.before_update(*old, tensor);
             }
           })
      .def("before_change",
           [](Tape& tape, uintptr_t key, bool emptied) {
             tape.before_change(key, emptied ? Change::Emptied : Change::Written);
           },
           "key"_a, "emptied"_a = false)
      .def("node", &special_node, "special"_a, "inputs"_a, "grad"_a)
      .def("pin", &start_from, "node"_a, "tensors"_a, "governor"_a)
      .def("boundary", &Tape::boundary)
      .def("wrote", &wrote, "node"_a, "tensor"_a, "extent"_a, "plan"_a);

  py::class_<Forms, std::shared_ptr<Forms>>(m, "Forms")
      .def(py::init<const std::vector<uintptr_t>&>(), "meter"_a)
      .def("known", &Forms::known)
      .def("know", &Forms::know);
  py::class_<Governor, std::shared_ptr<Governor>>(m, "Governor")
      .def(py::init<py::object, int64_t, double, bool, bool, int64_t, std::shared_ptr<Forms>>(), "live"_a,
           "room_bytes"_a, "share"_a = 0.0, "is_open"_a = false, "widens"_a = true, "resident_bytes"_a = 0,
           "forms"_a)
      .def("join", &Governor::join)
      .def("count", &Governor::count)
      .def_property_readonly("is_joint", &Governor::is_joint)
      .def_property_readonly("limit_bytes", &Governor::limit)
      .def_property_readonly("has_widened", &Governor::has_widened)
      .def_property_readonly("wished_bytes", &Governor::wished)
      .def_property_readonly("is_open", &Governor::is_open)
      .def_property_readonly("evicted", &Governor::evicted)
      .def_readonly("replayed", &Governor::replayed)
      .def_readonly("searches", &Governor::searches)
      .def("want", py::overload_cast<int64_t>(&Governor::want))
      .def("relieve", &Governor::relieve)
      .def_property_readonly("excess", [](const Governor& governor) -> py::object {
        if (!governor.excess) return py::none();
        auto& one = *governor.excess;
        return py::make_tuple(one.operation, one.need_bytes, one.above_bytes, one.first_call, one.where);
      });
  py::class_<Fact>(m, "Fact")
      .def(py::init([](py::str name, bool plain, bool ignored, bool uninitialized, bool reads_values, bool of_aten,
                       std::vector<size_t> writes, std::vector<size_t> statistics, long training,
                       long dropout, std::vector<size_t> loose) {
             return Fact{name,   plain,      ignored,  uninitialized, reads_values, of_aten,
                         writes, statistics, training, dropout,       loose};
           }),
           "name"_a, py::kw_only(), "plain"_a = false, "ignored"_a = false, "uninitialized"_a = false,
           "reads_values"_a = false, "of_aten"_a = false, "writes"_a = std::vector<size_t>(),
           "statistics"_a = std::vector<size_t>(), "training"_a = -1, "dropout"_a = -1,
           "loose"_a = std::vector<size_t>());
  py::class_<Program, std::shared_ptr<Program>>(m, "Program")
      .def(py::init<>())
      .def("add", &Program::add, "name"_a, "overload"_a, "replayed"_a, "python"_a, "stored"_a);
  py::class_<Recorder, std::shared_ptr<Recorder>>(m, "Recorder")
      .def(py::init<std::shared_ptr<Tape>, std::shared_ptr<Governor>, py::object, std::shared_ptr<Program>,
                    bool>(),
           py::kw_only(), "tape"_a, "governor"_a, "pack"_a, "program"_a, "smaller"_a = false)
      .def_property("on", [](Recorder& recorder) { return recorder.on.load(); }, &Recorder::turn)
      .def_property("in_forward", [](Recorder& recorder) { return recorder.in_forward.load(); },
                    [](Recorder& recorder, bool inside) {
                      recorder.in_forward = inside;
                      recorder.tape().recorded_on = inside ? std::this_thread::get_id() : std::thread::id();
                      if (inside) watched.add(recorder.step()->tape);
                    })
      .def_readwrite("compares", &Recorder::compares)
      .def("set_program", &Recorder::set_program)
      .def_property_readonly("follows", &Recorder::follows)
      .def_property_readonly("strict", &Recorder::strict)
      .def_property_readonly("departed", &Recorder::departed)
      .def_property_readonly("at", &Recorder::at)
      .def("advance", &Recorder::advance)
      .def("depart", &Recorder::depart)
      .def_property_readonly("extra", &Recorder::extra)
      .def_property_readonly("ran", &Recorder::ran)
      .def_property_readonly("seconds", [](const Recorder& recorder) { return recorder.step()->seconds; })
      .def_property_readonly("handles", [](const Recorder& recorder) { return recorder.step()->handles; })
      .def_property("on_unpack", nullptr,
                    [](Recorder& recorder, py::object call) {
                      recorder.step()->on_unpack = call.is_none() ? py::object() : std::move(call);
                    })
      .def("save", [](Recorder& recorder, const Tensor& tensor) -> py::object {
        py::object handle = recorder.save(tensor);
        return handle ? handle : py::none();
      })
      .def("hooks", &Recorder::hooks);
  py::class_<ProfileRecorder, Recorder, std::shared_ptr<ProfileRecorder>>(m, "ProfileRecorder")
      .def(py::init([](std::shared_ptr<Tape> tape, std::shared_ptr<Governor> governor, py::object pack,
                       py::object tracer, py::dict begun, py::list written, py::object register_storage,
                       py::object end_storage, py::object note_node, py::object note_meeting,
                       py::object note_others, py::object note_overwritten, py::object keep_overwritten,
                       py::object note_finding, py::object digest, uintptr_t few_digest,
                       const std::vector<uintptr_t>& meter, Py_ssize_t runs) {
             ProfilerCalls profiler{register_storage, end_storage,      note_node,    note_meeting, note_others,
                                    note_overwritten, keep_overwritten, note_finding, digest};
             return std::make_shared<ProfileRecorder>(tape, governor, pack, tracer, begun, written, profiler,
                                                      few_digest, meter, runs);
           }),
           py::kw_only(), "tape"_a, "governor"_a, "pack"_a, "tracer"_a, "begun"_a, "written"_a,
           "register_storage"_a, "end_storage"_a, "note_node"_a, "note_meeting"_a, "note_others"_a,
           "note_overwritten"_a, "keep_overwritten"_a, "note_finding"_a, "digest"_a, "few_digest"_a, "meter"_a,
           "runs"_a)
      .def_readwrite("pack_hook", &ProfileRecorder::pack_hook);

  m.def("activate", [](std::shared_ptr<Recorder> recorder) {
    current = recorder;
    current_task = -1;
  });
  m.def("know", [](py::object here, py::object fingerprint, py::object overwritten, py::object unpack,
                   py::object facts, py::object where, py::object current) {
    functions = new Functions{here, fingerprint, overwritten, unpack, facts, where, current};
  }, py::kw_only(), "here"_a, "fingerprint"_a, "overwritten"_a, "unpack"_a, "facts"_a, "where"_a, "current"_a);
  m.def("know_traced", [](py::object tracer, py::object reference, py::object storage, py::object version,
                          py::object operation, py::object cost, py::object calling_line,
                          std::vector<std::string> says_where, std::vector<std::string> writes_part,
                          py::object outside) {
    traced = new Traced{{tracer}, {reference}, {storage}, {version}, {operation}, {cost}, calling_line,
                        std::move(says_where), std::move(writes_part), outside};
  }, py::kw_only(), "tracer"_a, "reference"_a, "storage"_a, "version"_a, "operation"_a, "cost"_a,
     "calling_line"_a, "says_where"_a, "writes_part"_a, "outside"_a);
  m.def("before_change", [](uintptr_t key, bool emptied) {
    watched.each([&](Tape& tape) { tape.before_change(key, emptied ? Change::Emptied : Change::Written); });
  });
  m.def("any_watched", [] {
    watched.each([](Tape&) {});
    return watched.any.load();
  });
  m.def("value_of_handle", [](py::handle handle) -> ValuePtr {
    SavedEvicted* evicted = Boxed<SavedEvicted>::in(handle);
    return evicted == nullptr ? ValuePtr() : evicted->value();
  });
  m.def("is_behind", [](py::handle handle) {
    SavedEvicted* evicted = Boxed<SavedEvicted>::in(handle);
    return evicted != nullptr && evicted->is_behind();
  });
  m.def("keep_shown", [](py::handle handle, const Tensor& over) {  // what is unpacked lies there from now on
    if (SavedEvicted* evicted = Boxed<SavedEvicted>::in(handle)) evicted->value()->shown = over;
  });
  m.def("is_handle", [](py::handle handle) { return Boxed<SavedEvicted>::in(handle) != nullptr; });
  m.def("kept", [](const Tensor& tensor) {
    return Boxed<SavedKept>::of(tensor.is_leaf() ? tensor : alias_of(tensor));
  });
  m.def("aliased", [](const Tensor& tensor) {
    Tensor made = aliased(tensor);
    return made.defined() ? made : alias_of(tensor);
  });
  m.def("resident_bytes", [](const py::iterable& tensors, const c10::Device& device) {
    return resident_bytes(tensors, device.type());
  });
  m.def("let_in", torch::wrap_pybind_function(&let_in));
  m.attr("unpack") = function_of<&unpacked>("unpack", py::none());
}
