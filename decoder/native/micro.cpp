// The product of a few rows with one group of a packed matrix, once for every size, so that all sums stay in registers.
#include "gemm.h"

// c [R, NB * 16] (+)= x [R, k] * w [k, NB * 16]; w_stride between consecutive k (or pairs of k, in bf16).
template <int R, int NB, Kind KIND>
static void micro(const float* x, long ldx, const void* w, long w_stride, int k, float* c, long ldc, bool add) {
  F16 acc[R][NB];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < NB; ++b) acc[r][b] = add ? load(c + r * ldc + b * LANES) : set1(0.0f);
  const auto step = [&](const F16(&wide)[NB], int i) __attribute__((always_inline)) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const F16 a = set1(x[r * ldx + i]);
#pragma GCC unroll 4
      for (int b = 0; b < NB; ++b) acc[r][b] = fma(a, wide[b], acc[r][b]);
    }
  };
  F16 wide[NB];
  if constexpr (KIND == BF16) {
    const uint32_t* p = static_cast<const uint32_t*>(w);
    for (int i = 0; i < k; i += 2, p += w_stride) {
#pragma GCC unroll 4
      for (int b = 0; b < NB; ++b) wide[b] = as_floats(load_bits(p + b * LANES) << 16);
      step(wide, i);
#pragma GCC unroll 4
      for (int b = 0; b < NB; ++b) wide[b] = as_floats(load_bits(p + b * LANES) & 0xffff0000u);
      step(wide, i + 1);
    }
  } else if constexpr (KIND == HALF) {
    const uint16_t* p = static_cast<const uint16_t*>(w);
    for (int i = 0; i < k; ++i, p += w_stride) {
#pragma GCC unroll 4
      for (int b = 0; b < NB; ++b) wide[b] = load_halves(p + b * LANES);
      step(wide, i);
    }
  } else {
    const float* p = static_cast<const float*>(w);
    for (int i = 0; i < k; ++i, p += w_stride) {
#pragma GCC unroll 4
      for (int b = 0; b < NB; ++b) {
        wide[b] = load(p + b * LANES);
        if (R > 1 && R < 5) wide[b] = in_register(wide[b]);  // 5 and 6 rows are bound by arithmetic either way
      }
      step(wide, i);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < NB; ++b) store(c + r * ldc + b * LANES, acc[r][b]);
}

#define ROWS_OF(KIND, R) {micro<R, 1, KIND>, micro<R, 2, KIND>, micro<R, 3, KIND>, micro<R, 4, KIND>}
#define TABLE(KIND) \
  {ROWS_OF(KIND, 1), ROWS_OF(KIND, 2), ROWS_OF(KIND, 3), ROWS_OF(KIND, 4), ROWS_OF(KIND, 5), ROWS_OF(KIND, 6)}
const Micro MICRO[3][STRIP][GROUP_BLOCKS] = {TABLE(FP32), TABLE(BF16), TABLE(HALF)};
#undef TABLE
#undef ROWS_OF
