#include "integers.h"

#include "elements.h"

#if REFERENCE_SERVER_LANES
#include <immintrin.h>

#include <algorithm>
#include <iterator>

namespace {

constexpr int64_t kPanel = 32;
// Rounded rows that stay in the second-level cache while all panels are read.
constexpr int64_t kCachedInputBytes = 384 << 10;
constexpr int64_t kPrefetchBytes = 3072;

#if REFERENCE_SERVER_LANES == 16
struct Isa {
  using Ints = __m512i;
  using Floats = __m512;
  static constexpr int kLanes = 16, kMaxRows = 12;
  // Codes need no conversion.
  static constexpr int subtracted(int) { return 0; }

  static Ints all(int32_t value) { return _mm512_set1_epi32(value); }
  static Floats all(float value) { return _mm512_set1_ps(value); }
  static Floats to_floats(Ints value) { return _mm512_cvtepi32_ps(value); }
  static Floats halves(const uint16_t* values) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)values)); }
  static Floats bytes(const uint8_t* values) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)values)));
  }
  static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats add_product(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
  static Floats load(const float* from) { return _mm512_load_ps(from); }
  static void store(float* to, Floats value) { _mm512_store_ps(to, value); }

  template <int kBits>
  static void load(const uint8_t* codes, Ints (&parts)[2]) {
    const Ints first = _mm512_loadu_si512(codes);
    if constexpr (kBits == 8) {
      parts[0] = first;
      parts[1] = _mm512_loadu_si512(codes + 64);
    } else {
      const Ints mask = _mm512_set1_epi8(15);
      parts[0] = _mm512_and_si512(first, mask);
      parts[1] = _mm512_and_si512(_mm512_srli_epi16(first, 4), mask);
    }
  }

  template <int kBits>
  static Ints add_dots(Ints sum, Ints codes, Ints rows) {
    // For the intrinsic, GCC 12 copies every sum to another register and back.
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(rows));
    return sum;
  }
};
#else
struct Isa {
  using Ints = __m256i;
  using Floats = __m256;
  static constexpr int kLanes = 8, kMaxRows = 4;
  // vpmaddubsw adds pairs in 16 bits, so codes of 8 bits are made signed: a pair of unsigned ones would overflow.
  static constexpr int subtracted(int bits) { return bits == 8 ? 128 : 0; }

  static Ints all(int32_t value) { return _mm256_set1_epi32(value); }
  static Floats all(float value) { return _mm256_set1_ps(value); }
  static Floats to_floats(Ints value) { return _mm256_cvtepi32_ps(value); }
  static Floats halves(const uint16_t* values) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)values)); }
  static Floats bytes(const uint8_t* values) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)values)));
  }
  static Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats add_product(Floats a, Floats b, Floats sum) { return _mm256_fmadd_ps(a, b, sum); }
  static Floats load(const float* from) { return _mm256_load_ps(from); }
  static void store(float* to, Floats value) { _mm256_store_ps(to, value); }

  template <int kBits>
  static void load(const uint8_t* codes, Ints (&parts)[4]) {
    const auto read = [&](int64_t vector) { return _mm256_loadu_si256((const __m256i*)(codes + 32 * vector)); };
    if constexpr (kBits == 8) {
      for (int part = 0; part < 4; ++part) parts[part] = _mm256_xor_si256(read(part), _mm256_set1_epi8(-128));
    } else {
      const Ints mask = _mm256_set1_epi8(15);
      for (int part = 0; part < 2; ++part) {
        const Ints both = read(part);
        parts[part] = _mm256_and_si256(both, mask);
        parts[part + 2] = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
      }
    }
  }

  // A pair is at most 2 * 128 * 127, which fits in 16 bits.
  template <int kBits>
  static Ints add_dots(Ints sum, Ints codes, Ints rows) {
    const Ints pairs = kBits == 8 ? _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(rows, codes))
                                  : _mm256_maddubs_epi16(codes, rows);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
};
#endif

constexpr int kParts = kPanel / Isa::kLanes;

// Where a product writes: the element type is that of the model.
struct Output {
  const void* bias;
  void* values;
  bool is_float;
  int64_t stride;
};

template <typename T>
void write(const float* sums, const float* multipliers, const void* bias, void* values, int64_t offset, int64_t count) {
  T* out = static_cast<T*>(values) + offset;
  const T* biases = static_cast<const T*>(bias);
  if (biases) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) out[i] = from_float<T>(sums[i] * multipliers[i] + to_float(biases[i]));
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) out[i] = from_float<T>(sums[i] * multipliers[i]);
  }
}

enum Kind { kInt8, kInt8Groups, kInt4, kInt4Zeros };

