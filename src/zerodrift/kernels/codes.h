// Moments in 8 bits: encode a block of 256 values as codes and a scale, and decode them.
//
// The definition is `optim/rounding.py`, which also makes the tables. There are plain loops for any processor, and
// lookups in registers with vectors of 512 and 256 bits for whole pieces with an ordinary scale.
//
// Invariant: both give the codes of the definition, bit for bit.

#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cmath>

#include "formats.h"

namespace {

constexpr int LEVELS = 8;  // decades of a code

// An 8-bit code; the tables come from `optim/rounding.py`.
struct Code {
  float bound[LEVELS];  // a fraction above bound[i] is in decade i + 1 or higher
  float start[LEVELS];  // where a decade begins
  float steep[LEVELS];  // codes per unit in it
  float value[256];     // of every code
};

constexpr uint32_t INFINITY_BITS = 0x7F800000u;
constexpr uint32_t LEAST_SCALE = (127u - 96u) << 23;     // 2^-96
constexpr uint32_t LARGEST_SCALE = (127u + 126u) << 23;  // 2^126

// The largest magnitude, within the range of scales; compared as integers, so a NaN is the largest of all.
float block_scale(const float* __restrict in, int n) {
  uint32_t most = 0;
  for (int i = 0; i < n; ++i) {
    const uint32_t magnitude = bits(in[i]) & 0x7FFFFFFFu;
    most = magnitude > most ? magnitude : most;
  }
  if (most > INFINITY_BITS) return value(QUIET << 16);
  if (most < LEAST_SCALE) return 0.0f;
  return value(most < LARGEST_SCALE ? most : LARGEST_SCALE);
}

// The plain loops, for any number of values of any kind. HALF: which half of a random word rounds this moment;
// see [Note: random bits].

inline void decode_plain(float* __restrict out, const uint8_t* __restrict in, float scale, const Code& code, int n) {
  const float* __restrict value = code.value;
  for (int i = 0; i < n; ++i) out[i] = value[in[i]] * scale;
}

template <bool SIGNED, int HALF>
void encode_plain(uint8_t* __restrict out, const float* __restrict in, float scale, const Code& code,
                  const uint32_t* __restrict words, int n) {
  constexpr int TOP = SIGNED ? 127 : 255;
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  const int least = !SIGNED && scale != 0.0f;  // a nonzero value is never stored as zero
  const Code c = code;
  for (int i = 0; i < n; ++i) {
    const uint32_t u = bits(in[i]);
    const uint32_t magnitude = u & 0x7FFFFFFFu;
    float part = value(magnitude) * inverse;
    part = part <= 1.0f ? part : 1.0f;  // a NaN is 1 as well
    int first = 0;                      // the code before this decade's: 2^level - 1
    float start = c.start[0], steep = c.steep[0];
    for (int level = 1; level < LEVELS; ++level) {
      const bool above = part > c.bound[level - 1];
      first = above ? (1 << level) - 1 : first;
      start = above ? c.start[level] : start;
      steep = above ? c.steep[level] : steep;
    }
    const float share = static_cast<float>((words[i] >> (16 * HALF)) & 0xFFFFu) * 0x1p-16f;
    int found = first + static_cast<int>((part - start) * steep + share);
    found = found < TOP ? found : TOP;
    const int floor = magnitude != 0 ? least : 0;
    found = found > floor ? found : floor;
    const uint32_t sign = SIGNED && magnitude <= INFINITY_BITS ? u >> 31 << 7 : 0;
    out[i] = static_cast<uint8_t>(static_cast<uint32_t>(found) | sign);
  }
}

// [Note: steps as integers] Vectors count steps in units of 2^-24 of a code, so that random bits are added as integers
// and the code is the highest byte of the sum. No sum of the definition is rounded up to a whole step but one below
// the first step, within half of the last bit of 65535/65536: half a unit, which is where the conversion to integers
// rounds. The scale itself is 2^31 units behind the last bound, whose conversion has just the highest bit. Where the
// scale is the largest magnitude, no fraction is above one, and no code above the last. A nonzero value is never
// stored as zero: it is raised to the least fraction that reaches the first code with any random bits.
inline float least_step(const Code& code) {
  float least = code.bound[0];
  while (least * code.steep[0] < 1.0f) least = std::nextafter(least, 1.0f);
  return least;
}

#if defined(__AVX512BW__)

// [Note: tables in registers] With 512-bit vectors a lookup among 16 numbers, or among 128 bytes, is one instruction,
// and a gather is sixteen loads. So the bytes of a value are looked up for 64 codes at a time, or its halves for 32.
// A decade is found by the exponent of a number: no two neighbouring binades have two bounds in them, so 16 groups
// of two tell the decade but for one comparison, and a number above its group's bound has the decade of the next
// group.
constexpr int GROUPS = 16;  // of two binades, from 2^-31 to 2; the lowest bound is 1e-7

struct Table {
  const Code& code;
#if defined(__AVX512VBMI__)
  alignas(64) uint8_t byte[4][256];  // of every value, from the lowest
#else
  alignas(64) uint16_t high[256];
  alignas(64) uint16_t low[256];
#endif
  alignas(64) float bound[GROUPS];  // the bound in this group, or one that no value reaches
  alignas(64) float start[GROUPS];  // of what is not above the bound, like the next two
  alignas(64) float steep[GROUPS];  // in units of 2^-24 of a code
  alignas(64) uint32_t first[GROUPS];  // the code before the decade's, and 2^23: see `add_draw`
  float least;

