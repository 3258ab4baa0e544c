// The sum of many parts of one length, element by element. The definition is `comm/fold.py`.
//
// Invariant: an element's additions have one order, in one dtype, each rounded there.

#pragma once

#include <cstdint>
#include <cstring>

#include "formats.h"

namespace {

constexpr int SPAN = 4 * BLOCK;  // elements that are summed at once: their parts come and go, the sum stays
constexpr int HEIGHT = 32;       // of a tree: below 2^32 parts

// Adds one more part; where sums are of 16 bits, each is rounded to these.
INLINE void add_part(float* __restrict sum, const float* __restrict part, int32_t sum_type, int n) {
  for (int i = 0; i < n; ++i) sum[i] += part[i];
  if (sum_type == FP32) return;
  uint16_t narrow[SPAN];
  if (sum_type == BF16) {
    narrow_even(narrow, sum, n);
    widen_bf16(sum, narrow, n);
  } else {
    narrow_fp16(narrow, sum, n);
    widen_fp16(sum, narrow, n);
  }
}

struct Parts {
  const void* const* data;
  int64_t count;
  int32_t type;
  const float* widened(float* buffer, int64_t number, int64_t at, int n) const {
    return widen(buffer, data[number], type, at, n);
  }
};

// ((part 0 + part 1) + part 2) + ...
INLINE void add_in_turn(float* sum, const Parts& parts, int32_t sum_type, int64_t at, int n) {
  alignas(64) float buffer[SPAN];
  std::memcpy(sum, parts.widened(buffer, 0, at, n), sizeof(float) * n);
  for (int64_t number = 1; number < parts.count; ++number)
    add_part(sum, parts.widened(buffer, number, at, n), sum_type, n);
}

// By the binary tree: as parts come, sums of equally many are added; what is left at the end, from the right.
void add_by_tree(float* sum, const Parts& parts, int32_t sum_type, int64_t at, int n) {
  alignas(64) float waiting[HEIGHT][SPAN];
  alignas(64) float buffer[SPAN];
  for (int64_t number = 0; number < parts.count; ++number) {
    std::memcpy(sum, parts.widened(buffer, number, at, n), sizeof(float) * n);
    int level = 0;
    for (; number >> level & 1; ++level) {
      add_part(waiting[level], sum, sum_type, n);
      std::memcpy(sum, waiting[level], sizeof(float) * n);
    }
    std::memcpy(waiting[level], sum, sizeof(float) * n);
  }
  int level = __builtin_ctzll(static_cast<unsigned long long>(parts.count));
  std::memcpy(sum, waiting[level], sizeof(float) * n);
  for (++level; parts.count >> level; ++level)
    if (parts.count >> level & 1) {
      add_part(waiting[level], sum, sum_type, n);
      std::memcpy(sum, waiting[level], sizeof(float) * n);
    }
}

// `out` may be one of the parts.
void store_sum(void* out, int32_t type, const float* sum, int64_t at, int n) {
  if (type == FP32) {
    std::memcpy(static_cast<float*>(out) + at, sum, sizeof(float) * n);
  } else if (type == BF16) {
    narrow_even(static_cast<uint16_t*>(out) + at, sum, n);
  } else {
    narrow_fp16(static_cast<uint16_t*>(out) + at, sum, n);
  }
}

}  // namespace
