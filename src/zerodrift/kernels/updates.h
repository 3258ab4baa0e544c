// The arithmetic of AdamW, Adam, SGD and Lion on one block, with fp32 parameters and stored moments. The
// definition is `optim/updates.py`.
//
// Invariant: multiply and add are fused where ZERODRIFT_FMA_* says that torch's kernels fuse them, and nowhere
// else.

#pragma once

#include <cmath>

#include "formats.h"

namespace {

enum Algorithm : int32_t { ADAM = 0, SGD = 1, LION = 2 };

// A vector square root with the interface of MKL's vmsSqrt; null is the processor's own, correctly rounded.
using Root = void (*)(int, const float*, float*, int64_t);
constexpr int64_t ROOT_MODE = 0x140102;  // as torch calls it; see `kernels/native.py`

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

// ------------------------------------------------------------------------------------- moments in memory

const uint32_t NO_WORDS[BLOCK] = {0};

// The storage of one moment between steps. The low end of `word` has 16 random bits; most ignore it.
struct Wide {
  using Type = float;
  static constexpr int SIZE = 4;  // bytes in memory
  static float load(float x) { return x; }
  static float store(float x, uint32_t) { return x; }
};

struct Nearest {
  using Type = uint16_t;
  static constexpr int SIZE = 2;
  static float load(uint16_t x) { return value(static_cast<uint32_t>(x) << 16); }
  static uint16_t store(float x, uint32_t) { return bf16_even(x); }
};

// [Note: random bits] One 32-bit word per element serves both moments: its low half rounds the first, its
// high half the second. The word is a keyed mix of the element's place in its block.
struct Stochastic {
  using Type = uint16_t;
  static constexpr int SIZE = 2;
  static float load(uint16_t x) { return value(static_cast<uint32_t>(x) << 16); }
  static uint16_t store(float x, uint32_t word) { return bf16_random(x, word & 0xFFFFu); }
};

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

// The input of every algorithm: one block in fp32, its stored moments, and random words.
template <class Moment>
struct Block {
  using Type = typename Moment::Type;
  float* p;
  Type* m;
  Type* v;
  float* g;
  float* wanted;  // receives the intended change of p, before rounding; used if WANTED
  const uint32_t* words;
  int n;

  Block part(int from, int count) const {
    return {p + from, behind(m, from), behind(v, from), g + from, behind(wanted, from), words + from, count};
  }
  template <class T>
  static T* behind(T* data, int from) {
    return data == nullptr ? nullptr : data + from;
  }
};

// The gradient of an L2 penalty. Nothing is added for 0, as in torch: 0 * inf would be NaN.
INLINE void add_l2(float* __restrict g, const float* __restrict p, float l2, int n) {
  if (l2 == 0.0f) return;
  for (int i = 0; i < n; ++i) g[i] = add_scaled(g[i], l2, p[i]);
}

// NEAR: torch.lerp starts from the nearer end, the old moment for a weight under one half.
template <class Moment, bool WANTED, bool NEAR>
INLINE void adam_one_pass(const Block<Moment>& b, const Group& group) {
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

// The same with the square root as a function call: moments first, then all roots, then the parameter.
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
INLINE void adam(const Block<Moment>& b, const Group& h, Root root) {
  add_l2(b.g, b.p, h.l2, b.n);
  if (root != nullptr) {
    adam_with_root<Moment, WANTED>(b, h, root);
  } else if (std::fabs(h.blend1) < 0.5f) {
    adam_one_pass<Moment, WANTED, true>(b, h);
  } else {
    adam_one_pass<Moment, WANTED, false>(b, h);
  }
}

// Writes the direction of the parameter's change to g.
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
INLINE void advance(int32_t algorithm, Root root, const Group& h, const Block<Moment>& block) {
  if (algorithm == ADAM) {
    adam<Moment, WANTED>(block, h, root);
  } else if (algorithm == SGD) {
    sgd<Moment, WANTED>(block, h);
  } else {
    lion<Moment, WANTED>(block, h);
  }
}

}  // namespace
