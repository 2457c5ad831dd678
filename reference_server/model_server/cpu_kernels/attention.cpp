// Attention over block tables, for one query token of each row or for prompts; and storage of new keys and values.
//
//     cache   [blocks, 2, num_kv_heads, block_size, head_dim], in the query's type or in eight bits
//
// Keys and values are first converted, a part of a block at a time: those of eight bits always, bfloat16 to float for
// several heads if the processor does not multiply it. The kernel reads keys once for all query heads of their group,
// then values. It does not read keys outside of a row's window.
#include "float8.h"
#include "kernels.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#ifdef __AVX512BF16__
#include <immintrin.h>
constexpr bool kMultipliesBFloat16 = true;
#else
constexpr bool kMultipliesBFloat16 = false;
#endif

namespace {

// The floats of one register. GCC keeps the values of a wider type in memory.
#if defined(__AVX512F__)
constexpr int64_t kWidth = 16;
#elif defined(__AVX__)
constexpr int64_t kWidth = 8;
#else
constexpr int64_t kWidth = 4;
#endif
typedef float Vector __attribute__((vector_size(4 * kWidth)));
typedef uint32_t Words __attribute__((vector_size(4 * kWidth)));
typedef uint16_t Bits __attribute__((vector_size(2 * kWidth)));
// Registers for sums of values; x86 has 16 in all without AVX-512.
constexpr int64_t kSums = kWidth == 16 ? 16 : 12;
// Query heads of one K/V head that a page is read for at once, tokens of a prompt taken together.
constexpr int64_t kTileHeads = 16;
// Keys or values that are converted at once, so that they stay in the first-level cache; a multiple of kWidth.
constexpr int64_t kWidenedKeys = 32;

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

// Sums of adjacent lanes. Each vector holds the lanes of kKeys keys, one key after the other; the result has those of
// both.
template <size_t kKeys, size_t... kLanes>
inline Vector join(Vector a, Vector b, std::index_sequence<kLanes...>) {
  constexpr size_t width = kWidth / kKeys, half = width / 2;
  return __builtin_shufflevector(a, b, (kLanes / half * width + kLanes % half)...) +
         __builtin_shufflevector(a, b, (kLanes / half * width + half + kLanes % half)...);
}

// The totals of the vectors, in order. The lanes of each vector are those of kKeys keys.
template <size_t kKeys = 1>
inline Vector totals(Vector (&sums)[kWidth]) {
  for (size_t i = 0; i < kWidth / kKeys / 2; ++i) {
    sums[i] = join<kKeys>(sums[2 * i], sums[2 * i + 1], std::make_index_sequence<kWidth>{});
  }
  if constexpr (2 * kKeys < kWidth) return totals<2 * kKeys>(sums);
  return sums[0];
}

// A query in registers, for a head size that the compiler knows. `times` returns one partial sum for each lane.
template <int64_t kSize, typename T>
struct Query {
  Vector parts[kSize / kWidth];

  explicit Query(const T* query) {
    for (int64_t i = 0; i < kSize / kWidth; ++i) parts[i] = load(query + i * kWidth);
  }

  template <typename P>
  Vector times(const P* key) const {
    Vector sum = parts[0] * load(key);
#pragma GCC unroll 16
    for (int64_t i = 1; i < kSize / kWidth; ++i) sum += parts[i] * load(key + i * kWidth);
    return sum;
  }
};

#ifdef __AVX512BF16__
template <int64_t kSize>
struct Query<kSize, BFloat16> {
  static constexpr int64_t kPairs = 2 * kWidth;
  __m512bh parts[kSize / kPairs];

  static __m512bh read(const BFloat16* values) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(values)); }

  explicit Query(const BFloat16* query) {
    for (int64_t i = 0; i < kSize / kPairs; ++i) parts[i] = read(query + i * kPairs);
  }

  Vector times(const BFloat16* key) const {
    __m512 sum = _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int64_t i = 0; i < kSize / kPairs; ++i) sum = _mm512_dpbf16_ps(sum, parts[i], read(key + i * kPairs));
    return reinterpret_cast<Vector>(sum);
  }
};
#endif

