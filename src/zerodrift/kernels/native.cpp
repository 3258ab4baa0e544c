// The CPU fast path: one optimizer step in one pass over memory, and sums of squares per block.
//
// A flat buffer is processed in blocks of 256 elements. Values that are not fp32 in memory are widened into a
// buffer of one block in the first-level cache. The update runs on fp32 there, or in place if memory has fp32
// already, and results are narrowed when they are stored. So every dtype is one small function instead of a
// factor in a product of templates, and the file compiles in seconds. It needs no torch headers: tensors
// arrive as addresses in a plain struct, which `optim/fused.py` mirrors.
//
// This file has the pass and the exported functions. Its parts, one translation unit with this file, are `formats.h` (16
// bits), `codes.h` (8 bits), `narrow.h` (4 and 8 bits), `updates.h` (the arithmetic), `squares.h`, `prints.h`,
// `digests.h`, `sums.h`, and `memory.h`, which is about speed alone. Each of the others names the Python file that
// defines its numbers, and equals it bit for bit. Three rules ensure that: the compiler may not fuse
// a*b+c on its own (-ffp-contract=off), multiply and add are fused exactly where torch's own kernels fuse them
// (ZERODRIFT_FMA_*, set by `kernels/native.py`), and every sum has a fixed order within its block.
//
// Invariant: an element's result depends on its own values, its group and its block's key: never on where a
// slice begins, on the number of threads, or on alignment.

#include <cstdint>
#include <cstring>

#include "codes.h"
#include "digests.h"
#include "formats.h"
#include "memory.h"
#include "narrow.h"
#include "prints.h"
#include "squares.h"
#include "sums.h"
#include "updates.h"

