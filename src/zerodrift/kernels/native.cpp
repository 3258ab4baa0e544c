// The CPU fast path: one optimizer step in one pass over memory, and sums of squares per block.
//
// A flat buffer is worked through in blocks of 256 elements. What is not fp32 in memory is widened into a
// buffer of one block that stays in the first-level cache; the update runs on fp32 there (or in place, where
// memory holds fp32 already); results are narrowed on the way back. So every dtype is one small function
// instead of a factor in a product of templates, and the whole file compiles in seconds. No torch headers:
// tensors arrive as addresses in a plain struct, which `optim/fused.py` mirrors.
//
// The definition of every number is `optim/updates.py`, `optim/rounding.py`, `optim/blockwise.py` and
// `kernels/squares.py`; this file equals them bit for bit. Three things make that hold: the compiler may not
// contract a*b+c on its own (-ffp-contract=off), products and sums are contracted exactly where torch's own
// kernels were seen to (ZERODRIFT_FMA_*, set by `kernels/probe.py`), and every sum has a fixed order within
// its block.
//
// Invariant: an element's result depends on its own values, its group and its block's key: never on where a
// slice begins, on the number of threads, or on alignment.

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int BLOCK = 256;
constexpr int LANES = 16;         // partial sums of a block; lane i takes elements i, i + 16, ...
constexpr int DIGITS = 44;        // of an exact sum, 32 bits each; the lowest is worth 2^LOWEST
constexpr int LOWEST = -352;      // 2^-298 is the least square of an fp32 value; a double has 52 bits below
constexpr int STATISTICS = 6;     // numbers per block
constexpr int64_t GRAIN = 32768;  // elements that are worth a thread
constexpr int LEVELS = 8;         // decades of an 8-bit code

enum Type : int32_t { FP32 = 0, BF16 = 1, FP16 = 2 };
enum Master : int32_t { MASTER_FP32 = 0, MASTER_SPLIT = 1, MASTER_SAME = 2 };
enum Rounding : int32_t { EVEN = 0, AWAY = 1 };
enum State : int32_t { STATE_FP32 = 0, STATE_BF16 = 1, STATE_STOCHASTIC = 2, STATE_8BIT = 3 };
enum Algorithm : int32_t { ADAM = 0, SGD = 1, LION = 2 };

// A vector square root with the interface of MKL's vmsSqrt; null is the processor's own, correctly rounded.
using Root = void (*)(int, const float*, float*, int64_t);
constexpr int64_t ROOT_MODE = 0x140102;  // as torch calls it; see `kernels/probe.py`

// One row per group, all fp32, rounded from doubles by the caller.
struct Group {
  float scale;       // multiplies the gradient: unscale x clip factor, negative to maximize
  float decay;       // multiplies the parameter first (decoupled weight decay)
  float l2;          // times the parameter, added to the gradient
  float blend1;      // weight of the gradient in the first moment
  float keep1;       // weight of the old first moment (SGD: the momentum; Adam's follows from blend1)
  float blend2;      // weight of the new value in the second moment (Lion: in the stored first moment)
  float keep2;       // weight of the old one
  float correction;  // divides the root of the second moment
  float epsilon;
  float step;        // negative learning rate, bias correction included
  float first;       // 1 on the first update: SGD's buffer starts as the gradient
  float nesterov;
};

// An 8-bit code; the tables come from `optim/blockwise.py`.
struct Code {
  float bound[LEVELS];  // a fraction above bound[i] is in decade i + 1 or higher
  float start[LEVELS];  // where a decade begins
  float steep[LEVELS];  // codes per unit in it
  float value[256];     // of every code
};

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
  int32_t rounding;
  int32_t state_kind;
  int32_t algorithm;
  int32_t threads;
};

// ---------------------------------------------------------------------------------------------- formats

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

constexpr uint32_t QUIET = 0x7FC0;  // the one NaN that is ever stored in 16 bits
const uint32_t NO_WORDS[BLOCK] = {0};

