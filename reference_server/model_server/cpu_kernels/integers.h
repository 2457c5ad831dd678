// Products of rows that are rounded to int8 and weights of 4 or 8 bits, packed for vpdpbusd. Without torch; callable
// from C.
//
// A panel is 32 outputs. Four inputs of each output are next to each other:
//
//     8 bits    codes [panels, groups, group / 4, 32, 4]
//     4 bits    codes [panels, groups, group / 4, 16, 4]   output o in the low half of a byte, o + 16 in the high half
//
//     w = (code - zero) * scale * multiplier
//
// A row has one scale per group of inputs. Products within a group are summed as integers, groups as floats in order,
// so a row's result does not depend on the other rows.
#pragma once

#include <cstdint>

// Outputs in one vector: 16 with AVX-512 VNNI, 8 with AVX2, 0 without either.
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
#define REFERENCE_SERVER_LANES 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define REFERENCE_SERVER_LANES 8
#else
#define REFERENCE_SERVER_LANES 0
#endif

extern "C" {

// `group` is a multiple of 4; inputs are padded to `groups * group`.
struct IntegerWeight {
  const uint8_t* codes;
  const float* multipliers;  // [panels, 32]
  const uint16_t* scales;    // [panels, groups, 32], float16; null: 1
  const uint8_t* zeros;      // [panels, groups, 32]; null: 8 or 128, the middle of the codes. Needs scales.
  int64_t outputs, inputs, groups, group, bits;
};

// Rows as round_rows leaves them. codes: [rows, groups * group]; scales, sums: [rows, groups].
struct RoundedRows {
  int8_t* codes;
  float* scales;
  int32_t* sums;
};

// REFERENCE_SERVER_LANES; if it is 0, the other functions must not be called.
int64_t integer_lanes();

// Round rows to int8, with one scale per group. The elements are bfloat16, or float if `is_float`; `stride` is counted
// in elements.
void round_rows(
    const void* input, int64_t is_float, int64_t rows, int64_t stride, const IntegerWeight* weight,
    const RoundedRows* rounded);

// The outputs of panels [first_panel, last_panel) for all rows. bias may be null; bias and output have the input's
// type.
void multiply_integers(
    const RoundedRows* rounded, int64_t rows, const IntegerWeight* weight, int64_t first_panel, int64_t last_panel,
    const void* bias, void* output, int64_t is_float, int64_t output_stride);
}