  explicit Table(const Code& from) : code(from), least(least_step(from)) {
    for (int i = 0; i < 256; ++i) {
#if defined(__AVX512VBMI__)
      for (int k = 0; k < 4; ++k) byte[k][i] = static_cast<uint8_t>(bits(code.value[i]) >> (8 * k));
#else
      high[i] = static_cast<uint16_t>(bits(code.value[i]) >> 16);
      low[i] = static_cast<uint16_t>(bits(code.value[i]));
#endif
    }
    for (int group = 0; group < GROUPS; ++group) {
      const float least = std::ldexp(1.0f, 2 * group - 31);
      int level = 0;
      while (code.bound[level] < least) ++level;  // the last one is 2
      bound[group] = code.bound[level] < 4.0f * least ? code.bound[level] : 2.0f;
      start[group] = code.start[level];
      steep[group] = code.steep[level] * 0x1p24f;
      first[group] = (((1u << level) - 1) << 24) + (1u << 23);
    }
  }
};

#if defined(__AVX512VBMI__)

// A byte of the values of 64 codes: of their low 7 bits, or of all 8.
template <bool SIGNED>
INLINE __m512i find_bytes(const uint8_t* table, __m512i code) {
  const auto among_128 = [&](int at) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table + at), code, _mm512_load_si512(table + at + 64));
  };
  if (SIGNED) return among_128(0);
  return _mm512_mask_blend_epi8(_mm512_movepi8_mask(code), among_128(0), among_128(128));
}

template <bool SIGNED>
void decode(float* __restrict out, const uint8_t* __restrict in, float scale, const Table& table, int n) {
  if (n % 64 != 0) return decode_plain(out, in, scale, table.code, n);
  const __m512 factor = _mm512_set1_ps(scale);
  // Of four codes, as `unpack` takes them.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (int i = 0; i < n; i += 64) {
    const __m512i code = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(in + i));
    __m512i byte[4];
    for (int k = 0; k < 4; ++k) byte[k] = find_bytes<SIGNED>(table.byte[k], code);
    if (SIGNED) {
      const __m512i sign = _mm512_and_si512(code, _mm512_set1_epi8(INT8_MIN));
      byte[3] = _mm512_or_si512(byte[3], sign);
    }
    const __m512i low[2] = {_mm512_unpacklo_epi8(byte[0], byte[1]), _mm512_unpackhi_epi8(byte[0], byte[1])};
    const __m512i high[2] = {_mm512_unpacklo_epi8(byte[2], byte[3]), _mm512_unpackhi_epi8(byte[2], byte[3])};
    for (int k = 0; k < 2; ++k) {
      const __m512i left = _mm512_unpacklo_epi16(low[k], high[k]), right = _mm512_unpackhi_epi16(low[k], high[k]);
      _mm512_storeu_ps(out + i + 32 * k, _mm512_mul_ps(_mm512_castsi512_ps(left), factor));
      _mm512_storeu_ps(out + i + 32 * k + 16, _mm512_mul_ps(_mm512_castsi512_ps(right), factor));
    }
  }
}

#else

// The low 7 bits of 32 codes, or all 8, to a half of their values.
template <bool SIGNED>
INLINE __m512i find_halves(const uint16_t* table, __m512i code) {
  const auto among_64 = [&](int at) {
    return _mm512_permutex2var_epi16(_mm512_load_si512(table + at), code, _mm512_load_si512(table + at + 32));
  };
  const __mmask32 bit6 = _mm512_test_epi16_mask(code, _mm512_set1_epi16(64));
  const __m512i found = _mm512_mask_blend_epi16(bit6, among_64(0), among_64(64));
  if (SIGNED) return found;
  const __mmask32 bit7 = _mm512_test_epi16_mask(code, _mm512_set1_epi16(128));
  return _mm512_mask_blend_epi16(bit7, found, _mm512_mask_blend_epi16(bit6, among_64(128), among_64(192)));
}

template <bool SIGNED>
void decode(float* __restrict out, const uint8_t* __restrict in, float scale, const Table& table, int n) {
  if (n % 32 != 0) return decode_plain(out, in, scale, table.code, n);
  const __m512 factor = _mm512_set1_ps(scale);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // of four codes, as `unpack` takes them
  for (int i = 0; i < n; i += 32) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i));
    const __m512i code = _mm512_cvtepu8_epi16(_mm256_permutevar8x32_epi32(codes, order));
    __m512i high = find_halves<SIGNED>(table.high, code);
    const __m512i low = find_halves<SIGNED>(table.low, code);
    if (SIGNED) {
      const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(code, 8), _mm512_set1_epi16(INT16_MIN));
      high = _mm512_or_si512(high, sign);
    }
    const __m512i left = _mm512_unpacklo_epi16(low, high), right = _mm512_unpackhi_epi16(low, high);
    _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_castsi512_ps(left), factor));
    _mm512_storeu_ps(out + i + 16, _mm512_mul_ps(_mm512_castsi512_ps(right), factor));
  }
}

#endif

// Adds half of a random word, times 256. A word is signed here, so its halves had 2^15 taken away.
template <int HALF>
INLINE __m512i add_draw(__m512i sum, __m512i word) {
  const __m512i half = _mm512_set1_epi32(HALF ? 256 << 16 : 256);
#if defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(sum, word, half);
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(word, half));
#endif
}

// The highest bytes of 64 sums.
INLINE __m512i highest(const __m512i* sums) {
#if defined(__AVX512VBMI__)
  const __m512i place = _mm512_setr_epi32(
      0x0F0B0703, 0x1F1B1713, 0x2F2B2723, 0x3F3B3733, 0x4F4B4743, 0x5F5B5753, 0x6F6B6763, 0x7F7B7773,
      0x0F0B0703, 0x1F1B1713, 0x2F2B2723, 0x3F3B3733, 0x4F4B4743, 0x5F5B5753, 0x6F6B6763, 0x7F7B7773);
  const __m512i left = _mm512_permutex2var_epi8(sums[0], place, sums[1]);
  const __m512i right = _mm512_permutex2var_epi8(sums[2], place, sums[3]);
  return _mm512_inserti64x4(left, _mm512_castsi512_si256(right), 1);
#else
  const auto bytes = [&](int k) { return _mm512_cvtepi32_epi8(_mm512_srli_epi32(sums[k], 24)); };
  const __m512i two = _mm512_inserti32x4(_mm512_castsi128_si512(bytes(0)), bytes(1), 1);
  return _mm512_inserti32x4(_mm512_inserti32x4(two, bytes(2), 2), bytes(3), 3);
#endif
}

