// Shared by the kernels: element types, and access to tensors through torch's stable ABI.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "elements.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename T>
inline T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

template <typename T>
inline const T* data(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? static_cast<const T*>(tensor->data_ptr()) : nullptr;
}

// Calls `kernel` with a value of the tensor's element type.
template <typename Kernel>
inline void by_type(const Tensor& tensor, Kernel kernel) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return kernel(float{});
    case ScalarType::BFloat16:
      return kernel(BFloat16{});
    default:
      STD_TORCH_CHECK(false, "the compiled kernels take float32 and bfloat16");
  }
}

// e^x within two units in the last place, without branches, so that the compiler vectorizes loops over it. NaN stays
// NaN.
inline float fast_exp(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float shifted = x * 1.44269504f + 12582912.0f;
  const float whole = shifted - 12582912.0f;
  const float rest = std::fma(whole, -1.42860677e-6f, std::fma(whole, -0.693145752f, x));
  float result = 1.98756911e-4f;
  result = std::fma(result, rest, 1.39819994e-3f);
  result = std::fma(result, rest, 8.33345205e-3f);
  result = std::fma(result, rest, 4.16657962e-2f);
  result = std::fma(result, rest, 1.66666657e-1f);
  result = std::fma(result, rest, 5.00000000e-1f);
  result = std::fma(result * rest, rest, rest + 1.0f);
  int32_t bits;
  std::memcpy(&bits, &shifted, 4);
  // The integer lies in the low bits of `shifted`; clamping keeps 127 + it within a float's exponents.
  bits = (bits + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return result * scale;
}
