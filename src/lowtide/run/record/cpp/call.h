// One recorded call of an operation: tensors as storages with a geometry, everything else by value.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/utils/pybind.h>

namespace lowtide {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;
using Tensors = c10::SmallVector<Tensor, 4>;

constexpr auto OURS = DispatchKey::Fake;
constexpr auto WRITES = DispatchKey::TESTING_ONLY_GenericMode;  // of `writes`
constexpr auto ANY_THREAD = DispatchKey::BackendSelect;         // each thread has it in: of `stray_writes`

inline uintptr_t storage_key(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
}

inline bool has_bytes(const Tensor& t) {  // of its own storage
  constexpr DispatchKeySet STRANGE(
      {DispatchKey::Python, DispatchKey::Conjugate, DispatchKey::Negative, DispatchKey::ZeroTensor,
       DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper, DispatchKey::Functionalize});
  return t.layout() == at::kStrided && !t.is_nested() && !t.is_quantized() && t.has_storage() &&
      !t.is_meta() && (t.key_set() & STRANGE).empty();
}

inline bool plain(const Tensor& t) { return has_bytes(t) && !t.is_inference(); }

inline Tensor alias_of(const Tensor& t) {  // shares the version counter, has no autograd history
  auto* impl = t.unsafeGetTensorImpl();
  return Tensor(impl->shallow_copy_and_detach(impl->version_counter(), false));
}

inline int64_t version_of(const Tensor& t) { return t.is_inference() ? 0 : t._version(); }

struct Geometry {
  c10::DimVector sizes, strides;
  int64_t offset;
  at::ScalarType dtype;
  bool conjugate, negative;

  explicit Geometry(const Tensor& t)
      : sizes(t.sizes()),
        strides(t.strides()),
        offset(t.storage_offset()),
        dtype(t.scalar_type()),
        conjugate(t.is_conj()),
        negative(t.is_neg()) {}

  Tensor over(const Tensor& base) const {
    if (base.scalar_type() != dtype) {
      Tensor empty = at::empty({0}, base.options().dtype(dtype));
      empty.set_(base.storage(), offset, sizes, strides);
      return marked(std::move(empty));
    }
    bool same = base.sizes() == sizes && base.strides() == strides && base.storage_offset() == offset;
    if (same && base.is_conj() == conjugate && base.is_neg() == negative) return base;
    auto made = base.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true);
    made->set_sizes_and_strides(sizes, strides, offset);
    return marked(Tensor(std::move(made)));
  }

 private:
  Tensor marked(Tensor made) const {
    if (made.is_conj() != conjugate) made._set_conj(conjugate);
    if (made.is_neg() != negative) made._set_neg(negative);
    return made;
  }
};

struct Without {  // a key, in this thread
  DispatchKey key;
  bool before = c10::impl::tls_is_dispatch_key_included(key);
  explicit Without(DispatchKey which) : key(which) { c10::impl::tls_set_dispatch_key_included(key, false); }
  ~Without() { c10::impl::tls_set_dispatch_key_included(key, before); }
};

struct Unseen {  // bypasses our kernels, `stray_writes`, too
  Without ours{OURS};
  c10::impl::ExcludeDispatchKeyGuard writes{WRITES};
};

inline void run_below(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {  // our key
  static const DispatchKeySet below(DispatchKeySet::FULL_AFTER, OURS);
  op.redispatchBoxed(keys & below, stack);
}

// Calls `with` for each tensor in an argument or result until one returns false; whether none did.
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

// Whether a compiler traces (torch.compile within a forward, torch.export): calls compute nothing there.
inline bool is_tracing() {
  using Modes = c10::impl::TorchDispatchModeTLS;
  using Mode = c10::impl::TorchDispatchModeKey;
  if (!Modes::any_modes_set()) return false;
  return Modes::get_mode(Mode::FAKE) || Modes::get_mode(Mode::PROXY) || Modes::get_mode(Mode::FUNCTIONAL);
}

// Whether an argument has no bytes: a tensor that is fake or of the meta device, or that device.
inline bool is_abstract(const IValue& value) {
  if (value.isTensor()) {
    const auto* impl = value.toTensor().unsafeGetTensorImpl();
    return impl->has_storage() && impl->unsafe_storage().device_type() == at::kMeta;
  }
  if (value.isList()) return std::ranges::any_of(value.toListRef(), is_abstract);
  return value.isDevice() && value.toDevice().is_meta();
}

// A number in place of a tensor (`x * 0.5`), in the form that PyTorch gives it.
inline bool is_number(const IValue& value) {
  return value.isTensor() && value.toTensor().defined() &&
      value.toTensor().unsafeGetTensorImpl()->is_wrapped_number();
}

inline at::Scalar number_in(const Tensor& wrapped) {  // whose tensor would count as live bytes
  switch (wrapped.scalar_type()) {
    case at::kDouble: return *wrapped.const_data_ptr<double>();
    case at::kLong: return *wrapped.const_data_ptr<int64_t>();
    case at::kBool: return *wrapped.const_data_ptr<bool>();
    case at::kComplexDouble: return *wrapped.const_data_ptr<c10::complex<double>>();
    default: break;
  }
  Unseen unseen;
  return wrapped.item();
}

inline Tensors flat_results(const Stack& stack, size_t from) {
  Tensors found;
  for (size_t at = from; at < stack.size(); ++at) {
    if (stack[at].isTensorList()) {
      for (const IValue& part : stack[at].toListRef()) found.push_back(part.toTensor());
    } else {
      found.push_back(stack[at].isTensor() ? stack[at].toTensor() : Tensor());
    }
  }
  return found;
}

struct RecordedCall {
  struct Place {  // of a tensor: its input, and its geometry
    size_t argument, item, input;
    Geometry geometry;
  };
  OperatorHandle op;
  Stack arguments;  // empty at the places of tensors, and of numbers in their place
  std::vector<Place> places;
  c10::SmallVector<std::pair<size_t, at::Scalar>, 1> numbers;  // with their places among the arguments
  // Records an argument without its tensors.
  void add(const IValue& argument) {
    if (argument.isTensorList()) {
      arguments.emplace_back(c10::List<Tensor>(std::vector<Tensor>(argument.toListRef().size())));
    } else if (argument.isOptionalTensorList()) {
      std::vector<std::optional<Tensor>> blank(argument.toListRef().size());
      arguments.emplace_back(c10::List<std::optional<Tensor>>(blank));
    } else if (is_number(argument)) {
      numbers.push_back({arguments.size(), number_in(argument.toTensor())});
      arguments.emplace_back();
    } else if (argument.isTensor() && argument.toTensor().defined()) {
      arguments.emplace_back();
    } else {
      arguments.push_back(argument);
    }
  }

  template <class Governor>
  Tensors again(at::ArrayRef<Tensor> inputs, Governor* governor) const {
    Stack stack = arguments;
    for (IValue& argument : stack) {
      if (argument.isTensorList()) argument = argument.toTensorList().copy();
      else if (argument.isOptionalTensorList()) argument = argument.toOptionalTensorList().copy();
    }
    for (auto& [place, number] : numbers) {
      Tensor made = c10::scalar_to_tensor(number);
      made.unsafeGetTensorImpl()->set_wrapped_number(true);
      stack[place] = std::move(made);
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
    auto run = [&] { op.callBoxed(stack); };
    py::gil_scoped_release others;
    if (governor != nullptr) (*governor)(op, stack, 0, run);
    else run();
    return flat_results(stack, 0);
  }
};

}  // namespace lowtide
