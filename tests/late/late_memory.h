// The memory of the devices of late_device.cpp, and their streams: what is asked of each, in order, and when
// it runs.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <random>
#include <set>

namespace {
constexpr auto TYPE = c10::DeviceType::CUDA;
constexpr auto KEY = c10::DispatchKey::CUDA;
constexpr int DEVICES = 2, POOL = 16;        // streams of a pool serve in turn, as of PyTorch's
constexpr int64_t MOST_PENDING = 256 << 20;  // bytes of results that wait to be written
constexpr unsigned char FRESH = 0xFF, FREED = 0xFD;

// ---- memory, as strided pieces of it

struct Piece {
  char* at;
  std::vector<int64_t> sizes, strides;  // in elements
  int64_t element;

  template <class F>
  void each(F f) const {
    walk(at, 0, f);
  }
  template <class F>
  void walk(char* from, size_t axis, F& f) const {
    if (axis == sizes.size()) return f(from, element);
    int64_t dense = 1;
    for (size_t i = sizes.size(); i-- > axis; dense *= sizes[i])
      if (sizes[i] != 1 && strides[i] != dense) {
        dense = -1;
        break;
      }
    if (dense >= 0) return dense ? f(from, dense * element) : void();
    for (int64_t i = 0; i < sizes[axis]; i++) walk(from + i * strides[axis] * element, axis + 1, f);
  }
  std::vector<char> bytes() const {
    std::vector<char> found;
    each([&](char* from, int64_t n) { found.insert(found.end(), from, from + n); });
    return found;
  }
  void put(const std::vector<char>& given) const {
    size_t done = 0;
    each([&](char* to, int64_t n) {
      std::memcpy(to, given.data() + done, n);
      done += n;
    });
  }
  uint64_t hash() const {
    uint64_t found = 0x9E3779B97F4A7C15;
    each([&](char* from, int64_t n) {
      for (; n > 0; n -= 8, from += 8) {
        uint64_t word = 0;
        std::memcpy(&word, from, n < 8 ? n : 8);
        found = (found ^ word) * 0xFF51AFD7ED558CCD;
        found ^= found >> 29;
      }
    });
    return found;
  }
  std::pair<char*, char*> span() const {
    char *low = at, *high = at + element;
    for (size_t i = 0; i < sizes.size(); i++) {
      if (!sizes[i]) return {at, at};
      (strides[i] < 0 ? low : high) += (sizes[i] - 1) * strides[i] * element;
    }
    return {low, high};
  }
  Piece moved(int64_t by) const { return {at + by, sizes, strides, element}; }
};
Piece piece_of(const at::Tensor& t) {
  return {(char*)t.const_data_ptr(), t.sizes().vec(), t.strides().vec(), (int64_t)t.element_size()};
}

// ---- streams

struct Queue;
struct Point {
  Queue* queue = nullptr;
  uint64_t at = 0;
  bool reached() const;
};
struct Job {
  std::string name;
  std::vector<std::pair<Piece, uint64_t>> reads;
  std::vector<std::pair<Piece, std::vector<char>>> writes;
  Point after;  // what it waits for, and nothing else
  int64_t bytes() const {
    int64_t n = 0;
    for (auto& w : writes) n += w.second.size();
    return n;
  }
};
struct Queue {
  int device, number;
  double rate = 0.5;
  std::deque<Job> jobs;
  std::vector<Piece> freed;  // what the next work may overwrite
  uint64_t done = 0;
  Point end() { return {this, done + jobs.size()}; }
};
bool Point::reached() const { return !queue || queue->done >= at; }

struct Block {
  char* real;
  int64_t bytes, asked;
  int device;
  Queue* stream;
  std::set<Queue*> used_by;
  bool live = false;
};

std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;
std::mt19937_64 chance;
std::map<std::pair<int, c10::StreamId>, Queue> queues;
std::map<char*, Block> blocks;
std::multimap<std::tuple<Queue*, int64_t>, Block*> unused;
std::list<std::pair<Block*, std::vector<Point>>> used;   // freed, and streams that have yet to get there
std::map<char*, int64_t> locked;                         // page-locked host memory
std::list<std::pair<char*, std::vector<Point>>> let_go;  // of it what PyTorch's own allocator waits with
std::vector<std::string> faults;
int64_t pending = 0, ran = 0, order = 0, next_stream = 0;
int64_t live[DEVICES], peak[DEVICES], asked[DEVICES], most_asked[DEVICES], reserved[DEVICES],
    most_reserved[DEVICES];
struct Moment {
  int device, sign;
  int64_t bytes;
  double time;
};
std::vector<Moment> history;
bool recording = false;
double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
thread_local c10::DeviceIndex current = 0;
thread_local c10::StreamId stream_of[DEVICES] = {};

Queue* queue(int device, c10::StreamId id) {
  auto [found, made] = queues.try_emplace({device, id}, Queue{device, (int)id});
  if (made) found->second.rate = std::vector<double>{0, 0.1, 0.5, 1}[chance() % 4];
  return &found->second;
}
Queue* here(int device) { return queue(device, stream_of[device]); }
double toss() { return (chance() >> 11) * 0x1p-53; }

bool ready(const Queue& q) { return !q.jobs.empty() && q.jobs.front().after.reached(); }
void run(Queue& q) {
  Job job = std::move(q.jobs.front());
  for (auto& [piece, hash] : job.reads)
    if (piece.hash() != hash && faults.size() < 50) {
      auto [low, high] = piece.span();
      bool host = true;
      for (auto& [_, b] : blocks) host = host && !(low >= b.real && low < b.real + b.bytes);
      faults.push_back(job.name + " on stream " + std::to_string(q.number) + " of device " +
                       std::to_string(q.device) + " reads " + std::to_string(high - low) + " bytes of " +
                       (host ? "main memory" : "the device") + " too early, or too late");
    }
  for (auto& [piece, bytes] : job.writes) piece.put(bytes);
  pending -= job.bytes();
  ran++;
  order = (order ^ (q.number * 31 + q.device + 1)) * 0x100000001B3;
  q.jobs.pop_front();
  q.done++;
}
void others() {  // get as far as each of them likes
  for (auto& [_, q] : queues)
    while (ready(q) && toss() < q.rate) run(q);
}
void reach(Point point) {  // while others go on
  while (!point.reached()) {
    if (ready(*point.queue))
      run(*point.queue);
    else
      reach(point.queue->jobs.front().after);
    if (toss() < 0.5) others();
  }
}
Point push(Queue* q, Job job) {
  if (!job.after.queue) {  // work, which may find its memory among what was freed
    for (auto& piece : q->freed) {
      q->jobs.push_back(
          {"reuse of freed memory", {}, {{piece, std::vector<char>(piece.sizes[0], FREED)}}, {}});
      pending += piece.sizes[0];
    }
    q->freed.clear();
  }
  pending += job.bytes();
  q->jobs.push_back(std::move(job));
  return q->end();
}
void freed(Block* b);
void tick() {
  if (toss() < 0.02)
    for (auto& [_, q] : queues) q.rate = std::vector<double>{0, 0.1, 0.5, 1}[chance() % 4];
  others();
  while (pending > MOST_PENDING) {
    std::vector<Queue*> some;
    for (auto& [_, q] : queues)
      if (ready(q)) some.push_back(&q);
    run(*some[chance() % some.size()]);
  }
  for (auto it = used.begin(); it != used.end();) {
    bool over = true;
    for (auto& p : it->second) over = over && p.reached();
    if (over) {
      freed(it->first);
      it = used.erase(it);
    } else
      ++it;
  }
  for (auto it = let_go.begin(); it != let_go.end();) {
    bool over = true;
    for (auto& p : it->second) over = over && p.reached();
    if (over) {
      std::free(it->first);
      it = let_go.erase(it);
    } else
      ++it;
  }
}
Point ask(Queue* q, Job job) {
  Point end = push(q, std::move(job));
  tick();
  return end;
}
std::vector<Point> ends() {
  std::vector<Point> all;
  for (auto& [_, q] : queues) all.push_back(q.end());
  return all;
}

// ---- blocks

Block* block_at(const void* at) {
  auto found = blocks.upper_bound((char*)at);
  if (found == blocks.begin()) return nullptr;
  Block& b = (--found)->second;
  return (char*)at < b.real + b.bytes ? &b : nullptr;
}
Piece whole(Block* b) { return {b->real, {b->bytes}, {1}, 1}; }
void freed(Block* b) {
  b->stream->freed.push_back(whole(b));
  unused.emplace(std::tuple{b->stream, b->bytes}, b);
}
void let_go_of(void* p) {
  Lock lock(mutex);
  auto* b = (Block*)p;
  live[b->device] -= b->bytes;
  asked[b->device] -= b->asked;
  if (recording) history.push_back({b->device, -1, b->asked, now()});
  b->live = false;
  std::vector<Point> until;
  for (Queue* q : b->used_by) until.push_back(q->end());
  b->used_by.clear();
  if (until.empty())
    freed(b);
  else
    used.emplace_back(b, until);
}
struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    if (!n) return {nullptr, {TYPE, current}};
    Lock lock(mutex);
    int64_t bytes = (n + 511) / 512 * 512;
    Queue* stream = here(current);
    Block* b;
    auto found = unused.find({stream, bytes});
    if (found != unused.end()) {
      b = found->second;
      unused.erase(found);
    } else {
      char* real = (char*)std::aligned_alloc(512, 2 * bytes);
      b = &(blocks[real] = Block{real, bytes, 0, current, stream, {}, false});
      reserved[current] += bytes;
      most_reserved[current] = std::max(most_reserved[current], reserved[current]);
    }
    b->asked = n;
    b->live = true;
    int d = b->device;
    live[d] += bytes, peak[d] = std::max(peak[d], live[d]);
    asked[d] += n, most_asked[d] = std::max(most_asked[d], asked[d]);
    if (recording) history.push_back({d, 1, (int64_t)n, now()});
    std::memset(b->real + b->bytes, FRESH, b->bytes);
    push(b->stream, {"new memory", {}, {{whole(b), std::vector<char>(b->bytes, FRESH)}}, {}});
    return {b->real, b, let_go_of, c10::Device(TYPE, d)};
  }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
} memory;
struct Locked final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    if (!n) return {nullptr, {c10::kCPU}};
    Lock lock(mutex);
    void* at = std::aligned_alloc(64, (n + 63) / 64 * 64);
    locked[(char*)at] = n;
    return {at, at,
            [](void* p) {
              Lock lock(mutex);
              locked.erase((char*)p);
              let_go.emplace_back((char*)p, ends());
            },
            c10::kCPU};
  }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
} locked_memory;
bool is_locked(const void* at) {
  Lock lock(mutex);
  auto found = locked.upper_bound((char*)at);
  return found != locked.begin() && (--found, (char*)at < found->first + found->second);
}

}  // namespace
