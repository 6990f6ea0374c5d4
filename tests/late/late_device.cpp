// Two devices of type CUDA in main memory, for a build of PyTorch without CUDA, whose streams run late and
// out of order. Each operation runs at once on a shadow of the device's memory, in the order in which the
// program asked: so shapes, values and random numbers are known. What a stream does later is to check that
// the operation's inputs in the memory itself are those of the shadow, and to write its results there. An
// input that differs was read before it was ready, or after its memory served something else: a fault.
//
// The allocator caches freed blocks for each stream, as PyTorch's does, and overwrites what is freed as soon
// as the block's own stream is next given work. Load this before `import torch`: who asks for CUDA's hooks
// first, decides.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "late_memory.h"

namespace {
using c10::IValue;
using Stack = torch::jit::Stack;

// ---- what PyTorch asks of a device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto old = getDevice();
    setDevice(d);
    return old;
  }
  c10::Device getDevice() const override { return {TYPE, current}; }
  void setDevice(c10::Device d) const override {
    if (d.index() >= 0) current = d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0) current = d.index();
  }
  int at(c10::Device d) const { return d.index() < 0 ? current : d.index(); }
  c10::Stream stream(c10::Device d, c10::StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, at(d)), id);
  }
  c10::Stream fresh(c10::Device d) const {
    Lock lock(mutex);
    return stream(d, 1 + next_stream++ % POOL);
  }
  Queue* of(const c10::Stream& s) const { return queue(at(s.device()), s.id()); }
  c10::Stream getStream(c10::Device d) const override { return stream(d, stream_of[at(d)]); }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(d, 0); }
  c10::Stream getNewStream(c10::Device d, int) const override { return fresh(d); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return fresh(d); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = getStream(s.device());
    stream_of[at(s.device())] = s.id();
    return old;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void record(void** e, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock lock(mutex);
    if (!*e) *e = new std::pair<Point, double>;
    *(std::pair<Point, double>*)*e = {of(s)->end(), now()};
  }
  void block(void* e, const c10::Stream& s) const override {
    Lock lock(mutex);
    if (e) ask(of(s), {"wait", {}, {}, ((std::pair<Point, double>*)e)->first});
  }
  bool queryEvent(void* e) const override {
    Lock lock(mutex);
    if (!e) return true;
    Point p = ((std::pair<Point, double>*)e)->first;
    tick();
    if (toss() < 0.3) reach(p);  // who asks again and again is answered at last
    return p.reached();
  }
  void destroyEvent(void* e, const c10::DeviceIndex) const noexcept override {
    delete (std::pair<Point, double>*)e;
  }
  bool queryStream(const c10::Stream& s) const override {
    Lock lock(mutex);
    tick();
    return of(s)->jobs.empty();
  }
  void synchronizeStream(const c10::Stream& s) const override {
    Lock lock(mutex);
    tick();
    reach(of(s)->end());
  }
  void synchronizeEvent(void* e) const override {
    Lock lock(mutex);
    tick();
    if (e) reach(((std::pair<Point, double>*)e)->first);
  }
  void synchronizeDevice(const c10::DeviceIndex d) const override {
    Lock lock(mutex);
    for (auto& [key, q] : queues)
      if (key.first == d) reach(q.end());
    tick();
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
    Lock lock(mutex);
    Block* b = block_at(p.get());
    if (b && p.get_context() == b && of(s) != b->stream)
      b->used_by.insert(of(s));  // as PyTorch's: of its own memory alone
  }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    return (((std::pair<Point, double>*)b)->second - ((std::pair<Point, double>*)a)->second) * 1e3;
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// ---- operations

bool ours(const at::Tensor& t) { return t.defined() && t.device().type() == TYPE; }
int64_t to_shadow(const at::Tensor& t) {
  Block* b = block_at(t.storage().data());
  return b ? b->bytes : 0;
}
at::Tensor alias(const at::Tensor& t) {
  if (!ours(t)) return t;
  auto* at = (char*)t.storage().mutable_data();
  c10::Storage same(c10::Storage::use_byte_size_t(), t.storage().nbytes(),
                    c10::DataPtr(at ? at + to_shadow(t) : at, c10::Device(c10::kCPU)), nullptr, false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(same),
                                                       c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  made._set_conj(t.is_conj());
  return made;
}
void reads(Job& job, const at::Tensor& t) {
  if (!ours(t) || !t.numel()) return;
  Piece real = piece_of(t);
  job.reads.emplace_back(real, real.moved(to_shadow(t)).hash());
}
void writes(Job& job, const at::Tensor& t) {
  if (!ours(t) || !t.numel()) return;
  Piece real = piece_of(t);
  job.writes.emplace_back(real, real.moved(to_shadow(t)).bytes());
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(c10::Device(TYPE)));
  return at::detail::empty_generic_symint(size, &memory, c10::DispatchKeySet(KEY), type.value_or(at::kFloat),
                                          format);
}
at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<at::ScalarType> type, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(TYPE)));
  return at::detail::empty_strided_symint_generic(size, stride, &memory, c10::DispatchKeySet(KEY),
                                                  type.value_or(at::kFloat));
}
const at::Tensor& resize(const at::Tensor& t, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  Lock lock(mutex);
  t.unsafeGetTensorImpl()->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  int64_t bytes = (t.numel() + t.storage_offset()) * t.element_size();
  auto& storage = t.storage();
  if ((int64_t)storage.nbytes() >= bytes) return t;
  c10::DeviceGuard guard(t.device());
  auto fresh = memory.allocate(bytes);
  if (int64_t n = storage.nbytes()) {
    Piece from{(char*)storage.data(), {n}, {1}, 1}, to{(char*)fresh.get(), {n}, {1}, 1};
    Piece shadow = from.moved(to_shadow(t));
    to.moved(block_at(to.at)->bytes).put(shadow.bytes());
    ask(here(current), {"resize_", {{from, shadow.hash()}}, {{to, shadow.bytes()}}, {}});
  }
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(bytes);
  return t;
}
at::Tensor& set(at::Tensor& t, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                c10::SymIntArrayRef stride) {
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  t.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size),
                                                 C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return t;
}
at::Tensor& set_storage(at::Tensor& t, at::Storage storage) {
  c10::SymInt count = (int64_t)storage.nbytes() / (int64_t)t.element_size(), one = 1;
  return set(t, storage, 0, count, one);
}
at::Tensor& set_tensor(at::Tensor& t, const at::Tensor& s) {
  return set(t, s.storage(), s.storage_offset(), s.sym_sizes(), s.sym_strides());
}
void record_stream(at::Tensor& t, c10::Stream s) { Guard().recordDataPtrOnStream(t.storage().data_ptr(), s); }

