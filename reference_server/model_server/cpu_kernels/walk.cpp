// The decode step of a whole decoder as one operator: from the embeddings of one token a row to the logits.
//
// It runs the kernels of the other operators in the order of models/fused/walk.py, over a table that
// models/fused/compiled_walk.py writes once. For bfloat16 only: other types have no packed product.
#include "float8.h"
#include "kernels.h"
#include "panels.h"

#ifdef REFERENCE_SERVER_PANELS
#include <algorithm>
#include <memory>
#include <utility>

namespace {

using T = BFloat16;

enum class CacheType : int64_t { kBFloat16, kE4M3, kE5M2 };

// As models/fused/walk.py's FusedLayer. A norm without a weight is absent. The factors multiply keys and values before
// they are rounded to eight bits; `value_scale` multiplies the attended values.
struct Layer {
  Norm<T> input_norm, post_norm, query_norm, key_norm, attended_norm, mlp_norm;
  Product qkv, output, up, down;
  Geometry geometry;
  void* cache;
  CacheType cache_type;
  double key_factor, value_factor, value_scale;
  double multiplier, query_scale;
  Activation activation;
  int64_t is_gated, is_parallel;
};

// The operations after the layers. A head without a weight is absent: the result is the normed hidden states.
struct End {
  Norm<T> norm;
  Product head;
};

// Memory of the thread for the rows between two kernels, which grows to the largest step.
class Scratch {
 public:
  T* take(int64_t elements) {
    if (elements > size_) {
      memory_.reset(new T[elements]);
      size_ = elements;
    }
    return memory_.get();
  }

 private:
  std::unique_ptr<T[]> memory_;
  int64_t size_ = 0;
};

void scale(T* values, int64_t rows, int64_t stride, int64_t size, double factor) {
  if (factor == 1) return;
  const float by = float(factor);
  for (int64_t row = 0; row < rows; ++row) {
    T* own = values + row * stride;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) own[i] = from_float<T>(to_float(own[i]) * by);
  }
}

void add(T* values, const T* others, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) values[i] = from_float<T>(to_float(values[i]) + to_float(others[i]));
}

// The products of a layer, in the order of their sites.
enum Site { kQkv, kOutput, kUp, kDown, kSites };

// One step's rows, and the rows between two kernels. factors: of the layer's sites by slot, `capacity` each, or null.
struct Step {
  int64_t rows, size;
  const T* table;
  int64_t rotary_dim, table_stride;
  const int64_t *positions, *slots, *block_table, *lengths;
  T *hidden, *normed, *delta, *qkv, *attended, *up, *activated;
  const AdapterFactors* factors = nullptr;
  int64_t capacity = 0;
  AdapterGroups groups{};

  // A product, with the updates of the adapters.
  void multiply(const Product& product, Site site, const T* input, int64_t stride, T* output) {
    multiply_rows(product, input, stride, rows, output);
    if (factors) add_adapters(factors + site * capacity, groups, input, stride, output, product.outputs);
  }

  void add_norm(const T* added, const Norm<T>& norm, T* output) {
    add_norm_rows(hidden, size, added, size, norm, rows, size, output);
  }

  // The addition to the residual: normed if the layer has a norm for it, then scaled.
  void finish(const Norm<T>& norm, double multiplier) {
    if (norm.weight) {
      add_norm_rows(delta, size, static_cast<const T*>(nullptr), 0, norm, rows, size, normed);
      std::swap(normed, delta);
    }
    scale(delta, rows, size, size, multiplier);
  }

  void attend(const Layer& layer) {
    const Geometry& g = layer.geometry;
    const int64_t width = layer.qkv.outputs, queries = g.num_heads * g.head_dim, keys = g.num_kv_heads * g.head_dim;
    multiply(layer.qkv, kQkv, normed, size, qkv);
    if (layer.query_norm.weight && layer.key_norm.weight) {
      norm_heads_of<T>(
          {qkv, rows, width, g.num_heads, g.head_dim, g.head_dim}, layer.query_norm.weight, layer.query_norm.epsilon);
      norm_heads_of<T>(
          {qkv + queries, rows, width, g.num_kv_heads, g.head_dim, g.head_dim}, layer.key_norm.weight,
          layer.key_norm.epsilon);
    }
    scale(qkv, rows, width, queries, layer.query_scale);
    if (table) {
      rotate_heads<T>(
          {qkv, rows, width, g.num_heads + g.num_kv_heads, g.head_dim, g.head_dim}, table, rotary_dim, positions);
    }
    switch (layer.cache_type) {
      case CacheType::kBFloat16:
        store_and_attend(layer, static_cast<T*>(layer.cache), keys);
        break;
      case CacheType::kE4M3:
        store_and_attend(layer, static_cast<E4M3*>(layer.cache), keys);
        break;
      case CacheType::kE5M2:
        store_and_attend(layer, static_cast<E5M2*>(layer.cache), keys);
    }
    multiply(layer.output, kOutput, attended, queries, delta);
  }

  template <typename C>
  void store_and_attend(const Layer& layer, C* cache, int64_t keys) {
    const Geometry& g = layer.geometry;
    const int64_t width = layer.qkv.outputs, queries = g.num_heads * g.head_dim;
    store_rows<T, C>(
        cache, g, qkv + queries, width, keys, g.head_dim, slots, rows, float(layer.key_factor),
        float(layer.value_factor));
    attend_rows<T, C>(qkv, width, rows, cache, block_table, table_stride, lengths, g, attended);
    scale(attended, rows, queries, queries, layer.value_scale);
  }

