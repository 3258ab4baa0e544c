// Prefetch memory ahead of the arithmetic, and write past the caches.
//
// [Note: streams] A step walks through up to five arrays at once. A processor prefetches by itself, but its
// prefetchers follow an array to the end of a 4 KiB page and start again in the next, for each array at another
// moment, and their misses wait behind square roots and divisions. So every piece of a block prefetches the
// memory AHEAD of it. A bf16 weight beside an fp32 master is written without having been read. A plain store
// would first fetch the line that it then overwrites, so it is stored past the caches if a slice is too
// large to stay in them.
//
// Invariant: results do not depend on this file; addresses beyond the end of an array are prefetched,
// and never read or written.

#pragma once

#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "formats.h"

namespace {

constexpr int LINE = 64;   // bytes
constexpr int PIECE = 64;  // elements prefetched at once: one line for every byte of an element

// Prefetch distance in elements, found by trying.
constexpr int AHEAD = 2 * BLOCK;
constexpr int AHEAD_READING = 8 * BLOCK;  // a sum is faster than a step

constexpr int64_t STREAMED = 1 << 20;  // elements of a slice that no cache holds together with its moments

// Prefetches a piece of an array whose elements have `size` bytes. Always inline: a compiler may remove a
// function that only prefetches.
template <bool WRITTEN>
INLINE void ask(const void* data, int size, int64_t at) {
  const uintptr_t first = reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(at * size);
  for (int line = 0; line < size; ++line)
    __builtin_prefetch(reinterpret_cast<const void*>(first + static_cast<uintptr_t>(line * LINE)), WRITTEN);
}

// Copies n values of 16 bits past the caches, if the processor can; `settle` makes them visible to other threads.
inline void stream(uint16_t* __restrict out, const uint16_t* __restrict in, int n) {
#if defined(__SSE2__)
  if (n == BLOCK && reinterpret_cast<uintptr_t>(out) % sizeof(__m128i) == 0) {
    for (int i = 0; i < BLOCK; i += 8)
      _mm_stream_si128(reinterpret_cast<__m128i*>(out + i),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i)));
    return;
  }
#endif
  std::memcpy(out, in, sizeof(uint16_t) * n);
}

inline void settle() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace
