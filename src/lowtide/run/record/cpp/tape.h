// The classes of Python that both halves of the recorder work on, and the slots that C++ reads or writes. It
// knows nothing else of Python's objects; lowtide.run.record.cpp_recorder names the classes.
#pragma once

#include "call.h"
#include "python.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Stream.h>

namespace lowtide {

struct Classes {
  struct OfValue {
    py::object type;
    Slot node{type, "node"}, nbytes{type, "nbytes"}, extent{type, "extent"}, held{type, "held"},
        version{type, "version"}, emptied{type, "emptied"}, cached{type, "cached"},
        stream{type, "stream"}, readers{type, "readers"}, digest{type, "digest"},
        evicted{type, "evicted"}, shown{type, "shown"};
  } value;
  struct OfNode {
    py::object type;
    Slot func{type, "func"}, order{type, "order"}, device{type, "device"}, exact{type, "exact"},
        waits{type, "waits"},
        args{type, "args"}, kwargs{type, "kwargs"}, written{type, "written"}, outputs{type, "outputs"},
        statistics{type, "statistics"}, random_state{type, "random_state"}, generator{type, "generator"},
        grad{type, "grad"}, inputs{type, "inputs"},
        call{type, "call"}, updated{type, "updated"};
  } node;
  struct OfTape {
    py::object type;
    Slot replayable{type, "replayable"}, sources{type, "sources"}, blank{type, "blank"}, order{type, "order"};
  } tape;
  struct OfDirector {
    py::object type;
    Slot at{type, "at"}, skipped{type, "skipped"};
  } director;
  py::object here, unpack, bring_back, run_node, drop_inputs, overwritten;  // functions in Python
  py::tuple nothing{0};
  py::dict no_names;
};
inline Classes* classes = nullptr;  // set once per process

inline py::object new_value(py::object node, const Tensor& shows) {
  auto& v = classes->value;
  py::object value = fresh(v.type);
  py::int_ bytes(shows.storage().nbytes());
  v.node.set(value, std::move(node));
  v.extent.set(value, bytes);
  v.nbytes.set(value, std::move(bytes));
  v.version.set(value, py::int_(0));
  v.readers.set(value, py::int_(0));
  v.evicted.set(value, py::bool_(false));
  for (const Slot* slot : {&v.held, &v.cached, &v.stream, &v.digest, &v.emptied, &v.shown})
    slot->set(value, py::none());
  return value;
}

inline c10::Stream stream_of(const Tensor& tensor) {  // on which this thread computes
  return c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device());
}

inline void note_stream(py::handle value, const Tensor& tensor) {
  if (tensor.is_cpu() || tensor.is_meta()) return;
  classes->value.stream.set(value, owned(THPStream_Wrap(stream_of(tensor))));
}

inline py::object held_value(const Tensor& tensor) {  // LiveValue.hold
  auto& v = classes->value;
  py::object value = new_value(py::none(), tensor);
  v.held.set(value, wrapped(alias_of(tensor)));
  if (int64_t version = version_of(tensor)) v.version.set(value, py::int_(version));
  note_stream(value, tensor);
  return value;
}

inline long readers_of(py::handle value) { return PyLong_AsLong(classes->value.readers(value)); }

inline void add_reader(py::handle value) {
  classes->value.readers.set(value, py::int_(readers_of(value) + 1));
}

inline void count_off(py::handle value) {  // LiveValue.count_off
  long readers = readers_of(value);
  if (readers <= 0) return;
  classes->value.readers.set(value, py::int_(readers - 1));
  if (readers == 1) classes->value.cached.set(value, py::none());
}

inline void RecordedCall::drop_inputs() {  // Node.drop_inputs
  if (!std::exchange(waits, false)) return;
  for (py::handle input : py::reinterpret_borrow<py::tuple>(inputs)) count_off(input);
}

// Of one that is held; Python compares what was emptied and filled again.
inline bool is_as_recorded(py::handle value) {
  auto& v = classes->value;
  if (v.emptied(value) != Py_None) return false;
  return version_of(THPVariable_Unpack(v.held(value))) == PyLong_AsLong(v.version(value));
}

inline void keep_cached(py::handle value, const Tensor& copy) {  // LiveValue.keep_cached
  note_stream(value, copy);
  classes->value.cached.set(value, wrapped(copy));
}

// Whether the stream on which this thread computes is the value's own.
inline bool is_on_stream(py::handle value, const Tensor& tensor) {
  py::handle stream = classes->value.stream(value);
  return stream.is_none() || stream.cast<c10::Stream>() == stream_of(tensor);
}

// Undefined where the value has to be replayed, or where Python has to raise an error.
inline Tensor here(py::handle value) {
  auto& v = classes->value;
  if (v.held(value) != Py_None) {
    const Tensor& tensor = THPVariable_Unpack(v.held(value));
    bool whole = tensor.storage().nbytes() >= PyLong_AsSize_t(v.nbytes(value));
    if (!whole || !is_as_recorded(value)) return Tensor();
    if (tensor.is_cpu() || is_on_stream(value, tensor)) return tensor;
    return classes->here(value).cast<Tensor>();  // Python says that this stream reads it, too
  }
  PyObject* cached = v.cached(value);
  if (cached == Py_None) return Tensor();
  const Tensor& copy = THPVariable_Unpack(cached);
  if (is_on_stream(value, copy)) return copy;
  return classes->here(value).cast<Tensor>();  // Python orders the streams
}

// What code outside has overwritten it with, if it did.
inline Tensor overwritten_with(py::handle value) {
  PyObject* shown = classes->value.shown(value);
  return THPVariable_Check(shown) ? THPVariable_Unpack(shown) : Tensor();
}

inline bool is_node(py::handle object) {  // those that Python made are of a class of their own
  return PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(classes->node.type.ptr()));
}

inline RecordedCall* call_of(py::handle node) {  // or null: Python recorded it
  return is_a(node, classes->node.type) ? Boxed<RecordedCall>::in(classes->node.call(node)) : nullptr;
}

// Calls `with` for each value that a node reads.
template <class With>
void each_input(PyObject* node, With with) {  // Python's nodes have a list
  PyObject* inputs = classes->node.inputs(node);
  for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(inputs); ++at)
    with(PySequence_Fast_GET_ITEM(inputs, at));
}

// A node without its inputs and outputs.
inline py::object new_node(const py::object& func, long order, py::object call) {
  auto& n = classes->node;
  py::object node = fresh(n.type);
  n.func.set(node, func);
  n.order.set(node, py::int_(order));
  n.exact.set(node, py::bool_(true));
  for (const Slot* slot : {&n.args, &n.written, &n.statistics, &n.updated}) slot->set(node, classes->nothing);
  n.kwargs.set(node, classes->no_names);
  for (const Slot* slot : {&n.device, &n.random_state, &n.generator}) slot->set(node, py::none());
  n.grad.set(node, py::bool_(c10::GradMode::is_enabled()));
  n.call.set(node, std::move(call));
  return node;
}

}  // namespace lowtide
