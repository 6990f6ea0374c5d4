// A CPU allocator for PyTorch that counts: exact bytes as requested, every thread, at the cost of one small
// table access per block.
//
// Blocks come from c10::alloc_cpu and look exactly like the default allocator's (same address, alignment,
// context == data), so a block may be freed by either allocator whoever made it: oneDNN, for one, frees its
// workspaces through whichever allocator is current. Sizes live in a side table. A block that left through
// another deleter leaves a stale entry; it is dropped when its address is issued again.
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/flat_hash_map.h>

#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>

namespace {

constexpr int kShards = 64;
constexpr int kMarks = 64;
constexpr uint64_t kRing = 1u << 20;

struct Spin {
  std::atomic_flag flag = ATOMIC_FLAG_INIT;
  void lock() noexcept {
    while (flag.test_and_set(std::memory_order_acquire)) {
    }
  }
  void unlock() noexcept { flag.clear(std::memory_order_release); }
};

struct alignas(64) Shard {
  Spin lock;
  ska::flat_hash_map<void*, size_t> sizes;
};

// A watermark register: the most bytes live since it was opened.
struct Mark {
  std::atomic<int64_t> peak{0};
  std::atomic<int64_t> start{0};
};

// The log: where nobody reads it, no page of it is touched.
struct Event {
  int64_t ns;
  int64_t delta;
};
Event ring[kRing];

struct State {
  std::array<Shard, kShards> shards;
  std::array<Mark, kMarks> marks;
  std::atomic<uint64_t> open{0};
  std::atomic<int64_t> live{0};
  std::atomic<uint64_t> written{0};
  std::atomic<int> readers{0};
  std::mutex mutex;
  int installs = 0;
  c10::Allocator* previous = nullptr;
};

// Never destroyed: blocks may be freed after static destructors ran.
State& state() {
  static State* s = new State();
  return *s;
}

Shard& shard(void* p) {
  auto a = reinterpret_cast<uintptr_t>(p);
  return state().shards[((a >> 6) ^ (a >> 12) ^ (a >> 20)) % kShards];
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void raise_to(std::atomic<int64_t>& peak, int64_t value) {
  int64_t seen = peak.load(std::memory_order_relaxed);
  while (seen < value && !peak.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

void log_event(int64_t delta) {
  State& s = state();
  if (s.readers.load(std::memory_order_relaxed) == 0) return;
  ring[s.written.fetch_add(1, std::memory_order_relaxed) % kRing] = Event{now_ns(), delta};
}

void note_alloc(int64_t bytes) {
  State& s = state();
  int64_t live = s.live.fetch_add(bytes, std::memory_order_seq_cst) + bytes;
  for (uint64_t open = s.open.load(std::memory_order_seq_cst); open != 0; open &= open - 1)
    raise_to(s.marks[__builtin_ctzll(open)].peak, live);
  log_event(bytes);
}

void note_free(int64_t bytes) {
  state().live.fetch_sub(bytes, std::memory_order_seq_cst);
  log_event(-bytes);
}

// Remember a block; returns the size of a stale entry at the same address, 0 when there was none.
size_t remember(void* p, size_t bytes) {
  Shard& sh = shard(p);
  std::lock_guard<Spin> guard(sh.lock);
  auto [it, fresh] = sh.sizes.emplace(p, bytes);
  if (fresh) return 0;
  size_t stale = it->second;
  it->second = bytes;
  return stale;
}

size_t forget(void* p) {
  Shard& sh = shard(p);
  std::lock_guard<Spin> guard(sh.lock);
  auto it = sh.sizes.find(p);
  if (it == sh.sizes.end()) return 0;
  size_t bytes = it->second;
  sh.sizes.erase(it);
  return bytes;
}

void counted_delete(void* p) {
  if (p == nullptr) return;
  if (size_t bytes = forget(p)) note_free(static_cast<int64_t>(bytes));
  c10::profiledCPUMemoryReporter().Delete(p);
  c10::free_cpu(p);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = nullptr;
    try {
      data = c10::alloc_cpu(nbytes);
    } catch (c10::Error&) {
      c10::profiledCPUMemoryReporter().OutOfMemory(nbytes);
      throw;
    }
    c10::profiledCPUMemoryReporter().New(data, nbytes);
    if (data != nullptr && nbytes != 0) {
      if (size_t stale = remember(data, nbytes)) note_free(static_cast<int64_t>(stale));
      note_alloc(static_cast<int64_t>(nbytes));
    }
    return {data, data, &counted_delete, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &counted_delete; }
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    default_copy_data(dest, src, count);
  }
};

CountingAllocator& allocator() {
  static CountingAllocator* a = new CountingAllocator();
  return *a;
}

void before_fork() {
  for (auto& sh : state().shards) sh.lock.lock();
}
void after_fork() {
  for (auto& sh : state().shards) sh.lock.unlock();
}

}  // namespace

extern "C" {

// 0: installed (or one more user); 1: somebody else's allocator is set; 2: one of higher priority cannot be
// replaced.
int lt_install() {
  State& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  if (s.installs > 0 && c10::GetCPUAllocator() == &allocator()) {
    ++s.installs;
    return 0;
  }
  c10::Allocator* current = c10::GetCPUAllocator();
  if (current != c10::GetDefaultCPUAllocator()) return 1;
  static const bool forks = pthread_atfork(&before_fork, &after_fork, &after_fork) == 0;
  (void)forks;
  c10::SetCPUAllocator(&allocator(), 0);
  if (c10::GetCPUAllocator() != &allocator()) return 2;
  s.previous = current;
  ++s.installs;
  return 0;
}

// The number of users left, or -1 when there was none.
int lt_uninstall() {
  State& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  if (s.installs == 0) return -1;
  if (--s.installs == 0 && c10::GetCPUAllocator() == &allocator()) c10::SetCPUAllocator(s.previous, 0);
  return s.installs;
}

int lt_installs() {
  std::lock_guard<std::mutex> guard(state().mutex);
  return state().installs;
}

int64_t lt_live() { return state().live.load(); }
int64_t lt_now() { return now_ns(); }

// Open a watermark register; -1 when all are in use.
int lt_mark_open() {
  State& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  uint64_t spare = ~s.open.load();
  if (spare == 0) return -1;
  int id = __builtin_ctzll(spare);
  int64_t live = s.live.load();
  s.marks[id].start.store(live);
  s.marks[id].peak.store(live);
  s.open.fetch_or(uint64_t{1} << id);
  raise_to(s.marks[id].peak, s.live.load());
  return id;
}

int64_t lt_mark_peak(int id) { return state().marks[id].peak.load() - state().marks[id].start.load(); }
int64_t lt_mark_live(int id) { return state().live.load() - state().marks[id].start.load(); }

void lt_mark_close(int id) {
  std::lock_guard<std::mutex> guard(state().mutex);
  state().open.fetch_and(~(uint64_t{1} << id));
}

// Begin logging for one more reader; returns the position of the next event.
int64_t lt_log_open() {
  state().readers.fetch_add(1);
  return static_cast<int64_t>(state().written.load());
}

// Log for one reader less; returns the position after its last event.
int64_t lt_log_close() {
  auto end = static_cast<int64_t>(state().written.load());
  state().readers.fetch_sub(1);
  return end;
}

// Copy the events [from, to) into ns and delta, the oldest that the ring no longer has left out; returns how
// many were copied.
int64_t lt_log_read(int64_t from, int64_t to, int64_t* ns, int64_t* delta) {
  auto kept = static_cast<int64_t>(state().written.load()) - static_cast<int64_t>(kRing);
  if (from < kept) from = kept;
  int64_t copied = 0;
  for (int64_t i = from; i < to; ++i, ++copied) {
    ns[copied] = ring[i % kRing].ns;
    delta[copied] = ring[i % kRing].delta;
  }
  return copied;
}

}  // extern "C"
