// Attention of one query token a row over block tables, and the store of new keys and values.
//
//     cache   [blocks, 2, num_kv_heads, block_size, head_dim]
//
// Keys are read once for all query heads of their group, then values; what is outside a row's window is not read.
#include "rows.h"

#include <algorithm>

namespace {

// Sixteen floats, in as many registers as the processor needs for them.
typedef float Vector __attribute__((vector_size(64)));
typedef float Half __attribute__((vector_size(32)));
typedef float Quarter __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Bits __attribute__((vector_size(32)));
constexpr int64_t kWidth = 16;

inline Vector load(const float* values) {
  Vector result;
  std::memcpy(&result, values, sizeof(result));
  return result;
}

inline Vector load(const BFloat16* values) {
  Bits bits;
  std::memcpy(&bits, values, sizeof(bits));
  return reinterpret_cast<Vector>(__builtin_convertvector(bits, Words) << 16);
}

inline float total(Vector values) {
  Half halves[2];
  std::memcpy(halves, &values, sizeof(values));
  halves[0] += halves[1];
  Quarter quarters[2];
  std::memcpy(quarters, halves, sizeof(halves[0]));
  quarters[0] += quarters[1];
  return (quarters[0][0] + quarters[0][2]) + (quarters[0][1] + quarters[0][3]);
}

// kSize: the head size if it is one of those below, for which sums stay in registers; else 0.
template <int64_t kSize, typename T>
void score(float* scores, const float* query, const T* page_keys, int64_t keys, int64_t size) {
  if constexpr (kSize == 0) {
    for (int64_t key = 0; key < keys; ++key) {
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < size; ++i) sum += query[i] * to_float(page_keys[key * size + i]);
      scores[key] = sum;
    }
  } else {
    Vector part[kSize / kWidth];
    for (int64_t i = 0; i < kSize / kWidth; ++i) part[i] = load(query + i * kWidth);
    for (int64_t key = 0; key < keys; ++key) {
      const T* own = page_keys + key * kSize;
      Vector sum = part[0] * load(own);
#pragma GCC unroll 16
      for (int64_t i = 1; i < kSize / kWidth; ++i) sum += part[i] * load(own + i * kWidth);
      scores[key] = total(sum);
    }
  }
}

template <int64_t kSize, typename T>
void add_values(float* output, const float* weights, const T* page_values, int64_t keys, int64_t size) {
  if constexpr (kSize == 0) {
    for (int64_t key = 0; key < keys; ++key) {
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) output[i] += weights[key] * to_float(page_values[key * size + i]);
    }
  } else {
    Vector sums[kSize / kWidth];
    for (int64_t i = 0; i < kSize / kWidth; ++i) sums[i] = load(output + i * kWidth);
    for (int64_t key = 0; key < keys; ++key) {
#pragma GCC unroll 16
      for (int64_t i = 0; i < kSize / kWidth; ++i) sums[i] += weights[key] * load(page_values + key * kSize + i * kWidth);
    }
    std::memcpy(output, sums, sizeof(sums));
  }
}

template <typename T>
struct PageFunctions {
  void (*score)(float*, const float*, const T*, int64_t, int64_t);
  void (*add_values)(float*, const float*, const T*, int64_t, int64_t);
};

template <typename T>
PageFunctions<T> page_functions(int64_t size) {
  switch (size) {
    case 32:
      return {score<32, T>, add_values<32, T>};
    case 64:
      return {score<64, T>, add_values<64, T>};
    case 96:
      return {score<96, T>, add_values<96, T>};
    case 128:
      return {score<128, T>, add_values<128, T>};
    default:
      return {score<0, T>, add_values<0, T>};
  }
}

// In place: scores to weights that add up to 1.
void softmax(float* scores, int64_t count) {
  float largest = scores[0];
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; ++i) largest = scores[i] > largest ? scores[i] : largest;
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < count; ++i) {
    scores[i] = fast_exp(scores[i] - largest);
    total += scores[i];
  }
  const float scale = 1 / total;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) scores[i] *= scale;
}

struct Geometry {
  int64_t num_heads, num_kv_heads, block_size, head_dim, window;
  float scaling, softcap;
  const float* slopes;
};