// Products of the rows from `row` on and `kPanels` adjacent panels. Few rows take several panels at once: each running
// sum waits for its last product, and the processor computes other sums meanwhile.
template <Kind kKind, int kRows, int kPanels>
void multiply(const RoundedRows& rounded, int64_t row, const IntegerWeight& weight, int64_t panel, const Output& output) {
  constexpr int kBits = kKind == kInt8 || kKind == kInt8Groups ? 8 : 4;
  constexpr bool kHasScales = kKind != kInt8, kHasZeros = kKind == kInt8Groups || kKind == kInt4Zeros;
  constexpr int64_t kQuadBytes = kPanel * kBits / 2;
  constexpr int kMiddle = (1 << (kBits - 1)) - Isa::subtracted(kBits);
  const int64_t groups = weight.groups, quads = weight.group / 4, row_size = groups * weight.group;
  const int8_t* codes = rounded.codes + row * row_size;
  const float* row_scales = rounded.scales + row * groups;
  const int32_t* row_sums = rounded.sums + row * groups;
  const int64_t group_bytes = quads * kQuadBytes;
  const uint8_t* panel_codes = weight.codes + panel * groups * group_bytes;
  const int64_t distance = (kPrefetchBytes + group_bytes - 1) / group_bytes;

  alignas(64) float sums[kRows][kPanels][kPanel] = {};
  for (int64_t group = 0; group < groups; ++group) {
    // In groups. After a panel's end comes its place in the next `kPanels` panels: the adjacent one is being read.
    const int64_t ahead = group + distance < groups ? distance : distance + (kPanels - 1) * groups;
    // Integer sums use all registers, so the compiler keeps float sums in memory.
    if constexpr (kRows * kPanels > 4) asm volatile("" : : "r"(sums) : "memory");
    typename Isa::Ints dots[kRows][kPanels][kParts];
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const auto start = Isa::all(int32_t(kHasZeros ? 0 : -kMiddle * row_sums[r * groups + group]));
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) dots[r][p][part] = start;
      }
    }
    for (int64_t quad = group * quads; quad < (group + 1) * quads; ++quad) {
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) {
        const uint8_t* own = panel_codes + (p * groups * quads + quad) * kQuadBytes;
        const char* later = reinterpret_cast<const char*>(own + ahead * group_bytes);
        _mm_prefetch(later, _MM_HINT_T0);
        if constexpr (kBits == 8) _mm_prefetch(later + 64, _MM_HINT_T0);
        typename Isa::Ints parts[kParts];
        Isa::template load<kBits>(own, parts);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
          int32_t four;
          std::memcpy(&four, codes + r * row_size + 4 * quad, 4);
          const auto values = Isa::all(four);
#pragma GCC unroll 4
          for (int part = 0; part < kParts; ++part) {
            dots[r][p][part] = Isa::template add_dots<kBits>(dots[r][p][part], parts[part], values);
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) {
      const int64_t place = ((panel + p) * groups + group) * kPanel;
      if constexpr (kHasScales) {
        _mm_prefetch(reinterpret_cast<const char*>(weight.scales + place + ahead * kPanel), _MM_HINT_T0);
      }
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        typename Isa::Floats scale, zero;
        if constexpr (kHasScales) scale = Isa::halves(weight.scales + place + part * Isa::kLanes);
        if constexpr (kHasZeros) {
          const auto stored = weight.zeros ? Isa::bytes(weight.zeros + place + part * Isa::kLanes) : Isa::all(128.0f);
          zero = Isa::add_product(stored, Isa::all(-1.0f), Isa::all(float(Isa::subtracted(kBits))));
        }
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
          auto dot = Isa::to_floats(dots[r][p][part]);
          if constexpr (kHasZeros) dot = Isa::add_product(zero, Isa::all(float(row_sums[r * groups + group])), dot);
          auto factor = Isa::all(row_scales[r * groups + group]);
          if constexpr (kHasScales) factor = Isa::multiply(scale, factor);
          float* sum = sums[r][p] + part * Isa::kLanes;
          Isa::store(sum, Isa::add_product(dot, factor, Isa::load(sum)));
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kPanels; ++p) {
      const int64_t first = (panel + p) * kPanel, count = std::min(kPanel, weight.outputs - first);
      const int64_t offset = (row + r) * output.stride + first;
      const float* multipliers = weight.multipliers + first;
      if (output.is_float) {
        const float* bias = output.bias ? static_cast<const float*>(output.bias) + first : nullptr;
        write<float>(sums[r][p], multipliers, bias, output.values, offset, count);
      } else {
        const BFloat16* bias = output.bias ? static_cast<const BFloat16*>(output.bias) + first : nullptr;
        write<BFloat16>(sums[r][p], multipliers, bias, output.values, offset, count);
      }
    }
  }
}

using Multiply = decltype(&multiply<kInt8, 1, 1>);
struct Wide {
  int64_t panels;
  Multiply function;
};

// The functions of one kind by rows, from 1 on. `wide`: for several panels at once.
struct Functions {
  Multiply by_rows[Isa::kMaxRows];
  Wide wide[Isa::kLanes == 16 ? 4 : 1];
};

