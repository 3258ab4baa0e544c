// What a step has to move, with nothing computed: the limit of the machine for `bench/update.py`.
//
// The arrays of an AdamW step with an fp32 state, each element read and written once; an exclusive or stands for
// the arithmetic, so that nothing can be left out and nothing takes time. Memory is asked for ahead, and what is
// only written goes past the caches, as in `kernels/memory.h`.

#include <cstdint>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

using Word = uint32_t;
using Half = uint16_t;
using Byte = uint8_t;

namespace {

constexpr int PIECE = 64;
constexpr int AHEAD = 512;

template <class T>
inline void ask(const T* data, int ahead) {
  const char* line = reinterpret_cast<const char*>(data) + ahead * sizeof(T);
  for (unsigned byte = 0; byte < PIECE * sizeof(T); byte += 64) __builtin_prefetch(line + byte);
}

inline void write_past(Half* __restrict out, const Half* __restrict in) {
#if defined(__SSE2__)
  for (int i = 0; i < PIECE; i += 8)
    _mm_stream_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i)));
#else
  for (int i = 0; i < PIECE; ++i) out[i] = in[i];
#endif
}

}  // namespace

// All arrays start on a cache line, and n is a multiple of PIECE.

// An fp32 master, and the bf16 weight that is written and not read.
extern "C" void move_fp32(int64_t n, const Word* __restrict grad, Half* __restrict storage,
                          Word* __restrict master, Word* __restrict first, Word* __restrict second) {
  for (int64_t at = 0; at < n; at += PIECE) {
    ask(grad + at, AHEAD);
    ask(master + at, AHEAD);
    ask(first + at, AHEAD);
    ask(second + at, AHEAD);
    alignas(64) Half narrow[PIECE];
    for (int i = 0; i < PIECE; ++i) {
      const Word g = grad[at + i];
      first[at + i] ^= g;
      second[at + i] ^= g;
      const Word p = master[at + i] ^ g;
      master[at + i] = p;
      narrow[i] = static_cast<Half>(p >> 16);
    }
    write_past(storage + at, narrow);
  }
}

namespace {

// The two halves of a split one, and moments of any width.
template <class Moment>
void move_moments(int64_t n, const Word* __restrict grad, Half* __restrict high, Half* __restrict low,
                  Moment* __restrict first, Moment* __restrict second) {
  for (int64_t at = 0; at < n; at += PIECE) {
    ask(grad + at, AHEAD);
    ask(high + at, AHEAD);
    ask(low + at, AHEAD);
    ask(first + at, AHEAD);
    ask(second + at, AHEAD);
    for (int i = 0; i < PIECE; ++i) {
      const Word g = grad[at + i];
      first[at + i] ^= static_cast<Moment>(g);
      second[at + i] ^= static_cast<Moment>(g);
      high[at + i] ^= static_cast<Half>(g >> 16);
      low[at + i] ^= static_cast<Half>(g);
    }
  }
}

}  // namespace

extern "C" void move_split(int64_t n, const Word* grad, Half* high, Half* low, Word* first, Word* second) {
  move_moments(n, grad, high, low, first, second);
}

extern "C" void move_split_8bit(int64_t n, const Word* grad, Half* high, Half* low, Byte* first, Byte* second) {
  move_moments(n, grad, high, low, first, second);
}

// What a norm reads.
extern "C" Word move_read(int64_t n, const Word* grad) {
  Word found = 0;
  for (int64_t at = 0; at < n; at += PIECE) {
    ask(grad + at, 4 * AHEAD);
    for (int i = 0; i < PIECE; ++i) found ^= grad[at + i];
  }
  return found;
}
