// The work between two products: residual and norm, rotary positions, gated activations. One pass over memory each.
#include "rows.h"

namespace {

// residual += delta, in place where there is a delta; returns the norm of the sum. centered: a layer norm, which takes
// the mean away; else a root-mean-square norm. A 16-bit norm is rounded before the weight multiplies, as Llama's is.
// Rows may lie apart, as those of a part of a wider product do; the result's lie together.
Tensor add_norm(
    Tensor residual, std::optional<Tensor> delta, Tensor weight, std::optional<Tensor> bias, double epsilon,
    bool centered) {
  const int64_t rows = residual.size(0), size = residual.size(1);
  STD_TORCH_CHECK(
      residual.stride(1) == 1 && (!delta.has_value() || delta->stride(1) == 1), "a row's elements must lie together");
  STD_TORCH_CHECK(weight.scalar_type() == residual.scalar_type(), "the weight must have the input's type");
  const int64_t stride = residual.stride(0), delta_stride = delta.has_value() ? delta->stride(0) : 0;
  Tensor output = torch::stable::new_empty(residual, {rows, size});
  by_type(residual, [&](auto element) {
    using T = decltype(element);
    const T* added = data<T>(delta);
    const T* weights = data<T>(weight);
    const T* biases = data<T>(bias);
    torch::stable::parallel_for(0, rows, 32, [&](int64_t begin, int64_t end) {
      std::vector<float> values(size);
      for (int64_t row = begin; row < end; ++row) {
        T* own = data<T>(residual) + row * stride;
        T* out = data<T>(output) + row * size;
        float* value = values.data();
        if (added) {
          const T* other = added + row * delta_stride;
#pragma omp simd
          for (int64_t i = 0; i < size; ++i) own[i] = from_float<T>(to_float(own[i]) + to_float(other[i]));
        }
        float total = 0;
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < size; ++i) {
          value[i] = to_float(own[i]);
          total += value[i];
        }
        const float mean = centered ? total / size : 0;
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < size; ++i) squares += (value[i] - mean) * (value[i] - mean);
        const float scale = 1 / std::sqrt(squares / size + float(epsilon));
        if (centered) {
#pragma omp simd
          for (int64_t i = 0; i < size; ++i) {
            out[i] = from_float<T>((value[i] - mean) * scale * to_float(weights[i]) + (biases ? to_float(biases[i]) : 0));
          }
        } else {
#pragma omp simd
          for (int64_t i = 0; i < size; ++i) {
            out[i] = from_float<T>(to_float(from_float<T>(value[i] * scale)) * to_float(weights[i]));
          }
        }
      }
    });
  });
  return output;
}

// In place: the root-mean-square norm of every head. heads: [tokens, heads, head_dim], head_dim contiguous.
void norm_heads(Tensor heads, Tensor weight, double epsilon) {
  const int64_t tokens = heads.size(0), count = heads.size(1), size = heads.size(2);
  by_type(heads, [&](auto element) {
    using T = decltype(element);
    const T* weights = data<T>(weight);
    torch::stable::parallel_for(0, tokens, 32, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        for (int64_t head = 0; head < count; ++head) {
          T* own = data<T>(heads) + token * heads.stride(0) + head * heads.stride(1);
          float squares = 0;
#pragma omp simd reduction(+ : squares)
          for (int64_t i = 0; i < size; ++i) squares += to_float(own[i]) * to_float(own[i]);
          const float scale = 1 / std::sqrt(squares / size + float(epsilon));
#pragma omp simd
          for (int64_t i = 0; i < size; ++i) {
            own[i] = from_float<T>(to_float(from_float<T>(to_float(own[i]) * scale)) * to_float(weights[i]));
          }
        }
      }
    });
  });
}

// In place. heads: [tokens, heads, head_dim], head_dim contiguous. table: [positions, 2, rotary_dim], the sines with
// the sign of the half that is turned; what a head has beyond rotary_dim stays.
void rotate(Tensor heads, Tensor table, Tensor positions) {
  const int64_t tokens = heads.size(0), count = heads.size(1), size = table.size(2), half = size / 2;
  const int64_t* position = data<int64_t>(positions);
  by_type(heads, [&](auto element) {
    using T = decltype(element);
    torch::stable::parallel_for(0, tokens, 32, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const T* cosines = data<T>(table) + position[token] * 2 * size;
        const T* sines = cosines + size;
        for (int64_t head = 0; head < count; ++head) {
          T* first = data<T>(heads) + token * heads.stride(0) + head * heads.stride(1);
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
  });
}

// gate_up: [rows, 2 * size], gates first. Returns silu(gate) * up, the silu rounded as torch rounds it.
Tensor silu_mul(Tensor gate_up) {
  const int64_t rows = gate_up.size(0), size = gate_up.size(1) / 2;
  STD_TORCH_CHECK(gate_up.is_contiguous(), "rows must be contiguous");
  Tensor output = torch::stable::new_empty(gate_up, {rows, size});
  by_type(gate_up, [&](auto element) {
    using T = decltype(element);
    torch::stable::parallel_for(0, rows, 16, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* gate = data<T>(gate_up) + row * 2 * size;
        const T* up = gate + size;
        T* out = data<T>(output) + row * size;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) {
          const float x = to_float(gate[i]);
          out[i] = from_float<T>(to_float(from_float<T>(x / (1 + fast_exp(-x)))) * to_float(up[i]));
        }
      }
    });
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
