// Sums of squares of a block, and their exact total. The definition is `kernels/squares.py`.
//
// Invariant: a block's sum has one fixed order, and the total has none.

#pragma once

#include <cstdint>
#include <cstring>

#include "formats.h"

namespace {

constexpr int LANES = 16;     // partial sums of a block; lane i takes elements i, i + 16, ...
constexpr int DIGITS = 44;    // of an exact sum, 32 bits each; the lowest is worth 2^LOWEST
constexpr int LOWEST = -352;  // 2^-298 is the least square of an fp32 value; a double has 52 bits below

// Products of two fp32 values are exact in fp64, so only the order of additions matters, and it is fixed.
double sum_of_squares(const float* __restrict x, int n) {
  double lanes[LANES] = {0};
  int i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int lane = 0; lane < LANES; ++lane) {
      const double wide = x[i + lane];
      lanes[lane] += wide * wide;
    }
  for (int lane = 0; i + lane < n; ++lane) {
    const double wide = x[i + lane];
    lanes[lane] += wide * wide;
  }
  // By halves, written out: a loop over halves costs as much as the rest.
  for (int lane = 0; lane < 8; ++lane) lanes[lane] += lanes[lane + 8];
  for (int lane = 0; lane < 4; ++lane) lanes[lane] += lanes[lane + 4];
  return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

// Adds a non-negative double exactly: it is cut at multiples of 32 bits, and digits are summed as integers. The
// last place of `out` counts values that are not finite.
INLINE void add_one(double sum, int64_t* out) {
  uint64_t u;
  std::memcpy(&u, &sum, 8);
  const int exponent = static_cast<int>((u >> 52) & 0x7FF);
  if (exponent == 0x7FF) {
    out[DIGITS] += 1;
    return;
  }
  const uint64_t mantissa = (u & 0xFFFFFFFFFFFFFu) | (exponent ? 0x10000000000000u : 0u);
  const int place = (exponent ? exponent : 1) - 1075 - LOWEST;
  if (mantissa == 0 || place < 0) return;
  const uint64_t low = (mantissa & 0xFFFFFFFFu) << (place % 32);
  const uint64_t high = (mantissa >> 32) << (place % 32);
  int64_t* digit = out + place / 32;
  digit[0] += static_cast<int64_t>(low & 0xFFFFFFFFu);
  digit[1] += static_cast<int64_t>((low >> 32) + (high & 0xFFFFFFFFu));
  digit[2] += static_cast<int64_t>(high >> 32);
}

// Into four sums in turn, because a single sum would wait for its last written digit.
void add_digits(int64_t count, const double* sums, int64_t* out) {
  int64_t parts[4][DIGITS + 1] = {};
  for (int64_t i = 0; i < count; ++i) add_one(sums[i], parts[i % 4]);
  for (const auto& part : parts)
    for (int place = 0; place <= DIGITS; ++place) out[place] += part[place];
}

}  // namespace
