// Calls Python before an operation writes to a storage that is watched: lowtide.writes.
#pragma once

#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "call.h"
#include "python.h"

namespace lowtide {

struct Watched {
  struct Storage {
    c10::weak_intrusive_ptr<c10::StorageImpl> itself;  // so that its address goes to no other storage
    long readers;
  };

  std::shared_mutex mutex;
  std::unordered_map<uintptr_t, Storage> storages;
  std::atomic<bool> any{false};
  py::object before_write;  // a function in Python

  bool has(uintptr_t storage) {
    std::shared_lock lock(mutex);
    return storages.count(storage) != 0;
  }

  void add(const std::vector<uintptr_t>& keys) {
    std::unique_lock lock(mutex);
    for (uintptr_t key : keys) {
      auto found = storages.find(key);
      if (found != storages.end()) {
        ++found->second.readers;
        continue;
      }
      auto* storage = reinterpret_cast<c10::StorageImpl*>(key);
      c10::raw::intrusive_ptr::incref(storage);
      auto strong = c10::intrusive_ptr<c10::StorageImpl>::reclaim(storage);
      storages.emplace(key, Storage{c10::weak_intrusive_ptr<c10::StorageImpl>(strong), 1});
    }
    any = !storages.empty();
  }

  void remove(const std::vector<uintptr_t>& keys) {
    std::unique_lock lock(mutex);
    for (uintptr_t key : keys) {
      auto found = storages.find(key);
      if (found != storages.end() && --found->second.readers == 0) storages.erase(found);
    }
    any = !storages.empty();
  }
};
inline Watched& watched = *new Watched;

// The kernel of operations that write, above autograd.
inline void writes(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  static const DispatchKeySet below(DispatchKeySet::FULL_AFTER, WRITES);
  if (!watched.any) {
    c10::impl::tls_set_dispatch_key_included(WRITES, false);
  } else {
    const auto& arguments = op.schema().arguments();
    Tensors found;
    for (size_t at = 0; at < arguments.size(); ++at) {
      const auto* alias = arguments[at].alias_info();
      if (alias == nullptr || !alias->isWrite()) continue;
      each_tensor((*stack)[stack->size() - arguments.size() + at], [&](const Tensor& tensor, size_t) {
        if (plain(tensor) && watched.has(storage_key(tensor))) found.push_back(tensor);
        return true;
      });
    }
    if (!found.empty()) {
      py::gil_scoped_acquire gil;
      py::list written;
      for (const Tensor& tensor : found) written.append(wrapped(tensor));
      watched.before_write(written, op.schema().name());
    }
  }
  op.redispatchBoxed(keys & below, stack);
}

}  // namespace lowtide
