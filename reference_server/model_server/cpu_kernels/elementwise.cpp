// Operations between two products: residual and norm, rotary positions, gated activations. Each is one pass over
// memory.
#include "kernels.h"

// A 16-bit norm is rounded before it is multiplied by the weight, as in Llama.
template <typename T>
void add_norm_rows(
    T* residual, int64_t stride, const T* delta, int64_t delta_stride, const Norm<T>& norm, int64_t rows, int64_t size,
    T* output) {
  torch::stable::parallel_for(0, rows, 32, [&](int64_t begin, int64_t end) {
    std::vector<float> values(size);
    for (int64_t row = begin; row < end; ++row) {
      T* own = residual + row * stride;
      T* out = output + row * size;
      float* value = values.data();
      if (delta) {
        const T* other = delta + row * delta_stride;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) own[i] = from_float<T>(to_float(own[i]) + to_float(other[i]));
      }
      float total = 0;
#pragma omp simd reduction(+ : total)
      for (int64_t i = 0; i < size; ++i) {
        value[i] = to_float(own[i]);
        total += value[i];
      }
      const float mean = norm.centered ? total / size : 0;
      float squares = 0;
#pragma omp simd reduction(+ : squares)
      for (int64_t i = 0; i < size; ++i) squares += (value[i] - mean) * (value[i] - mean);
      const float scale = 1 / std::sqrt(squares / size + float(norm.epsilon));
      if (norm.centered) {
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) {
          out[i] = from_float<T>(
              (value[i] - mean) * scale * to_float(norm.weight[i]) + (norm.bias ? to_float(norm.bias[i]) : 0));
        }
      } else {
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) {
          out[i] = from_float<T>(to_float(from_float<T>(value[i] * scale)) * to_float(norm.weight[i]));
        }
      }
    }
  });
}

template <typename T>
void norm_heads_of(const Heads<T>& heads, const T* weight, double epsilon) {
  torch::stable::parallel_for(0, heads.tokens, 32, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t head = 0; head < heads.count; ++head) {
        T* own = heads.first + token * heads.token_stride + head * heads.head_stride;
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < heads.size; ++i) squares += to_float(own[i]) * to_float(own[i]);
        const float scale = 1 / std::sqrt(squares / heads.size + float(epsilon));
#pragma omp simd
        for (int64_t i = 0; i < heads.size; ++i) {
          own[i] = from_float<T>(to_float(from_float<T>(to_float(own[i]) * scale)) * to_float(weight[i]));
        }
      }
    }
  });
}

template <typename T>
void rotate_heads(const Heads<T>& heads, const T* table, int64_t size, const int64_t* positions) {
  const int64_t half = size / 2;
  torch::stable::parallel_for(0, heads.tokens, 32, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const T* cosines = table + positions[token] * 2 * size;
      const T* sines = cosines + size;
      for (int64_t head = 0; head < heads.count; ++head) {
        T* first = heads.first + token * heads.token_stride + head * heads.head_stride;
        T* second = first + half;
#pragma omp simd
        for (int64_t i = 0; i < half; ++i) {
          const float x = to_float(first[i]), y = to_float(second[i]);
          first[i] = from_float<T>(x * to_float(cosines[i]) + y * to_float(sines[i]));
          second[i] = from_float<T>(y * to_float(cosines[half + i]) + x * to_float(sines[half + i]));
        }
      }
    }
  });
}

namespace {

// The activated half is rounded before the product, as in torch. Without a gate, input and output may be the same
// memory.
template <typename T, typename Function>
void activate_by(Function function, const T* input, int64_t rows, int64_t size, bool is_gated, T* output) {
  torch::stable::parallel_for(0, rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      T* out = output + row * size;
      if (is_gated) {
        const T* gate = input + row * 2 * size;
        const T* up = gate + size;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) {
          out[i] = from_float<T>(to_float(from_float<T>(function(to_float(gate[i])))) * to_float(up[i]));
        }
      } else {
        const T* in = input + row * size;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) out[i] = from_float<T>(function(to_float(in[i])));
      }
    }
  });
}

inline float silu(float x) { return x / (1 + fast_exp(-x)); }

// tanh(u) + 1 is twice the sigmoid of 2u.
inline float gelu_tanh(float x) { return x / (1 + fast_exp(x * (-1.59576912f - 0.0713548128f * x * x))); }

// Formula 7.1.26 of Abramowitz and Stegun; its largest error is 1.5e-7.
inline float gelu_erf(float x) {
  const float z = std::fabs(x) * 0.707106781f, t = 1 / (1 + 0.3275911f * z);
  const float series =
      t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
  const float tail = 0.5f * x * series * fast_exp(-z * z);
  return x > 0 ? x - tail : tail;
}

inline float relu(float x) { return x < 0 ? 0 : x; }

}  // namespace