// Step by step for four vectors, so that each step has independent instructions.
template <bool SIGNED, int HALF>
void encode(uint8_t* __restrict out, const float* __restrict in, float scale, const Table& table,
            const uint32_t* __restrict words, int n) {
  if (n % 64 != 0 || !(scale > 0.0f && scale < value(LARGEST_SCALE)))
    return encode_plain<SIGNED, HALF>(out, in, scale, table.code, words, n);
  const __m512 inverse = _mm512_set1_ps(1.0f / scale), least = _mm512_set1_ps(table.least);
  const __m512 bound = _mm512_load_ps(table.bound), start = _mm512_load_ps(table.start);
  const __m512 steep = _mm512_load_ps(table.steep);
  const __m512i first = _mm512_load_si512(table.first), unit = _mm512_set1_epi32(1);
  const __m512i lowest = _mm512_set1_epi32((127 - 31) << 23), sign = _mm512_set1_epi32(INT32_MIN);
  const __m512i halves = _mm512_set1_epi16(INT16_MIN);
  for (int i = 0; i < n; i += 64) {
    __m512 x[4], part[4], inside[4];
    __m512i group[4], sum[4];
    for (int k = 0; k < 4; ++k) {
      x[k] = _mm512_loadu_ps(in + i + 16 * k);
      part[k] = _mm512_mul_ps(_mm512_abs_ps(x[k]), inverse);
      if (!SIGNED) {
        const __mmask16 something = _mm512_test_epi32_mask(_mm512_castps_si512(x[k]), _mm512_set1_epi32(INT32_MAX));
        part[k] = _mm512_mask_max_ps(part[k], something, part[k], least);
      }
    }
    // A lookup takes the last four bits of its index: half of the exponent.
    for (int k = 0; k < 4; ++k) {
      group[k] = _mm512_castps_si512(part[k]);
      if (SIGNED) group[k] = _mm512_max_epi32(group[k], lowest);
      group[k] = _mm512_srli_epi32(group[k], 24);
    }
    for (int k = 0; k < 4; ++k) {
      const __mmask16 above = _mm512_cmp_ps_mask(part[k], _mm512_permutexvar_ps(group[k], bound), _CMP_GT_OQ);
      group[k] = _mm512_mask_add_epi32(group[k], above, group[k], unit);
    }
    for (int k = 0; k < 4; ++k) {
      const __m512 behind = _mm512_sub_ps(part[k], _mm512_permutexvar_ps(group[k], start));
      inside[k] = _mm512_mul_ps(behind, _mm512_permutexvar_ps(group[k], steep));
    }
    for (int k = 0; k < 4; ++k) {
      const __m512i word = _mm512_xor_si512(_mm512_loadu_si512(words + i + 16 * k), halves);
      sum[k] = add_draw<HALF>(_mm512_permutexvar_epi32(group[k], first), word);
      sum[k] = _mm512_add_epi32(sum[k], _mm512_cvtps_epi32(inside[k]));
      if (SIGNED) sum[k] = _mm512_or_si512(sum[k], _mm512_and_si512(_mm512_castps_si512(x[k]), sign));
    }
    _mm512_storeu_si512(out + i, highest(sum));
  }
}

#elif defined(__AVX2__)

// With 256-bit vectors the numbers of a decade are looked up among 8, and the decade of a group among 16 bytes.
struct Table {
  const Code& code;
  alignas(32) uint8_t level[32];  // of the least number of a group of two binades from 2^-31 on; twice
  alignas(32) float steep[LEVELS];
  alignas(32) uint32_t first[LEVELS];  // the code before the decade's
  float least;

  explicit Table(const Code& from) : code(from), least(least_step(from)) {
    for (int group = 0; group < 16; ++group) {
      int found = 0;
      while (code.bound[found] < std::ldexp(1.0f, 2 * group - 31)) ++found;  // the last one is 2
      level[group] = level[group + 16] = static_cast<uint8_t>(found);
    }
    for (int i = 0; i < LEVELS; ++i) {
      steep[i] = code.steep[i] * 0x1p24f;
      first[i] = ((1u << i) - 1) << 24;
    }
  }
};

