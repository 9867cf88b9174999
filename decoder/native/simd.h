// Sixteen floats at a time. AVX-512 intrinsics where the machine has them; elsewhere the compiler splits the vectors.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

constexpr int LANES = 16;

typedef float F16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));

static inline F16 load(const float* p) {
  F16 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

static inline void store(float* p, F16 v) { std::memcpy(p, &v, sizeof v); }

static inline U16 load_bits(const uint32_t* p) {
  U16 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

#ifdef __AVX512F__

// Loaded once, where the compiler would rather read memory again for every use.
static inline F16 in_register(F16 v) {
  asm("" : "+v"(v));
  return v;
}
static inline F16 set1(float x) { return (F16)_mm512_set1_ps(x); }
static inline F16 fma(F16 a, F16 b, F16 c) { return (F16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
static inline float sum(F16 v) { return _mm512_reduce_add_ps((__m512)v); }
static inline float largest(F16 v) { return _mm512_reduce_max_ps((__m512)v); }
static inline F16 larger(F16 a, F16 b) { return (F16)_mm512_max_ps((__m512)a, (__m512)b); }
static inline F16 smaller(F16 a, F16 b) { return (F16)_mm512_min_ps((__m512)a, (__m512)b); }
static inline __mmask16 first_lanes(int n) { return n >= LANES ? 0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1); }
// The first n lanes of v, `other` in the rest.
static inline F16 keep(F16 v, int n, F16 other) {
  return (F16)_mm512_mask_mov_ps((__m512)other, first_lanes(n), (__m512)v);
}
static inline F16 load(const float* p, int n) {
  return n >= LANES ? load(p) : (F16)_mm512_maskz_loadu_ps(first_lanes(n), p);
}
static inline void store(float* p, F16 v, int n) {
  if (n >= LANES)
    store(p, v);
  else
    _mm512_mask_storeu_ps(p, first_lanes(n), (__m512)v);
}
#define READS_HALVES 1
static inline F16 load_halves(const uint16_t* p) {
  return (F16)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// Rounded to 16 bits; what is too large becomes the largest.
static inline void store_halves(uint16_t* p, F16 v) {
  const F16 bounded = larger(set1(-65504.0f), smaller(set1(65504.0f), v));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)bounded, _MM_FROUND_TO_NEAREST_INT));
}
static inline F16 round_even(F16 v) { return (F16)_mm512_roundscale_ps((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline F16 times_power_of_two(F16 v, F16 n) { return (F16)_mm512_scalef_ps((__m512)v, (__m512)n); }

#else

#define READS_HALVES 0  // without instructions for it a draft would only get slower
static inline F16 load_halves(const uint16_t*) { return F16{}; }
static inline void store_halves(uint16_t*, F16) {}
static inline F16 in_register(F16 v) { return v; }
static inline F16 set1(float x) {
  F16 v;
  for (int i = 0; i < LANES; ++i) v[i] = x;
  return v;
}
static inline F16 fma(F16 a, F16 b, F16 c) {
#ifdef __FMA__
  F16 v;
  for (int i = 0; i < LANES; ++i) v[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return v;
#else
  return a * b + c;  // -ffp-contract=off: two roundings, everywhere the same
#endif
}
static inline float sum(F16 v) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) v[i] += v[i + half];
  return v[0];
}
static inline F16 larger(F16 a, F16 b) { return a > b ? a : b; }
static inline F16 smaller(F16 a, F16 b) { return a < b ? a : b; }
static inline float largest(F16 v) {
  float x = v[0];
  for (int i = 1; i < LANES; ++i) x = v[i] > x ? v[i] : x;
  return x;
}
static inline F16 keep(F16 v, int n, F16 other) {
  for (int i = n < 0 ? 0 : n; i < LANES; ++i) v[i] = other[i];
  return v;
}
static inline F16 load(const float* p, int n) {
  if (n >= LANES) return load(p);
  F16 v = set1(0.0f);
  for (int i = 0; i < n; ++i) v[i] = p[i];
  return v;
}
static inline void store(float* p, F16 v, int n) {
  for (int i = 0; i < (n < LANES ? n : LANES); ++i) p[i] = v[i];
}
static inline F16 round_even(F16 v) {
  const F16 magic = set1(12582912.0f);  // 1.5 * 2^23: adding it leaves no fraction bits
  return (v + magic) - magic;
}
static inline F16 times_power_of_two(F16 v, F16 n) {
  typedef int32_t I16 __attribute__((vector_size(64)));
  const I16 whole = __builtin_convertvector(n, I16), half = whole >> 1;
  const I16 low = (half + 127) << 23, high = (whole - half + 127) << 23;  // two factors, so that denormals round once
  F16 a, b;
  std::memcpy(&a, &low, sizeof a);
  std::memcpy(&b, &high, sizeof b);
  return v * a * b;
}

#endif

static inline F16 as_floats(U16 bits) {
  F16 v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

// e^x to about one ulp: x = n ln 2 + r with |r| <= ln 2 / 2 (Cody and Waite), then Cephes' polynomial of degree 7.
// -inf gives 0, +inf and overflow give +inf, NaN stays NaN.
static inline F16 exp(F16 x) {
  x = smaller(set1(104.0f), larger(set1(-110.0f), x));  // this order of operands lets NaN through
  const F16 n = round_even(x * set1(1.44269504088896341f));
  F16 r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  F16 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r) + set1(1.0f);
  return times_power_of_two(p, n);
}

// 2^x for x <= 0 (or NaN) to about one ulp, Cephes' polynomial of degree 6; -inf gives 0.
static inline F16 exp2_of_negative(F16 x) {
  x = larger(set1(-160.0f), x);
  const F16 n = round_even(x), r = x - n;
  F16 p = set1(1.535336188319500e-4f);
  p = fma(p, r, set1(1.339887440266574e-3f));
  p = fma(p, r, set1(9.618437357674640e-3f));
  p = fma(p, r, set1(5.550332471162809e-2f));
  p = fma(p, r, set1(2.402264791363012e-1f));
  p = fma(p, r, set1(6.931472028550421e-1f));
  return times_power_of_two(fma(p, r, set1(1.0f)), n);
}

// log(1 + e^x): max(x, 0) + log1p(e) with e = e^-|x| <= 1, and log1p(e) = 2 atanh(s), s = e / (2 + e) <= 1/3, by its
// series up to s^17, the next term of which is below 1e-9.
static inline F16 softplus(F16 x) {
  const F16 zero = set1(0.0f), e = exp(smaller(x, -x)), s = e / (e + set1(2.0f)), square = s * s;
  F16 series = set1(1.0f / 17);
  for (int odd = 15; odd >= 3; odd -= 2) series = fma(series, square, set1(1.0f / odd));
  return larger(x, zero) + fma(series * square, s + s, s + s);
}

static inline F16 sigmoid(F16 x) { return set1(1.0f) / (set1(1.0f) + exp(-x)); }
static inline F16 silu(F16 x) { return x / (set1(1.0f) + exp(-x)); }