// kSize: the head size if it is one of those below, so that sums stay in registers; otherwise 0.
template <int64_t kSize, typename T, typename P>
void score(float* scores, const T* query, const P* page_keys, int64_t keys, int64_t size, float scaling) {
  if constexpr (kSize == 0) {
    for (int64_t key = 0; key < keys; ++key) {
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < size; ++i) sum += to_float(query[i]) * to_float(page_keys[key * size + i]);
      scores[key] = sum * scaling;
    }
  } else {
    const Query<kSize, T> own(query);
    int64_t key = 0;
    for (; key + kWidth <= keys; key += kWidth) {
      Vector sums[kWidth];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kWidth; ++i) sums[i] = own.times(page_keys + (key + i) * kSize);
      const Vector whole = totals(sums) * scaling;
      std::memcpy(scores + key, &whole, sizeof(whole));
    }
    if (key < keys) {
      Vector sums[kWidth] = {};
      for (int64_t i = 0; key + i < keys; ++i) sums[i] = own.times(page_keys + (key + i) * kSize);
      const Vector whole = totals(sums) * scaling;
      std::memcpy(scores + key, &whole, (keys - key) * sizeof(float));
    }
  }
}

// The most vectors of each output, of `vectors`, that are summed at once for `heads` heads.
constexpr int64_t summed_parts(int64_t vectors, int64_t heads) {
  int64_t parts = vectors;
  while (parts * heads > kSums || vectors % parts != 0) --parts;
  return parts;
}

// Adds the weighted values to the outputs of kHeads heads, which are `size` apart; their weights are `stride` apart.
template <int64_t kSize, int kHeads, typename P>
void add_values_of(float* output, const float* weights, int64_t stride, const P* page_values, int64_t keys) {
  constexpr int64_t kParts = summed_parts(kSize / kWidth, kHeads), kPartSize = kParts * kWidth;
  for (int64_t first = 0; first < kSize; first += kPartSize) {
    float* own = output + first;
    Vector sums[kHeads][kParts];
#pragma GCC unroll 4
    for (int head = 0; head < kHeads; ++head) std::memcpy(sums[head], own + head * kSize, sizeof(sums[head]));
    for (int64_t key = 0; key < keys; ++key) {
#pragma GCC unroll 16
      for (int64_t i = 0; i < kParts; ++i) {
        const Vector value = load(page_values + key * kSize + first + i * kWidth);
#pragma GCC unroll 4
        for (int head = 0; head < kHeads; ++head) sums[head][i] += weights[head * stride + key] * value;
      }
    }
#pragma GCC unroll 4
    for (int head = 0; head < kHeads; ++head) std::memcpy(own + head * kSize, sums[head], sizeof(sums[head]));
  }
}

template <int64_t kSize, typename P>
void add_values(
    float* output, const float* weights, int64_t stride, const P* page_values, int64_t keys, int64_t heads,
    int64_t size) {
  int64_t head = 0;
  if constexpr (kSize == 0) {
    for (; head < heads; ++head) {
      float* own = output + head * size;
      for (int64_t key = 0; key < keys; ++key) {
        const float weight = weights[head * stride + key];
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) own[i] += weight * to_float(page_values[key * size + i]);
      }
    }
  } else {
    const auto take = [&](auto count) {
      constexpr int kHeads = count;
      for (; head + kHeads <= heads; head += kHeads) {
        add_values_of<kSize, kHeads>(output + head * kSize, weights + head * stride, stride, page_values, keys);
      }
    };
    take(std::integral_constant<int, 4>{});
    take(std::integral_constant<int, 3>{});
    take(std::integral_constant<int, 2>{});
    take(std::integral_constant<int, 1>{});
  }
}

// P: the type of the keys and values as they are multiplied.
template <typename T, typename P>
struct PageFunctions {
  void (*score)(float*, const T*, const P*, int64_t, int64_t, float);
  void (*add_values)(float*, const float*, int64_t, const P*, int64_t, int64_t, int64_t);
};

template <typename T, typename P>
PageFunctions<T, P> page_functions(int64_t size) {
  switch (size) {
    case 32:
      return {score<32, T, P>, add_values<32, P>};
    case 64:
      return {score<64, T, P>, add_values<64, P>};
    case 96:
      return {score<96, T, P>, add_values<96, P>};
    case 128:
      return {score<128, T, P>, add_values<128, P>};
    default:
      return {score<0, T, P>, add_values<0, P>};
  }
}

