// Values where CUDA's kernels do nothing (runtime.c): each operation of the CUDA build runs as it is, so that
// it asks the allocator for what it asks on a card, and then the CPU's kernel writes into the same memory.
// What the CPU has no kernel for keeps what lies in its memory; NO_CARD_LOG=1 names it.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/narrow.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <cstdio>
#include <cstdlib>
#include <limits>
#include <mutex>
#include <set>
#include <unordered_map>

namespace {

using c10::DispatchKey;
using c10::IValue;
using torch::jit::Stack;

thread_local bool within = false;  // what an operation calls is part of it
std::unordered_map<std::string, c10::SafeKernelFunction> of_cuda;

void tell(const std::string& name, const char* why) {
  if (std::getenv("NO_CARD_LOG")) std::fprintf(stderr, "no values of %s: %.200s\n", name.c_str(), why);
}

// ---- the same memory, as the CPU sees it ------------------------------------------------------------

at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  const c10::Storage& storage = tensor.storage();
  c10::DataPtr data(storage.mutable_data(), c10::Device(c10::kCPU));
  c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), nullptr, false);
  auto seen = at::detail::make_tensor<c10::TensorImpl>(
      std::move(same), c10::DispatchKeySet(DispatchKey::CPU), tensor.dtype());
  seen.unsafeGetTensorImpl()->set_sizes_and_strides(
      tensor.sizes(), tensor.strides(), tensor.storage_offset());
  seen._set_conj(tensor.is_conj());
  seen._set_neg(tensor.is_neg());
  return seen;
}

IValue on_cpu(const IValue& value) {
  if (value.isGenerator()) return IValue();
  if (value.isTensor()) return on_cpu(value.toTensor());
  if (value.isDevice()) return c10::Device(c10::kCPU);
  if (value.isTensorList()) {
    c10::List<at::Tensor> seen;
    for (const at::Tensor& one : value.toTensorList()) seen.push_back(on_cpu(one));
    return seen;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> seen;
    for (const std::optional<at::Tensor>& one : value.toOptionalTensorList())
      seen.push_back(one ? std::optional(on_cpu(*one)) : one);
    return seen;
  }
  return value;
}

// Writes what the CPU computed where CUDA's operation made room for it.
void write(IValue& result, const IValue& computed, bool padded) {
  if (result.isTensorList() && computed.isTensorList()) {
    auto to = result.toTensorList(), from = computed.toTensorList();
    for (size_t at = 0; at < to.size() && at < from.size(); at++) {
      IValue one = to.get(at);
      write(one, from.get(at), padded);
      to.set(at, one.toTensor());
    }
  } else if (result.isTensor() && computed.isTensor()) {
    at::Tensor to = result.toTensor(), from = computed.toTensor();
    if (!to.defined() || !from.defined() || !to.is_cuda()) return;
    if (to.sizes() != from.sizes() && padded) {  // an attention's logsumexp, filled up with infinity
      if (to.numel() == 0) return;
      at::Tensor room = on_cpu(to);
      room.fill_(std::numeric_limits<float>::infinity());
      room.narrow(-1, 0, from.size(-1)).copy_(from);
      return;
    }
    if (to.sizes() != from.sizes())  // how many there are depends on values
      result = to = at::empty_strided(from.sizes(), from.strides(), from.options().device(to.device()));
    at::Tensor seen = on_cpu(to);
    if (seen.data_ptr() != from.data_ptr()) seen.copy_(from);
  } else if (!result.isTensor() && !result.isNone()) {
    result = computed;
  }
}

// ---- random numbers ---------------------------------------------------------------------------------

std::recursive_mutex of_generator;

// Meanwhile the CPU's generator draws numbers that follow from the state of a card's, and from nothing else.
struct Drawing {
  explicit Drawing(at::Generator of_card) : held(of_generator) {
    at::Generator own = at::detail::getDefaultCPUGenerator();
    before = own.get_state();
    own.set_current_seed(of_card.current_seed() * 0x9E3779B97F4A7C15ull + of_card.get_offset());
  }
  ~Drawing() { at::Generator(at::detail::getDefaultCPUGenerator()).set_state(before); }
  std::unique_lock<std::recursive_mutex> held;
  at::Tensor before;
};

// The card's generator that an operation draws from; undefined where it draws none.
at::Generator generator_of(const c10::OperatorHandle& op, const std::vector<IValue>& given) {
  bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
  c10::Device device(c10::kCUDA, 0);
  for (const IValue& value : given) {
    if (value.isGenerator()) {
      at::Generator named = value.toGenerator();
      return named.device().is_cuda() ? named : at::Generator();
    }
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cuda())
      device = value.toTensor().device();
  }
  for (const c10::Argument& argument : op.schema().arguments())
    draws |= argument.type()->str().find("Generator") != std::string::npos;
  return draws ? at::globalContext().defaultGenerator(device) : at::Generator();
}

// ---- operations -------------------------------------------------------------------------------------

