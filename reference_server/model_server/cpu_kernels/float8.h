// Eight-bit floats of a K/V cache, without torch: e4m3 (no infinity, one NaN) and e5m2.
//
//     e4m3  s eeee mmm    bias 7, largest 448          e5m2  s eeeee mm    bias 15, largest 57344
//
// Every value of both is a bfloat16. Rounding is to the nearest even; larger values become the largest one.
#pragma once

#include <algorithm>

#include "elements.h"

#ifdef __AVX512BW__
#include <immintrin.h>
#endif

template <int kMantissa, int kBias, bool kHasInfinity>
struct Float8 {
  static constexpr int kMantissaBits = kMantissa;
  // Of the float32 exponents.
  static constexpr int kShift = 127 - kBias;
  static constexpr bool kInfinity = kHasInfinity;
  // The first magnitude that is not a number.
  static constexpr uint32_t kEnd = kHasInfinity ? 0x7c : 0x7f;
  static constexpr uint32_t kNaN = 0x7f;
  uint8_t bits;
};
using E4M3 = Float8<3, 7, false>;
using E5M2 = Float8<2, 15, true>;

namespace float8 {

inline float as_float(uint32_t bits) {
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// The bits of a float32, of which the lower half is 0. It has no branches, so that the compiler vectorizes loops over
// it.
template <typename F>
inline uint32_t widened_bits(uint32_t bits) {
  constexpr int mantissa = 23 - F::kMantissaBits;
  const uint32_t magnitude = bits & 0x7f, sign = (bits & 0x80) << 24;
  const uint32_t normal = (magnitude << mantissa) + (uint32_t(F::kShift) << 23);
  // With the exponent of the smallest normal value and its implied one, which is then subtracted.
  constexpr uint32_t smallest = uint32_t(F::kShift + 1) << 23;
  const uint32_t subnormal = as_bits(as_float((magnitude << mantissa) | smallest) - as_float(smallest));
  uint32_t result = magnitude < (1u << F::kMantissaBits) ? subnormal : normal;
  const uint32_t other = F::kInfinity && magnitude == F::kEnd ? 0x7f800000u : 0x7fc00000u;
  result = magnitude >= F::kEnd ? other : result;
  return result | sign;
}

template <typename F>
inline uint8_t rounded_bits(float value) {
  constexpr int dropped = 23 - F::kMantissaBits;
  constexpr uint32_t smallest = uint32_t(F::kShift + 1) << 23;
  // The largest value: the code before kEnd.
  constexpr uint32_t largest = ((F::kEnd - 1) << dropped) + (uint32_t(F::kShift) << 23);
  const uint32_t bits = as_bits(value), sign = (bits >> 24) & 0x80;
  const uint32_t whole = bits & 0x7fffffffu, magnitude = whole < largest ? whole : largest;
  const uint32_t normal = ((magnitude + ((1u << (dropped - 1)) - 1) + ((magnitude >> dropped) & 1)) >> dropped) -
                          (uint32_t(F::kShift) << F::kMantissaBits);
  // A float of this magnitude has the smallest subnormal value as the unit of its last place, so the sum is rounded.
  constexpr uint32_t magic = uint32_t(F::kShift + 1 - F::kMantissaBits + 23) << 23;
  const uint32_t subnormal = as_bits(as_float(magnitude) + as_float(magic)) - magic;
  const uint32_t result = magnitude < smallest ? subnormal : normal;
  return uint8_t((whole > 0x7f800000u ? F::kNaN : result) | sign);
}

#ifdef __AVX512BW__
// The upper halves of `widened_bits` for all magnitudes, in four registers.
template <typename F>
struct Table {
  alignas(64) uint16_t values[128];
  Table() {
    for (uint32_t i = 0; i < 128; ++i) values[i] = uint16_t(widened_bits<F>(i) >> 16);
  }
};
#endif

}  // namespace float8

template <typename F>
inline void widen(const F* values, int64_t count, float* output) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) output[i] = float8::as_float(float8::widened_bits<F>(values[i].bits));
}

template <typename F>
inline void widen(const F* values, int64_t count, BFloat16* output) {
  int64_t i = 0;
#ifdef __AVX512BW__
  static const float8::Table<F> table;
  __m512i parts[4];
  for (int part = 0; part < 4; ++part) parts[part] = _mm512_load_si512(table.values + 32 * part);
  const __m512i sign = _mm512_set1_epi16(int16_t(0x8000));
  for (; i + 32 <= count; i += 32) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + i));
    const __m512i words = _mm512_cvtepu8_epi16(bytes);
    const __m512i low = _mm512_permutex2var_epi16(parts[0], words, parts[1]);
    const __m512i high = _mm512_permutex2var_epi16(parts[2], words, parts[3]);
    const __mmask32 is_high = _mm512_test_epi16_mask(words, _mm512_set1_epi16(0x40));
    const __m512i magnitude = _mm512_mask_blend_epi16(is_high, low, high);
    const __m512i signs = _mm512_and_si512(_mm512_slli_epi16(words, 8), sign);
    _mm512_storeu_si512(output + i, _mm512_or_si512(magnitude, signs));
  }
#endif
#pragma omp simd
  for (int64_t j = i; j < count; ++j) output[j].bits = uint16_t(float8::widened_bits<F>(values[j].bits) >> 16);
}

// Each value times `factor`, rounded.
template <typename F, typename T>
inline void round_to(const T* values, int64_t count, float factor, F* output) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) output[i].bits = float8::rounded_bits<F>(to_float(values[i]) * factor);
}
