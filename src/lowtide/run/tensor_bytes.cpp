// The digest of lowtide.run.tensor_bytes, and a comparison of bytes, for small tensors of main memory: there
// a dozen of PyTorch's calls take longer than the bytes do. It gives the same numbers.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t FEW_WORDS = 256;
constexpr uint64_t STRIDE = 0x9E3779B97F4A7C15, FIRST = 0xBF58476D1CE4E5B9, SECOND = 0x94D049BB133111EB;

uint64_t folded(uint64_t x) { return x ^ static_cast<uint64_t>(static_cast<int64_t>(x) >> 31); }

// The mixed sums, each with its place.
struct Sum {
  uint64_t place = 0, total = 0;
  void add(uint64_t value) {
    place += STRIDE;
    total += folded(folded(folded(place + value) * FIRST) * SECOND);
  }
};

uint64_t word(const char* data, int64_t at) {
  uint64_t found;
  std::memcpy(&found, data + 8 * at, 8);
  return found;
}

void columns(const char* data, int64_t words, int64_t width, Sum& sum) {
  std::vector<uint64_t> sums(width);
  int64_t at = 0;
  for (; at + width <= words; at += width)
    for (int64_t c = 0; c < width; ++c) sums[c] += word(data, at + c);
  for (int64_t c = 0; at < words; ++c, ++at) sums[c] += word(data, at);
  for (uint64_t value : sums) sum.add(value);
}

void rows(const char* data, int64_t words, int64_t width, Sum& sum) {
  int64_t at = 0;
  for (; at + width <= words; at += width) {
    uint64_t row = 0;
    for (int64_t c = 0; c < width; ++c) row += word(data, at + c);
    sum.add(row);
  }
  uint64_t rest = 0;
  for (; at < words; ++at) rest += word(data, at);
  sum.add(rest);
}

int64_t root(int64_t n) {
  int64_t found = static_cast<int64_t>(std::sqrt(static_cast<double>(n)));
  while (found * found > n) --found;
  while ((found + 1) * (found + 1) <= n) ++found;
  return found;
}

}  // namespace

extern "C" {

int64_t lt_digest(const char* data, int64_t extent) {
  const int64_t words = extent / 8;
  Sum sum;
  for (int64_t at = 8 * words; at < extent; ++at) sum.add(static_cast<unsigned char>(data[at]));
  if (words <= FEW_WORDS) {
    for (int64_t at = 0; at < words; ++at) sum.add(word(data, at));
  } else {
    const int64_t width = root(words) | 1;
    columns(data, words, width, sum);
    columns(data, words, width + 2, sum);
    rows(data, words, width, sum);
  }
  return static_cast<int64_t>(sum.total);
}

int lt_same(const char* a, const char* b, int64_t extent) { return std::memcmp(a, b, extent) == 0; }
}
