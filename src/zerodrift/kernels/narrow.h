// Narrow formats: a block of values to codes of 4 or 8 bits and one scale, and back.
//
// The definition is `kernels/narrow.py`. A run is processed in spans of 256 elements, one block or more,
// through buffers in the first-level cache: values, their quotients by the scale, a byte per code, and two codes
// to a byte where they have 4 bits. Every loop has a length that the compiler knows and no branch, so that it is
// vectorised on any processor. Only lookups among 16 numbers are written for 512-bit vectors.
//
// Invariant: codes and scales are those of the definition, bit for bit, and a decoded NaN is a NaN.

#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

#include "codes.h"
#include "formats.h"

namespace {

enum Element : int32_t { E4M3 = 0, E5M2 = 1, E2M1 = 2, INT8 = 3, INT4 = 4, NF4 = 5 };
enum Scale : int32_t { SCALE_FP32 = 0, SCALE_BF16 = 1, SCALE_E8M0 = 2 };

struct Format {
  int32_t element;
  int32_t block;      // elements
  int32_t scale;      // its dtype
};

constexpr float NF4_NUMBERS[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f,
    0.7229568362236023f, 1.0f};

// A middle of two fp32 numbers is exact in fp64.
constexpr float nf4_bound(int code) {
  return static_cast<float>((static_cast<double>(NF4_NUMBERS[code]) + static_cast<double>(NF4_NUMBERS[code + 1])) / 2.0);
}

// ------------------------------------------------------------------------------------------- elements

// A power of two as a constant.
constexpr float power(int exponent) {
  float x = 1.0f;
  for (; exponent > 0; --exponent) x *= 2.0f;
  for (; exponent < 0; ++exponent) x *= 0.5f;
  return x;
}

// True if 16 random bits round up a value that is a share of a step above a number.
INLINE uint32_t is_drawn_up(float share, uint32_t draw) {
  return share + static_cast<float>(static_cast<int32_t>(draw)) * 0x1p-16f >= 1.0f ? 1u : 0u;
}

// Floating point in a byte or half a byte: e4m3, e5m2 and e2m1.
template <int BITS, int MANTISSA, int BIAS>
struct SmallFloat {
  static constexpr int CODE_BITS = BITS;
  static constexpr uint32_t ZERO = 0;
  static constexpr uint32_t SIGN = 1u << (BITS - 1);
  static constexpr int SHIFT = 23 - MANTISSA;
  static constexpr uint32_t REBIAS = (127u - BIAS) << 23;
  static constexpr uint32_t LEAST_NORMAL = (128u - BIAS) << 23;
  static constexpr float STEP = power(1 - BIAS - MANTISSA);  // between its subnormal numbers
  static constexpr float MAGIC = power(24 - BIAS - MANTISSA);  // an fp32 value whose last bit is one STEP

  // Nearest, ties to even, of a quotient that is no NaN. `largest` are the bits of the largest number.
  static INLINE uint32_t code(float quotient, uint32_t largest) {
    const uint32_t u = bits(quotient);
    uint32_t part = u & 0x7FFFFFFFu;
    part = part < largest ? part : largest;
    const uint32_t even = (1u << (SHIFT - 1)) - 1u + ((part >> SHIFT) & 1u);
    const uint32_t normal = (part - REBIAS + even) >> SHIFT;
    const uint32_t small = bits(value(part) + MAGIC) - bits(MAGIC);
    return (part < LEAST_NORMAL ? small : normal) | ((u >> (32 - BITS)) & SIGN);
  }

  // Rounded up with the probability of the share above the lower number; `draw` has 16 random bits.
  static INLINE uint32_t drawn(float quotient, uint32_t largest, uint32_t draw) {
    const uint32_t u = bits(quotient);
    uint32_t part = u & 0x7FFFFFFFu;
    part = part < largest ? part : largest;
    const uint32_t normal = (part - REBIAS + (draw << (SHIFT - 16))) >> SHIFT;
    const float steps = part < LEAST_NORMAL ? value(part) * (1.0f / STEP) : 0.0f;
    const int32_t below = static_cast<int32_t>(steps);
    const uint32_t small = static_cast<uint32_t>(below) + is_drawn_up(steps - static_cast<float>(below), draw);
    return (part < LEAST_NORMAL ? small : normal) | ((u >> (32 - BITS)) & SIGN);
  }