template <bool SIGNED, int HALF>
void encode(uint8_t* __restrict out, const float* __restrict in, float scale, const Table& table,
            const uint32_t* __restrict words, int n) {
  if (n % 32 != 0 || !(scale > 0.0f && scale < value(LARGEST_SCALE)))
    return encode_plain<SIGNED, HALF>(out, in, scale, table.code, words, n);
  const __m256 inverse = _mm256_set1_ps(1.0f / scale);
  const __m256 bound = _mm256_loadu_ps(table.code.bound), start = _mm256_loadu_ps(table.code.start);
  const __m256 steep = _mm256_load_ps(table.steep), least = _mm256_set1_ps(table.least);
  const __m256i first = _mm256_load_si256(reinterpret_cast<const __m256i*>(table.first));
  const __m256i levels = _mm256_load_si256(reinterpret_cast<const __m256i*>(table.level));
  const __m256i sign = _mm256_set1_epi32(INT32_MIN), lowest = _mm256_set1_epi32((127 - 31) << 23);
  const __m256i draws = _mm256_set1_epi32(0x00FFFF00), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (int i = 0; i < n; i += 32) {
    __m256i found[4];
    for (int k = 0; k < 4; ++k) {
      const int at = i + 8 * k;
      const __m256 x = _mm256_loadu_ps(in + at);
      const __m256 magnitude = _mm256_andnot_ps(_mm256_castsi256_ps(sign), x);
      __m256 part = _mm256_mul_ps(magnitude, inverse);
      if (!SIGNED) {  // a nonzero value is never stored as zero
        const __m256i something = _mm256_cmpgt_epi32(_mm256_castps_si256(magnitude), _mm256_setzero_si256());
        part = _mm256_max_ps(part, _mm256_and_ps(_mm256_castsi256_ps(something), least));
      }
      const __m256i group = _mm256_srli_epi32(_mm256_max_epi32(_mm256_castps_si256(part), lowest), 24);
      __m256i level = _mm256_shuffle_epi8(levels, group);
      const __m256 above = _mm256_cmp_ps(part, _mm256_permutevar8x32_ps(bound, level), _CMP_GT_OQ);
      level = _mm256_sub_epi32(level, _mm256_castps_si256(above));
      const __m256 behind = _mm256_sub_ps(part, _mm256_permutevar8x32_ps(start, level));
      const __m256i steps = _mm256_cvtps_epi32(_mm256_mul_ps(behind, _mm256_permutevar8x32_ps(steep, level)));
      const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + at));
      const __m256i draw = _mm256_and_si256(HALF ? _mm256_srli_epi32(word, 8) : _mm256_slli_epi32(word, 8), draws);
      const __m256i sum = _mm256_add_epi32(_mm256_permutevar8x32_epi32(first, level), _mm256_add_epi32(steps, draw));
      const __m256i signed_sum = _mm256_or_si256(sum, _mm256_and_si256(_mm256_castps_si256(x), sign));
      found[k] = _mm256_srli_epi32(SIGNED ? signed_sum : sum, 24);
    }
    const __m256i left = _mm256_packus_epi32(found[0], found[1]), right = _mm256_packus_epi32(found[2], found[3]);
    const __m256i codes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(left, right), order);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), codes);
  }
}

#else

struct Table {
  const Code& code;
  explicit Table(const Code& from) : code(from) {}
};

template <bool SIGNED, int HALF>
void encode(uint8_t* __restrict out, const float* __restrict in, float scale, const Table& table,
            const uint32_t* __restrict words, int n) {
  encode_plain<SIGNED, HALF>(out, in, scale, table.code, words, n);
}

#endif

#if !defined(__AVX512BW__)

template <bool SIGNED>
void decode(float* __restrict out, const uint8_t* __restrict in, float scale, const Table& table, int n) {
  decode_plain(out, in, scale, table.code, n);
}

#endif

}  // namespace
