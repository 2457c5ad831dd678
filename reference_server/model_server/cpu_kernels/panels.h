// Panels of 32 outputs: the layout of packed weights, and the division of a product's work, up to 12 rows at a time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "elements.h"

// Whether this processor has a product of rows and bfloat16 panels. It has that of integers too, which needs F16C.
#if defined(__AVX512BF16__) || (defined(__AVX2__) && defined(__FMA__) && defined(__F16C__))
#define REFERENCE_SERVER_PANELS
#endif

constexpr int64_t kPanel = 32;
constexpr int64_t kMaxRows = 12;
// Input rows that stay in the second-level cache while all panels are read.
constexpr int64_t kCachedInputBytes = 384 << 10;

// Calls `call(row, count, panel)` for every panel and all rows, in groups of nearly equal size. The inputs of a row are
// bfloat16.
template <typename Call>
inline void each_row_group(int64_t inputs, int64_t rows, int64_t first_panel, int64_t last_panel, Call call) {
  const int64_t cached = std::max(kMaxRows, kCachedInputBytes / (2 * inputs) / kMaxRows * kMaxRows);
  for (int64_t chunk = 0; chunk < rows; chunk += cached) {
    const int64_t chunk_rows = std::min(cached, rows - chunk), groups = (chunk_rows + kMaxRows - 1) / kMaxRows;
    for (int64_t panel = first_panel; panel < last_panel; ++panel) {
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t row = chunk + chunk_rows * group / groups;
        call(row, chunk + chunk_rows * (group + 1) / groups - row, panel);
      }
    }
  }
}

extern "C" {

// The outputs of panels [first_panel, last_panel) for all rows, which are at a distance of `stride` elements.
//
//     packed   [outputs / 32, inputs / 2, 32, 2]   bias: [outputs] or null   output: [rows, outputs]
//
// Every output is one running sum over the inputs in order, so a row's result does not depend on the other rows.
void multiply_panels(
    const BFloat16* packed, const BFloat16* bias, int64_t inputs, int64_t outputs, const BFloat16* input,
    int64_t stride, int64_t rows, BFloat16* output, int64_t first_panel, int64_t last_panel);
}
