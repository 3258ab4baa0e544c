// A fingerprint of each block of words. The definition is `kernels/digests.py`.
//
// Invariant: a block in which one word changed has another print, whatever the words are.

#pragma once

#include <cstdint>

namespace {

constexpr int PRINT_LANES = 16;            // word i of a block goes to lane i % 16
constexpr int PRINT_WORDS = 128;           // of a block: 512 bytes
constexpr uint32_t PRINT_STEP = 0x9E3779B1u;
constexpr int PRINT_TURN = 15;
constexpr uint64_t PRINT_FOLD = 0x9E3779B97F4A7C15u;

uint64_t print_of(const uint32_t* __restrict words, int64_t block) {
  uint32_t lanes[PRINT_LANES];
  const uint32_t first = static_cast<uint32_t>(block);
  for (int lane = 0; lane < PRINT_LANES; ++lane) lanes[lane] = first;
  for (int at = 0; at < PRINT_WORDS; at += PRINT_LANES)
    for (int lane = 0; lane < PRINT_LANES; ++lane) {
      const uint32_t product = (lanes[lane] ^ words[at + lane]) * PRINT_STEP;
      lanes[lane] = product << PRINT_TURN | product >> (32 - PRINT_TURN);
    }
  uint64_t print = 0;
  for (int lane = 0; lane < PRINT_LANES; ++lane) print = print * PRINT_FOLD + lanes[lane];
  return print;
}

}  // namespace