template <Kind kKind>
constexpr Functions functions() {
#if REFERENCE_SERVER_LANES == 16
  return {{multiply<kKind, 1, 1>, multiply<kKind, 2, 1>, multiply<kKind, 3, 1>, multiply<kKind, 4, 1>,
           multiply<kKind, 5, 1>, multiply<kKind, 6, 1>, multiply<kKind, 7, 1>, multiply<kKind, 8, 1>,
           multiply<kKind, 9, 1>, multiply<kKind, 10, 1>, multiply<kKind, 11, 1>, multiply<kKind, 12, 1>},
          {{4, multiply<kKind, 1, 4>}, {2, multiply<kKind, 2, 2>}, {2, multiply<kKind, 3, 2>},
           {2, multiply<kKind, 4, 2>}}};
#else
  return {{multiply<kKind, 1, 1>, multiply<kKind, 2, 1>, multiply<kKind, 3, 1>, multiply<kKind, 4, 1>},
          {{2, multiply<kKind, 1, 2>}}};
#endif
}

constexpr Functions kFunctions[] = {
    functions<kInt8>(), functions<kInt8Groups>(), functions<kInt4>(), functions<kInt4Zeros>()};

const Functions& functions_for(const IntegerWeight& weight) {
  if (weight.bits == 8) return kFunctions[weight.scales ? kInt8Groups : kInt8];
  return kFunctions[weight.zeros ? kInt4Zeros : kInt4];
}

// As integers, NaN is greater than infinity and both are greater than all numbers, so the maximum keeps them.
template <typename T>
void round_group(const T* input, int64_t count, int64_t padded, int8_t* codes, float* scale, int32_t* sum) {
  int32_t largest_bits = 0;
#pragma omp simd reduction(max : largest_bits)
  for (int64_t i = 0; i < count; ++i) {
    const float value = to_float(input[i]);
    int32_t bits;
    std::memcpy(&bits, &value, 4);
    bits &= 0x7fffffff;
    largest_bits = bits > largest_bits ? bits : largest_bits;
  }
  float largest;
  std::memcpy(&largest, &largest_bits, 4);
  // The reciprocal of a smaller number is not finite.
  const float inverse = largest < 1e-35f ? 0.0f : 127.0f / largest;
  int32_t total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < count; ++i) {
    // Rounds to the nearest even: the sum has no bits after the point.
    const float shifted = to_float(input[i]) * inverse + 12582912.0f;
    int32_t bits;
    std::memcpy(&bits, &shifted, 4);
    const int8_t code = int8_t(bits - 0x4b400000);
    codes[i] = code;
    total += code;
  }
  std::fill(codes + count, codes + padded, int8_t(0));
  *scale = largest / 127.0f;
  *sum = total;
}

template <typename T>
void round_all(const T* input, int64_t rows, int64_t stride, const IntegerWeight& weight, const RoundedRows& rounded) {
  const int64_t groups = weight.groups, size = weight.group;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t place = row * groups + group, first = group * size;
      const int64_t count = std::clamp<int64_t>(weight.inputs - first, 0, size);
      round_group(
          input + row * stride + first, count, size, rounded.codes + place * size, rounded.scales + place,
          rounded.sums + place);
    }
  }
}

}  // namespace

int64_t integer_lanes() { return REFERENCE_SERVER_LANES; }

void round_rows(
    const void* input, int64_t is_float, int64_t rows, int64_t stride, const IntegerWeight* weight,
    const RoundedRows* rounded) {
  if (is_float) {
    round_all(static_cast<const float*>(input), rows, stride, *weight, *rounded);
  } else {
    round_all(static_cast<const BFloat16*>(input), rows, stride, *weight, *rounded);
  }
}

void multiply_integers(
    const RoundedRows* rounded, int64_t rows, const IntegerWeight* weight, int64_t first_panel, int64_t last_panel,
    const void* bias, void* values, int64_t is_float, int64_t output_stride) {
  const Output output{bias, values, bool(is_float), output_stride};
  const Functions& own = functions_for(*weight);
  int64_t panel = first_panel;
  if (0 < rows && rows <= int64_t(std::size(own.wide))) {
    const Wide wide = own.wide[rows - 1];
    for (; panel + wide.panels <= last_panel; panel += wide.panels) wide.function(*rounded, 0, *weight, panel, output);
  }
  constexpr int64_t kMaxRows = Isa::kMaxRows;
  const int64_t rest = panel, cached_rows = kCachedInputBytes / (weight->groups * weight->group);
  const int64_t cached = std::max(kMaxRows, cached_rows / kMaxRows * kMaxRows);
  for (int64_t chunk = 0; chunk < rows; chunk += cached) {
    const int64_t chunk_rows = std::min(cached, rows - chunk), groups = (chunk_rows + kMaxRows - 1) / kMaxRows;
    for (panel = rest; panel < last_panel; ++panel) {
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t row = chunk + chunk_rows * group / groups, end = chunk + chunk_rows * (group + 1) / groups;
        own.by_rows[end - row - 1](*rounded, row, *weight, panel, output);
      }
    }
  }
}
#else

int64_t integer_lanes() { return 0; }
void round_rows(const void*, int64_t, int64_t, int64_t, const IntegerWeight*, const RoundedRows*) {}
void multiply_integers(
    const RoundedRows*, int64_t, const IntegerWeight*, int64_t, int64_t, const void*, void*, int64_t, int64_t) {}
#endif