  static INLINE float number(uint32_t code) {
    const uint32_t part = code & (SIGN - 1u);
    const float small = static_cast<float>(static_cast<int32_t>(part)) * STEP;
    uint32_t u = part < (1u << MANTISSA) ? bits(small) : (part << SHIFT) + REBIAS;
    // Only the codes that `code` never gives: the NaN of e4m3, and infinity and NaNs of e5m2.
    if (BITS == 8 && MANTISSA == 3) u = part == 0x7Fu ? QUIET << 16 : u;
    if (BITS == 8 && MANTISSA == 2) u = part >= 0x7Cu ? 0x7F800000u | ((part & 3u) << SHIFT) : u;
    return value(u | (code & SIGN) << (32 - BITS));
  }
};

template <int BITS>
struct Whole {
  static constexpr int CODE_BITS = BITS;
  static constexpr uint32_t ZERO = 0;
  static constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: an fp32 value whose last bit is one

  static INLINE uint32_t code(float quotient, uint32_t largest) {
    const float most = value(largest);
    float part = quotient < most ? quotient : most;
    part = part > -most ? part : -most;
    return bits(part + MAGIC) & ((1u << BITS) - 1u);
  }

  static INLINE uint32_t drawn(float quotient, uint32_t largest, uint32_t draw) {
    const float most = value(largest);
    float part = quotient < most ? quotient : most;
    part = part > -most ? part : -most;
    int32_t below = static_cast<int32_t>(part);
    below -= static_cast<float>(below) > part ? 1 : 0;
    const uint32_t up = is_drawn_up(part - static_cast<float>(below), draw);
    return (static_cast<uint32_t>(below) + up) & ((1u << BITS) - 1u);
  }

  static INLINE float number(uint32_t code) {
    constexpr int32_t HALF = 1 << (BITS - 1);
    return static_cast<float>((static_cast<int32_t>(code) ^ HALF) - HALF);
  }
};

struct NormalFloat {
  static constexpr int CODE_BITS = 4;
  static constexpr uint32_t ZERO = 7;

  static INLINE uint32_t code(float quotient, uint32_t) {
    uint32_t found = 0;
    for (int bound = 0; bound < 15; ++bound) found += quotient > nf4_bound(bound) ? 1u : 0u;
    return found;
  }

  static INLINE uint32_t drawn(float quotient, uint32_t largest, uint32_t) { return code(quotient, largest); }

  static INLINE float number(uint32_t code) { return NF4_NUMBERS[code]; }
};

// ------------------------------------------------------------------------------------------- codes

#if defined(__AVX512F__)

// Halves the 16 codes four times. `bounds` are the middles between numbers, so the last of 16 is not used.
INLINE void find_among_16(uint8_t* __restrict codes, const float* __restrict quotients,
                          const float* __restrict bounds) {
  const __m512 table = _mm512_loadu_ps(bounds);
  for (int i = 0; i < BLOCK; i += 16) {
    const __m512 x = _mm512_load_ps(quotients + i);
    __m512i found = _mm512_setzero_si512();
    for (int half = 8; half > 0; half /= 2) {
      const __m512i middle = _mm512_add_epi32(found, _mm512_set1_epi32(half - 1));
      const __mmask16 above = _mm512_cmp_ps_mask(x, _mm512_permutexvar_ps(middle, table), _CMP_GT_OQ);
      found = _mm512_mask_add_epi32(found, above, found, _mm512_set1_epi32(half));
    }
    _mm_store_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtepi32_epi8(found));
  }
}

#endif

template <class Numbers>
INLINE void encode_codes(uint8_t* __restrict codes, const float* __restrict quotients, uint32_t largest) {
  for (int i = 0; i < BLOCK; ++i) codes[i] = static_cast<uint8_t>(Numbers::code(quotients[i], largest));
}

#if defined(__AVX512F__)
template <>
INLINE void encode_codes<NormalFloat>(uint8_t* __restrict codes, const float* __restrict quotients, uint32_t) {
  float bounds[16] = {0};
  for (int code = 0; code < 15; ++code) bounds[code] = nf4_bound(code);
  find_among_16(codes, quotients, bounds);
}
#endif

template <class Numbers>
INLINE void draw_codes(uint8_t* __restrict codes, const float* __restrict quotients, uint32_t largest,
                       const uint32_t* __restrict words) {
  for (int i = 0; i < BLOCK; ++i)
    codes[i] = static_cast<uint8_t>(Numbers::drawn(quotients[i], largest, words[i] & 0xFFFFu));
}

constexpr int PART = 32;  // elements: no block is smaller

// Decodes a span; there is a scale for each 32 elements.
template <class Numbers>
INLINE void decode_codes(float* __restrict out, const uint8_t* __restrict codes, const float* __restrict scales) {
#if defined(__AVX512F__)
  if (Numbers::CODE_BITS == 4) {
    alignas(64) float numbers[16];
    for (uint32_t code = 0; code < 16; ++code) numbers[code] = Numbers::number(code);
    const __m512 table = _mm512_load_ps(numbers);
    for (int i = 0; i < BLOCK; i += 16) {
      const __m512i code = _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(codes + i)));
      const __m512 scale = _mm512_set1_ps(scales[i / PART]);
      _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_permutexvar_ps(code, table), scale));
    }
    return;
  }
