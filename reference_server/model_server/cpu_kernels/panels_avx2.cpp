// The product of bfloat16 panels with AVX2: weights are widened to float in registers, rows once before the products.
//
// One row reads the weights as fast as memory allows. For more rows, a block of a panel stays in the first-level cache
// while all of them are computed.
#include "panels.h"

#if defined(REFERENCE_SERVER_PANELS) && !defined(__AVX512BF16__)
#include <immintrin.h>

#include <vector>

namespace {

// 16 KiB of weights.
constexpr int64_t kBlockPairs = 128;
// Rows and vectors of 8 outputs whose sums fit in the 16 registers, beside a vector of weights each and one input.
constexpr int kGroupRows = 6, kFewRows = 3, kPanelVectors = kPanel / 8;

// Adds products of kRows rows and 8 * kVectors outputs to `sums`, whose rows have kPanel outputs.
template <int kRows, int kVectors>
inline void add_products(
    const float* input, int64_t input_stride, const BFloat16* weights, int64_t pairs, float* sums) {
  const __m256i upper = _mm256_set1_epi32(int32_t(0xffff0000));
  __m256 own[kRows][kVectors];
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int part = 0; part < kVectors; ++part) own[row][part] = _mm256_loadu_ps(sums + row * kPanel + 8 * part);
  }
  const auto multiply = [&](const float* values, const __m256(&factors)[kVectors]) {
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
      const __m256 value = _mm256_broadcast_ss(values + row * input_stride);
#pragma GCC unroll 4
      for (int part = 0; part < kVectors; ++part) own[row][part] = _mm256_fmadd_ps(value, factors[part], own[row][part]);
    }
  };
  for (int64_t pair = 0; pair < pairs; ++pair) {
    // The lower half of 32 bits is the first input's weight.
    const __m256i* both = reinterpret_cast<const __m256i*>(weights + pair * 2 * kPanel);
    // The next block, which the processor does not prefetch: a half of a panel has every second line of the cache.
    const char* later = reinterpret_cast<const char*>(weights + (pair + kBlockPairs) * 2 * kPanel);
#pragma GCC unroll 2
    for (int line = 0; line < kVectors / 2; ++line) _mm_prefetch(later + 64 * line, _MM_HINT_T0);
    __m256 factors[kVectors];
#pragma GCC unroll 4
    for (int part = 0; part < kVectors; ++part) {
      factors[part] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(both + part), 16));
    }
    multiply(input + 2 * pair, factors);
#pragma GCC unroll 4
    for (int part = 0; part < kVectors; ++part) {
      factors[part] = _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(both + part), upper));
    }
    multiply(input + 2 * pair + 1, factors);
  }
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int part = 0; part < kVectors; ++part) _mm256_storeu_ps(sums + row * kPanel + 8 * part, own[row][part]);
  }
}

// Few rows take a panel at once, more take its halves.
template <int kRows>
void add_block(const float* input, int64_t input_stride, const BFloat16* weights, int64_t pairs, float* sums) {
  constexpr int kVectors = kRows <= kFewRows ? kPanelVectors : kPanelVectors / 2;
  for (int first = 0; first < kPanelVectors; first += kVectors) {
    add_products<kRows, kVectors>(input, input_stride, weights + 16 * first, pairs, sums + 8 * first);
  }
}

using AddBlock = decltype(&add_block<1>);
constexpr AddBlock kAddBlock[kGroupRows] = {add_block<1>, add_block<2>, add_block<3>,
                                            add_block<4>, add_block<5>, add_block<6>};

void write(const float* sums, const BFloat16* bias, int64_t count, BFloat16* output) {
  if (bias) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) output[i] = from_float<BFloat16>(sums[i] + to_float(bias[i]));
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) output[i] = from_float<BFloat16>(sums[i]);
  }
}

// The sums of one panel and `rows` rows. input: [rows, inputs] float. sums: [rows, kPanel].
void multiply_panel(const float* input, int64_t inputs, int64_t rows, const BFloat16* weights, float* sums) {
  const int64_t pairs = inputs / 2, groups = (rows + kGroupRows - 1) / kGroupRows;
  std::fill(sums, sums + rows * kPanel, 0.0f);
  for (int64_t pair = 0; pair < pairs; pair += kBlockPairs) {
    const int64_t block = std::min(kBlockPairs, pairs - pair);
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t row = rows * group / groups, count = rows * (group + 1) / groups - row;
      kAddBlock[count - 1](
          input + row * inputs + 2 * pair, inputs, weights + pair * 2 * kPanel, block, sums + row * kPanel);
    }
  }
}

}  // namespace

void multiply_panels(
    const BFloat16* packed, const BFloat16* bias, int64_t inputs, int64_t outputs, const BFloat16* input,
    int64_t stride, int64_t rows, BFloat16* output, int64_t first_panel, int64_t last_panel) {
  static thread_local std::vector<float> widened, sums;
  // Widened rows that stay in the second-level cache while all panels are read.
  const int64_t cached_rows = kCachedInputBytes / (4 * inputs) / kGroupRows * kGroupRows;
  const int64_t cached = std::max<int64_t>(kGroupRows, cached_rows);
  for (int64_t chunk = 0; chunk < rows; chunk += cached) {
    const int64_t count = std::min(cached, rows - chunk);
    widened.resize(count * inputs), sums.resize(count * kPanel);
    for (int64_t row = 0; row < count; ++row) {
      widen(input + (chunk + row) * stride, inputs, widened.data() + row * inputs);
    }
    for (int64_t panel = first_panel; panel < last_panel; ++panel) {
      multiply_panel(widened.data(), inputs, count, packed + panel * inputs * kPanel, sums.data());
      const int64_t column = panel * kPanel, width = std::min(kPanel, outputs - column);
      for (int64_t row = 0; row < count; ++row) {
        write(
            sums.data() + row * kPanel, bias ? bias + column : nullptr, width,
            output + (chunk + row) * outputs + column);
      }
    }
  }
}
#endif
