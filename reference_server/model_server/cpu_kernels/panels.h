// Division of a product's work: panels of 32 outputs, up to 12 rows at a time.
#pragma once

#include <algorithm>
#include <cstdint>

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
