// Python objects in C++: slots of classes, weak references, and C++ objects that Python holds.
#pragma once

#include <ATen/ATen.h>
#include <structmember.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace lowtide {

using at::Tensor;

struct Slot {  // an entry of a class's __slots__
  Py_ssize_t offset;

  Slot(const py::object& type, const char* name)
      : offset(reinterpret_cast<PyMemberDescrObject*>(type.attr(name).ptr())->d_member->offset) {}

  PyObject*& of(py::handle object) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object.ptr()) + offset);
  }
  PyObject* operator()(py::handle object) const { return of(object); }
  void set(py::handle object, py::object value) const {
    PyObject* before = std::exchange(of(object), value.release().ptr());
    Py_XDECREF(before);
  }
};

inline py::object owned(PyObject* made) {  // a new reference
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

// Hides an object from Python's collector, which would look through thousands of them in each step: what is
// recorded is in no cycle that Python sees, since autograd's graph holds it.
inline py::object uncollected(py::object made) {
  PyObject_GC_UnTrack(made.ptr());
  return made;
}

inline py::object fresh(const py::object& type) {  // its slots are empty
  auto* kind = reinterpret_cast<PyTypeObject*>(type.ptr());
  return uncollected(owned(kind->tp_alloc(kind, 0)));
}

inline bool is_a(py::handle object, const py::object& type) {
  return reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) == type.ptr();
}

inline py::object wrapped(const Tensor& tensor) { return owned(THPVariable_Wrap(tensor)); }

inline py::object weak(py::handle object, py::handle callback = py::handle()) {
  return uncollected(owned(PyWeakref_NewRef(object.ptr(), callback.ptr())));
}

inline py::object behind(py::handle weak_reference) {  // or None
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = nullptr;
  if (PyWeakref_GetRef(weak_reference.ptr(), &found) < 0) throw py::error_already_set();
  return found ? py::reinterpret_steal<py::object>(found) : py::none();
#else
  return py::reinterpret_borrow<py::object>(PyWeakref_GET_OBJECT(weak_reference.ptr()));
#endif
}

inline PyObject* entry_of(const py::dict& table, const py::int_& key) {  // borrowed, or null
  return PyDict_GET_SIZE(table.ptr()) ? PyDict_GetItem(table.ptr(), key.ptr()) : nullptr;
}

template <class Items>
py::object tuple_of(Items& items) {
  py::tuple made(items.size());
  for (size_t at = 0; at < items.size(); ++at) PyTuple_SET_ITEM(made.ptr(), at, items[at].release().ptr());
  return uncollected(std::move(made));
}

inline py::object pair_of(py::object first, py::object second) {
  return uncollected(owned(PyTuple_Pack(2, first.ptr(), second.ptr())));
}

// A C++ object that is opaque to Python.
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
    py::object made = owned(type->tp_alloc(type, 0));
    new (&reinterpret_cast<Boxed*>(made.ptr())->content) T{std::forward<Arguments>(arguments)...};
    return made;
  }

  static T* in(py::handle object) {  // or null
    return Py_TYPE(object.ptr()) == type ? &reinterpret_cast<Boxed*>(object.ptr())->content : nullptr;
  }
};

template <PyCFunction function>
py::object function_of(const char* name, const py::object& self) {  // takes one argument beside self
  static PyMethodDef definition = {name, function, METH_O, nullptr};
  return owned(PyCFunction_New(&definition, self.ptr()));
}

}  // namespace lowtide
