// How a moment rests in 8 bits: a block of 256 values to codes and a scale, and back.
//
// The definition is `optim/blockwise.py`, which also makes the tables. There are two ways from a value to its
// code, chosen by the processor: lookups in registers with 512-bit vectors, plain loops without.
//
// Invariant: both ways leave the codes of the definition, bit for bit.

#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include <cmath>

#include "formats.h"

namespace {

constexpr int LEVELS = 8;  // decades of a code

// An 8-bit code; the tables come from `optim/blockwise.py`.
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

#if defined(__AVX512F__)

// [Note: tables in registers] With 512-bit vectors a lookup among 32 numbers is one instruction, and a gather
// is sixteen loads. So the values of a code are looked up 32 at a time and the right ones kept; and a decade
// is found by the exponent of a number: no binade has two bounds in it, so 32 binades tell the decade but for
// one comparison. The arithmetic is that of the plain loops below, operation by operation.
constexpr int BINADES = 32;  // from 2^-31 to 1; the lowest bound is 1e-7

struct Table {
  alignas(64) float value[256];
  alignas(64) float bound[BINADES];  // the one in this binade, or one that nothing reaches
  alignas(64) int32_t base[BINADES];  // how many bounds are below this binade
  alignas(64) float start[16];
  alignas(64) float steep[16];