// One K/V head of one row. scores: room for [group, keys]; queries, sums: for [group, head_dim].
template <typename T>
void attend_head(
    const T* query, const T* cache, const int64_t* table, int64_t length, int64_t kv_head, const Geometry& g,
    std::vector<float>& room, T* output) {
  const int64_t group = g.num_heads / g.num_kv_heads, size = g.head_dim;
  const PageFunctions<T> page = page_functions<T>(size);
  const int64_t first = g.window > 0 ? std::max<int64_t>(0, length - g.window) : 0, keys = length - first;
  room.resize(group * (keys + 2 * size));
  float* scores = room.data();
  float* queries = scores + group * keys;
  float* sums = queries + group * size;
  for (int64_t i = 0; i < group * size; ++i) {
    queries[i] = to_float(query[i]) * g.scaling;
    sums[i] = 0;
  }
  const auto pages_of = [&](int64_t plane, auto visit) {
    for (int64_t position = first; position < length;) {
      const int64_t offset = position % g.block_size, count = std::min(g.block_size - offset, length - position);
      const int64_t block = table[position / g.block_size];
      const int64_t head_page = (block * 2 + plane) * g.num_kv_heads + kv_head;
      visit(position - first, count, cache + (head_page * g.block_size + offset) * size);
      position += count;
    }
  };
  pages_of(0, [&](int64_t place, int64_t count, const T* page_keys) {
    for (int64_t head = 0; head < group; ++head) {
      page.score(scores + head * keys + place, queries + head * size, page_keys, count, size);
    }
  });
  for (int64_t head = 0; head < group; ++head) {
    float* own = scores + head * keys;
    if (g.softcap > 0) {
      for (int64_t i = 0; i < keys; ++i) own[i] = g.softcap * std::tanh(own[i] / g.softcap);
    }
    if (g.slopes) {
      const float slope = g.slopes[kv_head * group + head];
      for (int64_t i = 0; i < keys; ++i) own[i] += slope * float(i - keys + 1);
    }
    softmax(own, keys);
  }
  pages_of(1, [&](int64_t place, int64_t count, const T* page_values) {
    for (int64_t head = 0; head < group; ++head) {
      page.add_values(sums + head * size, scores + head * keys + place, page_values, count, size);
    }
  });
  for (int64_t i = 0; i < group * size; ++i) output[i] = from_float<T>(sums[i]);
}

// query: [rows, num_heads, head_dim], heads of a row contiguous. block_table: [rows, blocks] int64, rows contiguous.
// seqlen_k: [rows] int64. window, softcap: 0 for none. Returns [rows, num_heads, head_dim]; a row without keys is 0.
Tensor attend_decode(
    Tensor query, Tensor cache, Tensor block_table, Tensor seqlen_k, double scaling, int64_t window, double softcap,
    std::optional<Tensor> slopes) {
  const int64_t rows = query.size(0), num_heads = query.size(1), head_dim = query.size(2);
  const Geometry g{num_heads, cache.size(2), cache.size(3), head_dim, window, float(scaling), float(softcap),
                   data<float>(slopes)};
  STD_TORCH_CHECK(query.stride(2) == 1 && (num_heads == 1 || query.stride(1) == head_dim), "a query's heads must lie together");
  Tensor output = torch::stable::new_empty(query, {rows, num_heads, head_dim});
  const int64_t* lengths = data<int64_t>(seqlen_k);
  by_type(query, [&](auto element) {
    using T = decltype(element);
    const int64_t group = g.num_heads / g.num_kv_heads;
    torch::stable::parallel_for(0, rows * g.num_kv_heads, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> room;
      for (int64_t task = begin; task < end; ++task) {
        const int64_t row = task / g.num_kv_heads, kv_head = task % g.num_kv_heads, head = kv_head * group;
        T* place = data<T>(output) + (row * num_heads + head) * head_dim;
        if (lengths[row] == 0) {
          std::fill_n(place, group * head_dim, from_float<T>(0));
          continue;
        }
        attend_head(
            data<T>(query) + row * query.stride(0) + head * head_dim, data<T>(cache),
            data<int64_t>(block_table) + row * block_table.stride(0), lengths[row], kv_head, g, room, place);
      }
    });
  });
  return output;
}

// key_value: [tokens, 2, num_kv_heads, head_dim], head_dim contiguous. slots: [tokens] int64.
void store(Tensor cache, Tensor key_value, Tensor slots) {
  const int64_t planes = 2, heads = cache.size(2), block_size = cache.size(3), head_dim = cache.size(4);
  STD_TORCH_CHECK(key_value.stride(3) == 1, "a key's elements must lie together");
  const int64_t* slot = data<int64_t>(slots);
  by_type(cache, [&](auto element) {
    using T = decltype(element);
    for (int64_t token = 0; token < slots.size(0); ++token) {
      const int64_t block = slot[token] / block_size, offset = slot[token] % block_size;
      for (int64_t plane = 0; plane < planes; ++plane) {
        for (int64_t head = 0; head < heads; ++head) {
          const T* from = data<T>(key_value) + token * key_value.stride(0) + plane * key_value.stride(1) +
                          head * key_value.stride(2);
          T* to = data<T>(cache) + (((block * planes + plane) * heads + head) * block_size + offset) * head_dim;
          std::memcpy(to, from, head_dim * sizeof(T));
        }
      }
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(reference_server_cpu, library) {
  library.def(
      "attend_decode(Tensor query, Tensor cache, Tensor block_table, Tensor seqlen_k, float scaling, int window, "
      "float softcap, Tensor? slopes) -> Tensor");
  library.def("store(Tensor(a!) cache, Tensor key_value, Tensor slots) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(reference_server_cpu, CPU, library) {
  library.impl("attend_decode", TORCH_BOX(&attend_decode));
  library.impl("store", TORCH_BOX(&store));
}
