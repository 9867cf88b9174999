// Causal attention of many query rows over one kv head's cache: each block of 64 keys is read once for all rows.
//
// Keys lie by blocks of 64 positions, [block][dim][64], values [position][dim16]: both are what `micro` reads as weights.
// Block borders are fixed in the sequence, so a row's arithmetic does not depend on the rows beside it: a key that a
// row may not see has probability exactly 0, and adding 0 changes nothing.
#pragma once

#include "gemm.h"

constexpr int KEY_BLOCK = 64;

// Room for `queries` rows: [dim16] of output, then the softmax's running state.
struct AttentionScratch {
  float* query;   // [queries, dim]
  float* mixed;   // [queries, dim16]
  float* mass;    // [queries, 16], running sum of e^(score - peak), lane by lane
  float* peak;    // [queries], running maximum
};

static inline void write_key(float* keys, long position, int dim, const float* key) {
  float* to = keys + position / KEY_BLOCK * KEY_BLOCK * dim + position % KEY_BLOCK;
  for (int d = 0; d < dim; ++d) to[d * KEY_BLOCK] = key[d];
}

// Softmax of a strip's scores against one block, in place; rescales what was accumulated. seen[r]: keys row r may see.
static inline void softmax_block(float* scores, int rows, const long* seen, float* peak, float* mass, float* mixed,
                                 int dim16) {
  constexpr float LOWEST = -std::numeric_limits<float>::infinity();
  alignas(64) float tops[LANES] = {}, old[LANES] = {};
  for (int r = 0; r < rows; ++r) {
    F16 top = set1(LOWEST);
    for (int b = 0; b < GROUP_BLOCKS; ++b) {
      float* at = scores + r * KEY_BLOCK + b * LANES;
      const long visible = seen[r] - b * LANES;
      F16 v = load(at);
      if (visible < LANES) {
        v = keep(v, visible < 0 ? 0 : static_cast<int>(visible), set1(LOWEST));
        store(at, v);
      }
      top = larger(top, v);
    }
    old[r] = peak[r];
    tops[r] = largest(top);
  }
  const F16 peaks = larger(load(old), load(tops));
  alignas(64) float fresh[LANES], shrink[LANES];
  store(fresh, peaks);
  store(shrink, exp(load(old) - peaks));
  for (int r = 0; r < rows; ++r) {
    peak[r] = fresh[r];
    F16 total = load(mass + r * LANES) * set1(shrink[r]);
    for (int b = 0; b < GROUP_BLOCKS; ++b) {
      float* at = scores + r * KEY_BLOCK + b * LANES;
      const F16 p = exp(load(at) - set1(fresh[r]));
      store(at, p);
      total = total + p;
    }
    store(mass + r * LANES, total);
    if (shrink[r] == 1.0f) continue;
    for (int c = 0; c < dim16; c += LANES) store(mixed + r * dim16 + c, load(mixed + r * dim16 + c) * set1(shrink[r]));
  }
}

// scratch.query [queries, dim] (scaled, `group` rows a position from `start` on) -> scratch.mixed.
static inline void attend(const AttentionScratch& s, int queries, int group, long start, const float* keys,
                          const float* values, int dim, int dim16) {
  alignas(64) float scores[STRIP * KEY_BLOCK];
  for (int i = 0; i < queries; ++i) {
    s.peak[i] = -std::numeric_limits<float>::infinity();
    store(s.mass + i * LANES, set1(0.0f));
    for (int c = 0; c < dim16; c += LANES) store(s.mixed + static_cast<long>(i) * dim16 + c, set1(0.0f));
  }
  const long last = start + (queries - 1) / group;
  for (long first = 0; first <= last; first += KEY_BLOCK) {
    const float *key_block = keys + first * dim, *value_block = values + first * dim16;
    for_strips(queries, [&](int begin, int rows) {
      long seen[STRIP];
      for (int r = 0; r < rows; ++r) seen[r] = start + (begin + r) / group - first + 1;
      const long visible = seen[rows - 1];
      if (visible <= 0) return;
      float* mixed = s.mixed + static_cast<long>(begin) * dim16;
      fp32_micro(rows, GROUP_BLOCKS)(s.query + static_cast<long>(begin) * dim, dim, key_block, KEY_BLOCK, dim, scores,
                                     KEY_BLOCK, false);
      softmax_block(scores, rows, seen, s.peak + begin, s.mass + begin * LANES, mixed, dim16);
      const int used = visible < KEY_BLOCK ? static_cast<int>(visible) : KEY_BLOCK;
      for (int c = 0; c < dim16; c += GROUP) {
        const int blocks = (dim16 - c < GROUP ? dim16 - c : GROUP) / LANES;
        fp32_micro(rows, blocks)(scores, KEY_BLOCK, value_block + c, dim16, used, mixed + c, dim16, true);
      }
    });
  }
  for (int i = 0; i < queries; ++i) {
    const F16 whole = set1(1.0f / sum(load(s.mass + i * LANES)));
    float* mixed = s.mixed + static_cast<long>(i) * dim16;
    for (int c = 0; c < dim16; c += LANES) store(mixed + c, load(mixed + c) * whole);
  }
}