  explicit Table(const Code& code) {
    std::memcpy(value, code.value, sizeof(value));
    for (int i = 0; i < BINADES; ++i) {
      const float low = std::ldexp(1.0f, i - 31), high = 2.0f * low;
      bound[i] = 2.0f;
      base[i] = 0;
      for (int level = 0; level < LEVELS; ++level) {
        const float at = code.bound[level];
        if (at < low) base[i] += 1;
        if (at >= low && at < high) bound[i] = at;
      }
    }
    for (int level = 0; level < LEVELS; ++level) {
      start[level] = start[level + LEVELS] = code.start[level];
      steep[level] = steep[level + LEVELS] = code.steep[level];
    }
  }
};

// A block in vectors of 16. What is left at its end goes by way of a buffer, which is faster than masks: some
// processors do not forward a masked store to the load behind it.
template <class In, class Out, class Step>
void in_sixteens(Out* __restrict out, const In* __restrict in, int n, Step step) {
  int i = 0;
  for (; i + 16 <= n; i += 16) step(out + i, in + i, i);
  if (i == n) return;
  In from[16] = {0};
  Out to[16];
  std::memcpy(from, in + i, sizeof(In) * (n - i));
  step(to, from, i);
  std::memcpy(out + i, to, sizeof(Out) * (n - i));
}

inline __m512 find32(const float* table, __m512i index) {
  return _mm512_permutex2var_ps(_mm512_load_ps(table), index, _mm512_load_ps(table + 16));
}

inline __m512 find128(const float* table, __m512i index) {
  const __mmask16 bit5 = _mm512_test_epi32_mask(index, _mm512_set1_epi32(32));
  const __mmask16 bit6 = _mm512_test_epi32_mask(index, _mm512_set1_epi32(64));
  const __m512 low = _mm512_mask_blend_ps(bit5, find32(table, index), find32(table + 32, index));
  const __m512 high = _mm512_mask_blend_ps(bit5, find32(table + 64, index), find32(table + 96, index));
  return _mm512_mask_blend_ps(bit6, low, high);
}

template <bool SIGNED>
void decode(float* __restrict out, const uint8_t* __restrict in, float scale, const Table& table, int n) {
  const __m512 factor = _mm512_set1_ps(scale);
  in_sixteens(out, in, n, [&](float* to, const uint8_t* from, int) {
    const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    __m512 found = find128(table.value, code);
    const __mmask16 bit7 = _mm512_test_epi32_mask(code, _mm512_set1_epi32(128));
    if (SIGNED) {
      const __m512i bits = _mm512_castps_si512(found);
      found = _mm512_castsi512_ps(_mm512_mask_xor_epi32(bits, bit7, bits, _mm512_set1_epi32(INT32_MIN)));
    } else {
      found = _mm512_mask_blend_ps(bit7, found, find128(table.value + 128, code));
    }
    _mm512_storeu_ps(to, _mm512_mul_ps(found, factor));
  });
}

// HALF: which half of a random word rounds this moment; see [Note: random bits]. There are words for a block.
template <bool SIGNED, int HALF>
float encode(uint8_t* __restrict out, const float* __restrict in, const Table& table,
             const uint32_t* __restrict words, int n) {
  const float scale = block_scale(in, n);
  const __m512 inverse = _mm512_set1_ps(scale > 0.0f ? 1.0f / scale : 0.0f);
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512i unit = _mm512_set1_epi32(1), largest = _mm512_set1_epi32(0x7FFFFFFF);
  const __m512i top = _mm512_set1_epi32(SIGNED ? 127 : 255), lower = _mm512_set1_epi32(0xFFFF);
  const __m512 start = _mm512_load_ps(table.start), steep = _mm512_load_ps(table.steep);
  const __m512i low = _mm512_load_si512(table.base), high = _mm512_load_si512(table.base + 16);
  const bool least = !SIGNED && scale != 0.0f;  // what is there is never stored as nothing
  in_sixteens(out, in, n, [&](uint8_t* to, const float* from, int i) {
    const __m512i u = _mm512_loadu_si512(from);
    const __m512i magnitude = _mm512_and_si512(u, largest);
    __m512 part = _mm512_mul_ps(_mm512_castsi512_ps(magnitude), inverse);
    // A NaN is 1 as well.
    part = _mm512_mask_mov_ps(one, _mm512_cmp_ps_mask(part, one, _CMP_LE_OQ), part);
    // Exponents from 96 on; a lookup takes the last five bits, of which 96 has none.
    const __m512i binade =
        _mm512_max_epi32(_mm512_srli_epi32(_mm512_castps_si512(part), 23), _mm512_set1_epi32(127 - 31));
    const __mmask16 above = _mm512_cmp_ps_mask(part, find32(table.bound, binade), _CMP_GT_OQ);
    __m512i level = _mm512_permutex2var_epi32(low, binade, high);
    level = _mm512_mask_add_epi32(level, above, level, unit);
    const __m512i first = _mm512_sub_epi32(_mm512_sllv_epi32(unit, level), unit);
    const __m512i word = _mm512_loadu_si512(words + i);
    const __m512i drawn = HALF ? _mm512_srli_epi32(word, 16) : _mm512_and_si512(word, lower);
    const __m512 share = _mm512_mul_ps(_mm512_cvtepi32_ps(drawn), _mm512_set1_ps(0x1p-16f));
    const __m512 inside = _mm512_mul_ps(_mm512_sub_ps(part, _mm512_permutexvar_ps(level, start)),
                                        _mm512_permutexvar_ps(level, steep));
    __m512i found = _mm512_add_epi32(first, _mm512_cvttps_epi32(_mm512_add_ps(inside, share)));
    found = _mm512_min_epi32(found, top);
    const __mmask16 something = _mm512_test_epi32_mask(magnitude, magnitude);
    if (least) found = _mm512_mask_max_epi32(found, something, found, unit);
    if (SIGNED) {
      const __mmask16 number = _mm512_cmple_epu32_mask(magnitude, _mm512_set1_epi32(INFINITY_BITS));
      const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(u, 24), _mm512_set1_epi32(128));
      found = _mm512_mask_or_epi32(found, number, found, sign);
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(found));
  });
  return scale;
}

#else

using Table = Code;

template <bool SIGNED>
void decode(float* __restrict out, const uint8_t* __restrict in, float scale, const Table& table, int n) {
  const float* __restrict value = table.value;
  for (int i = 0; i < n; ++i) out[i] = value[in[i]] * scale;
}

// HALF: which half of a random word rounds this moment; see [Note: random bits].
template <bool SIGNED, int HALF>
float encode(uint8_t* __restrict out, const float* __restrict in, const Table& table,
             const uint32_t* __restrict words, int n) {
  constexpr int TOP = SIGNED ? 127 : 255;
  const float scale = block_scale(in, n);
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  const int least = !SIGNED && scale != 0.0f;  // what is there is never stored as nothing
  const Code c = table;
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
  return scale;
}

#endif

}  // namespace
