// Two storages over the same bytes, each of which ends by itself; the bytes go with the last.
//
// Autograd's copy of a tensor must not lengthen the life of the program's own storage where that life is
// written down. A lazy clone (copy on write) would do, but kernels that ask for mutable data would copy it.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/impl/COW.h>

#include <atomic>

namespace lowtide {

struct SharedBytes {
  c10::DataPtr bytes;
  std::atomic<long> owners{1};

  static void end(void* context) {
    auto* shared = static_cast<SharedBytes*>(context);
    if (shared->owners.fetch_sub(1) == 1) delete shared;
  }

  static SharedBytes* of(const c10::DataPtr& pointer) {  // or null
    return pointer.get_deleter() == &end ? static_cast<SharedBytes*>(pointer.get_context()) : nullptr;
  }
};

inline long owners_of_bytes(const c10::Storage& storage) {
  SharedBytes* shared = SharedBytes::of(storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks());
  return shared == nullptr ? 1 : shared->owners.load();
}

// The tensor over another storage of the same bytes; undefined where PyTorch shares these by itself.
inline at::Tensor aliased(const at::Tensor& tensor) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  c10::DataPtr& own = storage->_mutable_data_ptr_no_checks();
  if (own.get() == nullptr || c10::impl::cow::is_cow_data_ptr(own)) return {};
  SharedBytes* both = SharedBytes::of(own);
  if (both == nullptr) {
    void* data = own.get();
    c10::Device device = own.device();
    both = new SharedBytes{std::move(own)};
    own = c10::DataPtr(data, both, &SharedBytes::end, device);
  }
  both->owners.fetch_add(1);
  auto twin = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage->nbytes(),
      c10::DataPtr(own.get(), both, &SharedBytes::end, own.device()), storage->allocator(), false);
  c10::InferenceMode outside(tensor.is_inference());  // else the tensor would take no version counter
  c10::Storage over(twin);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(over), tensor.key_set(), tensor.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (!tensor.is_inference()) impl->set_version_counter(tensor.unsafeGetTensorImpl()->version_counter());
  return made;
}

}  // namespace lowtide