struct Plain {  // PyTorch as it is without modes, autograd and interceptions
  c10::impl::ForceDispatchKeyGuard keys{
      c10::default_included_set,
      c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView};
};

// Host memory as it will be when the copies that are under way to it have run.
std::vector<char> expected(const Piece& p, char* low, char* high) {
  std::vector<char> found(low, high);
  for (auto& [_, q] : queues)
    for (auto& job : q.jobs)
      for (auto& [to, bytes] : job.writes) {
        auto [first, last] = to.span();
        if (first >= high || last <= low) continue;
        size_t done = 0;
        to.each([&, &bytes = bytes](char* at, int64_t n) {
          for (int64_t i = 0; i < n; i++, done++)
            if (at + i >= low && at + i < high) found[at + i - low] = bytes[done];
        });
      }
  return found;
}
at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool beside) {
  Lock lock(mutex);
  if (!to.numel()) return to;
  Plain plain;
  at::Tensor source = from.expand(to.sizes());
  if (source.is_neg() || source.is_conj()) source = ours(source) ? source : source.clone();
  Job job{"copy_", {}, {}, {}};
  if (ours(to) && ours(from)) {
    Queue *out = here(from.device().index()), *in = here(to.device().index());
    if (out != in) ask(out, {"wait", {}, {}, in->end()});
    alias(to).copy_(alias(source));
    reads(job, source), writes(job, to);
    Point end = ask(out, std::move(job));
    if (out != in) ask(in, {"wait", {}, {}, end});
    return to;
  }
  Queue* q = here((ours(to) ? to : from).device().index());
  if (ours(to)) {
    bool direct = is_locked(source.const_data_ptr());
    at::Tensor values = source;
    std::vector<char> bytes;
    if (direct) {
      Piece piece = piece_of(source);
      auto [low, high] = piece.span();
      bytes = expected(piece, low, high);
      values =
          at::from_blob(bytes.data() + (piece.at - low), source.sizes(), source.strides(), source.options());
      job.reads.emplace_back(piece, piece_of(values).hash());
    }
    alias(to).copy_(values);
    writes(job, to);
    Point end = ask(q, std::move(job));
    if (!beside) reach(end);
  } else {
    bool direct = beside && is_locked(to.const_data_ptr());
    at::Tensor values = at::empty_strided(to.sizes(), to.strides(), to.options());
    values.copy_(alias(source));
    reads(job, source);
    job.writes.emplace_back(piece_of(to), piece_of(values).bytes());
    Point end = ask(q, std::move(job));
    if (!direct) reach(end);
  }
  return to;
}

