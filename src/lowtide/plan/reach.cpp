// Sweeps over what the operations of a step read. See reach.py, which does the same in Python.
// Plain C interface, no PyTorch: compiled once per machine by lowtide.native.

#include <cstdint>
#include <vector>

namespace {

constexpr int kNone = -1;

}  // namespace

// The operations that bring `given` back, in their order: how many there are, or -1 where that is not possible.
// `reads` of operation i: value[start[i]] to value[start[i + 1]], exclusive.
extern "C" int lowtide_closure(int count, const int32_t* start, const int32_t* value, const int32_t* producer, const uint8_t* refused,
                               const uint8_t* must_store, const uint8_t* flags, int given_count, const int32_t* given, int32_t* order) {
  std::vector<uint8_t> needed(count, 0);
  std::vector<int32_t> stack;
  stack.reserve(given_count + 256);
  for (int k = 0; k < given_count; ++k) stack.push_back(producer[given[k]]);
  while (!stack.empty()) {
    const int32_t index = stack.back();
    stack.pop_back();
    if (index < 0) return kNone;
    if (needed[index]) continue;
    if (refused[index]) return kNone;
    needed[index] = 1;
    for (int32_t k = start[index]; k < start[index + 1]; ++k) {
      const int32_t u = value[k];
      if (flags[u] == 2) return kNone;
      if (flags[u]) continue;
      if (must_store[u]) return kNone;
      stack.push_back(producer[u]);
    }
  }
  int found = 0;
  for (int index = 0; index < count; ++index) {
    if (needed[index]) order[found++] = index;
  }
  return found;
}

// Rule 3, for the operations in `order`: `until` says it for those that make what is given up, and in the end for all; `hold` for what is stored.
extern "C" void lowtide_rests(const int32_t* start, const int32_t* value, const int32_t* producer, const uint8_t* flags, int order_count,
                              const int32_t* order, int64_t* until, int64_t* hold) {
  for (int k = order_count - 1; k >= 0; --k) {
    const int32_t index = order[k];
    const int64_t last = until[index];
    for (int32_t r = start[index]; r < start[index + 1]; ++r) {
      const int32_t u = value[r];
      int64_t& known = flags[u] ? hold[u] : until[producer[u]];
      if (last > known) known = last;
    }
  }
}

// What of `kept` is used by the operations that bring `given` back, and what they need that nothing brings back.
extern "C" void lowtide_close(int count, const int32_t* start, const int32_t* value, const int32_t* producer, const uint8_t* storable,
                              const uint8_t* must, const uint8_t* kept, int given_count, const int32_t* given, uint8_t* used) {
  std::vector<uint8_t> seen(count, 0);
  std::vector<int32_t> stack;
  stack.reserve(given_count + 256);
  for (int k = 0; k < given_count; ++k) stack.push_back(producer[given[k]]);
  while (!stack.empty()) {
    const int32_t index = stack.back();
    stack.pop_back();
    if (index < 0 || seen[index]) continue;
    seen[index] = 1;
    for (int32_t k = start[index]; k < start[index + 1]; ++k) {
      const int32_t u = value[k];
      if (storable[u] && (kept[u] || must[u])) {
        used[u] = 1;
      } else {
        if (!storable[u]) used[u] = 0;
        stack.push_back(producer[u]);
      }
    }
  }
}
