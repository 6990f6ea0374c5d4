// What a model is made of: lowtide.run.limit.key.Members.
#pragma once

#include <torch/csrc/DynamicTypes.h>

#include <unordered_set>

#include "python.h"

namespace lowtide {

// Modules, parameters, buffers, one of each type of the latter two, the modules that are compiled, and each
// module's mode; or None where a module is not an ordinary one.
inline py::object members(const py::object& model) {
  static PyObject* const tables[] = {PyUnicode_InternFromString("_parameters"),
                                     PyUnicode_InternFromString("_buffers"),
                                     PyUnicode_InternFromString("_modules")};
  static PyObject* const training = PyUnicode_InternFromString("training");
  static PyObject* const compiled[] = {PyUnicode_InternFromString("_compiled_call_impl"),
                                       PyUnicode_InternFromString("dynamo_ctx")};
  py::list found[] = {py::list(), py::list(), py::list()}, kinds, marked;
  py::list& modules = found[2];
  modules.append(model);
  std::string modes;
  std::unordered_set<PyObject*> seen{model.ptr()};
  for (size_t at = 0; at < modules.size(); ++at) {
    py::object own = owned(PyObject_GenericGetDict(modules[at].ptr(), nullptr));
    PyObject* mode = PyDict_GetItemWithError(own.ptr(), training);
    if (mode != Py_True && mode != Py_False) return py::none();
    modes.push_back(mode == Py_True);
    for (PyObject* name : compiled) {
      PyObject* mark = PyDict_GetItemWithError(own.ptr(), name);
      if (mark != nullptr && mark != Py_None) {
        marked.append(modules[at]);
        break;
      }
    }
    for (size_t kind = 0; kind < 3; ++kind) {
      PyObject* table = PyDict_GetItemWithError(own.ptr(), tables[kind]);
      if (table == nullptr || !PyDict_Check(table)) return py::none();
      PyObject *name, *item;
      for (Py_ssize_t place = 0; PyDict_Next(table, &place, &name, &item);) {
        if (item == Py_None || (kind == 2 && !seen.insert(item).second)) continue;
        found[kind].append(py::handle(item));
        auto* type = reinterpret_cast<PyObject*>(Py_TYPE(item));
        if (kind != 2 && seen.insert(type).second) kinds.append(py::handle(item));
      }
    }
  }
  return py::make_tuple(modules, found[0], found[1], kinds, marked, py::bytes(modes));
}

// A byte for each parameter: whether it is trainable; another: whether it has a gradient; then of each its
// type and its bytes.
inline py::tuple standing(const py::list& parameters) {
  std::string trainable, gradients;
  std::vector<int64_t> sizes;
  sizes.reserve(2 * parameters.size());
  for (py::handle one : parameters) {
    const Tensor& tensor = THPVariable_Unpack(one.ptr());
    trainable.push_back(tensor.requires_grad());
    // PyTorch warns of who asks for the gradient of what was computed
    gradients.push_back(tensor.is_leaf() && tensor.grad().defined());
    bool ordinary = Py_TYPE(one.ptr()) == reinterpret_cast<PyTypeObject*>(ParameterClass);
    sizes.push_back(reinterpret_cast<int64_t>(torch::getTHPDtype(tensor.scalar_type())));
    sizes.push_back(ordinary ? static_cast<int64_t>(tensor.nbytes()) : py::hash(one.attr("nbytes")));
  }
  py::bytes types(reinterpret_cast<const char*>(sizes.data()), sizes.size() * sizeof(int64_t));
  return py::make_tuple(py::bytes(trainable), py::bytes(gradients), types);
}

}  // namespace lowtide
