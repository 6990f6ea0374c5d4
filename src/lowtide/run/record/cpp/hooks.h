// A recorder's saved-tensor hooks among those of its thread.
#pragma once

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/PyInterpreter.h>

#include "python.h"

namespace lowtide {

// Puts hooks on top of this thread's, unless they are there. A node of a backward that runs them is the last
// to see them: autograd's engine gives its thread its own state again after each node.
inline void push_hooks(const py::object& pack, const py::object& unpack) {
  auto& pairs = at::SavedTensorDefaultHooks::get_tls_state().stack;
  auto* interpreter = getPyInterpreter();
  if (!pairs.empty() && pairs.top().second.ptr(interpreter) == unpack.ptr()) return;
  at::SavedTensorDefaultHooks::push_hooks(
      c10::SafePyObject(py::object(pack).release().ptr(), interpreter),
      c10::SafePyObject(py::object(unpack).release().ptr(), interpreter));
}

}  // namespace lowtide