#endif
  for (int part = 0; part < BLOCK / PART; ++part)
    for (int i = part * PART; i < (part + 1) * PART; ++i) out[i] = Numbers::number(codes[i]) * scales[part];
}

// Two codes of 4 bits share a byte: the first is in its low half, except for NF4.
template <class Numbers>
INLINE void pack(uint8_t* __restrict out, const uint8_t* __restrict codes) {
  constexpr bool HIGH = Numbers::ZERO != 0;
  for (int i = 0; i < BLOCK / 2; ++i) {
    const uint8_t first = codes[2 * i], second = codes[2 * i + 1];
    out[i] = static_cast<uint8_t>(HIGH ? first << 4 | second : second << 4 | first);
  }
}

template <class Numbers>
INLINE void unpack(uint8_t* __restrict codes, const uint8_t* __restrict in) {
  constexpr bool HIGH = Numbers::ZERO != 0;
  for (int i = 0; i < BLOCK / 2; ++i) {
    const uint8_t low = in[i] & 0xFu, high = in[i] >> 4;
    codes[2 * i] = HIGH ? high : low;
    codes[2 * i + 1] = HIGH ? low : high;
  }
}

// ------------------------------------------------------------------------------------------- scales

// Zero, a normal number, or a NaN. Magnitudes are compared as integers, so infinities and NaNs are the largest.
INLINE float scale_of(const Format& format, uint32_t most, float largest) {
  if (most < LEAST_SCALE) return 0.0f;
  if (most >= INFINITY_BITS) return value(QUIET << 16);
  most = most < LARGEST_SCALE ? most : LARGEST_SCALE;
  if (format.scale == SCALE_E8M0) return value((most & INFINITY_BITS) - ((bits(largest) & INFINITY_BITS) - (127u << 23)));
  const float exact = value(most) / largest;
  return format.scale == SCALE_BF16 ? value(static_cast<uint32_t>(bf16_even(exact)) << 16) : exact;
}

INLINE void store_scale(uint8_t* scales, const Format& format, int64_t block, float scale) {
  if (format.scale == SCALE_E8M0) {
    scales[block] = static_cast<uint8_t>(bits(scale) >> 23 & 0xFFu);
  } else if (format.scale == SCALE_BF16) {
    const uint16_t high = static_cast<uint16_t>(bits(scale) >> 16);
    std::memcpy(scales + 2 * block, &high, 2);
  } else {
    std::memcpy(scales + 4 * block, &scale, 4);
  }
}

INLINE float load_scale(const uint8_t* scales, const Format& format, int64_t block) {
  float scale;
  if (format.scale == SCALE_FP32) {
    std::memcpy(&scale, scales + 4 * block, 4);
    return scale;
  }
  if (format.scale == SCALE_BF16) {
    uint16_t high;
    std::memcpy(&high, scales + 2 * block, 2);
    return value(static_cast<uint32_t>(high) << 16);
  }
  const uint32_t exponent = scales[block];
  if (exponent == 0xFFu) return value(QUIET << 16);
  return value(exponent == 0 ? 0x400000u : exponent << 23);
}

// Scales of a span's blocks of N elements, and quotients by these scales; zeros for a scale of zero.
template <int N>
INLINE void divide(float* __restrict quotients, float* __restrict scales, const float* __restrict in,
                   const Format& format, float largest) {
  for (int block = 0; block < BLOCK / N; ++block, in += N, quotients += N) {
    uint32_t most = 0;
    for (int i = 0; i < N; ++i) {
      const uint32_t magnitude = bits(in[i]) & 0x7FFFFFFFu;
      most = magnitude > most ? magnitude : most;
    }
    const float scale = scale_of(format, most, largest);
    scales[block] = scale;
    if (!(scale > 0.0f)) {
      std::memset(quotients, 0, sizeof(float) * N);
    } else if (format.scale != SCALE_E8M0) {
      for (int i = 0; i < N; ++i) quotients[i] = in[i] / scale;
    } else {
      const float inverse = 1.0f / scale;  // a power of two: the product is the quotient
      for (int i = 0; i < N; ++i) quotients[i] = in[i] * inverse;
    }
  }
}

// ------------------------------------------------------------------------------------------- a span

// A run of blocks in memory: the values, the codes, then the scales.
struct Run {
  Format format;
  float largest;
  int64_t numel;
  int32_t type;  // of the values
  void* values;
  uint8_t* codes;
  uint8_t* scales;
  const int64_t* keys;  // of spans, from which a word is drawn for each value that is encoded; null: to nearest
  int64_t number;       // of the draw, mixed
};

