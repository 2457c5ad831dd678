// The updates of LoRA adapters, grouped: for the rows of each adapter, a product with A and one with B for each part.
//
// Both are the packed products of linear.cpp, on rows that are gathered first. A group is divided into pieces of as
// many rows as that kernel computes at a time, and threads share the pieces.
#include "kernels.h"
#include "panels.h"

#ifdef REFERENCE_SERVER_PANELS
#include <algorithm>
#include <vector>

namespace {

constexpr int64_t kPieceRows = 12;

struct Piece {
  const AdapterFactors* factors;
  const int64_t* rows;
  int64_t count;
};

void add_piece(const Piece& piece, const BFloat16* input, int64_t stride, BFloat16* result, int64_t result_stride) {
  static thread_local std::vector<BFloat16> scratch;
  const AdapterFactors& factors = *piece.factors;
  int64_t widest = 0;
  for (int64_t i = 0; i < factors.parts; ++i) widest = std::max(widest, factors.updates[i].outputs);
  const size_t needed = size_t(kPieceRows * (factors.inputs + factors.ranks + widest));
  if (scratch.size() < needed) scratch.resize(needed);
  BFloat16* gathered = scratch.data();
  BFloat16* shrunk = gathered + kPieceRows * factors.inputs;
  BFloat16* expanded = shrunk + kPieceRows * factors.ranks;
  for (int64_t row = 0; row < piece.count; ++row) {
    std::memcpy(gathered + row * factors.inputs, input + piece.rows[row] * stride, size_t(2 * factors.inputs));
  }
  multiply_rows(
      {factors.packed, nullptr, factors.inputs, factors.ranks}, gathered, factors.inputs, piece.count, shrunk);
  for (int64_t i = 0; i < factors.parts; ++i) {
    const AdapterUpdate& update = factors.updates[i];
    multiply_rows(
        {update.packed, nullptr, update.rank, update.outputs}, shrunk + update.first_rank, factors.ranks, piece.count,
        expanded);
    for (int64_t row = 0; row < piece.count; ++row) {
      BFloat16* own = result + piece.rows[row] * result_stride + update.first_output;
      const BFloat16* added = expanded + row * update.outputs;
#pragma omp simd
      for (int64_t j = 0; j < update.outputs; ++j) own[j] = from_float<BFloat16>(to_float(own[j]) + to_float(added[j]));
    }
  }
}

}  // namespace

void add_adapters(
    const AdapterFactors* by_slot, const AdapterGroups& groups, const BFloat16* input, int64_t stride,
    BFloat16* result, int64_t result_stride) {
  static thread_local std::vector<Piece> pieces;
  pieces.clear();
  for (int64_t group = 0; group < groups.count; ++group) {
    const AdapterFactors* factors = by_slot + groups.slots[group];
    if (!factors->packed) continue;
    for (int64_t first = groups.starts[group]; first < groups.starts[group + 1]; first += kPieceRows) {
      pieces.push_back({factors, groups.order + first, std::min(kPieceRows, groups.starts[group + 1] - first)});
    }
  }
  // Other threads run the body; each has its own `pieces`.
  const Piece* all = pieces.data();
  torch::stable::parallel_for(0, int64_t(pieces.size()), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) add_piece(all[i], input, stride, result, result_stride);
  });
}

namespace {

// result: [tokens, outputs], changed. rows: [tokens, inputs]. factors: bytes of the site's AdapterFactors by slot.
// groups: as in `adapter_groups`.
void adapters(Tensor result, Tensor rows, Tensor factors, Tensor groups) {
  STD_TORCH_CHECK(
      rows.scalar_type() == ScalarType::BFloat16 && result.scalar_type() == ScalarType::BFloat16 &&
          rows.stride(1) == 1 && result.stride(1) == 1 && rows.size(0) == result.size(0),
      "adapters add to bfloat16 rows");
  add_adapters(
      data<const AdapterFactors>(factors), adapter_groups(data<const int64_t>(groups)), data<BFloat16>(rows),
      rows.stride(0), data<BFloat16>(result), result.stride(0));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(reference_server_cpu, library) {
  library.def("adapters(Tensor(a!) result, Tensor rows, Tensor factors, Tensor groups) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(reference_server_cpu, CPU, library) {
  library.impl("adapters", TORCH_BOX(&adapters));
}
#endif
