// The settings of PyTorch under which an operation runs: they decide which kernel it takes, and how that
// rounds. They are the process's, so a program may set others between forward and backward.
#pragma once

#include <ATen/Context.h>
#include <c10/core/DefaultDtype.h>

#include <array>
#include <memory>
#include <optional>

namespace lowtide {
namespace settings {

using C = at::Context;
using Backend = at::Float32Backend;
using Op = at::Float32Op;

struct Setting {
  int (*get)(C&);
  void (*set)(C&, int);
};

template <auto GET, auto SET>
constexpr Setting one() {
  return {[](C& c) { return static_cast<int>((c.*GET)()); },
          [](C& c, int value) { (c.*SET)(static_cast<decltype((c.*GET)())>(value)); }};
}

template <auto GET, auto SET>
constexpr Setting reduction() {  // of cuBLAS
  return {[](C& c) { return static_cast<int>((c.*GET)()); },
          [](C& c, int value) { (c.*SET)(value == 0, value <= 1); }};
}

template <Backend BACKEND, Op OP>
constexpr Setting precision() {
  return {[](C& c) { return static_cast<int>(c.float32Precision(BACKEND, OP)); },
          [](C& c, int value) {
            c.setFloat32Precision(BACKEND, OP, static_cast<at::Float32Precision>(value));
          }};
}

inline int deterministic(C& c) {
  return c.deterministicAlgorithms() ? 1 + c.deterministicAlgorithmsWarnOnly() : 0;
}

inline int default_dtype(C&) { return static_cast<int>(c10::get_default_dtype_as_scalartype()); }

inline void set_default_dtype(C&, int value) {
  c10::set_default_dtype(c10::scalarTypeToTypeMeta(static_cast<c10::ScalarType>(value)));
}

// Each decides by itself.
inline constexpr std::array ALL{
    one<&C::userEnabledCuDNN, &C::setUserEnabledCuDNN>(),
    one<&C::benchmarkCuDNN, &C::setBenchmarkCuDNN>(),
    one<&C::deterministicCuDNN, &C::setDeterministicCuDNN>(),
    one<&C::userEnabledMkldnn, &C::setUserEnabledMkldnn>(),
    one<&C::deterministicMkldnn, &C::setDeterministicMkldnn>(),
    one<&C::allowTF32OneDNN, &C::setAllowTF32OneDNN>(),
    one<&C::userEnabledNNPACK, &C::setUserEnabledNNPACK>(),
    one<&C::userEnabledFlashSDP, &C::setSDPUseFlash>(),
    one<&C::userEnabledMemEfficientSDP, &C::setSDPUseMemEfficient>(),
    one<&C::userEnabledMathSDP, &C::setSDPUseMath>(),
    one<&C::userEnabledCuDNNSDP, &C::setSDPUseCuDNN>(),
    one<&C::allowFP16BF16ReductionMathSDP, &C::setAllowFP16BF16ReductionMathSDP>(),
    one<&C::allowFP16ReductionCPU, &C::setAllowFP16ReductionCPU>(),
    one<&C::allowFP16AccumulationCuBLAS, &C::setAllowFP16AccumulationCuBLAS>(),
    reduction<&C::allowFP16ReductionCuBLAS, &C::setAllowFP16ReductionCuBLAS>(),
    reduction<&C::allowBF16ReductionCuBLAS, &C::setAllowBF16ReductionCuBLAS>(),
    one<&C::linalgPreferredBackend, &C::setLinalgPreferredBackend>(),
    one<&C::blasPreferredBackend, &C::setBlasPreferredBackend>(),
    Setting{deterministic, [](C& c, int value) { c.setDeterministicAlgorithms(value > 0, value > 1); }},
    one<&C::deterministicFillUninitializedMemory, &C::setDeterministicFillUninitializedMemory>(),
    Setting{default_dtype, set_default_dtype},
    precision<Backend::MKLDNN, Op::CONV>(),
    precision<Backend::MKLDNN, Op::RNN>(),
    precision<Backend::MKLDNN, Op::MATMUL>(),
    precision<Backend::CUDA, Op::CONV>(),
    precision<Backend::CUDA, Op::RNN>(),
    precision<Backend::CUDA, Op::MATMUL>(),
};

constexpr int UNKNOWN = -1;

template <auto GET>
int or_unknown(C& c) {
  try {
    return static_cast<int>(GET(c));
  } catch (const c10::Error&) {
    return UNKNOWN;
  }
}

inline void set_matmul_precision(C& c, int value) {
  constexpr std::array NAMES{"highest", "high", "medium"};
  c.setFloat32MatmulPrecision(NAMES[static_cast<size_t>(value)]);
}

// What sets several precisions: two older names, which have a flag of their own (PyTorch raises when it is
// asked for that of a program that has set the precisions by themselves), and what precisions inherit from.
inline constexpr std::array WIDER{
    Setting{or_unknown<[](C& c) { return c.float32MatmulPrecision(); }>, set_matmul_precision},
    Setting{or_unknown<[](C& c) { return c.allowTF32CuDNN(); }>,
            [](C& c, int value) { c.setAllowTF32CuDNN(value != 0); }},
    precision<Backend::GENERIC, Op::ALL>(),
    precision<Backend::MKLDNN, Op::ALL>(),
    precision<Backend::CUDA, Op::ALL>(),
};

template <size_t COUNT>
std::array<int, COUNT> read(const std::array<Setting, COUNT>& all) {
  std::array<int, COUNT> values;
  for (size_t at = 0; at < COUNT; ++at) values[at] = all[at].get(at::globalContext());
  return values;
}

template <size_t COUNT>
void set(const std::array<Setting, COUNT>& all, const std::array<int, COUNT>& values) {
  for (size_t at = 0; at < COUNT; ++at) {
    int now = all[at].get(at::globalContext()), then = values[at];
    if (now != then && now != UNKNOWN && then != UNKNOWN) all[at].set(at::globalContext(), then);
  }
}

}  // namespace settings

struct Settings {  // of one moment
  decltype(settings::read(settings::ALL)) all = settings::read(settings::ALL);
  decltype(settings::read(settings::WIDER)) wider = settings::read(settings::WIDER);

  // Those of now, for each operation: the wider ones are read where the others have changed.
  static std::shared_ptr<const Settings> now() {  // under the interpreter's lock
    static auto& last = *new std::shared_ptr<const Settings>(std::make_shared<const Settings>());
    if (!last->are_now()) last = std::make_shared<const Settings>();
    return last;
  }

  bool are_now() const { return all == settings::read(settings::ALL); }

  void apply() const {  // precisions after what sets them, too
    settings::set(settings::WIDER, wider);
    settings::set(settings::ALL, all);
  }
};

// In a block, the settings of another moment. Backwards of several devices may be in blocks at once: who
// leaves last restores what was there before the first.
class UnderSettings {
 public:
  explicit UnderSettings(const Settings& wanted) {
    if (inside == 0 && wanted.are_now()) return;
    before_.emplace();
    if (inside++ == 0) outside = *before_;
    wanted.apply();
  }
  UnderSettings(const UnderSettings&) = delete;
  ~UnderSettings() {
    if (before_) (--inside == 0 ? outside : *before_).apply();
  }

 private:
  inline static long inside = 0;
  inline static Settings outside;
  std::optional<Settings> before_;
};

}  // namespace lowtide
