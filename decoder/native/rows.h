// What is done to one row at a time: norms, rotation, the convolution, gates.
#pragma once

#include "simd.h"

static inline float sum_of_squares(const float* x, int n) {
  F16 total = set1(0.0f);
  for (int i = 0; i < n; i += LANES) {
    const F16 v = load(x + i, n - i);
    total = fma(v, v, total);
  }
  return sum(total);
}

static inline float dot(const float* x, const float* y, int n) {
  F16 total = set1(0.0f);
  for (int i = 0; i < n; i += LANES) total = fma(load(x + i, n - i), load(y + i, n - i), total);
  return sum(total);
}

// out = x * factor * weight over n values; weight may be null.
static inline void scale_row(const float* x, float factor, const float* weight, int n, float* out) {
  for (int i = 0; i < n; i += LANES) {
    F16 v = load(x + i, n - i) * set1(factor);
    if (weight) v = v * load(weight + i, n - i);
    store(out + i, v, n - i);
  }
}

// RMSNorm with weight (1 + w where the checkpoint stores w).
static inline void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
  scale_row(x, 1.0f / std::sqrt(sum_of_squares(x, n) / n + eps), weight, n, out);
}

// x / sqrt(sum x^2 + eps) * scale
static inline void unit_row(const float* x, int n, float eps, float scale, float* out) {
  scale_row(x, scale / std::sqrt(sum_of_squares(x, n) + eps), nullptr, n, out);
}

// Half-rotation of the first 2 * half values in place.
static inline void rotate(float* x, const float* cosine, const float* sine, int half) {
  for (int i = 0; i < half; i += LANES) {
    const int n = half - i;
    const F16 a = load(x + i, n), b = load(x + half + i, n), c = load(cosine + i, n), s = load(sine + i, n);
    store(x + i, fma(a, c, -(b * s)), n);
    store(x + half + i, fma(b, c, a * s), n);
  }
}

// out = silu(sum over taps of taps[t] * inputs[t]) over n channels (a multiple of 16); inputs: one row a tap, oldest first.
static inline void convolve(const float* const* inputs, const float* taps, int width, int n, float* out) {
  for (int c = 0; c < n; c += LANES) {
    F16 total = set1(0.0f);
    for (int t = 0; t < width; ++t) total = fma(load(inputs[t] + c), load(taps + static_cast<long>(t) * n + c), total);
    store(out + c, silu(total));
  }
}

// beta = sigmoid(b), log_decay = -rate * softplus(a + dt_bias) over n heads.
static inline void decay_gates(const float* b, const float* a, const float* dt_bias, const float* negative_rate, int n,
                               float* beta, float* log_decay) {
  for (int i = 0; i < n; i += LANES) {
    const int left = n - i;
    store(beta + i, sigmoid(load(b + i, left)), left);
    store(log_decay + i, load(negative_rate + i, left) * softplus(load(a + i, left) + load(dt_bias + i, left)), left);
  }
}

// out[i] = x[i] * sigmoid(gate[i])
static inline void gate_by_sigmoid(const float* x, const float* gate, int n, float* out) {
  for (int i = 0; i < n; i += LANES) store(out + i, load(x + i, n - i) * sigmoid(load(gate + i, n - i)), n - i);
}

// out[i] = RMSNorm(x)[i] * weight[i] * silu(gate[i])
static inline void gated_norm(const float* x, const float* weight, const float* gate, int n, float eps, float* out) {
  const F16 factor = set1(1.0f / std::sqrt(sum_of_squares(x, n) / n + eps));
  for (int i = 0; i < n; i += LANES) {
    const F16 normed = load(x + i, n - i) * factor * load(weight + i, n - i);
    store(out + i, normed * silu(load(gate + i, n - i)), n - i);
  }
}

// First index of the largest of n values (n >= 1); the first NaN where there is one, as torch.argmax has it.
static inline int argmax(const float* x, int n) {
  F16 best = set1(-std::numeric_limits<float>::infinity());
  bool has_nan = false;
  for (int i = 0; i < n; i += LANES) {
    const F16 v = keep(load(x + i, n - i), n - i, best);
    best = larger(best, v);
    for (int l = 0; l < LANES; ++l) has_nan |= v[l] != v[l];
  }
  const float value = largest(best);
  for (int i = 0; i < n; ++i)
    if (has_nan ? x[i] != x[i] : x[i] == value) return i;
  return 0;
}