  // From `normed` to `output`.
  void mlp(const Layer& layer, T* output) {
    multiply(layer.up, kUp, normed, size, up);
    activate<T>(layer.activation, up, rows, layer.down.inputs, layer.is_gated, activated);
    multiply(layer.down, kDown, activated, layer.down.inputs, output);
  }

  void run(const Layer& layer, bool is_first) {
    add_norm(is_first ? nullptr : delta, layer.input_norm, normed);
    attend(layer);
    if (layer.is_parallel) {
      // Without its own norm, the MLP reads the normed input, which is still in `normed`.
      scale(delta, rows, size, size, layer.multiplier);
      if (layer.post_norm.weight) add_norm(nullptr, layer.post_norm, normed);
      mlp(layer, attended);
      add(delta, attended, rows * size);
      return;
    }
    finish(layer.attended_norm, layer.multiplier);
    add_norm(delta, layer.post_norm, normed);
    mlp(layer, delta);
    finish(layer.mlp_norm, layer.multiplier);
  }
};

template <typename Record>
const Record* records(const Tensor& bytes) {
  STD_TORCH_CHECK(
      bytes.scalar_type() == ScalarType::Byte && bytes.numel() % sizeof(Record) == 0 && bytes.numel() > 0,
      "the table of the walk has another layout");
  return data<const Record>(bytes);
}

// hidden: [rows, size], overwritten. layers, end: bytes of the structures above, whose addresses stay valid during the
// call; the caches of the layers are written. rotary: [positions, 2, rotary_dim]. positions, slots, seqlen_k: [rows]
// int64. block_table: [rows, blocks] int64. kept: [rows, size], gets the normed hidden states that the head reads.
// factors: [4 * layers, slots] AdapterFactors as bytes; groups: as in `adapter_groups`; both or neither. Returns
// [rows, vocab_size], or [rows, size] without a head.
Tensor walk(
    Tensor hidden, Tensor layers, Tensor end, std::optional<Tensor> rotary, Tensor positions, Tensor slots,
    Tensor block_table, Tensor seqlen_k, std::optional<Tensor> kept, std::optional<Tensor> factors,
    std::optional<Tensor> groups) {
  static thread_local Scratch scratch;
  const Layer* layer = records<Layer>(layers);
  const End* last = records<End>(end);
  const int64_t rows = hidden.size(0), size = hidden.size(1), count = layers.numel() / int64_t(sizeof(Layer));
  STD_TORCH_CHECK(
      hidden.scalar_type() == ScalarType::BFloat16 && hidden.is_contiguous() && positions.size(0) == rows &&
          slots.size(0) == rows && block_table.size(0) == rows && seqlen_k.size(0) == rows,
      "a decode step has one bfloat16 token a row");
  Step step{rows, size, data<T>(rotary), rotary.has_value() ? rotary->size(2) : 0, block_table.stride(0)};
  step.positions = data<int64_t>(positions), step.slots = data<int64_t>(slots);
  step.block_table = data<int64_t>(block_table), step.lengths = data<int64_t>(seqlen_k);
  int64_t qkv = 0, attended = size, up = 0, activated = 0;
  for (int64_t i = 0; i < count; ++i) {
    qkv = std::max(qkv, layer[i].qkv.outputs), attended = std::max(attended, layer[i].output.inputs);
    up = std::max(up, layer[i].up.outputs), activated = std::max(activated, layer[i].down.inputs);
  }
  T* room = scratch.take(rows * (2 * size + qkv + attended + up + activated));
  const auto part = [&](int64_t width) { return std::exchange(room, room + rows * width); };
  step.hidden = data<T>(hidden), step.normed = part(size), step.delta = part(size), step.qkv = part(qkv);
  step.attended = part(attended), step.up = part(up), step.activated = part(activated);
  const AdapterFactors* adapters = nullptr;
  if (factors.has_value() && groups.has_value()) {
    const int64_t records = factors->numel() / int64_t(sizeof(AdapterFactors));
    STD_TORCH_CHECK(records % (kSites * count) == 0, "the table of adapters has another layout");
    adapters = data<AdapterFactors>(*factors);
    step.capacity = records / (kSites * count), step.groups = adapter_groups(data<int64_t>(*groups));
  }
  for (int64_t i = 0; i < count; ++i) {
    step.factors = adapters ? adapters + i * kSites * step.capacity : nullptr;
    step.run(layer[i], i == 0);
  }
  const bool has_head = last->head.packed;
  Tensor output = torch::stable::new_empty(hidden, {rows, has_head ? last->head.outputs : size});
  T* normed = !has_head ? data<T>(output) : kept.has_value() ? data<T>(*kept) : step.normed;
  step.add_norm(step.delta, last->norm, normed);
  if (has_head) multiply_rows(last->head, normed, size, rows, data<T>(output));
  return output;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(reference_server_cpu, library) {
  library.def(
      "walk(Tensor(a!) hidden, Tensor layers, Tensor end, Tensor? rotary, Tensor positions, Tensor slots, Tensor "
      "block_table, Tensor seqlen_k, Tensor(b!)? kept, Tensor? factors, Tensor? groups) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(reference_server_cpu, CPU, library) {
  library.impl("walk", TORCH_BOX(&walk));
}
#endif
