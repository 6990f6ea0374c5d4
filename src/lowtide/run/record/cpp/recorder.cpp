// The C++ recorder: it does what lowtide.run.record does in Python, for the plain operations
// of a plan's program. Everything else (another operation than the program has next, writes to known values,
// random numbers, subclasses) goes to Python, which is the reference. Both halves work on the same objects:
// slots of the classes that tape.h and traced.h declare.
//
//   recorder.h   the operations of a forward, and its saved tensors
//   profile.h    the operations of a profiled step: lowtide.run.profile
//   traced.h     what these are written down as, and what measures them
//   saved.h      what autograd holds in place of a saved tensor
//   on_demand.h  evicts values when memory is short
//   replay.h     brings evicted values back
//   tape.h       values, and the nodes that wrote them, made of call.h and python.h
//   hooks.h      when autograd calls the recorder at all
//   writes.h     what is about to be overwritten: lowtide.writes

#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <unordered_map>

#include "profile.h"
#include "writes.h"

namespace lowtide {
namespace {

using Packer = Boxed<std::shared_ptr<Recorder>>;

constexpr auto PYTHON = DispatchKey::TESTING_ONLY_GenericWrapper;  // the key of Python's kernels

thread_local std::weak_ptr<Recorder> current;

void kernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  std::shared_ptr<Recorder> recorder = current.lock();
  auto forward = [] { return torch::autograd::get_current_graph_task_id() == -1; };
  if (recorder && recorder->on && (recorder->sees_backward() || forward())) {
    if (recorder->takes(op, keys, stack)) return;
    py::gil_scoped_acquire gil;
    recorder->to_python();
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
  }
}

// Autograd calls these between two kernels.
PyObject* packed(PyObject* packer, PyObject* tensor) {
  HANDLE_TH_ERRORS
  return (*Packer::in(packer))->pack(tensor).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* unpacked(PyObject*, PyObject* packed) {
  HANDLE_TH_ERRORS
  return unpack(packed).release().ptr();
  END_HANDLE_TH_ERRORS
}

std::vector<Tensor> again(const py::object& call, const std::vector<Tensor>& inputs) {
  Tensors made = Boxed<RecordedCall>::in(call)->again(inputs);
  return {made.begin(), made.end()};
}

}  // namespace
}  // namespace lowtide