template <typename T>
void activate(Activation activation, const T* input, int64_t rows, int64_t size, bool is_gated, T* output) {
  switch (activation) {
    case Activation::kSilu:
      return activate_by([](float x) { return silu(x); }, input, rows, size, is_gated, output);
    case Activation::kGeluTanh:
      return activate_by([](float x) { return gelu_tanh(x); }, input, rows, size, is_gated, output);
    case Activation::kGeluErf:
      return activate_by([](float x) { return gelu_erf(x); }, input, rows, size, is_gated, output);
    case Activation::kRelu:
      return activate_by([](float x) { return relu(x); }, input, rows, size, is_gated, output);
  }
  STD_TORCH_CHECK(false, "an unknown activation");
}

template void add_norm_rows(
    BFloat16*, int64_t, const BFloat16*, int64_t, const Norm<BFloat16>&, int64_t, int64_t, BFloat16*);
template void norm_heads_of(const Heads<BFloat16>&, const BFloat16*, double);
template void rotate_heads(const Heads<BFloat16>&, const BFloat16*, int64_t, const int64_t*);
template void activate(Activation, const BFloat16*, int64_t, int64_t, bool, BFloat16*);

namespace {

template <typename T>
Heads<T> heads_of(const Tensor& heads) {
  return {data<T>(heads), heads.size(0), heads.stride(0), heads.size(1), heads.stride(1), heads.size(2)};
}

// residual += delta, in place where there is a delta; returns the norm of the sum. centered: a layer norm, which
// subtracts the mean; otherwise a root-mean-square norm. Rows may have gaps between them, as in a part of a wider
// product; those of the result have none.
Tensor add_norm(
    Tensor residual, std::optional<Tensor> delta, Tensor weight, std::optional<Tensor> bias, double epsilon,
    bool centered) {
  const int64_t rows = residual.size(0), size = residual.size(1);
  STD_TORCH_CHECK(
      residual.stride(1) == 1 && (!delta.has_value() || delta->stride(1) == 1), "a row's elements must lie together");
  STD_TORCH_CHECK(weight.scalar_type() == residual.scalar_type(), "the weight must have the input's type");
  const int64_t delta_stride = delta.has_value() ? delta->stride(0) : 0;
  Tensor output = torch::stable::new_empty(residual, {rows, size});
  by_type(residual, [&](auto element) {
    using T = decltype(element);
    add_norm_rows<T>(
        data<T>(residual), residual.stride(0), data<T>(delta), delta_stride,
        {data<T>(weight), data<T>(bias), epsilon, centered}, rows, size, data<T>(output));
  });
  return output;
}

// In place: the root-mean-square norm of every head. heads: [tokens, heads, head_dim], head_dim contiguous.
void norm_heads(Tensor heads, Tensor weight, double epsilon) {
  by_type(heads, [&](auto element) {
    using T = decltype(element);
    norm_heads_of<T>(heads_of<T>(heads), data<T>(weight), epsilon);
  });
}

// In place. heads: [tokens, heads, head_dim], head_dim contiguous. table: [positions, 2, rotary_dim], the sines with
// the sign of the half that is rotated. Elements of a head beyond rotary_dim do not change.
void rotate(Tensor heads, Tensor table, Tensor positions) {
  by_type(heads, [&](auto element) {
    using T = decltype(element);
    rotate_heads<T>(heads_of<T>(heads), data<T>(table), table.size(2), data<int64_t>(positions));
  });
}

// gate_up: [rows, 2 * size], gates first. Returns silu(gate) * up, the silu rounded as torch rounds it.
Tensor silu_mul(Tensor gate_up) {
  const int64_t rows = gate_up.size(0), size = gate_up.size(1) / 2;
  STD_TORCH_CHECK(gate_up.is_contiguous(), "rows must be contiguous");
  Tensor output = torch::stable::new_empty(gate_up, {rows, size});
  by_type(gate_up, [&](auto element) {
    using T = decltype(element);
    activate<T>(Activation::kSilu, data<T>(gate_up), rows, size, true, data<T>(output));
  });
  return output;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(reference_server_cpu, library) {
  library.def(
      "add_norm(Tensor(a!) residual, Tensor? delta, Tensor weight, Tensor? bias, float epsilon, bool centered) -> "
      "Tensor");
  library.def("norm_heads(Tensor(a!) heads, Tensor weight, float epsilon) -> ()");
  library.def("rotate(Tensor(a!) heads, Tensor table, Tensor positions) -> ()");
  library.def("silu_mul(Tensor gate_up) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(reference_server_cpu, CPU, library) {
  library.impl("add_norm", TORCH_BOX(&add_norm));
  library.impl("norm_heads", TORCH_BOX(&norm_heads));
  library.impl("rotate", TORCH_BOX(&rotate));
  library.impl("silu_mul", TORCH_BOX(&silu_mul));
}