inline uint16_t bf16_even(float x) {
  const uint32_t u = bits(x);
  const uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(is_nan(u) ? QUIET : rounded);
}

inline uint16_t bf16_away(float x) {
  const uint32_t u = bits(x);
  return static_cast<uint16_t>(is_nan(u) ? QUIET : (u + 0x8000u) >> 16);
}

inline uint16_t bf16_random(float x, uint32_t random16) {
  const uint32_t u = bits(x);
  return static_cast<uint16_t>(is_nan(u) ? QUIET : (u + random16) >> 16);
}

void widen_bf16(float* __restrict out, const uint16_t* __restrict in, int n) {
  for (int i = 0; i < n; ++i) out[i] = value(static_cast<uint32_t>(in[i]) << 16);
}

void narrow_even(uint16_t* __restrict out, const float* __restrict in, int n) {
  for (int i = 0; i < n; ++i) out[i] = bf16_even(in[i]);
}

void narrow_away(uint16_t* __restrict out, const float* __restrict in, int n) {
  for (int i = 0; i < n; ++i) out[i] = bf16_away(in[i]);
}

void widen_fp16(float* __restrict out, const uint16_t* __restrict in, int n) {
  int i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
#endif
  for (; i < n; ++i) {
    _Float16 half;
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
    const _Float16 half = static_cast<_Float16>(in[i]);
    std::memcpy(out + i, &half, 2);
  }
}

void join(float* __restrict out, const uint16_t* __restrict high, const int16_t* __restrict low, int n) {
  for (int i = 0; i < n; ++i)
    out[i] = value((static_cast<uint32_t>(high[i]) << 16) + static_cast<uint32_t>(int32_t{low[i]}));
}

void split(uint16_t* __restrict high, int16_t* __restrict low, const float* __restrict in, int n) {
  for (int i = 0; i < n; ++i) {
    const uint32_t u = bits(in[i]);
    const bool nan = is_nan(u);
    high[i] = static_cast<uint16_t>(nan ? QUIET : (u + 0x8000u) >> 16);
    low[i] = static_cast<int16_t>(nan ? 0 : u & 0xFFFFu);
  }
}

