// Element types of the kernels, without torch.
#pragma once

#include <cstdint>
#include <cstring>

// bfloat16 is the upper half of a float; the compiler turns the loops over these into vector instructions.
struct BFloat16 {
  uint16_t bits;
};

inline float to_float(float value) { return value; }
inline float to_float(BFloat16 value) {
  const uint32_t bits = uint32_t(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

template <typename T>
inline T from_float(float value);
template <>
inline float from_float<float>(float value) {
  return value;
}
// Rounds to the nearest even, as torch does.
template <>
inline BFloat16 from_float<BFloat16>(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return {uint16_t(value != value ? 0x7fc0 : rounded)};
}

inline void widen(const BFloat16* values, int64_t count, float* output) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) output[i] = to_float(values[i]);
}