bool is_write_only(const std::string& name, const c10::Argument& argument) {
  static const std::set<std::string> all{"aten::zero_",       "aten::fill_",      "aten::normal_",
                                         "aten::uniform_",    "aten::bernoulli_", "aten::random_",
                                         "aten::exponential_"};
  return argument.alias_info() && argument.alias_info()->isWrite() && (argument.is_out() || all.count(name));
}
void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const size_t n = schema.arguments().size(), first = stack->size() - n;
  std::vector<IValue> given(stack->begin() + first,
                            stack->end());  // goes after the lock: it may need Python's
  Lock lock(mutex);
  c10::Device device(TYPE, current);
  for (auto& v : given) {
    if (v.isTensor() && ours(v.toTensor())) {
      device = v.toTensor().device();
      break;
    }
    if (v.isTensorList() && v.toTensorList().size() && ours(v.toTensorList().get(0))) {
      device = v.toTensorList().get(0).device();
      break;
    }
  }
  Job job{schema.name(), {}, {}, {}};
  std::vector<std::pair<at::Tensor, at::Tensor>> fresh;  // results that get their size now
  std::vector<at::Tensor> written_to;
  for (size_t i = 0; i < n; i++) {
    IValue& v = (*stack)[first + i];
    const auto& argument = schema.arguments()[i];
    const bool written = argument.alias_info() && argument.alias_info()->isWrite(),
               reading = !is_write_only(schema.name(), argument);
    auto take = [&](const at::Tensor& t) {
      if (reading) reads(job, t);
      if (written && ours(t)) written_to.push_back(t);
      return alias(t);
    };
    if (v.isTensor() && ours(v.toTensor()) && written && !v.toTensor().numel())
      fresh.emplace_back(v.toTensor(), at::empty({0}, v.toTensor().options().device(at::kCPU))),
          v = fresh.back().second;
    else if (v.isTensor())
      v = take(v.toTensor());
    else if (v.isTensorList()) {
      c10::List<at::Tensor> l;
      for (const at::Tensor& t : v.toTensorList()) l.push_back(take(t));
      v = l;
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> l;
      for (const std::optional<at::Tensor>& t : v.toOptionalTensorList())
        l.push_back(t ? std::optional(take(*t)) : t);
      v = l;
    } else if (v.isDevice() && v.toDevice().type() == TYPE)
      v = c10::Device(c10::kCPU);
  }
  {
    Plain plain;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  c10::DeviceGuard guard(device);
  auto fill = [&](const at::Tensor& t, const at::Tensor& low) {
    if (!t.numel()) return;
    Plain plain;
    alias(t).copy_(low);
    writes(job, t);
  };
  for (auto& [t, low] : fresh) resize(t, low.sym_sizes(), std::nullopt), fill(t, low);
  for (auto& t : written_to) writes(job, t);
  auto raised = [&](const at::Tensor& t) {
    if (!t.defined()) return t;
    auto made = at::empty_strided(t.sizes(), t.strides(), t.options().device(device));
    fill(made, t);
    return made;
  };
  bool host = schema.returns().size() > 0;  // the program gets a number, and has to wait for it
  const size_t results = schema.returns().size(), from = stack->size() - results;
  for (size_t i = 0; i < results; i++) {
    IValue& v = (*stack)[from + i];
    const auto* written = schema.returns()[i].alias_info();
    if (written && written->isWrite()) {
      for (size_t j = 0; j < n; j++)
        if (schema.arguments()[j].alias_info() && *schema.arguments()[j].alias_info() == *written)
          v = given[j];
    } else if (v.isTensor())
      v = raised(v.toTensor());
    else if (v.isTensorList()) {
      c10::List<at::Tensor> l;
      for (const at::Tensor& t : v.toTensorList()) l.push_back(raised(t));
      v = l;
    }
    host = host && !v.isTensor() && !v.isTensorList();
  }
  if (job.reads.empty() && job.writes.empty()) return;
  Point end = ask(here(device.index()), std::move(job));
  if (host) reach(end);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("copy_", &copy);
  m.impl("record_stream", &record_stream);
}
const bool registered = [] {
  c10::SetAllocator(TYPE, &memory);
  return true;
}();
}  // namespace