const float* widen(float* buffer, const void* data, int32_t type, int64_t at, int n) {
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

// ------------------------------------------------------------------------------------------------ squares

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
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

// ------------------------------------------------------------------------------------- moments in memory

// How one moment rests between steps. The word holds 16 random bits at its low end; most ignore it.
struct Wide {
  using Type = float;
  static float load(float x) { return x; }
  static float store(float x, uint32_t) { return x; }
};

struct Nearest {
  using Type = uint16_t;
  static float load(uint16_t x) { return value(static_cast<uint32_t>(x) << 16); }
  static uint16_t store(float x, uint32_t) { return bf16_even(x); }
};

// [Note: random bits] One 32-bit word per element serves both moments: its low half rounds the first, its
// high half the second. The word is a keyed mix of the element's place in its block.
struct Stochastic {
  using Type = uint16_t;
  static float load(uint16_t x) { return value(static_cast<uint32_t>(x) << 16); }
  static uint16_t store(float x, uint32_t word) { return bf16_random(x, word & 0xFFFFu); }
};

// ---------------------------------------------------------------------------------------------- 8-bit codes

constexpr uint32_t INFINITY_BITS = 0x7F800000u;
constexpr uint32_t LEAST_SCALE = (127u - 96u) << 23;     // 2^-96
constexpr uint32_t LARGEST_SCALE = (127u + 126u) << 23;  // 2^126

// The largest magnitude, within what a scale may be; compared as integers, so a NaN is the largest of all.
float block_scale(const float* __restrict in, int n) {
  uint32_t most = 0;
  for (int i = 0; i < n; ++i) {
    const uint32_t magnitude = bits(in[i]) & 0x7FFFFFFFu;
    most = magnitude > most ? magnitude : most;
  }
  if (most > INFINITY_BITS) return value(QUIET << 16);
  if (most < LEAST_SCALE) return 0.0f;
  return value(most < LARGEST_SCALE ? most : LARGEST_SCALE);
}

#if defined(__AVX512F__)

// [Note: tables in registers] With 512-bit vectors a lookup among 32 numbers is one instruction, and a gather
// is sixteen loads. So the values of a code are looked up 32 at a time and the right ones kept; and a decade
// is found by the exponent of a number: no binade has two bounds in it, so 32 binades tell the decade but for
// one comparison. The arithmetic is that of the plain loops below, operation by operation.
constexpr int BINADES = 32;  // from 2^-31 to 1; the lowest bound is 1e-7

struct Table {
  alignas(64) float value[256];
  alignas(64) float bound[BINADES];  // the one in this binade, or one that nothing reaches
  alignas(64) int32_t base[BINADES];  // how many bounds are below this binade
  alignas(64) float start[16];
  alignas(64) float steep[16];

  explicit Table(const Code& code) {
    std::memcpy(value, code.value, sizeof(value));
    for (int i = 0; i < BINADES; ++i) {
      const float low = std::ldexp(1.0f, i - 31), high = 2.0f * low;
      bound[i] = 2.0f;
      base[i] = 0;
      for (int level = 0; level < LEVELS; ++level) {
        const float at = code.bound[level];
        if (at < low) base[i] += 1;
        if (at >= low && at < high) bound[i] = at;
      }
    }
    for (int level = 0; level < LEVELS; ++level) {
      start[level] = start[level + LEVELS] = code.start[level];
      steep[level] = steep[level + LEVELS] = code.steep[level];
    }
  }
};

// A block in vectors of 16. What is left at its end goes by way of a buffer, which is faster than masks: some
// processors do not forward a masked store to the load behind it.
template <class In, class Out, class Step>
void in_sixteens(Out* __restrict out, const In* __restrict in, int n, Step step) {
  int i = 0;
  for (; i + 16 <= n; i += 16) step(out + i, in + i, i);
  if (i == n) return;
  In from[16] = {0};
  Out to[16];
  std::memcpy(from, in + i, sizeof(In) * (n - i));
  step(to, from, i);
  std::memcpy(out + i, to, sizeof(Out) * (n - i));
}

inline __m512 find32(const float* table, __m512i index) {
  return _mm512_permutex2var_ps(_mm512_load_ps(table), index, _mm512_load_ps(table + 16));
}

inline __m512 find128(const float* table, __m512i index) {
  const __mmask16 bit5 = _mm512_test_epi32_mask(index, _mm512_set1_epi32(32));
  const __mmask16 bit6 = _mm512_test_epi32_mask(index, _mm512_set1_epi32(64));
  const __m512 low = _mm512_mask_blend_ps(bit5, find32(table, index), find32(table + 32, index));
  const __m512 high = _mm512_mask_blend_ps(bit5, find32(table + 64, index), find32(table + 96, index));
  return _mm512_mask_blend_ps(bit6, low, high);
}

template <bool SIGNED>
void decode(float* __restrict out, const uint8_t* __restrict in, float scale, const Table& table, int n) {
  const __m512 factor = _mm512_set1_ps(scale);
  in_sixteens(out, in, n, [&](float* to, const uint8_t* from, int) {
    const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    __m512 found = find128(table.value, code);
    const __mmask16 bit7 = _mm512_test_epi32_mask(code, _mm512_set1_epi32(128));
    if (SIGNED) {
      const __m512i bits = _mm512_castps_si512(found);
      found = _mm512_castsi512_ps(_mm512_mask_xor_epi32(bits, bit7, bits, _mm512_set1_epi32(INT32_MIN)));
    } else {
      found = _mm512_mask_blend_ps(bit7, found, find128(table.value + 128, code));
    }
    _mm512_storeu_ps(to, _mm512_mul_ps(found, factor));
  });
}

// HALF: which half of a random word rounds this moment; see [Note: random bits]. There are words for a block.
template <bool SIGNED, int HALF>
float encode(uint8_t* __restrict out, const float* __restrict in, const Table& table,
             const uint32_t* __restrict words, int n) {
  const float scale = block_scale(in, n);
  const __m512 inverse = _mm512_set1_ps(scale > 0.0f ? 1.0f / scale : 0.0f);
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512i unit = _mm512_set1_epi32(1), largest = _mm512_set1_epi32(0x7FFFFFFF);
  const __m512i top = _mm512_set1_epi32(SIGNED ? 127 : 255), lower = _mm512_set1_epi32(0xFFFF);
  const __m512 start = _mm512_load_ps(table.start), steep = _mm512_load_ps(table.steep);
  const __m512i low = _mm512_load_si512(table.base), high = _mm512_load_si512(table.base + 16);
  const bool least = !SIGNED && scale != 0.0f;  // what is there is never stored as nothing
  in_sixteens(out, in, n, [&](uint8_t* to, const float* from, int i) {
    const __m512i u = _mm512_loadu_si512(from);
    const __m512i magnitude = _mm512_and_si512(u, largest);
    __m512 part = _mm512_mul_ps(_mm512_castsi512_ps(magnitude), inverse);
    // A NaN is 1 as well.
    part = _mm512_mask_mov_ps(one, _mm512_cmp_ps_mask(part, one, _CMP_LE_OQ), part);
    // Exponents from 96 on; a lookup takes the last five bits, of which 96 has none.
    const __m512i binade =
        _mm512_max_epi32(_mm512_srli_epi32(_mm512_castps_si512(part), 23), _mm512_set1_epi32(127 - 31));
    const __mmask16 above = _mm512_cmp_ps_mask(part, find32(table.bound, binade), _CMP_GT_OQ);
    __m512i level = _mm512_permutex2var_epi32(low, binade, high);
    level = _mm512_mask_add_epi32(level, above, level, unit);
    const __m512i first = _mm512_sub_epi32(_mm512_sllv_epi32(unit, level), unit);
    const __m512i word = _mm512_loadu_si512(words + i);
    const __m512i drawn = HALF ? _mm512_srli_epi32(word, 16) : _mm512_and_si512(word, lower);
    const __m512 share = _mm512_mul_ps(_mm512_cvtepi32_ps(drawn), _mm512_set1_ps(0x1p-16f));
    const __m512 inside = _mm512_mul_ps(_mm512_sub_ps(part, _mm512_permutexvar_ps(level, start)),
                                        _mm512_permutexvar_ps(level, steep));
    __m512i found = _mm512_add_epi32(first, _mm512_cvttps_epi32(_mm512_add_ps(inside, share)));
    found = _mm512_min_epi32(found, top);
    const __mmask16 something = _mm512_test_epi32_mask(magnitude, magnitude);
    if (least) found = _mm512_mask_max_epi32(found, something, found, unit);
    if (SIGNED) {
      const __mmask16 number = _mm512_cmple_epu32_mask(magnitude, _mm512_set1_epi32(INFINITY_BITS));
      const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(u, 24), _mm512_set1_epi32(128));
      found = _mm512_mask_or_epi32(found, number, found, sign);
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(found));
  });
  return scale;
}

