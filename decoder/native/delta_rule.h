// The gated delta rule of one value head: row by row for a verify, CHUNK rows at once for a prefill.
//
// Row i: D_i = b_i (v_i - S' k_i e^{g_i}), S <- S e^{g_i} + k_i D_i', o_i = S' q_i = e^{g_i} S_before' q_i + (q_i.k_i) D_i.
// S is [key_dim][value16], value16 the value dimension rounded up to 16; the columns beyond it hold no meaning.
#pragma once

#include "rows.h"
#include "gemm.h"

constexpr int CHUNK = 32;
constexpr int MAX_VERIFY_ROWS = 9;  // MAX_SPECULATIVE_TOKENS + 1

struct DeltaHead {
  const float *query, *key, *value;  // first row; unit keys, unit queries times key_dim^-0.5
  long key_stride, value_stride;     // between rows of query and key, of value
  const float *log_decay, *beta;     // g and b of the first row, `gate_stride` between rows
  long gate_stride;
  float* delta;  // [rows, value16] with stride out_stride; kept for commit
  float* out;    // [rows, value16] with stride out_stride
  long out_stride;
  int key_dim, value16;
};

// e^g, the same bits in verify and in commit.
static inline float decay_of(float log_decay) { return std::exp(log_decay); }

template <int NB>
static void delta_columns(const DeltaHead& h, const float* state, int rows, int column, float* local) {
  const float* from = state + column;
  long from_stride = h.value16;
  F16 delta[NB];
  for (int r = 0; r < rows; ++r) {
    const float *k = h.key + r * h.key_stride, *q = h.query + r * h.key_stride, *k_before = k - h.key_stride;
    const F16 decay_before = r ? set1(decay_of(h.log_decay[(r - 1) * h.gate_stride])) : set1(1.0f);
    F16 by_key[NB], by_query[NB];
    for (int b = 0; b < NB; ++b) by_key[b] = by_query[b] = set1(0.0f);
    for (int d = 0; d < h.key_dim; ++d) {
      const F16 kd = set1(k[d]), qd = set1(q[d]), before = r ? set1(k_before[d]) : set1(0.0f);
      for (int b = 0; b < NB; ++b) {
        F16 s = load(from + d * from_stride + b * LANES);
        if (r) {
          s = fma(before, delta[b], s * decay_before);
          store(local + (d * NB + b) * LANES, s);
        }
        by_key[b] = fma(kd, s, by_key[b]);
        by_query[b] = fma(qd, s, by_query[b]);
      }
    }
    if (r) {
      from = local;
      from_stride = NB * LANES;
    }
    const F16 decay = set1(decay_of(h.log_decay[r * h.gate_stride])), beta = set1(h.beta[r * h.gate_stride]);
    const F16 match = set1(dot(q, k, h.key_dim));
    for (int b = 0; b < NB; ++b) {
      const long at = r * h.out_stride + column + b * LANES;
      delta[b] = (load(h.value + r * h.value_stride + column + b * LANES) - by_key[b] * decay) * beta;
      store(h.delta + at, delta[b]);
      store(h.out + at, fma(match, delta[b], by_query[b] * decay));
    }
  }
}

// Outputs and deltas of a few rows after `state`, which stays as it is. local: key_dim * 64 floats.
static inline void delta_rows(const DeltaHead& h, const float* state, int rows, float* local) {
  for (int column = 0; column < h.value16; column += GROUP) {
    switch ((h.value16 - column) / LANES) {
      case 1: delta_columns<1>(h, state, rows, column, local); break;
      case 2: delta_columns<2>(h, state, rows, column, local); break;
      case 3: delta_columns<3>(h, state, rows, column, local); break;
      default: delta_columns<4>(h, state, rows, column, local);
    }
  }
}

// Advance the state by the first `kept` rows, in the very arithmetic of delta_rows.
static inline void delta_commit(const DeltaHead& h, float* state, int kept) {
  float decay[MAX_VERIFY_ROWS];
  for (int r = 0; r < kept; ++r) decay[r] = decay_of(h.log_decay[r * h.gate_stride]);
  for (int column = 0; column < h.value16; column += LANES) {
    for (int d = 0; d < h.key_dim; ++d) {
      float* at = state + static_cast<long>(d) * h.value16 + column;
      F16 s = load(at);
      for (int r = 0; r < kept; ++r)
        s = fma(set1(h.key[r * h.key_stride + d]), load(h.delta + r * h.out_stride + column), s * set1(decay[r]));
      store(at, s);
    }
  }
}

// Scratch of delta_chunk, in floats: keys transposed, two CHUNK x CHUNK blocks, one CHUNK x value16.
static inline long chunk_scratch(int key_dim, int value16) {
  return static_cast<long>(key_dim) * CHUNK + 2L * CHUNK * CHUNK + static_cast<long>(CHUNK) * value16;
}

