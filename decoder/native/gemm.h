// Rows times a packed matrix. Each output is one chain of fused multiply-adds over k in order, whatever the number of
// rows, so a row's result never depends on its neighbours.
#pragma once

#include "simd.h"

constexpr int STRIP = 6;         // rows held in registers: 6 x 4 accumulators of 32 vector registers
constexpr int GROUP_BLOCKS = 4;  // 16-lane blocks of outputs held in registers
constexpr int GROUP = GROUP_BLOCKS * LANES;

// [n, k] packed by groups of 64 outputs; the last group may be narrower by whole blocks of 16. Within a group k runs
// slowest: fp32 [k][outputs], bf16 [k / 2][outputs][2], so that one 32-bit lane holds the weights of k and k + 1.
struct Matrix {
  const void* data;
  int32_t n;
  int32_t k;
  int32_t is_bf16;
  int32_t unused;
};

// c [rows, blocks * 16] (+)= x [rows, k] * w [k, blocks * 16]: (x, its stride, w, its stride between consecutive k, k, c,
// its stride, whether to add); strides in elements, those of bf16 pairs.
typedef void (*Micro)(const float*, long, const void*, long, int, float*, long, bool);

// What w holds: fp32 [k][outputs], bf16 [k / 2][outputs][2] or IEEE halves [k][outputs].
enum Kind { FP32, BF16, HALF };
extern const Micro MICRO[3][STRIP][GROUP_BLOCKS];  // [kind][rows - 1][blocks - 1], micro.cpp

static inline Micro fp32_micro(int rows, int blocks) { return MICRO[FP32][rows - 1][blocks - 1]; }
static inline Micro micro_for(const float*, int rows, int blocks) { return MICRO[FP32][rows - 1][blocks - 1]; }
static inline Micro micro_for(const uint16_t*, int rows, int blocks) { return MICRO[HALF][rows - 1][blocks - 1]; }

static inline long round_up(long n, long multiple) { return (n + multiple - 1) / multiple * multiple; }

// Calls f(first row, rows) for strips of at most MOST rows, as equal as can be.
template <int MOST = STRIP, class F>
static inline void for_strips(int rows, F&& f) {
  const int strips = (rows + MOST - 1) / MOST;
  for (int s = 0, first = 0; s < strips; ++s) {
    const int size = (rows - first + strips - s - 1) / (strips - s);
    f(first, size);
    first += size;
  }
}

// Calls f(weights, first output, blocks of 16) for every group of a matrix.
template <class F>
static inline void for_groups(const Matrix& m, F&& f) {
  const int blocks = (m.n + LANES - 1) / LANES;
  const uint32_t* data = static_cast<const uint32_t*>(m.data);
  for (int block = 0; block < blocks; block += GROUP_BLOCKS)
    f(data + static_cast<long>(block) * LANES * m.k / (m.is_bf16 ? 2 : 1), block * LANES,
      blocks - block < GROUP_BLOCKS ? blocks - block : GROUP_BLOCKS);
}

// x [rows, k] * matrix^T, a tile at a time: take(first row, rows, first output, outputs, tile [rows, 64]).
template <class Take>
static inline void product(const Matrix& m, const float* x, long ldx, int rows, Take&& take) {
  alignas(64) float tile[STRIP * GROUP];
  for_groups(m, [&](const void* w, int column, int blocks) {
    for_strips(rows, [&](int first, int size) {
      MICRO[m.is_bf16][size - 1][blocks - 1](x + first * ldx, ldx, w, blocks * LANES, m.k, tile, GROUP, false);
      take(first, size, column, blocks * LANES, tile);
    });
  });
}

// out [rows, n rounded up to 16] = x * matrix^T
static inline void linear(const Matrix& m, const float* x, long ldx, int rows, float* out, long ldo) {
  for_groups(m, [&](const void* w, int column, int blocks) {
    for_strips(rows, [&](int first, int size) {
      MICRO[m.is_bf16][size - 1][blocks - 1](x + first * ldx, ldx, w, blocks * LANES, m.k, out + first * ldo + column, ldo,
                                             false);
    });
  });
}

// The same, added to what is there: one rounding at the size of `out`, not one for every k.
static inline void add_linear(const Matrix& m, const float* x, long ldx, int rows, float* out, long ldo) {
  product(m, x, ldx, rows, [&](int first, int size, int column, int width, const float* tile) {
    for (int r = 0; r < size; ++r) {
      float* to = out + (first + r) * ldo + column;
      for (int c = 0; c < width; c += LANES) store(to + c, load(to + c) + load(tile + r * GROUP + c));
    }
  });
}