#else

using Table = Code;

template <bool SIGNED>
void decode(float* __restrict out, const uint8_t* __restrict in, float scale, const Table& table, int n) {
  const float* __restrict value = table.value;
  for (int i = 0; i < n; ++i) out[i] = value[in[i]] * scale;
}

// HALF: which half of a random word rounds this moment; see [Note: random bits].
template <bool SIGNED, int HALF>
float encode(uint8_t* __restrict out, const float* __restrict in, const Table& table,
             const uint32_t* __restrict words, int n) {
  constexpr int TOP = SIGNED ? 127 : 255;
  const float scale = block_scale(in, n);
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  const int least = !SIGNED && scale != 0.0f;  // what is there is never stored as nothing
  const Code c = table;
  for (int i = 0; i < n; ++i) {
    const uint32_t u = bits(in[i]);
    const uint32_t magnitude = u & 0x7FFFFFFFu;
    float part = value(magnitude) * inverse;
    part = part <= 1.0f ? part : 1.0f;  // a NaN is 1 as well
    int first = 0;                      // the code before this decade's: 2^level - 1
    float start = c.start[0], steep = c.steep[0];
    for (int level = 1; level < LEVELS; ++level) {
      const bool above = part > c.bound[level - 1];
      first = above ? (1 << level) - 1 : first;
      start = above ? c.start[level] : start;
      steep = above ? c.steep[level] : steep;
    }
    const float share = static_cast<float>((words[i] >> (16 * HALF)) & 0xFFFFu) * 0x1p-16f;
    int found = first + static_cast<int>((part - start) * steep + share);
    found = found < TOP ? found : TOP;
    const int floor = magnitude != 0 ? least : 0;
    found = found > floor ? found : floor;
    const uint32_t sign = SIGNED && magnitude <= INFINITY_BITS ? u >> 31 << 7 : 0;
    out[i] = static_cast<uint8_t>(static_cast<uint32_t>(found) | sign);
  }
  return scale;
}

