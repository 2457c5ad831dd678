// The best id of each row of logits, and its log-probability.
#include "kernels.h"

#include <algorithm>
#include <limits>
#include <tuple>

namespace {

// Logits whose largest one is found at once.
constexpr int64_t kBlock = 256;

template <typename T>
float largest_of(const T* logits, int64_t count) {
  float largest = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; ++i) {
    const float value = to_float(logits[i]);
    largest = value > largest ? value : largest;
  }
  return largest;
}

// The first of equals is the best. Without a finite logit, or with NaN or infinity, the log-probability is NaN.
template <typename T>
void choose_best(const T* logits, int64_t count, int64_t& id, float& logprob) {
  float largest = largest_of(logits, std::min(kBlock, count));
  int64_t begin = 0;
  for (int64_t block = kBlock; block < count; block += kBlock) {
    const float own = largest_of(logits + block, std::min(kBlock, count - block));
    if (own > largest) largest = own, begin = block;
  }
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += fast_exp(to_float(logits[i]) - largest);
  logprob = -std::log(sum);
  id = begin;
  while (id < count - 1 && to_float(logits[id]) != largest) ++id;
}

// logits: [rows, ids], the ids of a row contiguous. Returns [rows] int64 and [rows] float32.
std::tuple<Tensor, Tensor> greedy(Tensor logits) {
  const int64_t rows = logits.size(0), count = logits.size(1), stride = logits.stride(0);
  STD_TORCH_CHECK(logits.stride(1) == 1 && count > 0, "the logits of a row must be contiguous");
  Tensor ids = torch::stable::new_empty(logits, {rows}, ScalarType::Long);
  Tensor logprobs = torch::stable::new_empty(logits, {rows}, ScalarType::Float);
  by_type(logits, [&](auto element) {
    using T = decltype(element);
    torch::stable::parallel_for(0, rows, 1, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        choose_best(data<T>(logits) + row * stride, count, data<int64_t>(ids)[row], data<float>(logprobs)[row]);
      }
    });
  });
  return {ids, logprobs};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(reference_server_cpu, library) {
  library.def("greedy(Tensor logits) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(reference_server_cpu, CPU, library) { library.impl("greedy", TORCH_BOX(&greedy)); }