template <class Numbers>
void encode_span(const Run& run, int64_t at, int n) {
  constexpr bool PAIRS = Numbers::CODE_BITS == 4;
  alignas(64) float buffer[BLOCK], quotients[BLOCK], scales[BLOCK / PART];
  alignas(64) uint8_t unpacked[BLOCK], last[BLOCK];
  const float* in = widen(buffer, run.values, run.type, at, n);
  if (n < BLOCK) {
    std::memmove(buffer, in, sizeof(float) * n);
    std::memset(buffer + n, 0, sizeof(float) * (BLOCK - n));
    in = buffer;
  }
  const Format& format = run.format;
  switch (format.block) {
    case 32: divide<32>(quotients, scales, in, format, run.largest); break;
    case 64: divide<64>(quotients, scales, in, format, run.largest); break;
    case 128: divide<128>(quotients, scales, in, format, run.largest); break;
    default: divide<256>(quotients, scales, in, format, run.largest);
  }
  for (int block = 0; block < n / format.block; ++block)
    store_scale(run.scales, format, at / format.block + block, scales[block]);
  uint8_t* codes = run.codes + (PAIRS ? at / 2 : at);
  uint8_t* out = n < BLOCK ? last : codes;
  uint8_t* coded = PAIRS ? unpacked : out;
  if (run.keys == nullptr) {
    encode_codes<Numbers>(coded, quotients, bits(run.largest));
  } else {
    alignas(64) uint32_t words[BLOCK];
    random_words(words, run.keys[at / BLOCK], run.number, BLOCK);
    draw_codes<Numbers>(coded, quotients, bits(run.largest), words);
  }
  if (PAIRS) pack<Numbers>(out, unpacked);
  if (n < BLOCK) std::memcpy(codes, last, PAIRS ? n / 2 : n);
}

// ADD: add to the old values, in fp32.
template <class Numbers, bool ADD>
void decode_span(const Run& run, int64_t at, int n) {
  constexpr bool PAIRS = Numbers::CODE_BITS == 4;
  alignas(64) float buffer[BLOCK], scales[BLOCK / PART];
  alignas(64) uint8_t unpacked[BLOCK], last[BLOCK];
  const int32_t parts = run.format.block / PART;
  for (int part = 0; part < n / PART; ++part)
    scales[part] = load_scale(run.scales, run.format, (at / PART + part) / parts);
  const uint8_t* codes = run.codes + (PAIRS ? at / 2 : at);
  if (n < BLOCK) {
    std::memset(scales + n / PART, 0, sizeof(float) * ((BLOCK - n) / PART));
    std::memset(last, 0, BLOCK);
    std::memcpy(last, codes, PAIRS ? n / 2 : n);
    codes = last;
  }
  if (PAIRS) {
    unpack<Numbers>(unpacked, codes);
    codes = unpacked;
  }
  float* wide = static_cast<float*>(run.values) + at;
  if (run.type == FP32 && !ADD && n == BLOCK) {
    decode_codes<Numbers>(wide, codes, scales);
    return;
  }
  decode_codes<Numbers>(buffer, codes, scales);
  uint16_t* half = static_cast<uint16_t*>(run.values) + at;
  if (ADD) {
    for (int i = 0; i < n; ++i) wide[i] += buffer[i];
  } else if (run.type == FP32) {
    std::memcpy(wide, buffer, sizeof(float) * n);
  } else if (run.type == BF16) {
    narrow_even(half, buffer, n);
  } else {
    narrow_fp16(half, buffer, n);
  }
}

enum Way : int32_t { ENCODE = 0, DECODE = 1, DECODE_AND_ADD = 2 };

using SpanFunction = void (*)(const Run&, int64_t, int);

template <class Numbers>
SpanFunction span_function(int32_t way) {
  if (way == ENCODE) return encode_span<Numbers>;
  return way == DECODE ? decode_span<Numbers, false> : decode_span<Numbers, true>;
}

SpanFunction span_function(int32_t element, int32_t way) {
  switch (element) {
    case E4M3: return span_function<SmallFloat<8, 3, 7>>(way);
    case E5M2: return span_function<SmallFloat<8, 2, 15>>(way);
    case E2M1: return span_function<SmallFloat<4, 1, 1>>(way);
    case INT8: return span_function<Whole<8>>(way);
    case INT4: return span_function<Whole<4>>(way);
    default: return span_function<NormalFloat>(way);
  }
}

constexpr float LARGEST[] = {448.0f, 57344.0f, 6.0f, 127.0f, 7.0f, 1.0f};  // by element

}  // namespace