#endif

// ------------------------------------------------------------------------------------------ the arithmetic

// a * b + c, three times: as torch's kernels for add(alpha), addcmul and lerp compute it on this machine.
inline float add_scaled(float c, float a, float b) {
#if ZERODRIFT_FMA_ADD
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

inline float add_product(float c, float a, float b) {
#if ZERODRIFT_FMA_ADDCMUL
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

inline float add_blend(float c, float a, float b) {
#if ZERODRIFT_FMA_LERP
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

inline float second_moment(float v, float g, const Group& h) {
  return add_product(v * h.keep2, h.blend2 * g, g);
}

inline float adam_change(float m, float root, const Group& h) {
  return (h.step * m) / (root / h.correction + h.epsilon);
}

// What every algorithm is given: one block in fp32, its moments as they rest, and random words.
template <class Moment>
struct Block {
  using Type = typename Moment::Type;
  float* p;
  Type* m;
  Type* v;
  float* g;
  float* wanted;  // receives what p was to change by, before rounding; used where WANTED
  const uint32_t* words;
  int n;
};

// The gradient of an L2 penalty. Nothing is added for 0, as in torch: 0 * inf would be NaN.
void add_l2(float* __restrict g, const float* __restrict p, float l2, int n) {
  if (l2 == 0.0f) return;
  for (int i = 0; i < n; ++i) g[i] = add_scaled(g[i], l2, p[i]);
}

// NEAR: torch.lerp starts from whichever end is nearer, the old moment for a weight under one half.
template <class Moment, bool WANTED, bool NEAR>
void adam_one_pass(const Block<Moment>& b, const Group& group) {
  using Type = typename Moment::Type;
  float* __restrict p = b.p;
  Type* __restrict m = b.m;
  Type* __restrict v = b.v;
  const float* __restrict g = b.g;
  float* __restrict wanted = b.wanted;
  const uint32_t* __restrict words = b.words;
  const Group h = group;
  const float weight = NEAR ? h.blend1 : h.blend1 - 1.0f;
  for (int i = 0; i < b.n; ++i) {
    const float old = Moment::load(m[i]);
    const float mean = add_blend(NEAR ? old : g[i], weight, g[i] - old);
    const float square = second_moment(Moment::load(v[i]), g[i], h);
    m[i] = Moment::store(mean, words[i]);
    v[i] = Moment::store(square, words[i] >> 16);
    const float change = adam_change(mean, __builtin_sqrtf(square), h);
    if (WANTED) wanted[i] = change + (h.decay - 1.0f) * p[i];
    p[i] = p[i] * h.decay + change;
  }
}

// The same with a square root that is a call: moments first, then all roots, then the parameter.
template <class Moment, bool WANTED>
void adam_with_root(const Block<Moment>& b, const Group& group, Root root) {
  using Type = typename Moment::Type;
  alignas(64) float means[BLOCK], squares[BLOCK], roots[BLOCK];
  float* __restrict p = b.p;
  Type* __restrict m = b.m;
  Type* __restrict v = b.v;
  const float* __restrict g = b.g;
  float* __restrict wanted = b.wanted;
  const uint32_t* __restrict words = b.words;
  const Group h = group;
  const bool near = std::fabs(h.blend1) < 0.5f;
  const float weight = near ? h.blend1 : h.blend1 - 1.0f;
  for (int i = 0; i < b.n; ++i) {
    const float old = Moment::load(m[i]);
    means[i] = add_blend(near ? old : g[i], weight, g[i] - old);
    squares[i] = second_moment(Moment::load(v[i]), g[i], h);
    m[i] = Moment::store(means[i], words[i]);
    v[i] = Moment::store(squares[i], words[i] >> 16);
  }
  root(b.n, squares, roots, ROOT_MODE);
  for (int i = 0; i < b.n; ++i) {
    const float change = adam_change(means[i], roots[i], h);
    if (WANTED) wanted[i] = change + (h.decay - 1.0f) * p[i];
    p[i] = p[i] * h.decay + change;
  }
}

template <class Moment, bool WANTED>
void adam(const Block<Moment>& b, const Group& h, Root root) {
  add_l2(b.g, b.p, h.l2, b.n);
  if (root != nullptr) {
    adam_with_root<Moment, WANTED>(b, h, root);
  } else if (std::fabs(h.blend1) < 0.5f) {
    adam_one_pass<Moment, WANTED, true>(b, h);
  } else {
    adam_one_pass<Moment, WANTED, false>(b, h);
  }
}

// Leaves in g the direction that the parameter takes.
template <class Moment>
void sgd_momentum(const Block<Moment>& b, const Group& group) {
  using Type = typename Moment::Type;
  Type* __restrict m = b.m;
  float* __restrict g = b.g;
  const uint32_t* __restrict words = b.words;
  const Group h = group;
  const bool first = h.first != 0.0f;
  const bool nesterov = h.nesterov != 0.0f;
  for (int i = 0; i < b.n; ++i) {
    const float blended = add_scaled(Moment::load(m[i]) * h.keep1, h.blend1, g[i]);
    const float buffer = first ? g[i] : blended;
    m[i] = Moment::store(buffer, words[i]);
    const float ahead = add_scaled(g[i], h.keep1, buffer);
    g[i] = nesterov ? ahead : buffer;
  }
}

template <class Moment, bool WANTED>
void sgd(const Block<Moment>& b, const Group& group) {
  const Group h = group;
  add_l2(b.g, b.p, h.l2, b.n);
  if (b.m != nullptr && h.keep1 != 0.0f) sgd_momentum<Moment>(b, h);
  float* __restrict p = b.p;
  const float* __restrict g = b.g;
  float* __restrict wanted = b.wanted;
  for (int i = 0; i < b.n; ++i) {
    if (WANTED) wanted[i] = h.step * g[i];
    p[i] = add_scaled(p[i], h.step, g[i]);
  }
}

template <class Moment, bool WANTED>
void lion(const Block<Moment>& b, const Group& group) {
  using Type = typename Moment::Type;
  float* __restrict p = b.p;
  Type* __restrict m = b.m;
  const float* __restrict g = b.g;
  float* __restrict wanted = b.wanted;
  const uint32_t* __restrict words = b.words;
  const Group h = group;
  for (int i = 0; i < b.n; ++i) {
    const float old = Moment::load(m[i]);
    const float direction = add_scaled(old * h.keep1, h.blend1, g[i]);
    const float sign = direction > 0.0f ? 1.0f : (direction < 0.0f ? -1.0f : 0.0f);
    m[i] = Moment::store(add_scaled(old * h.keep2, h.blend2, g[i]), words[i]);
    if (WANTED) wanted[i] = h.step * sign + (h.decay - 1.0f) * p[i];
    p[i] = add_scaled(p[i] * h.decay, h.step, sign);
  }
}

template <class Moment, bool WANTED>
void advance(const Update& u, const Group& h, const Block<Moment>& block) {
  if (u.algorithm == ADAM) {
    adam<Moment, WANTED>(block, h, u.root);
  } else if (u.algorithm == SGD) {
    sgd<Moment, WANTED>(block, h);
  } else {
    lion<Moment, WANTED>(block, h);
  }
}

// ---------------------------------------------------------------------------------------------- one block

void load_gradient(float* __restrict out, const Update& u, float scale, int64_t at, int n) {
  alignas(64) float buffer[BLOCK];
  const float* __restrict in = widen(buffer, u.grad, u.grad_type, at, n);
  for (int i = 0; i < n; ++i) out[i] = in[i] * scale;
}

// The master in fp32: in memory where it rests as fp32, in the buffer otherwise.
float* load_master(const Update& u, float* buffer, int64_t at, int n) {
  if (u.master_kind == MASTER_FP32) return static_cast<float*>(u.master) + at;
  if (u.master_kind == MASTER_SPLIT) {
    join(buffer, static_cast<const uint16_t*>(u.storage) + at, static_cast<const int16_t*>(u.master) + at, n);
    return buffer;
  }
  return const_cast<float*>(widen(buffer, u.storage, u.storage_type, at, n));
}

void store_visible(const Update& u, const float* p, int64_t at, int n) {
  uint16_t* narrow = static_cast<uint16_t*>(u.storage) + at;
  if (u.master_kind == MASTER_SPLIT) {
    split(narrow, static_cast<int16_t*>(u.master) + at, p, n);
  } else if (u.storage_type == FP16) {
    narrow_fp16(narrow, p, n);
  } else if (u.storage_type == BF16 && u.rounding == AWAY) {
    narrow_away(narrow, p, n);
  } else if (u.storage_type == BF16) {
    narrow_even(narrow, p, n);
  }
}

// What a block looked like before its update, kept on request.
struct Before {
  float weight[BLOCK];
  float gradient[BLOCK];
  float wanted[BLOCK];
  unsigned char visible[BLOCK * 4];
};

int visible_size(const Update& u) { return u.storage_type == FP32 ? 4 : 2; }

void remember(Before& before, const Update& u, const float* p, const float* g, int64_t at, int n) {
  const int size = visible_size(u);
  std::memcpy(before.weight, p, sizeof(float) * n);
  std::memcpy(before.gradient, g, sizeof(float) * n);
  std::memcpy(before.visible, static_cast<const unsigned char*>(u.storage) + at * size, size * n);
}

// The last moment of a block, as it is stored; null where there is none.
const float* last_moment(float* buffer, const Update& u, int64_t block, int64_t at, int n) {
  const bool second = u.moment2 != nullptr;
  const void* last = second ? u.moment2 : u.moment1;
  if (last == nullptr) return nullptr;
  if (u.state_kind != STATE_8BIT) return widen(buffer, last, u.state_kind == STATE_FP32 ? FP32 : BF16, at, n);
  const float scale = (second ? u.scale2 : u.scale1)[block];
  const float* value = u.codes[second].value;
  for (int i = 0; i < n; ++i) buffer[i] = value[static_cast<const uint8_t*>(last)[at + i]] * scale;
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

struct Coded : Wide {};

// What a state needs beside its moments, made once per update: for 8-bit codes, their tables.
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
// codes.
template <class Moment>
struct Moments {
  using Type = typename Moment::Type;
  Type *m, *v;
  Moments(const Update& u, const Tables<Moment>&, int64_t, int64_t at, int)
      : m(u.moment1 == nullptr ? nullptr : static_cast<Type*>(u.moment1) + at),
        v(u.moment2 == nullptr ? nullptr : static_cast<Type*>(u.moment2) + at) {}
  void store(const Update&, const Tables<Moment>&, int64_t, int64_t, const uint32_t*, int) {}
};

template <>
struct Moments<Coded> {
  float *m = nullptr, *v = nullptr;
  alignas(64) float first[BLOCK], second[BLOCK];
  Moments(const Update& u, const Tables<Coded>& tables, int64_t block, int64_t at, int n) {
    if (u.moment1 != nullptr) {
      m = first;
      decode<true>(m, static_cast<const uint8_t*>(u.moment1) + at, u.scale1[block], tables.first, n);
    }
    if (u.moment2 != nullptr) {
      v = second;
      decode<false>(v, static_cast<const uint8_t*>(u.moment2) + at, u.scale2[block], tables.second, n);
    }
  }
  void store(const Update& u, const Tables<Coded>& tables, int64_t block, int64_t at, const uint32_t* words,
             int n) {
    if (m != nullptr)
      u.scale1[block] = encode<true, 0>(static_cast<uint8_t*>(u.moment1) + at, m, tables.first, words, n);
    if (v != nullptr)
      u.scale2[block] = encode<false, 1>(static_cast<uint8_t*>(u.moment2) + at, v, tables.second, words, n);
  }
};

template <class Moment>
void update_block(const Update& u, const Tables<Moment>& tables, int64_t block) {
  const int64_t at = block * BLOCK;
  const int n = static_cast<int>(u.numel - at < BLOCK ? u.numel - at : BLOCK);
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
  Moments<Moment> moments(u, tables, block, at, n);
  if (u.statistics == nullptr) {
    advance<Moment, false>(u, h, {p, moments.m, moments.v, g, nullptr, words, n});
    moments.store(u, tables, block, at, words, n);
    store_visible(u, p, at, n);
    return;
  }
  Before before;
  remember(before, u, p, g, at, n);
  advance<Moment, true>(u, h, {p, moments.m, moments.v, g, before.wanted, words, n});
  moments.store(u, tables, block, at, words, n);
  store_visible(u, p, at, n);
  account(u.statistics + STATISTICS * block, before, u, p, block, at, n);
}

int workers(int64_t numel, int32_t threads) {
  const int64_t useful = numel / GRAIN;
  return static_cast<int>(useful < 1 ? 1 : (useful < threads ? useful : threads));
}

template <class Moment>
void update_all(const Update& u) {
  const int64_t blocks = (u.numel + BLOCK - 1) / BLOCK;
  const int count = workers(u.numel, u.threads);
  const Tables<Moment> tables(u);
  (void)count;
#pragma omp parallel for schedule(static) num_threads(count) if (count > 1)
  for (int64_t block = 0; block < blocks; ++block) update_block<Moment>(u, tables, block);
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
  (void)count;
#pragma omp parallel for schedule(static) num_threads(count) if (count > 1)
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t at = block * BLOCK;
    const int n = static_cast<int>(numel - at < BLOCK ? numel - at : BLOCK);
    alignas(64) float buffer[BLOCK];
    out[block] = sum_of_squares(widen(buffer, data, type, at, n), n);
  }
}

// Adds non-negative doubles exactly: each is cut at multiples of 32 bits, and digits are summed as integers.
// The last place of `out` counts what is not finite.
extern "C" void zerodrift_digits(int64_t count, const double* sums, int64_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    uint64_t u;
    std::memcpy(&u, sums + i, 8);
    const int exponent = static_cast<int>((u >> 52) & 0x7FF);
    if (exponent == 0x7FF) {
      out[DIGITS] += 1;
      continue;
    }
    const uint64_t mantissa = (u & 0xFFFFFFFFFFFFFu) | (exponent ? 0x10000000000000u : 0u);
    const int place = (exponent ? exponent : 1) - 1075 - LOWEST;
    if (mantissa == 0 || place < 0) continue;
    const uint64_t low = (mantissa & 0xFFFFFFFFu) << (place % 32);
    const uint64_t high = (mantissa >> 32) << (place % 32);
    int64_t* digit = out + place / 32;
    digit[0] += static_cast<int64_t>(low & 0xFFFFFFFFu);
    digit[1] += static_cast<int64_t>((low >> 32) + (high & 0xFFFFFFFFu));
    digit[2] += static_cast<int64_t>(high >> 32);
  }
}
