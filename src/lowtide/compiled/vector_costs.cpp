// What Inductor's generated kernels do to one vector, alone: each case is a loop as it writes them, so that
// its time over that of the first one is what a call adds to a kernel that has its inputs. In the order of
// `_NAMES` in vector_costs.py.
#include <torch/csrc/inductor/cpp_prefix.h>

using Vector = at::vec::Vectorized<float>;
using Mask = at::vec::VecMask<float, 1>;

extern "C" void kernel(const float* in, float* out, bool* mask, const int64_t what, const int64_t count,
                       const int64_t threads) {
  constexpr auto lanes = static_cast<int64_t>(Vector::size());
  const Vector one(1.0f), half(0.5f), power(2.5f);
  const auto pass = [&](auto compute) {
#pragma omp parallel for num_threads(threads)
    for (int64_t at = 0; at < count; at += lanes) {
      compute(at);
    }
  };
  const auto function = [&](auto compute) {
    pass([&](int64_t at) { compute(Vector::loadu(in + at, lanes)).store(out + at); });
  };
  switch (what) {
    case 0: return function([&](Vector x) { return x + one; });
    case 1:
      return pass([&](int64_t at) {
        const auto x = Vector::loadu(in + at, lanes);
        (x + one).store(out + at);
        Mask(x > half).store(mask + at, lanes);
      });
    case 2:
      return pass([&](int64_t at) {
        const auto shown = Mask::from(mask + at, lanes);
        const auto x = Vector::loadu(in + at, lanes);
        Vector::blendv(one, x, shown.template cast<float, 1>()).store(out + at);
      });
    case 3: return function([&](Vector x) { return x / half; });
    case 4: return function([&](Vector x) { return x.erf(); });
    case 5: return function([&](Vector x) { return x.exp(); });
    case 6: return function([&](Vector x) { return x.expm1(); });
    case 7: return function([&](Vector x) { return x.log(); });
    case 8: return function([&](Vector x) { return x.log1p(); });
    case 9: return function([&](Vector x) { return x.pow(power); });
    case 10: return function([&](Vector x) { return x.rsqrt(); });
    case 11: return function([&](Vector x) { return one / (one + x.neg().exp()); });
    case 12: return function([&](Vector x) { return x.sin(); });
    case 13: return function([&](Vector x) { return x.sqrt(); });
    case 14: return function([&](Vector x) { return x.tanh(); });
  }
}