// Softmax, in place: converts scores to weights whose sum is 1.
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

// Consecutive tokens of one row, and one K/V head. length: keys that the last token attends to. The scores are
// [tokens, group, keys]; a token uses those of the keys up to itself and within its window.
template <typename P, typename T, typename C>
void attend_head_as(
    const T* query, int64_t token_stride, int64_t tokens, const C* cache, const int64_t* table, int64_t length,
    int64_t kv_head, const Geometry& g, std::vector<float>& room, T* output) {
  constexpr bool is_widened = !std::is_same_v<P, C>;
  const int64_t group = g.num_heads / g.num_kv_heads, size = g.head_dim, heads = tokens * group;
  const PageFunctions<T, P> page = page_functions<T, P>(size);
  const int64_t first = g.window > 0 ? std::max<int64_t>(0, length - tokens + 1 - g.window) : 0, keys = length - first;
  room.resize(heads * (keys + size) + (is_widened ? kWidenedKeys * size : 0));
  float* scores = room.data();
  float* sums = scores + heads * keys;
  P* widened = reinterpret_cast<P*>(sums + heads * size);
  std::fill_n(sums, heads * size, 0.0f);
  const auto pages_of = [&](int64_t plane, auto visit) {
    for (int64_t position = first; position < length;) {
      const int64_t offset = position % g.block_size, block = table[position / g.block_size];
      int64_t count = std::min(g.block_size - offset, length - position);
      const C* place = cache + (((block * 2 + plane) * g.num_kv_heads + kv_head) * g.block_size + offset) * size;
      if constexpr (is_widened) {
        count = std::min(count, kWidenedKeys);
        widen(place, count * size, widened);
        visit(position - first, count, widened);
      } else {
        visit(position - first, count, place);
      }
      position += count;
    }
  };
  pages_of(0, [&](int64_t place, int64_t count, const P* page_keys) {
    for (int64_t head = 0; head < heads; ++head) {
      const T* own = query + head / group * token_stride + head % group * size;
      page.score(scores + head * keys + place, own, page_keys, count, size, float(g.scaling));
    }
  });
  for (int64_t head = 0; head < heads; ++head) {
    const int64_t end = keys - tokens + 1 + head / group;
    const int64_t begin = g.window > 0 ? std::max<int64_t>(0, end - g.window) : 0;
    float* own = scores + head * keys;
    if (g.softcap > 0) {
      const float softcap = float(g.softcap);
      for (int64_t i = begin; i < end; ++i) own[i] = softcap * std::tanh(own[i] / softcap);
    }
    if (g.slopes) {
      const float slope = g.slopes[kv_head * group + head % group];
      for (int64_t i = begin; i < end; ++i) own[i] += slope * float(i - end + 1);
    }
    std::fill(own, own + begin, 0.0f);
    std::fill(own + end, own + keys, 0.0f);
    softmax(own + begin, end - begin);
  }
  pages_of(1, [&](int64_t place, int64_t count, const P* page_values) {
    page.add_values(sums, scores + place, keys, page_values, count, heads, size);
  });
  for (int64_t token = 0; token < tokens; ++token) {
    T* own = output + token * g.num_heads * size;
    for (int64_t i = 0; i < group * size; ++i) own[i] = from_float<T>(sums[token * group * size + i]);
  }
}

template <typename T, typename C>
void attend_head(
    const T* query, int64_t token_stride, int64_t tokens, const C* cache, const int64_t* table, int64_t length,
    int64_t kv_head, const Geometry& g, std::vector<float>& room, T* output) {
  const auto attend = [&](auto page) {
    attend_head_as<decltype(page)>(query, token_stride, tokens, cache, table, length, kv_head, g, room, output);
  };
  if constexpr (std::is_same_v<T, float> || kMultipliesBFloat16) {
    attend(T{});
  } else if constexpr (std::is_same_v<T, C>) {
    // A single head reads each key once: converted apart, it would be stored and loaded again.
    tokens * g.num_heads == g.num_kv_heads ? attend(T{}) : attend(float{});
  } else {
    attend(float{});
  }
}

}  // namespace