PYBIND11_MODULE(lowtide_recorder, m) {
  using namespace lowtide;
  using namespace py::literals;
  Boxed<RecordedCall>::make_type("lowtide_recorder.RecordedCall");
  Boxed<Kept>::make_type("lowtide_recorder.Kept");
  Boxed<Evicted>::make_type("lowtide_recorder.Evicted");
  Packer::make_type("lowtide_recorder.Packer");
  py::class_<Replays, std::shared_ptr<Replays>>(m, "Replays")
      .def_readonly("seconds", &Replays::seconds)
      .def_readwrite("on_unpack", &Replays::on_unpack)
      .def_property("watch", nullptr, &Replays::keep);
  py::class_<Program, std::shared_ptr<Program>>(m, "Program")
      .def(py::init<bool>(), "any"_a = false)
      .def("add", &Program::add);
  py::class_<OnDemand, std::shared_ptr<OnDemand>>(m, "OnDemand")
      .def(py::init<py::object, int64_t, py::dict, py::object>(), "live"_a, "room_bytes"_a, "rates"_a,
           "learn"_a = py::none())
      .def("save", &OnDemand::save)
      .def("note_cached", &OnDemand::note_cached)
      .def("operation_begins", &OnDemand::operation_begins)
      .def("note_allocated", &OnDemand::note_allocated)
      .def("relieve", &OnDemand::relieve)
      .def("relieve_if_short", &OnDemand::relieve_if_short)
      .def("evict", &OnDemand::evict);
  py::class_<Recorder, std::shared_ptr<Recorder>>(m, "Recorder")
      .def(py::init<py::object, py::object, py::object, std::shared_ptr<Program>,
                    std::shared_ptr<OnDemand>>(),
           py::kw_only(), "tape"_a, "director"_a, "pack"_a, "program"_a, "on_demand"_a = nullptr)
      .def_property("on", [](Recorder& recorder) { return recorder.on.load(); }, &Recorder::turn)
      .def_property_readonly("ran", &Recorder::ran)
      .def_property_readonly("replays", &Recorder::replays)
      .def("hooks_found", &Recorder::hooks_found)
      .def("hooks_end", &Recorder::hooks_end)
      .def_property_readonly("pack", [](std::shared_ptr<Recorder> recorder) {
        return function_of<&packed>("pack", Packer::of(std::move(recorder)));
      });
  py::class_<ProfileRecorder, Recorder, std::shared_ptr<ProfileRecorder>>(m, "ProfileRecorder")
      .def(py::init([](py::object tape, py::object tracer, py::dict begun, py::list written,
                       py::object register_storage, py::object end_storage, py::object value_of,
                       py::object note_node, py::object note_meeting, py::object note_overwritten,
                       py::object keep_overwritten, py::object note_finding, uintptr_t digest,
                       const std::vector<uintptr_t>& meter, Py_ssize_t runs) {
             ProfilerCalls profiler{register_storage, end_storage,      value_of,         note_node,
                                    note_meeting,     note_overwritten, keep_overwritten, note_finding};
             return std::make_shared<ProfileRecorder>(tape, tracer, begun, written, profiler, digest, meter,
                                                      runs);
           }),
           py::kw_only(), "tape"_a, "tracer"_a, "begun"_a, "written"_a, "register_storage"_a,
           "end_storage"_a, "value_of"_a, "note_node"_a, "note_meeting"_a, "note_overwritten"_a,
           "keep_overwritten"_a, "note_finding"_a, "digest"_a, "meter"_a, "runs"_a)
      .def("learn", &ProfileRecorder::learn)
      .def_property_readonly("program", &ProfileRecorder::program);
  m.def("activate", [](std::shared_ptr<Recorder> recorder) { current = recorder; });
  m.def("know", [](py::object value, py::object node, py::object tape, py::object director,
                   py::object here, py::object unpack, py::object bring_back, py::object run_node,
                   py::object drop_inputs, py::object overwritten) {
    classes = new Classes{{value}, {node}, {tape}, {director}, here, unpack, bring_back, run_node,
                          drop_inputs, overwritten};
  }, py::kw_only(), "value"_a, "node"_a, "tape"_a, "director"_a, "here"_a, "unpack"_a, "bring_back"_a,
     "run_node"_a, "drop_inputs"_a, "overwritten"_a);
  m.def("know_traced", [](py::object tracer, py::object reference, py::object storage, py::object version,
                          py::object operation, py::object cost, py::object calling_line,
                          std::vector<std::string> says_where, std::vector<std::string> writes_part) {
    traced = new Traced{{tracer}, {reference}, {storage}, {version}, {operation}, {cost}, calling_line,
                        std::move(says_where), std::move(writes_part)};
  }, py::kw_only(), "tracer"_a, "reference"_a, "storage"_a, "version"_a, "operation"_a, "cost"_a,
     "calling_line"_a, "says_where"_a, "writes_part"_a);
  m.def("drop_inputs", [](py::handle call) { Boxed<RecordedCall>::in(call)->drop_inputs(); });
  m.def("waits", [](py::handle call) { return Boxed<RecordedCall>::in(call)->waits; });
  m.def("before_write", [](py::object function) { watched.before_write = function; });
  m.def("watch", [](const std::vector<uintptr_t>& keys) { watched.add(keys); });
  m.def("unwatch", [](const std::vector<uintptr_t>& keys) { watched.remove(keys); });
  m.def("let_in", torch::wrap_pybind_function(&let_in));
  m.attr("unpack") = function_of<&unpacked>("unpack", py::none());
  m.def("replay", [](py::handle value, std::shared_ptr<OnDemand> on_demand) -> py::object {
    if (classes == nullptr) return py::none();
    Tensor found = Replay(value, std::move(on_demand)).run_here();
    return found.defined() ? wrapped(found) : py::none();
  });
  m.def("again", torch::wrap_pybind_function(&again));
}