// c [rows, value16] += x [rows, k] * w [k, value16], 64 columns at a time.
static inline void add_wide(const float* x, long ldx, const float* w, int k, float* c, long ldc, int rows, int value16) {
  for (int column = 0; column < value16; column += GROUP) {
    const int blocks = (value16 - column < GROUP ? value16 - column : GROUP) / LANES;
    for_strips(rows, [&](int first, int size) {
      fp32_micro(size, blocks)(x + first * ldx, ldx, w + column, value16, k, c + first * ldc + column, ldc, true);
    });
  }
}

static inline void fill_rows(float* c, long ldc, int rows, int width, float value) {
  for (int r = 0; r < rows; ++r)
    for (int i = 0; i < width; i += LANES) store(c + r * ldc + i, set1(value));
}

// k_r.k_j *= -b_r e^{G_r - G_j} for j < r and q_r.k_j *= e^{G_r - G_j} for j <= r, 0 beyond.
static inline void decay_products(float* system, float* match, const float* total, const float* minus_beta, int first,
                                  int size, int blocks) {
  const F16 zero = set1(0.0f);
  for (int r = first; r < first + size; ++r)
    for (int b = 0; b < blocks; ++b) {
      const long at = r * CHUNK + b * LANES;
      const F16 decay = exp(set1(total[r]) - load(total + b * LANES));
      store(system + at, keep(load(system + at) * (decay * set1(minus_beta[r])), r - b * LANES, zero));
      store(match + at, keep(load(match + at) * decay, r + 1 - b * LANES, zero));
    }
}

// (I + A) D = b (V - e^G K S) with A_rj = b_r e^{G_r - G_j} k_r.k_j below the diagonal (arXiv 2412.06464), then
// O = e^G Q S + (Q K' o e^{G_r - G_j}) D and S <- e^{G_end} S + sum_j e^{G_end - G_j} k_j D_j'. Advances `state`.
static inline void delta_chunk(const DeltaHead& h, float* state, int rows, float* scratch) {
  float* keys_t = scratch;                                // [key_dim, CHUNK]
  float* system = keys_t + static_cast<long>(h.key_dim) * CHUNK;  // -A, [CHUNK, CHUNK]
  float* match = system + CHUNK * CHUNK;                  // [CHUNK, CHUNK]
  float* delta = match + CHUNK * CHUNK;                   // [CHUNK, value16]
  const int width = h.value16;
  alignas(64) float total[CHUNK], minus_beta[CHUNK];
  float running = 0.0f;
  for (int r = 0; r < CHUNK; ++r) {
    if (r < rows) running += h.log_decay[r * h.gate_stride];
    total[r] = running;
    minus_beta[r] = r < rows ? -h.beta[r * h.gate_stride] : 0.0f;
    for (int d = 0; d < h.key_dim; ++d) keys_t[d * CHUNK + r] = r < rows ? h.key[r * h.key_stride + d] : 0.0f;
  }
  fill_rows(delta, width, rows, width, 0.0f);
  fill_rows(h.out, h.out_stride, rows, width, 0.0f);
  add_wide(h.key, h.key_stride, state, h.key_dim, delta, width, rows, width);
  add_wide(h.query, h.key_stride, state, h.key_dim, h.out, h.out_stride, rows, width);
  for_strips(rows, [&](int first, int size) {
    const int blocks = (first + size - 1) / LANES + 1;
    const auto products = [&](const float* x, float* to) {
      fp32_micro(size, blocks)(x + first * h.key_stride, h.key_stride, keys_t, CHUNK, h.key_dim, to + first * CHUNK, CHUNK,
                               false);
    };
    products(h.key, system);
    products(h.query, match);
    decay_products(system, match, total, minus_beta, first, size, blocks);
    for (int r = first; r < first + size; ++r) {
      const F16 decay = set1(decay_of(total[r])), beta = set1(-minus_beta[r]);
      for (int c = 0; c < width; c += LANES) {
        float *d = delta + static_cast<long>(r) * width + c, *o = h.out + r * h.out_stride + c;
        store(d, (load(h.value + r * h.value_stride + c) - load(d) * decay) * beta);
        store(o, load(o) * decay);
      }
    }
    add_wide(system + first * CHUNK, CHUNK, delta, first, delta + static_cast<long>(first) * width, width, size, width);
    for (int r = first + 1; r < first + size; ++r)
      for (int j = first; j < r; ++j) {
        const F16 a = set1(system[r * CHUNK + j]);
        for (int c = 0; c < width; c += LANES) {
          float* d = delta + static_cast<long>(r) * width + c;
          store(d, fma(a, load(delta + static_cast<long>(j) * width + c), load(d)));
        }
      }
    add_wide(match + first * CHUNK, CHUNK, delta, first + size, h.out + first * h.out_stride, h.out_stride, size, width);
  });
  const F16 whole = set1(decay_of(running));
  for (int d = 0; d < h.key_dim; ++d) {
    for (int j = 0; j < CHUNK; j += LANES)
      store(keys_t + d * CHUNK + j, load(keys_t + d * CHUNK + j) * exp(set1(running) - load(total + j)));
    for (int c = 0; c < width; c += LANES) {
      float* s = state + static_cast<long>(d) * width + c;
      store(s, load(s) * whole);
    }
  }
  add_wide(keys_t, CHUNK, delta, rows, state, width, h.key_dim, width);
}
