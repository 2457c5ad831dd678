// Products with a weight of eight-bit floats (e4m3), widened to bfloat16 in registers, for vdpbf16ps.
//
//     packed    [outputs / 32, inputs / 2, 4, 2, 8] codes: the lanes of 128 bits; outputs 0-15, then 16-31; of each
//               lane four outputs with two inputs, which is the order in which the bytes are interleaved
//     factors   [outputs / 32, groups, 32] float: the scale of each output in each group of inputs
//
// Every e4m3 value is a bfloat16, so only the sums are rounded. Products within a group are summed first, then groups,
// in order, so a row's result does not depend on the other rows.
#include "kernels.h"
#include "panels.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#include <immintrin.h>

#include "float8.h"

namespace {

constexpr int64_t kPairBytes = 2 * kPanel;
constexpr int64_t kPrefetchPairs = 24;

// The bytes of the bfloat16 of every magnitude, in two registers each.
struct Widening {
  alignas(64) uint8_t low[128], high[128];
  Widening() {
    for (uint32_t i = 0; i < 128; ++i) {
      const uint32_t bits = float8::widened_bits<E4M3>(i) >> 16;
      low[i] = uint8_t(bits), high[i] = uint8_t(bits >> 8);
    }
  }
};
const Widening kWidening;

inline __m512 bias_of(const BFloat16* bias, __mmask16 mask) {
  const __m256i narrow = _mm256_maskz_loadu_epi16(mask, bias);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

// Products of the rows `input` and one panel.
template <int kRows>
void multiply(
    const BFloat16* input, int64_t input_stride, const uint8_t* packed, const float* factors, int64_t pairs,
    int64_t group_pairs, const BFloat16* bias, BFloat16* output, int64_t output_stride, int64_t outputs) {
  const __m512i low_first = _mm512_load_si512(kWidening.low), low_last = _mm512_load_si512(kWidening.low + 64);
  const __m512i high_first = _mm512_load_si512(kWidening.high), high_last = _mm512_load_si512(kWidening.high + 64);
  const __m512i sign = _mm512_set1_epi8(char(0x80));
  __m512 totals[kRows][2];
  for (auto& row : totals) row[0] = row[1] = _mm512_setzero_ps();
  for (int64_t first = 0; first < pairs; first += group_pairs, factors += kPanel) {
    __m512 sums[kRows][2];
    for (auto& row : sums) row[0] = row[1] = _mm512_setzero_ps();
    const int64_t last = std::min(first + group_pairs, pairs);
    for (int64_t pair = first; pair < last; ++pair) {
      const uint8_t* place = packed + pair * kPairBytes;
      _mm_prefetch(reinterpret_cast<const char*>(place + kPrefetchPairs * kPairBytes), _MM_HINT_T0);
      const __m512i codes = _mm512_loadu_si512(place);
      // The lookups ignore the highest bit of a code, its sign.
      const __m512i low = _mm512_permutex2var_epi8(low_first, codes, low_last);
      const __m512i magnitude = _mm512_permutex2var_epi8(high_first, codes, high_last);
      // (codes & sign) | magnitude
      const __m512i high = _mm512_ternarylogic_epi32(codes, sign, magnitude, 0xea);
      const __m512bh first_half = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi8(low, high));
      const __m512bh last_half = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi8(low, high));
#pragma GCC unroll 12
      for (int row = 0; row < kRows; ++row) {
        int32_t two;
        std::memcpy(&two, input + row * input_stride + 2 * pair, 4);
        const __m512bh values = reinterpret_cast<__m512bh>(_mm512_set1_epi32(two));
        sums[row][0] = _mm512_dpbf16_ps(sums[row][0], values, first_half);
        sums[row][1] = _mm512_dpbf16_ps(sums[row][1], values, last_half);
      }
    }
    for (int row = 0; row < kRows; ++row) {
      for (int part = 0; part < 2; ++part) {
        totals[row][part] = _mm512_fmadd_ps(sums[row][part], _mm512_loadu_ps(factors + 16 * part), totals[row][part]);
      }
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int part = 0; part < 2; ++part) {
      const int64_t column = part * 16, left = std::clamp<int64_t>(outputs - column, 0, 16);
      const __mmask16 mask = __mmask16((1u << left) - 1);
      const __m512 sum = bias ? _mm512_add_ps(totals[row][part], bias_of(bias + column, mask)) : totals[row][part];
      BFloat16* place = output + row * output_stride + column;
      _mm256_mask_storeu_epi16(place, mask, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(sum)));
    }
  }
}

using Multiply = decltype(&multiply<1>);
constexpr Multiply kMultiply[kMaxRows] = {multiply<1>, multiply<2>, multiply<3>, multiply<4>,  multiply<5>,  multiply<6>,
                                          multiply<7>, multiply<8>, multiply<9>, multiply<10>, multiply<11>, multiply<12>};

}  // namespace

void multiply_float8_rows(
    const Product& product, const BFloat16* input, int64_t stride, int64_t rows, BFloat16* output) {
  const uint8_t* packed = static_cast<const uint8_t*>(product.packed);
  const int64_t inputs = product.inputs, outputs = product.outputs, pairs = inputs / 2;
  torch::stable::parallel_for(0, (outputs + kPanel - 1) / kPanel, 4, [&](int64_t first_panel, int64_t last_panel) {
    each_row_group(inputs, rows, first_panel, last_panel, [&](int64_t row, int64_t count, int64_t panel) {
      const int64_t column = panel * kPanel;
      kMultiply[count - 1](
          input + row * stride, stride, packed + panel * pairs * kPairBytes,
          product.multipliers + panel * product.groups * kPanel, pairs, product.group / 2,
          product.bias ? product.bias + column : nullptr, output + row * outputs + column, outputs, outputs - column);
    });
  });
}

namespace {

// input: [rows, inputs], rows contiguous; packed and factors as above, groups of `group` inputs, an even number.
// Returns [rows, outputs].
Tensor float8_linear(
    Tensor input, Tensor packed, Tensor factors, std::optional<Tensor> bias, int64_t outputs, int64_t group) {
  const int64_t rows = input.size(0), inputs = input.size(1), panels = (outputs + kPanel - 1) / kPanel;
  const int64_t groups = factors.size(1);
  STD_TORCH_CHECK(
      inputs == 2 * packed.size(1) && input.stride(1) == 1 && panels == packed.size(0),
      "the input does not fit the packed weight");
  STD_TORCH_CHECK(
      factors.size(0) == panels && group % 2 == 0 && (inputs + group - 1) / group == groups,
      "the factors do not fit the packed weight");
  Tensor output = torch::stable::new_empty(input, {rows, outputs});
  Product product{};
  product.packed = data<uint8_t>(packed), product.bias = data<BFloat16>(bias);
  product.inputs = inputs, product.outputs = outputs;
  product.multipliers = data<float>(factors), product.groups = groups, product.group = group;
  multiply_float8_rows(product, data<BFloat16>(input), input.stride(0), rows, data<BFloat16>(output));
  return output;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(reference_server_cpu, library) {
  library.def(
      "float8_linear(Tensor input, Tensor packed, Tensor factors, Tensor? bias, int outputs, int group) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(reference_server_cpu, CPU, library) {
  library.impl("float8_linear", TORCH_BOX(&float8_linear));
}
#endif
