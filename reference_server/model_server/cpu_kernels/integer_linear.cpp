// The torch operator of integers.h. It has the name of the instructions that it is compiled for.
#include "integers.h"

#include "rows.h"

namespace {

// Kept by each thread: a new buffer for every product would have to be mapped anew.
struct Buffers {
  std::vector<int8_t> codes;
  std::vector<float> scales;
  std::vector<int32_t> sums;
};

// input: [rows, inputs], rows contiguous. codes, multipliers, scales and zeros: as in integers.h, contiguous. Returns
// [rows, outputs].
Tensor integer_linear(
    Tensor input, Tensor codes, Tensor multipliers, std::optional<Tensor> scales, std::optional<Tensor> zeros,
    std::optional<Tensor> bias, int64_t outputs, int64_t groups, int64_t group, int64_t bits) {
  const int64_t rows = input.size(0), panels = codes.size(0);
  const bool is_float = input.scalar_type() == ScalarType::Float;
  STD_TORCH_CHECK(is_float || input.scalar_type() == ScalarType::BFloat16, "rows must be float32 or bfloat16");
  STD_TORCH_CHECK(input.stride(1) == 1 && input.size(1) <= groups * group, "the input does not fit the packed weight");
  STD_TORCH_CHECK(codes.numel() == panels * groups * group * 32 * bits / 8, "the codes do not fill the panels");
  Tensor output = torch::stable::new_empty(input, {rows, outputs});
  const IntegerWeight weight{
      data<uint8_t>(codes), data<float>(multipliers), data<uint16_t>(scales), data<uint8_t>(zeros),
      outputs,              input.size(1),            groups,                 group,
      bits};
  thread_local Buffers buffers;
  buffers.codes.resize(rows * groups * group);
  buffers.scales.resize(rows * groups);
  buffers.sums.resize(rows * groups);
  const RoundedRows rounded{buffers.codes.data(), buffers.scales.data(), buffers.sums.data()};
  const void* biases = bias.has_value() ? bias->data_ptr() : nullptr;
  round_rows(input.data_ptr(), is_float, rows, input.stride(0), &weight, &rounded);
  torch::stable::parallel_for(0, panels, 4, [&](int64_t first_panel, int64_t last_panel) {
    multiply_integers(
        &rounded, rows, &weight, first_panel, last_panel, biases, output.data_ptr(), is_float, outputs);
  });
  return output;
}

}  // namespace

#if REFERENCE_SERVER_LANES == 16
#define INTEGER_LINEAR "integer_linear_vnni"
#elif REFERENCE_SERVER_LANES == 8
#define INTEGER_LINEAR "integer_linear_avx2"
#endif

#ifdef INTEGER_LINEAR
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