template <typename T, typename C>
void attend_rows(
    const T* query, int64_t query_stride, int64_t rows, const C* cache, const int64_t* table, int64_t table_stride,
    const int64_t* lengths, const Geometry& g, T* output) {
  const int64_t group = g.num_heads / g.num_kv_heads, size = g.head_dim;
  torch::stable::parallel_for(0, rows * g.num_kv_heads, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> room;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / g.num_kv_heads, kv_head = task % g.num_kv_heads, head = kv_head * group;
      T* place = output + (row * g.num_heads + head) * size;
      if (lengths[row] == 0) {
        std::fill_n(place, group * size, from_float<T>(0));
        continue;
      }
      attend_head(
          query + row * query_stride + head * size, 0, 1, cache, table + row * table_stride, lengths[row], kv_head, g,
          room, place);
    }
  });
}

template <typename T, typename C>
void store_rows(
    C* cache, const Geometry& g, const T* key_value, int64_t token_stride, int64_t plane_stride, int64_t head_stride,
    const int64_t* slots, int64_t tokens, float key_factor, float value_factor) {
  const int64_t planes = 2;
  for (int64_t token = 0; token < tokens; ++token) {
    const int64_t block = slots[token] / g.block_size, offset = slots[token] % g.block_size;
    for (int64_t plane = 0; plane < planes; ++plane) {
      for (int64_t head = 0; head < g.num_kv_heads; ++head) {
        const T* from = key_value + token * token_stride + plane * plane_stride + head * head_stride;
        const int64_t page = (block * planes + plane) * g.num_kv_heads + head;
        C* place = cache + (page * g.block_size + offset) * g.head_dim;
        if constexpr (std::is_same_v<T, C>) {
          std::memcpy(place, from, g.head_dim * sizeof(T));
        } else {
          round_to(from, g.head_dim, plane == 0 ? key_factor : value_factor, place);
        }
      }
    }
  }
}

#define INSTANTIATE(C)                                                                                                \
  template void attend_rows(                                                                                          \
      const BFloat16*, int64_t, int64_t, const C*, const int64_t*, int64_t, const int64_t*, const Geometry&,          \
      BFloat16*);                                                                                                     \
  template void store_rows(                                                                                           \
      C*, const Geometry&, const BFloat16*, int64_t, int64_t, int64_t, const int64_t*, int64_t, float, float)
INSTANTIATE(BFloat16);
INSTANTIATE(E4M3);
INSTANTIATE(E5M2);
#undef INSTANTIATE