namespace {

constexpr int STATISTICS = 6;     // numbers per block
constexpr int64_t GRAIN = 32768;  // least elements for a thread

enum Master : int32_t { MASTER_FP32 = 0, MASTER_SPLIT = 1, MASTER_SAME = 2 };
enum State : int32_t { STATE_FP32 = 0, STATE_BF16 = 1, STATE_STOCHASTIC = 2, STATE_8BIT = 3 };

struct Update {
  int64_t numel;
  int64_t stochastic;  // the step's part of the random key
  const void* grad;
  void* storage;
  void* master;
  void* moment1;
  void* moment2;
  float* scale1;  // per block; 8-bit states alone
  float* scale2;
  const Code* codes;      // of first and of second moments; 8-bit states alone
  const int32_t* groups;  // per block, or null: all in group 0
  const int64_t* keys;    // per block; needed where states are rounded at random
  const Group* table;
  Root root;
  double* statistics;  // per block 6 numbers, or null
  int32_t grad_type;
  int32_t storage_type;
  int32_t master_kind;
  int32_t state_kind;
  int32_t algorithm;
  int32_t threads;
};

// ---------------------------------------------------------------------------------------------- one block

INLINE void load_gradient(float* __restrict out, const Update& u, float scale, int64_t at, int n) {
  alignas(64) float buffer[BLOCK];
  const float* __restrict in = widen(buffer, u.grad, u.grad_type, at, n);
  for (int i = 0; i < n; ++i) out[i] = in[i] * scale;
}

// The master in fp32: in memory if it is stored as fp32, else in the buffer.
INLINE float* load_master(const Update& u, float* buffer, int64_t at, int n) {
  if (u.master_kind == MASTER_FP32) return static_cast<float*>(u.master) + at;
  if (u.master_kind == MASTER_SPLIT) {
    join(buffer, static_cast<const uint16_t*>(u.storage) + at, static_cast<const int16_t*>(u.master) + at, n);
    return buffer;
  }
  return const_cast<float*>(widen(buffer, u.storage, u.storage_type, at, n));
}

INLINE void narrow(uint16_t* out, const Update& u, const float* p, int n) {
  if (u.storage_type == FP16) {
    narrow_fp16(out, p, n);
  } else {
    narrow_even(out, p, n);
  }
}

// True if storage is written past the caches: see [Note: streams].
bool is_streamed(const Update& u) {
  return u.master_kind == MASTER_FP32 && u.storage_type != FP32 && u.numel >= STREAMED;
}

INLINE void store_visible(const Update& u, const float* p, int64_t at, int n) {
  uint16_t* out = static_cast<uint16_t*>(u.storage) + at;
  if (u.master_kind == MASTER_SPLIT) {
    split(out, static_cast<int16_t*>(u.master) + at, p, n);
  } else if (is_streamed(u)) {
    alignas(LINE) uint16_t buffer[BLOCK];
    narrow(buffer, u, p, n);
    stream(out, buffer, n);
  } else if (u.storage_type != FP32) {
    narrow(out, u, p, n);
  }
}

int visible_size(const Update& u) { return u.storage_type == FP32 ? 4 : 2; }

// Prefetches a piece of every array of a step.
template <class Moment>
INLINE void ask_all(const Update& u, int64_t at) {
  ask<false>(u.grad, u.grad_type == FP32 ? 4 : 2, at);
  if (u.master != nullptr) ask<true>(u.master, u.master_kind == MASTER_FP32 ? 4 : 2, at);
  if (!is_streamed(u)) ask<true>(u.storage, visible_size(u), at);
  if (u.moment1 != nullptr) ask<true>(u.moment1, Moment::SIZE, at);
  if (u.moment2 != nullptr) ask<true>(u.moment2, Moment::SIZE, at);
}

// The values of a block before its update, kept on request.
struct Before {
  float weight[BLOCK];
  float gradient[BLOCK];
  float wanted[BLOCK];
  unsigned char visible[BLOCK * 4];
};

void remember(Before& before, const Update& u, const float* p, const float* g, int64_t at, int n) {
  const int size = visible_size(u);
  std::memcpy(before.weight, p, sizeof(float) * n);
  std::memcpy(before.gradient, g, sizeof(float) * n);
  std::memcpy(before.visible, static_cast<const unsigned char*>(u.storage) + at * size, size * n);
}

// The stored last moment of a block; null if there is none.
const float* last_moment(float* buffer, const Update& u, int64_t block, int64_t at, int n) {
  const bool second = u.moment2 != nullptr;
  const void* last = second ? u.moment2 : u.moment1;
  if (last == nullptr) return nullptr;
  if (u.state_kind != STATE_8BIT) return widen(buffer, last, u.state_kind == STATE_FP32 ? FP32 : BF16, at, n);
  const float scale = (second ? u.scale2 : u.scale1)[block];
  decode_plain(buffer, static_cast<const uint8_t*>(last) + at, scale, u.codes[second], n);
  return buffer;
}

// Statistics of a block: elements to be changed, of those unchanged as seen and unchanged altogether, moments
// that underflowed, and the squares of the wanted change and of the weight. `p` is the new master.
void account(double* out, const Before& before, const Update& u, const float* p, int64_t block, int64_t at,
             int n) {
  const int size = visible_size(u);
  const unsigned char* visible = static_cast<const unsigned char*>(u.storage) + at * size;
  alignas(64) float buffer[BLOCK];
  const float* moment = last_moment(buffer, u, block, at, n);
  int64_t moved = 0, unseen = 0, lost = 0, underflow = 0;
  for (int i = 0; i < n; ++i) {
    const bool wanted = before.wanted[i] != 0.0f;
    moved += wanted;
    const bool same = std::memcmp(visible + i * size, before.visible + i * size, size) == 0;
    const bool kept = u.master_kind != MASTER_SAME && std::memcmp(p + i, before.weight + i, sizeof(float)) != 0;
    unseen += wanted && same;
    lost += wanted && same && !kept;
    underflow += moment != nullptr && before.gradient[i] != 0.0f && moment[i] == 0.0f;
  }
  out[0] = static_cast<double>(moved);
  out[1] = static_cast<double>(unseen);
  out[2] = static_cast<double>(lost);
  out[3] = static_cast<double>(underflow);
  out[4] = sum_of_squares(before.wanted, n);
  out[5] = sum_of_squares(before.weight, n);
}

struct Coded : Wide {
  static constexpr int SIZE = 1;
};

// Constants of a state, made once per update: the tables of 8-bit codes.
template <class Moment>
struct Tables {
  explicit Tables(const Update&) {}
};

template <>
struct Tables<Coded> {
  const Table first, second;
  explicit Tables(const Update& u) : first(u.codes[0]), second(u.codes[1]) {}
};

// The moments of a block, where an update finds and leaves them: in memory, or in fp32 buffers between 8-bit
// codes. They are loaded by pieces, and stored whole: a scale depends on all of them.
template <class Moment>
struct Moments {
  using Type = typename Moment::Type;
  Type *m, *v;
  Moments(const Update& u, int64_t at)
      : m(u.moment1 == nullptr ? nullptr : static_cast<Type*>(u.moment1) + at),
        v(u.moment2 == nullptr ? nullptr : static_cast<Type*>(u.moment2) + at) {}
  void load(const Update&, const Tables<Moment>&, int64_t, int, int) {}
  void store(const Update&, const Tables<Moment>&, int64_t, const uint32_t*, int) {}
};

template <>
struct Moments<Coded> {
  alignas(64) float first[BLOCK], second[BLOCK];
  float *m, *v;
  uint8_t *codes1, *codes2;
  Moments(const Update& u, int64_t at)
      : m(u.moment1 == nullptr ? nullptr : first),
        v(u.moment2 == nullptr ? nullptr : second),
        codes1(static_cast<uint8_t*>(u.moment1) + at),
        codes2(static_cast<uint8_t*>(u.moment2) + at) {}
  INLINE void load(const Update& u, const Tables<Coded>& tables, int64_t block, int from, int n) {
    if (m != nullptr) decode<true>(m + from, codes1 + from, u.scale1[block], tables.first, n);
    if (v != nullptr) decode<false>(v + from, codes2 + from, u.scale2[block], tables.second, n);
  }
  // Both scales first, so that the processor waits for neither.
  INLINE void store(const Update& u, const Tables<Coded>& tables, int64_t block, const uint32_t* words, int n) {
    if (m != nullptr) u.scale1[block] = block_scale(m, n);
    if (v != nullptr) u.scale2[block] = block_scale(v, n);
    if (m != nullptr) encode<true, 0>(codes1, m, u.scale1[block], tables.first, words, n);
    if (v != nullptr) encode<false, 1>(codes2, v, u.scale2[block], tables.second, words, n);
  }
};

// The update of a whole block, piece by piece, between requests for the memory of a later one. 8-bit moments are
// decoded beside the divisions of the piece before.
template <class Moment>
INLINE void advance_asking(const Update& u, const Group& h, const Block<Moment>& block, int64_t at,
                           Moments<Moment>& moments, const Tables<Moment>& tables) {
  for (int from = 0; from < BLOCK; from += PIECE) {
    ask_all<Moment>(u, at + AHEAD + from);
    moments.load(u, tables, at / BLOCK, from, PIECE);
    if (u.root == nullptr) advance<Moment, false>(u.algorithm, u.root, h, block.part(from, PIECE));
  }
  if (u.root != nullptr) advance<Moment, false>(u.algorithm, u.root, h, block);  // one call for all roots
}

// WHOLE: a whole block, whose loops have a length that the compiler knows.
template <class Moment, bool WHOLE>
void update_block(const Update& u, const Tables<Moment>& tables, int64_t block) {
  const int64_t at = block * BLOCK;
  const int n = WHOLE ? BLOCK : static_cast<int>(u.numel - at);
  const Group& h = u.table[u.groups == nullptr ? 0 : u.groups[block]];
  alignas(64) float g[BLOCK], p_buffer[BLOCK];
  alignas(64) uint32_t buffer[BLOCK];
  const uint32_t* words = NO_WORDS;

  load_gradient(g, u, h.scale, at, n);
  float* p = load_master(u, p_buffer, at, n);
  if (u.state_kind == STATE_STOCHASTIC || u.state_kind == STATE_8BIT) {
    random_words(buffer, u.keys[block], u.stochastic, n);
    words = buffer;
  }
  Moments<Moment> moments(u, at);
  if (u.statistics == nullptr) {
    const Block<Moment> here{p, moments.m, moments.v, g, nullptr, words, n};
    if (WHOLE) {
      advance_asking<Moment>(u, h, here, at, moments, tables);
    } else {
      moments.load(u, tables, block, 0, n);
      advance<Moment, false>(u.algorithm, u.root, h, here);
    }
    moments.store(u, tables, block, words, n);
    store_visible(u, p, at, n);
    return;
  }
  Before before;
  remember(before, u, p, g, at, n);
  moments.load(u, tables, block, 0, n);
  advance<Moment, true>(u.algorithm, u.root, h, {p, moments.m, moments.v, g, before.wanted, words, n});
  moments.store(u, tables, block, words, n);
  store_visible(u, p, at, n);
  account(u.statistics + STATISTICS * block, before, u, p, block, at, n);
}

int workers(int64_t numel, int32_t threads) {
  const int64_t useful = numel / GRAIN;
  return static_cast<int>(useful < 1 ? 1 : (useful < threads ? useful : threads));
}

template <class Moment>
void update_all(const Update& u) {
  const int64_t whole = u.numel / BLOCK;
  const int count = workers(u.numel, u.threads);
  const Tables<Moment> tables(u);
  (void)count;
#pragma omp parallel num_threads(count) if (count > 1)
  {
#pragma omp for schedule(static)
    for (int64_t block = 0; block < whole; ++block) update_block<Moment, true>(u, tables, block);
    settle();
  }
  if (u.numel % BLOCK != 0) update_block<Moment, false>(u, tables, whole);
}

}  // namespace

