// A fingerprint of each block of words. The definition is `kernels/digests.py`.
//
// A lane waits for its last product, so several blocks are computed at once. The lanes are folded as a sum of
// products with powers of the factor, which is the definition's chain without its waits.
//
// Invariant: a block in which one word changed has another print.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

constexpr int PRINT_LANES = 16;            // word i of a block goes to lane i % 16
constexpr int PRINT_WORDS = 128;           // of a block: 512 bytes
constexpr int PRINT_AT_ONCE = 2;           // blocks; four have more streams than are prefetched
constexpr uint32_t PRINT_STEP = 0x9E3779B1u;
constexpr int PRINT_TURN = 15;
constexpr uint64_t PRINT_FOLD = 0x9E3779B97F4A7C15u;

typedef uint32_t PrintLanes __attribute__((vector_size(4 * PRINT_LANES)));

struct PrintPowers {
  uint64_t of[PRINT_LANES];
  constexpr PrintPowers() : of() {
    uint64_t power = 1;
    for (int lane = PRINT_LANES - 1; lane >= 0; --lane, power *= PRINT_FOLD) of[lane] = power;
  }
};

constexpr PrintPowers PRINT_POWERS;

template <int COUNT>
void print_blocks(const uint32_t* __restrict words, int64_t block, uint64_t* __restrict out) {
  PrintLanes lanes[COUNT];
  for (int each = 0; each < COUNT; ++each) lanes[each] = PrintLanes{} + static_cast<uint32_t>(block + each);
  for (int at = 0; at < PRINT_WORDS; at += PRINT_LANES)
    for (int each = 0; each < COUNT; ++each) {
      PrintLanes read;
      std::memcpy(&read, words + each * PRINT_WORDS + at, sizeof read);
      const PrintLanes product = (lanes[each] ^ read) * PRINT_STEP;
      lanes[each] = product << PRINT_TURN | product >> (32 - PRINT_TURN);
    }
  for (int each = 0; each < COUNT; ++each) {
    uint64_t print = 0;
    for (int lane = 0; lane < PRINT_LANES; ++lane) print += PRINT_POWERS.of[lane] * lanes[each][lane];
    out[each] = print;
  }
}

}  // namespace
