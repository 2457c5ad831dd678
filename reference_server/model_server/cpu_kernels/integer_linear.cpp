// The torch operator of integers.h. Its name has the instructions that it is compiled for.
#include "kernels.h"

#include <type_traits>

#if REFERENCE_SERVER_LANES
namespace {

// Each thread keeps its buffer: the system would map a new one for every product.
struct Buffers {
  std::vector<int8_t> codes;
  std::vector<float> scales;
  std::vector<int32_t> sums;
};

}  // namespace

template <typename T>
void multiply_integer_rows(
    const IntegerWeight& weight, const T* input, int64_t stride, int64_t rows, const T* bias, T* output) {
  constexpr bool is_float = std::is_same_v<T, float>;
  thread_local Buffers buffers;
  buffers.codes.resize(rows * weight.groups * weight.group);
  buffers.scales.resize(rows * weight.groups);
  buffers.sums.resize(rows * weight.groups);
  const RoundedRows rounded{buffers.codes.data(), buffers.scales.data(), buffers.sums.data()};
  round_rows(input, is_float, rows, stride, &weight, &rounded);
  torch::stable::parallel_for(0, (weight.outputs + 31) / 32, 4, [&](int64_t first_panel, int64_t last_panel) {
    multiply_integers(&rounded, rows, &weight, first_panel, last_panel, bias, output, is_float, weight.outputs);
  });
}

template void multiply_integer_rows(
    const IntegerWeight&, const BFloat16*, int64_t, int64_t, const BFloat16*, BFloat16*);

namespace {

// input: [rows, inputs], rows contiguous. codes, multipliers, scales and zeros: as in integers.h, contiguous. Returns
// [rows, outputs].
Tensor integer_linear(
    Tensor input, Tensor codes, Tensor multipliers, std::optional<Tensor> scales, std::optional<Tensor> zeros,
    std::optional<Tensor> bias, int64_t outputs, int64_t groups, int64_t group, int64_t bits) {
  const int64_t rows = input.size(0), panels = (outputs + 31) / 32;
  STD_TORCH_CHECK(input.stride(1) == 1 && input.size(1) <= groups * group, "the input does not fit the packed weight");
  STD_TORCH_CHECK(codes.numel() == panels * groups * group * 32 * bits / 8, "the codes do not fill the panels");
  Tensor output = torch::stable::new_empty(input, {rows, outputs});
  const IntegerWeight weight{
      data<uint8_t>(codes), data<float>(multipliers), data<uint16_t>(scales), data<uint8_t>(zeros),
      outputs,              input.size(1),            groups,                 group,
      bits};
  by_type(input, [&](auto element) {
    using T = decltype(element);
    multiply_integer_rows<T>(weight, data<T>(input), input.stride(0), rows, data<T>(bias), data<T>(output));
  });
  return output;
}

}  // namespace

#if REFERENCE_SERVER_LANES == 16
#define INTEGER_LINEAR "integer_linear_vnni"
#else
#define INTEGER_LINEAR "integer_linear_avx2"
#endif

STABLE_TORCH_LIBRARY_FRAGMENT(reference_server_cpu, library) {
  library.def(
      INTEGER_LINEAR
      "(Tensor input, Tensor codes, Tensor multipliers, Tensor? scales, Tensor? zeros, Tensor? bias, int outputs, int "
      "groups, int group, int bits) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(reference_server_cpu, CPU, library) {
  library.impl(INTEGER_LINEAR, TORCH_BOX(&integer_linear));
}
#endif