// ------------------------------------------------------------------------------------------- the interface

extern "C" void zerodrift_update(const Update* u) {
  if (u->state_kind == STATE_FP32) {
    update_all<Wide>(*u);
  } else if (u->state_kind == STATE_BF16) {
    update_all<Nearest>(*u);
  } else if (u->state_kind == STATE_8BIT) {
    update_all<Coded>(*u);
  } else {
    update_all<Stochastic>(*u);
  }
}

extern "C" void zerodrift_squares(int64_t numel, const void* data, int32_t type, double* out,
                                  int32_t threads) {
  const int64_t blocks = (numel + BLOCK - 1) / BLOCK;
  const int count = workers(numel, threads);
  const int size = type == FP32 ? 4 : 2;
  (void)count;
#pragma omp parallel for schedule(static) num_threads(count) if (count > 1)
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t at = block * BLOCK;
    const int n = static_cast<int>(numel - at < BLOCK ? numel - at : BLOCK);
    alignas(64) float buffer[BLOCK];
    for (int from = 0; from < BLOCK; from += PIECE) ask<false>(data, size, at + AHEAD_READING + from);
    out[block] = sum_of_squares(widen(buffer, data, type, at, n), n);
  }
}

extern "C" void zerodrift_digits(int64_t count, const double* sums, int64_t* out) {
  add_digits(count, sums, out);
}

