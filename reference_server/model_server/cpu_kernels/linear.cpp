// Products with a packed weight: the operator for bfloat16 panels, and the choice of the kernel by kind of weight.
#include "kernels.h"
#include "panels.h"

#ifdef REFERENCE_SERVER_PANELS

void multiply_rows(const Product& product, const BFloat16* input, int64_t stride, int64_t rows, BFloat16* output) {
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
  if (product.bits == kFloat8Bits) return multiply_float8_rows(product, input, stride, rows, output);
#endif
  if (product.bits) {
    const IntegerWeight weight{
        static_cast<const uint8_t*>(product.packed), product.multipliers, product.scales, product.zeros,
        product.outputs, product.inputs, product.groups, product.group, product.bits};
    return multiply_integer_rows(weight, input, stride, rows, product.bias, output);
  }
  const BFloat16* packed = static_cast<const BFloat16*>(product.packed);
  const int64_t panels = (product.outputs + kPanel - 1) / kPanel;
  torch::stable::parallel_for(0, panels, 4, [&](int64_t first_panel, int64_t last_panel) {
    multiply_panels(
        packed, product.bias, product.inputs, product.outputs, input, stride, rows, output, first_panel, last_panel);
  });
}

namespace {

// input: [rows, inputs], rows contiguous; packed as in panels.h. Returns [rows, outputs].
Tensor linear(Tensor input, Tensor packed, std::optional<Tensor> bias, int64_t outputs) {
  const int64_t rows = input.size(0), inputs = input.size(1);
  STD_TORCH_CHECK(
      inputs == 2 * packed.size(1) && input.stride(1) == 1 && (outputs + kPanel - 1) / kPanel == packed.size(0),
      "the input does not fit the packed weight");
  Tensor output = torch::stable::new_empty(input, {rows, outputs});
  multiply_rows(
      {data<BFloat16>(packed), data<BFloat16>(bias), inputs, outputs}, data<BFloat16>(input), input.stride(0), rows,
      data<BFloat16>(output));
  return output;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(reference_server_cpu, library) {
  library.def("linear(Tensor input, Tensor packed, Tensor? bias, int outputs) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(reference_server_cpu, CPU, library) {
  library.impl("linear", TORCH_BOX(&linear));
}
#endif