// An attention by the CPU's one, which knows no dropout: which of the arguments it takes; NONE is left out,
// ZERO stands in the place of a dropout's chance.
constexpr int NONE = -1, ZERO = -2;
struct Attention {
  const char* name;
  std::vector<int> arguments;
};
const char FORWARD[] = "aten::_scaled_dot_product_flash_attention_for_cpu";
const char BACKWARD[] = "aten::_scaled_dot_product_flash_attention_for_cpu_backward";
const std::unordered_map<std::string, Attention> ATTENTION = {
    {"aten::_scaled_dot_product_flash_attention", {FORWARD, {0, 1, 2, ZERO, 4, NONE, 6}}},
    {"aten::_scaled_dot_product_efficient_attention", {FORWARD, {0, 1, 2, ZERO, 6, 3, 7}}},
    {"aten::_scaled_dot_product_flash_attention_backward",
     {BACKWARD, {0, 1, 2, 3, 4, 5, ZERO, 11, NONE, 14}}},
    {"aten::_scaled_dot_product_efficient_attention_backward",
     {BACKWARD, {0, 1, 2, 3, 5, 6, ZERO, 11, 4, 12}}},
};

Stack arguments_for(const Attention* attention, const std::vector<IValue>& given) {
  Stack made;
  if (attention == nullptr) {
    for (const IValue& value : given) made.push_back(on_cpu(value));
    return made;
  }
  for (int at : attention->arguments) {
    bool absent = at == NONE || (at >= 0 && given[at].isTensor() && !given[at].toTensor().defined());
    made.push_back(absent ? IValue() : at == ZERO ? IValue(0.0) : on_cpu(given[at]));
  }
  return made;
}

void call_on_cpu(const c10::OperatorHandle& op, Stack& stack) {
  c10::impl::ForceDispatchKeyGuard below_autograd(
      c10::default_included_set,
      c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  const Stack given = stack;
  try {
    op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), &stack);
  } catch (const c10::Error&) {
    if (op.schema().is_mutable()) throw;
    stack = given;  // some kernels take two types on a card, and one on a CPU
    for (IValue& value : stack)
      if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_floating_point())
        value = value.toTensor().to(at::kFloat);
    op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), &stack);
  }
}

void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const c10::SafeKernelFunction& kernel = of_cuda.at(toString(op.operator_name()));
  if (within) return kernel.callBoxed(op, keys, stack);
  struct Within {
    Within() { within = true; }
    ~Within() { within = false; }
  } here;
  const auto& schema = op.schema();
  const std::vector<IValue> given(stack->end() - schema.arguments().size(), stack->end());
  const at::Generator generator = generator_of(op, given);
  std::optional<Drawing> drawing;
  if (generator.defined()) drawing.emplace(generator);
  kernel.callBoxed(op, keys, stack);

  auto found = ATTENTION.find(schema.name());
  const Attention* attention = found == ATTENTION.end() ? nullptr : &found->second;
  auto by = attention ? c10::Dispatcher::singleton().findSchemaOrThrow(attention->name, "") : op;
  if (!by.hasComputedKernelForDispatchKey(DispatchKey::CPU)) return tell(schema.name(), "no kernel");
  Stack computed = arguments_for(attention, given);  // now: what is written may have got another size
  try {
    call_on_cpu(by, computed);
  } catch (const std::exception& error) {
    return tell(schema.name(), error.what());
  }
  const size_t results = schema.returns().size();
  for (size_t at = 0; at < results && at < computed.size(); at++) {
    const auto* alias = schema.returns()[at].alias_info();
    if (alias != nullptr && alias->isWrite()) continue;  // it was written in place
    write((*stack)[stack->size() - results + at], computed[at], attention != nullptr);
  }
}

const std::set<std::string> AS_THEY_ARE = {  // memory and geometry
    "aten::empty", "aten::empty_strided", "aten::_efficientzerotensor", "aten::resize_", "aten::set_",
    "aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::alias", "aten::unfold", "aten::squeeze",
    "aten::t", "aten::view_as_real", "aten::view_as_complex", "aten::record_stream", "aten::is_set_to",
    "aten::_local_scalar_dense", "aten::is_pinned", "aten::_pin_memory", "aten::_fused_sdp_choice",
    "aten::_cuda_getCurrentBlasHandle"};

const bool installed = [] {
  auto& dispatcher = c10::Dispatcher::singleton();
  static auto library = torch::Library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  auto names = dispatcher.getRegistrationsForDispatchKey(DispatchKey::CUDA);
  names.push_back({"aten::copy_", ""});  // one kernel for all devices, with one of each beneath
  for (const c10::OperatorName& name : names) {
    auto op = dispatcher.findOp(name);
    if (!op || name.name.rfind("aten::", 0) != 0 || AS_THEY_ARE.count(name.name)) continue;
    of_cuda.emplace(toString(name), op->getComputedKernelForDispatchKey(DispatchKey::CUDA));
    const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
  }
  return true;
}();

}  // namespace
