// The product of bfloat16 panels with AVX-512 BF16 (vdpbf16ps), which multiplies two inputs of each output at once.
//
// A panel is read from memory once, front to back, for up to 12 rows at a time.
#include "panels.h"

#ifdef __AVX512BF16__
#include <immintrin.h>

#include <cstring>
#include <iterator>

namespace {

constexpr int64_t kPrefetchPairs = 24;
// Larger weights are read from memory at every step of few rows, smaller ones may stay in the second-level cache.
constexpr int64_t kCachedWeightBytes = 1 << 20;

inline void write(__m512 sum, const BFloat16* bias, BFloat16* output, __mmask16 mask) {
  if (bias) {
    const __m256i narrow = _mm256_maskz_loadu_epi16(mask, bias);
    sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16)));
  }
  _mm256_mask_storeu_epi16(output, mask, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(sum)));
}

// Products of the rows `input` and `kPanels` adjacent panels. Few rows take several panels at once: each running sum
// waits for its last product, and the processor computes other sums meanwhile. From memory, one panel after the other
// is faster: the processor prefetches a single stream, and memory limits the products.
template <int kRows, int kPanels, bool kPrefetches = true>
void multiply(
    const BFloat16* input, int64_t input_stride, const BFloat16* packed, int64_t pairs, const BFloat16* bias,
    BFloat16* output, int64_t output_stride, int64_t outputs) {
  __m512 sums[kRows][kPanels][2];
  for (auto& row : sums) {
    for (auto& panel : row) panel[0] = panel[1] = _mm512_setzero_ps();
  }
  for (int64_t pair = 0; pair < pairs; ++pair) {
    // After a panel's end comes its place in the next `kPanels` panels: the adjacent one is being read.
    const int64_t ahead = kPrefetchPairs + (pair + kPrefetchPairs < pairs ? 0 : (kPanels - 1) * pairs);
#pragma GCC unroll 4
    for (int panel = 0; panel < kPanels; ++panel) {
      const BFloat16* weights = packed + (panel * pairs + pair) * 2 * kPanel;
      const char* later = reinterpret_cast<const char*>(weights + ahead * 2 * kPanel);
      if constexpr (kPrefetches) {
        _mm_prefetch(later, _MM_HINT_T0);
        _mm_prefetch(later + 64, _MM_HINT_T0);
      }
      const __m512bh low = reinterpret_cast<__m512bh>(_mm512_loadu_si512(weights));
      const __m512bh high = reinterpret_cast<__m512bh>(_mm512_loadu_si512(weights + kPanel));
#pragma GCC unroll 12
      for (int row = 0; row < kRows; ++row) {
        int32_t two;
        std::memcpy(&two, input + row * input_stride + 2 * pair, 4);
        const __m512bh values = reinterpret_cast<__m512bh>(_mm512_set1_epi32(two));
        sums[row][panel][0] = _mm512_dpbf16_ps(sums[row][panel][0], values, low);
        sums[row][panel][1] = _mm512_dpbf16_ps(sums[row][panel][1], values, high);
      }
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int part = 0; part < 2 * kPanels; ++part) {
      const int64_t first = part * 16, left = std::clamp<int64_t>(outputs - first, 0, 16);
      const __mmask16 mask = __mmask16((1u << left) - 1);
      write(sums[row][part / 2][part % 2], bias ? bias + first : nullptr, output + row * output_stride + first, mask);
    }
  }
}

using Multiply = decltype(&multiply<1, 1>);
constexpr Multiply kMultiply[kMaxRows] = {multiply<1, 1>, multiply<2, 1>,  multiply<3, 1>,  multiply<4, 1>,
                                          multiply<5, 1>, multiply<6, 1>,  multiply<7, 1>,  multiply<8, 1>,
                                          multiply<9, 1>, multiply<10, 1>, multiply<11, 1>, multiply<12, 1>};
// Number of panels at once, and the function, by number of rows from 1 on.
struct Wide {
  int64_t panels;
  Multiply function;
};
constexpr Wide kWide[] = {{4, multiply<1, 4>}, {4, multiply<2, 4>}, {2, multiply<3, 2>}, {2, multiply<4, 2>}};
constexpr Wide kStreamed[] = {
    {1, multiply<1, 1, false>}, {1, multiply<2, 1, false>}, {1, multiply<3, 1, false>}, {1, multiply<4, 1, false>}};
static_assert(std::size(kWide) == std::size(kStreamed));

}  // namespace

void multiply_panels(
    const BFloat16* packed, const BFloat16* bias, int64_t inputs, int64_t outputs, const BFloat16* input,
    int64_t stride, int64_t rows, BFloat16* output, int64_t first_panel, int64_t last_panel) {
  const int64_t pairs = inputs / 2;
  const auto call = [&](Multiply function, int64_t row, int64_t panel) {
    const int64_t column = panel * kPanel;
    function(
        input + row * stride, stride, packed + panel * pairs * 2 * kPanel, pairs, bias ? bias + column : nullptr,
        output + row * outputs + column, outputs, outputs - column);
  };
  int64_t panel = first_panel;
  if (0 < rows && rows <= int64_t(std::size(kWide))) {
    const Wide wide = (2 * inputs * outputs > kCachedWeightBytes ? kStreamed : kWide)[rows - 1];
    for (; panel + wide.panels <= last_panel; panel += wide.panels) call(wide.function, 0, panel);
  }
  // The rest of the panels, and all panels of more rows.
  each_row_group(inputs, rows, panel, last_panel, [&](int64_t row, int64_t count, int64_t each) {
    call(kMultiply[count - 1], row, each);
  });
}
#endif
