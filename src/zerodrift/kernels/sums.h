// The sum of many parts of one length, element by element. The definition is `comm/fold.py`.
//
// Invariant: an element's additions have one order, in one dtype, each rounded there.

#pragma once

#include <cstdint>
#include <cstring>

#include "formats.h"

namespace {

constexpr int SPAN = 4 * BLOCK;  // elements that are summed at once: the sum stays in a cache

// Writes left + right to `sum`, which may be either; sums in 16 bits are rounded.
INLINE void add_pair(float* sum, const float* left, const float* right, int32_t sum_type, int n) {
  for (int i = 0; i < n; ++i) sum[i] = left[i] + right[i];
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
    add_pair(sum, sum, parts.widened(buffer, number, at, n), sum_type, n);
}

// The binary tree over `count` parts from `first` on. Its left half is the largest power of two below `count`.
void add_by_tree(float* sum, const Parts& parts, int64_t first, int64_t count, int32_t sum_type, int64_t at,
                 int n) {
  alignas(64) float buffer[SPAN];
  if (count <= 2) {
    const float* left = parts.widened(sum, first, at, n);
    if (count == 2) {
      add_pair(sum, left, parts.widened(buffer, first + 1, at, n), sum_type, n);
    } else if (left != sum) {
      std::memcpy(sum, left, sizeof(float) * n);
    }
    return;
  }
  int64_t half = 2;
  while (2 * half < count) half *= 2;
  add_by_tree(sum, parts, first, half, sum_type, at, n);
  add_by_tree(buffer, parts, first + half, count - half, sum_type, at, n);
  add_pair(sum, sum, buffer, sum_type, n);
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