extern "C" void zerodrift_prints(int64_t blocks, const uint32_t* words, uint64_t* out, int32_t threads) {
  const int count = workers(blocks * BLOCK, threads);
  (void)count;
  const int64_t whole = blocks - blocks % PRINT_AT_ONCE;
#pragma omp parallel for schedule(static) num_threads(count) if (count > 1)
  for (int64_t block = 0; block < whole; block += PRINT_AT_ONCE)
    print_blocks<PRINT_AT_ONCE>(words + block * PRINT_WORDS, block, out + block);
  for (int64_t block = whole; block < blocks; ++block)
    print_blocks<1>(words + block * PRINT_WORDS, block, out + block);
}

// The first block may begin in the middle, at place `first`.
extern "C" void zerodrift_digests(int64_t numel, const void* data, int32_t bytes, int32_t first,
                                  const uint64_t* weights, uint64_t* out, int32_t threads) {
  const int64_t blocks = (first + numel + BLOCK - 1) / BLOCK;
  const int count = workers(numel, threads);
  (void)count;
#pragma omp parallel for schedule(static) num_threads(count) if (count > 1)
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t start = block * BLOCK - first;
    const int64_t low = start < 0 ? 0 : start;
    const int64_t high = start + BLOCK < numel ? start + BLOCK : numel;
    const int n = static_cast<int>(high - low);
    const uint64_t* here = weights + (low - start);
    out[block] = bytes == 4 ? digest_of(static_cast<const uint32_t*>(data) + low, here, n)
                            : digest_of(static_cast<const uint16_t*>(data) + low, here, n);
  }
}

extern "C" void zerodrift_sums(int64_t numel, int64_t count, const void* const* data, int32_t type, void* out,
                               int32_t out_type, int32_t tree, int32_t threads) {
  const Parts parts{data, count, type};
  const int64_t spans = (numel + SPAN - 1) / SPAN;
  const int team = workers(numel * count, threads);
  (void)team;
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
  for (int64_t span = 0; span < spans; ++span) {
    const int64_t at = span * SPAN;
    const int n = static_cast<int>(numel - at < SPAN ? numel - at : SPAN);
    alignas(64) float sum[SPAN];
    if (tree) {
      add_by_tree(sum, parts, 0, count, out_type, at, n);
    } else {
      add_in_turn(sum, parts, out_type, at, n);
    }
    store_sum(out, out_type, sum, at, n);
  }
}

// Encodes a run of whole blocks, or decodes it; see `enum Way`.
extern "C" void zerodrift_narrow(int64_t numel, const Format* format, int32_t way, void* values, int32_t type,
                                 void* codes, void* scales, const int64_t* keys, int64_t number,
                                 int32_t threads) {
  const Run run{*format, LARGEST[format->element], numel, type, values, static_cast<uint8_t*>(codes),
                static_cast<uint8_t*>(scales), keys, number};
  const SpanFunction function = span_function(format->element, way);
  const int64_t spans = (numel + BLOCK - 1) / BLOCK;
  const int count = workers(numel, threads);
  (void)count;
#pragma omp parallel for schedule(static) num_threads(count) if (count > 1)
  for (int64_t span = 0; span < spans; ++span) {
    const int64_t at = span * BLOCK;
    function(run, at, static_cast<int>(numel - at < BLOCK ? numel - at : BLOCK));
  }
}
