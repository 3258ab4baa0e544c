// How a moment rests in 8 bits: a block of 256 values to codes and a scale, and back.
//
// The definition is `optim/rounding.py`, which also makes the tables. There are plain loops for any processor, and
// lookups in registers with 512-bit vectors for whole pieces whose scale is an ordinary one.
//
// Invariant: both ways leave the codes of the definition, bit for bit.

#pragma once

#if defined(__AVX512BW__)
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

// The largest magnitude, within what a scale may be; compared as integers, so a NaN is the largest of all.
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
  const int least = !SIGNED && scale != 0.0f;  // what is there is never stored as nothing
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

#if defined(__AVX512BW__)

// [Note: tables in registers] With 512-bit vectors a lookup among 16 numbers, or among 64 halves of one, is one
// instruction, and a gather is sixteen loads. So the two halves of a value are looked up for 32 codes at a time.
// A decade is found by the exponent of a number: no two neighbouring binades have two bounds in them, so 16 groups
// of two tell the decade but for one comparison, and a number above its group's bound has the decade of the next
// group. Steps are counted in 65536ths, so that a random half is added as it is; the sum with 2^39, whose last bit
// is 65536, rounded towards zero, has the code as its lowest byte. Where the scale is the largest magnitude, no
// fraction is above one, and no code above the last.
constexpr int GROUPS = 16;  // of two binades, from 2^-31 to 2; the lowest bound is 1e-7

struct Table {
  const Code& code;
  alignas(64) uint16_t high[256];
  alignas(64) uint16_t low[256];
  alignas(64) float bound[GROUPS];  // the one in this group, or one that nothing reaches
  alignas(64) float start[GROUPS];  // of what is not above the bound, like the next two
  alignas(64) float steep[GROUPS];  // in 65536ths of a code
  alignas(64) float first[GROUPS];  // the code before the decade's, in 65536ths, and 2^39

  explicit Table(const Code& from) : code(from) {
    for (int i = 0; i < 256; ++i) {
      high[i] = static_cast<uint16_t>(bits(code.value[i]) >> 16);
      low[i] = static_cast<uint16_t>(bits(code.value[i]));
    }
    for (int group = 0; group < GROUPS; ++group) {
      const float least = std::ldexp(1.0f, 2 * group - 31);
      int level = 0;
      while (code.bound[level] < least) ++level;  // the last one is 2
      bound[group] = code.bound[level] < 4.0f * least ? code.bound[level] : 2.0f;
      start[group] = code.start[level];
      steep[group] = code.steep[level] * 0x1p16f;
      first[group] = 0x1p39f + 0x1p16f * static_cast<float>((1 << level) - 1);
    }
  }
};

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

template <bool SIGNED, int HALF>
void encode(uint8_t* __restrict out, const float* __restrict in, float scale, const Table& table,
            const uint32_t* __restrict words, int n) {
  if (n % 16 != 0 || !(scale > 0.0f && scale < value(LARGEST_SCALE)))
    return encode_plain<SIGNED, HALF>(out, in, scale, table.code, words, n);
  const __m512 inverse = _mm512_set1_ps(1.0f / scale);
  const __m512 bound = _mm512_load_ps(table.bound), start = _mm512_load_ps(table.start);
  const __m512 steep = _mm512_load_ps(table.steep), first = _mm512_load_ps(table.first);
  const __m512i least = _mm512_set1_epi32((127 - 31) << 23), unit = _mm512_set1_epi32(1);
  for (int i = 0; i < n; i += 16) {
    const __m512 x = _mm512_loadu_ps(in + i);
    const __m512 part = _mm512_mul_ps(_mm512_abs_ps(x), inverse);
    // A lookup takes the last four bits of its index: half of the exponent.
    __m512i group = _mm512_srli_epi32(_mm512_max_epi32(_mm512_castps_si512(part), least), 24);
    const __mmask16 above = _mm512_cmp_ps_mask(part, _mm512_permutexvar_ps(group, bound), _CMP_GT_OQ);
    group = _mm512_mask_add_epi32(group, above, group, unit);
    const __m512 behind = _mm512_sub_ps(part, _mm512_permutexvar_ps(group, start));
    const __m512 inside = _mm512_mul_ps(behind, _mm512_permutexvar_ps(group, steep));
    const __m512i word = _mm512_loadu_si512(words + i);
    const __m512i draw = HALF ? _mm512_srli_epi32(word, 16) : _mm512_and_si512(word, _mm512_set1_epi32(0xFFFF));
    const __m512 sum = _mm512_add_ps(inside, _mm512_cvtepi32_ps(draw));
    const __m512i found = _mm512_castps_si512(_mm512_add_round_ps(sum, _mm512_permutexvar_ps(group, first),
                                                                  _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC));
    __m128i code = _mm512_cvtepi32_epi8(found);
    if (SIGNED) {
      code = _mm_mask_add_epi8(code, _mm512_movepi32_mask(_mm512_castps_si512(x)), code, _mm_set1_epi8(INT8_MIN));
    } else {  // what is there is never stored as nothing
      const __mmask16 something = _mm512_test_epi32_mask(_mm512_castps_si512(x), _mm512_set1_epi32(INT32_MAX));
      code = _mm_mask_max_epu8(code, something, code, _mm_set1_epi8(1));
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), code);
  }
}

#else

struct Table {
  const Code& code;
  explicit Table(const Code& from) : code(from) {}
};

template <bool SIGNED>
void decode(float* __restrict out, const uint8_t* __restrict in, float scale, const Table& table, int n) {
  decode_plain(out, in, scale, table.code, n);
}

template <bool SIGNED, int HALF>
void encode(uint8_t* __restrict out, const float* __restrict in, float scale, const Table& table,
            const uint32_t* __restrict words, int n) {
  encode_plain<SIGNED, HALF>(out, in, scale, table.code, words, n);
}

#endif

}  // namespace
