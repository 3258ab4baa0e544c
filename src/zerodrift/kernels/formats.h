// fp32 values in 16 bits: bf16 with two roundings, fp16, and the two halves of a split master; and the random
// words for rounding. Part of native.cpp, like the other headers here.
//
// The definition is `optim/rounding.py`.
//
// Invariant: every NaN is stored as the same bit pattern in 16 bits.

#pragma once

#include <cstdint>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif

// For loops whose length the caller knows: a whole block, or a piece of one.
#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int BLOCK = 256;

#if defined(__aarch64__)
using Half = __fp16;  // g++ has the other name from 13 on
#else
using Half = _Float16;
#endif

enum Type : int32_t { FP32 = 0, BF16 = 1, FP16 = 2 };

inline uint32_t bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}

inline float value(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

inline bool is_nan(uint32_t u) { return (u & 0x7FFFFFFFu) > 0x7F800000u; }

constexpr uint32_t QUIET = 0x7FC0;  // the only NaN that is stored in 16 bits

inline uint16_t bf16_even(float x) {
  const uint32_t u = bits(x);
  const uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(is_nan(u) ? QUIET : rounded);
}

inline uint16_t bf16_random(float x, uint32_t random16) {
  const uint32_t u = bits(x);
  return static_cast<uint16_t>(is_nan(u) ? QUIET : (u + random16) >> 16);
}

INLINE void widen_bf16(float* __restrict out, const uint16_t* __restrict in, int n) {
  for (int i = 0; i < n; ++i) out[i] = value(static_cast<uint32_t>(in[i]) << 16);
}

INLINE void narrow_even(uint16_t* __restrict out, const float* __restrict in, int n) {
  for (int i = 0; i < n; ++i) out[i] = bf16_even(in[i]);
}

void widen_fp16(float* __restrict out, const uint16_t* __restrict in, int n) {
  int i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
#endif
  for (; i < n; ++i) {
    Half half;
    std::memcpy(&half, in + i, 2);
    out[i] = static_cast<float>(half);
  }
}

void narrow_fp16(uint16_t* __restrict out, const float* __restrict in, int n) {
  int i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < n; ++i) {
    const Half half = static_cast<Half>(in[i]);
    std::memcpy(out + i, &half, 2);
  }
}

INLINE void join(float* __restrict out, const uint16_t* __restrict high, const int16_t* __restrict low, int n) {
  for (int i = 0; i < n; ++i)
    out[i] = value((static_cast<uint32_t>(high[i]) << 16) + static_cast<uint32_t>(int32_t{low[i]}));
}

INLINE void split(uint16_t* __restrict high, int16_t* __restrict low, const float* __restrict in, int n) {
  for (int i = 0; i < n; ++i) {
    const uint32_t u = bits(in[i]);
    const bool nan = is_nan(u);
    high[i] = static_cast<uint16_t>(nan ? QUIET : (u + 0x8000u) >> 16);
    low[i] = static_cast<int16_t>(nan ? 0 : u & 0xFFFFu);
  }
}

INLINE const float* widen(float* buffer, const void* data, int32_t type, int64_t at, int n) {
  if (type == FP32) return static_cast<const float*>(data) + at;
  const uint16_t* narrow = static_cast<const uint16_t*>(data) + at;
  if (type == BF16) {
    widen_bf16(buffer, narrow, n);
  } else {
    widen_fp16(buffer, narrow, n);
  }
  return buffer;
}

// ------------------------------------------------------------------------------------------- random words

inline uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

void random_words(uint32_t* __restrict out, int64_t block_key, int64_t step_key, int n) {
  const uint64_t key = mix64(static_cast<uint64_t>(block_key) ^ static_cast<uint64_t>(step_key));
  const uint32_t k0 = static_cast<uint32_t>(key);
  const uint32_t k1 = static_cast<uint32_t>(key >> 32);
  for (int i = 0; i < n; ++i) {
    uint32_t x = static_cast<uint32_t>(i) * 0x9E3779B9u + k0;
    x = (x ^ (x >> 16)) * 0x21F0AAADu;
    x = ((x ^ (x >> 15)) + k1) * 0xD35A2D97u;
    out[i] = x ^ (x >> 15);
  }
}

}  // namespace
