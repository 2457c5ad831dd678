// The kernels over plain memory, which the operators and the walk share. Each has one definition, so both give the same
// bits. They divide their work over torch's threads. Fields of eight bytes, so that Python can write these structures.
#pragma once

#include "integers.h"
#include "rows.h"

// The `bits` of a weight of eight-bit floats.
constexpr int64_t kFloat8Bits = -8;

// A linear whose weight is packed as in panels.h if `bits` is 0, as in float8_linear.cpp if it is kFloat8Bits, else as
// in integers.h; `packed` are its codes, and `multipliers` the factors of eight-bit floats. bias: [outputs] or null.
struct Product {
  const void* packed;
  const BFloat16* bias;
  int64_t inputs, outputs;
  const float* multipliers;
  const uint16_t* scales;
  const uint8_t* zeros;
  int64_t groups, group, bits;
};

// A layer norm (centered) or a root-mean-square norm. A null weight: no norm.
template <typename T>
struct Norm {
  const T* weight;
  const T* bias;
  double epsilon;
  int64_t centered;
};

// [tokens, count, size], a head's elements side by side.
template <typename T>
struct Heads {
  T* first;
  int64_t tokens, token_stride, count, head_stride, size;
};

// Of attention over one layer's cache. window, softcap: 0 for none. slopes: [num_heads] or null.
struct Geometry {
  int64_t num_heads, num_kv_heads, block_size, head_dim, window;
  double scaling, softcap;
  const float* slopes;
};

enum class Activation : int64_t { kSilu, kGeluTanh, kGeluErf, kRelu };

// Addition of an adapter to the outputs of one part of a site: `b`, packed as in panels.h, with `rank` inputs, which
// are those from `first_rank` on of A's product.
struct AdapterUpdate {
  const void* packed;
  int64_t rank, first_rank, outputs, first_output;
};

// One adapter's factors at a site: A, packed, has `ranks` outputs. A null `packed`: the adapter does not change the
// site.
struct AdapterFactors {
  const void* packed;
  int64_t ranks, inputs, parts;
  AdapterUpdate updates[3];
};

// Rows of a step by adapter: those of group i are order[starts[i]] to order[starts[i + 1] - 1].
struct AdapterGroups {
  int64_t count;
  const int64_t *slots, *starts, *order;
};

// From one array: the count, then slots, starts and order.
inline AdapterGroups adapter_groups(const int64_t* packed) {
  const int64_t count = packed[0];
  return {count, packed + 1, packed + 1 + count, packed + 2 + 2 * count};
}

// Adds the updates of all adapters of a step to a site's result.
void add_adapters(
    const AdapterFactors* by_slot, const AdapterGroups& groups, const BFloat16* input, int64_t stride,
    BFloat16* result, int64_t result_stride);

// input: rows at a distance of `stride` elements. output: [rows, outputs].
void multiply_rows(const Product& product, const BFloat16* input, int64_t stride, int64_t rows, BFloat16* output);

// The same for a weight of eight-bit floats.
void multiply_float8_rows(
    const Product& product, const BFloat16* input, int64_t stride, int64_t rows, BFloat16* output);

// The same for a weight of integers and any element type.
template <typename T>
void multiply_integer_rows(
    const IntegerWeight& weight, const T* input, int64_t stride, int64_t rows, const T* bias, T* output);

// residual += delta unless that is null, in place; output: [rows, size], the norm of the sum.
template <typename T>
void add_norm_rows(
    T* residual, int64_t stride, const T* delta, int64_t delta_stride, const Norm<T>& norm, int64_t rows, int64_t size,
    T* output);

// In place: the root-mean-square norm of every head.
template <typename T>
void norm_heads_of(const Heads<T>& heads, const T* weight, double epsilon);

// In place. table: [positions, 2, size], the sines with the sign of the half that is rotated.
template <typename T>
void rotate_heads(const Heads<T>& heads, const T* table, int64_t size, const int64_t* positions);

// input: [rows, 2 * size], gates first, if the MLP is gated; else [rows, size]. output: [rows, size].
template <typename T>
void activate(Activation activation, const T* input, int64_t rows, int64_t size, bool is_gated, T* output);

// One token a row. query: a row's heads side by side. lengths: [rows], keys of each. output: [rows, num_heads,
// head_dim]. cache: of the query's type or of eight bits (float8.h).
template <typename T, typename C>
void attend_rows(
    const T* query, int64_t query_stride, int64_t rows, const C* cache, const int64_t* table, int64_t table_stride,
    const int64_t* lengths, const Geometry& geometry, T* output);

// key_value: [tokens, 2, num_kv_heads, head_dim], a head's elements side by side. slots: [tokens]. The factors multiply
// keys and values before they are rounded to eight bits.
template <typename T, typename C>
void store_rows(
    C* cache, const Geometry& geometry, const T* key_value, int64_t token_stride, int64_t plane_stride,
    int64_t head_stride, const int64_t* slots, int64_t tokens, float key_factor, float value_factor);
