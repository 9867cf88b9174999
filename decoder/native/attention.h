// Causal attention of many query rows over one kv head's cache: each block of 64 keys is read once for all rows.
//
// Keys lie by blocks of 64 positions, [block][dim][64], values [position][dim16]: both are what `micro` reads as weights.
// Block borders are fixed in the sequence, so a row's arithmetic does not depend on the rows beside it: a key that a
// row may not see has probability exactly 0, and adding 0 changes nothing.
#pragma once

#include "gemm.h"

constexpr int KEY_BLOCK = 64;
constexpr int TOGETHER = 2 * STRIP;  // query rows of one softmax: independent work while a row's chain waits

// Room for `queries` rows: [dim16] of output, then the softmax's running state.
struct AttentionScratch {
  float* query;   // [queries, dim]
  float* mixed;   // [queries, dim16]
  float* mass;    // [queries, 16], running sum of 2^(score - peak), lane by lane
  float* peak;    // [queries], running maximum
};

// Dimensions first ... of the key at `position`.
template <class T>
static inline void write_key(T* keys, long position, int dim, const T* part, int first, int count) {
  T* to = keys + position / KEY_BLOCK * KEY_BLOCK * dim + position % KEY_BLOCK + first * KEY_BLOCK;
  for (int d = 0; d < count; ++d) to[d * KEY_BLOCK] = part[d];
}

// The largest of a row's 64 scores; those from `seen` on become -inf.
static inline float mask_and_top(float* scores, long seen) {
  constexpr float LOWEST = -std::numeric_limits<float>::infinity();
  F16 v[GROUP_BLOCKS];
  for (int b = 0; b < GROUP_BLOCKS; ++b) v[b] = load(scores + b * LANES);
  if (seen < KEY_BLOCK)
    for (int b = 0; b < GROUP_BLOCKS; ++b) {
      const long left = seen - b * LANES;
      v[b] = keep(v[b], left < 0 ? 0 : left > LANES ? LANES : static_cast<int>(left), set1(LOWEST));
      store(scores + b * LANES, v[b]);
    }
  return largest(larger(larger(v[0], v[1]), larger(v[2], v[3])));
}

// Softmax of some rows' scores against one block, in place; rescales what was accumulated. seen[r]: keys row r may see.
static inline void softmax_block(float* scores, int rows, const long* seen, float* peak, float* mass, float* mixed,
                                 int dim16) {
  alignas(64) float tops[LANES] = {}, old[LANES] = {}, fresh[LANES], shrink[LANES];
  for (int r = 0; r < rows; ++r) {
    tops[r] = mask_and_top(scores + r * KEY_BLOCK, seen[r]);
    old[r] = peak[r];
  }
  const F16 peaks = larger(load(old), load(tops));
  store(fresh, peaks);
  store(shrink, exp2_of_negative(load(old) - peaks));
  for (int r = 0; r < rows; ++r) {
    float* at = scores + r * KEY_BLOCK;
    F16 p[GROUP_BLOCKS];
    for (int b = 0; b < GROUP_BLOCKS; ++b) {
      p[b] = exp2_of_negative(load(at + b * LANES) - set1(fresh[r]));
      store(at + b * LANES, p[b]);
    }
    store(mass + r * LANES, fma(load(mass + r * LANES), set1(shrink[r]), (p[0] + p[1]) + (p[2] + p[3])));
    peak[r] = fresh[r];
    if (shrink[r] == 1.0f) continue;
    for (int c = 0; c < dim16; c += LANES) store(mixed + r * dim16 + c, load(mixed + r * dim16 + c) * set1(shrink[r]));
  }
}

// scratch.query [queries, dim] (scaled by log2 e too, `group` rows a position from `start` on) -> scratch.mixed.
template <class T>
static inline void attend(const AttentionScratch& s, int queries, int group, long start, const T* keys, const T* values,
                          int dim, int dim16) {
  alignas(64) float scores[TOGETHER * KEY_BLOCK];
  for (int i = 0; i < queries; ++i) {
    s.peak[i] = -std::numeric_limits<float>::infinity();
    store(s.mass + i * LANES, set1(0.0f));
    for (int c = 0; c < dim16; c += LANES) store(s.mixed + static_cast<long>(i) * dim16 + c, set1(0.0f));
  }
  const long last = start + (queries - 1) / group;
  for (long first = 0; first <= last; first += KEY_BLOCK) {
    const T *key_block = keys + first * dim, *value_block = values + first * dim16;
    for_strips<TOGETHER>(queries, [&](int begin, int rows) {
      long seen[TOGETHER];
      for (int r = 0; r < rows; ++r) seen[r] = start + (begin + r) / group - first + 1;
      const long visible = seen[rows - 1];
      if (visible <= 0) return;
      const float* query = s.query + static_cast<long>(begin) * dim;
      float* mixed = s.mixed + static_cast<long>(begin) * dim16;
      for_strips<STRIP>(rows, [&](int r, int size) {
        micro_for(keys, size, GROUP_BLOCKS)(query + r * dim, dim, key_block, KEY_BLOCK, dim, scores + r * KEY_BLOCK, KEY_BLOCK,
                                       false);
      });
      softmax_block(scores, rows, seen, s.peak + begin, s.mass + begin * LANES, mixed, dim16);
      const int used = visible < KEY_BLOCK ? static_cast<int>(visible) : KEY_BLOCK;
      for_strips<STRIP>(rows, [&](int r, int size) {
        for (int c = 0; c < dim16; c += GROUP)
          micro_for(keys, size, (dim16 - c < GROUP ? dim16 - c : GROUP) / LANES)(
              scores + r * KEY_BLOCK, KEY_BLOCK, value_block + c, dim16, used, mixed + r * dim16 + c, dim16, true);
      });
    });
  }
  for (int i = 0; i < queries; ++i) {
    const F16 whole = set1(1.0f / sum(load(s.mass + i * LANES)));
    float* mixed = s.mixed + static_cast<long>(i) * dim16;
    for (int c = 0; c < dim16; c += LANES) store(mixed + c, load(mixed + c) * whole);
  }
}