namespace at {
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  void init() const override {}
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex d) const override { current = d; }
  bool isPinnedPtr(const void* at) const override { return is_locked(at); }
  Device getDeviceFromPtr(void* at) const override {
    Lock lock(mutex);
    return Device(kCUDA, block_at(at)->device);
  }
  Allocator* getPinnedMemoryAllocator() const override { return &locked_memory; }
  const Generator& getDefaultGenerator(DeviceIndex) const override {
    static Generator one = at::detail::getDefaultCPUGenerator();
    return one;
  }
  Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

extern "C" {
void late_set_device(int d) { current = d; }
int late_device() { return current; }
void late_begin(uint64_t seed) {  // everything before has run
  Lock lock(mutex);
  for (auto& [_, q] : queues) reach(q.end());
  chance.seed(seed);
  faults.clear();
  ran = order = 0;
  for (auto& [_, q] : queues) q.rate = std::vector<double>{0, 0.1, 0.5, 1}[chance() % 4];
}
void late_end() {
  Lock lock(mutex);
  for (auto& [_, q] : queues) reach(q.end());
  tick();
}
int64_t late_count(const char* what, int d) {
  Lock lock(mutex);
  std::string name = what;
  if (name == "ran") return ran;
  if (name == "order") return order;
  if (name == "faults") return faults.size();
  if (name == "requested") return asked[d];
  if (name == "most_requested") return most_asked[d];
  if (name == "allocated") return live[d];
  if (name == "most_allocated") return peak[d];
  if (name == "reserved") return reserved[d];
  return most_reserved[d];
}
const char* late_fault(int i) {
  Lock lock(mutex);
  return faults[i].c_str();
}
void late_reset_peak(int d) {
  Lock lock(mutex);
  peak[d] = live[d], most_asked[d] = asked[d], most_reserved[d] = reserved[d];
}
void late_empty_cache() {
  Lock lock(mutex);
  for (auto& [_, q] : queues) reach(q.end());
  tick();
  for (auto& [_, q] : queues) reach(q.end());
  for (auto& [_, q] : queues) q.freed.clear();
  for (auto& [_, b] : unused) {
    reserved[b->device] -= b->bytes;
    char* real = b->real;
    blocks.erase(real);
    std::free(real);
  }
  unused.clear();
}
void late_lock(char* at, int64_t bytes) {
  Lock lock(mutex);
  locked[at] = bytes;
}
void late_unlock(char* at) {
  Lock lock(mutex);
  char* end = at + locked[at];
  for (auto& [_, q] : queues) {
    for (auto& job : q.jobs) {
      bool touched = false;
      for (auto& [p, _] : job.reads) touched = touched || (p.at >= at && p.at < end);
      for (auto& [p, _] : job.writes) touched = touched || (p.at >= at && p.at < end);
      if (touched) faults.push_back(job.name + ": its page-locked memory was given back before it ran");
    }
    reach(q.end());
  }
  locked.erase(at);
}
void late_record(int on) {
  Lock lock(mutex);
  recording = on;
  if (on) history.clear();
}
int64_t late_moments() {
  Lock lock(mutex);
  return history.size();
}
double late_moment(int64_t i, int what) {
  Lock lock(mutex);
  auto& m = history[i];
  return what == 0 ? m.device : what == 1 ? m.sign * (double)m.bytes : m.time;
}
}