namespace {

Geometry geometry_of(
    const Tensor& query, const Tensor& cache, double scaling, int64_t window, double softcap,
    const std::optional<Tensor>& slopes) {
  const int64_t num_heads = query.size(1), head_dim = query.size(2);
  STD_TORCH_CHECK(
      query.stride(2) == 1 && (num_heads == 1 || query.stride(1) == head_dim), "a query's heads must lie together");
  return {num_heads, cache.size(2), cache.size(3), head_dim, window, scaling, softcap, data<float>(slopes)};
}

// Calls `kernel` with values of the types of the query and of the cache.
template <typename Kernel>
void by_types(const Tensor& query, const Tensor& cache, Kernel kernel) {
  by_type(query, [&](auto element) {
    switch (cache.scalar_type()) {
      case ScalarType::Float8_e4m3fn:
        return kernel(element, E4M3{});
      case ScalarType::Float8_e5m2:
        return kernel(element, E5M2{});
      default:
        STD_TORCH_CHECK(cache.scalar_type() == query.scalar_type(), "the cache has neither this type nor eight bits");
        return kernel(element, element);
    }
  });
}

// query: [rows, num_heads, head_dim], heads of a row contiguous. block_table: [rows, blocks] int64, rows contiguous.
// seqlen_k: [rows] int64. window, softcap: 0 for none. Returns [rows, num_heads, head_dim]; a row without keys is 0.
Tensor attend_decode(
    Tensor query, Tensor cache, Tensor block_table, Tensor seqlen_k, double scaling, int64_t window, double softcap,
    std::optional<Tensor> slopes) {
  const int64_t rows = query.size(0), num_heads = query.size(1), head_dim = query.size(2);
  const Geometry g = geometry_of(query, cache, scaling, window, softcap, slopes);
  Tensor output = torch::stable::new_empty(query, {rows, num_heads, head_dim});
  by_types(query, cache, [&](auto element, auto stored) {
    using T = decltype(element);
    attend_rows<T>(
        data<T>(query), query.stride(0), rows, data<const decltype(stored)>(cache), data<int64_t>(block_table), block_table.stride(0),
        data<int64_t>(seqlen_k), g, data<T>(output));
  });
  return output;
}

// query: [tokens, num_heads, head_dim], heads of a token contiguous, rows one after the other; a row's last token
// attends to all of the row's keys, the one before it to one less. seqlen_q, seqlen_k: [rows] int64. Others as in
// attend_decode.
Tensor attend_prefill(
    Tensor query, Tensor cache, Tensor block_table, Tensor seqlen_q, Tensor seqlen_k, double scaling, int64_t window,
    double softcap, std::optional<Tensor> slopes) {
  const int64_t num_heads = query.size(1), head_dim = query.size(2);
  const Geometry g = geometry_of(query, cache, scaling, window, softcap, slopes);
  const int64_t group = g.num_heads / g.num_kv_heads, most = std::max<int64_t>(1, kTileHeads / group);
  struct Tile {
    int64_t row, token, tokens, length;
  };
  std::vector<Tile> tiles;
  const int64_t *new_tokens = data<int64_t>(seqlen_q), *lengths = data<int64_t>(seqlen_k);
  for (int64_t row = 0, start = 0; row < seqlen_q.size(0); start += new_tokens[row++]) {
    for (int64_t done = 0; done < new_tokens[row]; done += most) {
      const int64_t tokens = std::min(most, new_tokens[row] - done);
      tiles.push_back({row, start + done, tokens, lengths[row] - new_tokens[row] + done + tokens});
    }
  }
  Tensor output = torch::stable::new_empty(query, {query.size(0), num_heads, head_dim});
  by_types(query, cache, [&](auto element, auto stored) {
    using T = decltype(element);
    torch::stable::parallel_for(0, int64_t(tiles.size()) * g.num_kv_heads, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> room;
      for (int64_t task = begin; task < end; ++task) {
        const Tile& tile = tiles[task / g.num_kv_heads];
        const int64_t kv_head = task % g.num_kv_heads, head = kv_head * group;
        attend_head(
            data<T>(query) + tile.token * query.stride(0) + head * head_dim, query.stride(0), tile.tokens,
            data<const decltype(stored)>(cache), data<int64_t>(block_table) + tile.row * block_table.stride(0), tile.length, kv_head, g,
            room, data<T>(output) + (tile.token * num_heads + head) * head_dim);
      }
    });
  });
  return output;
}

// key_value: [tokens, 2, num_kv_heads, head_dim], head_dim contiguous. slots: [tokens] int64. The factors multiply
// keys and values before they are rounded to eight bits.
void store(Tensor cache, Tensor key_value, Tensor slots, double key_factor, double value_factor) {
  STD_TORCH_CHECK(key_value.stride(3) == 1, "a key's elements must lie together");
  Geometry g{};
  g.num_kv_heads = cache.size(2), g.block_size = cache.size(3), g.head_dim = cache.size(4);
  by_types(key_value, cache, [&](auto element, auto stored) {
    store_rows(
        data<decltype(stored)>(cache), g, data<const decltype(element)>(key_value), key_value.stride(0),
        key_value.stride(1), key_value.stride(2), data<const int64_t>(slots), slots.size(0), float(key_factor),
        float(value_factor));
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(reference_server_cpu, library) {
  library.def(
      "attend_decode(Tensor query, Tensor cache, Tensor block_table, Tensor seqlen_k, float scaling, int window, "
      "float softcap, Tensor? slopes) -> Tensor");
  library.def(
      "attend_prefill(Tensor query, Tensor cache, Tensor block_table, Tensor seqlen_q, Tensor seqlen_k, float scaling, "
      "int window, float softcap, Tensor? slopes) -> Tensor");
  library.def(
      "store(Tensor(a!) cache, Tensor key_value, Tensor slots, float key_factor, float value_factor) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(reference_server_cpu, CPU, library) {
  library.impl("attend_decode", TORCH_BOX(&attend_decode));
  library.impl("attend_prefill", TORCH_BOX(&attend_prefill));
  library.impl("store", TORCH_BOX(&store));
}
