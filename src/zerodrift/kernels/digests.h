// The part of a block in a digest. The definition is `kernels/digests.py`.
//
// Invariant: a sum of integers, so neither order nor cuts change it.

#pragma once

#include <cstdint>

namespace {

template <class Word>
uint64_t digest_of(const Word* __restrict words, const uint64_t* __restrict weights, int n) {
  uint64_t sum = 0;
  for (int i = 0; i < n; ++i) sum += static_cast<uint64_t>(words[i]) * weights[i];
  return sum;
}

}  // namespace
