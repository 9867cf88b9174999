// The product of a few rows with one group of a packed matrix, once for every size, so that all sums stay in registers.
#include "gemm.h"

// c [R, NB * 16] (+)= x [R, k] * w [k, NB * 16]; strides in elements (of 32 bits), w_stride between consecutive k.
template <int R, int NB, bool BF16>
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
  if constexpr (BF16) {
    const uint32_t* p = static_cast<const uint32_t*>(w);
    for (int i = 0; i < k; i += 2, p += w_stride) {
#pragma GCC unroll 4
      for (int b = 0; b < NB; ++b) wide[b] = as_floats(load_bits(p + b * LANES) << 16);
      step(wide, i);
#pragma GCC unroll 4
      for (int b = 0; b < NB; ++b) wide[b] = as_floats(load_bits(p + b * LANES) & 0xffff0000u);
      step(wide, i + 1);
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

#define ROWS_OF(BF16, R) {micro<R, 1, BF16>, micro<R, 2, BF16>, micro<R, 3, BF16>, micro<R, 4, BF16>}
#define TABLE(BF16) \
  {ROWS_OF(BF16, 1), ROWS_OF(BF16, 2), ROWS_OF(BF16, 3), ROWS_OF(BF16, 4), ROWS_OF(BF16, 5), ROWS_OF(BF16, 6)}
const Micro MICRO[2][STRIP][GROUP_BLOCKS] = {TABLE(false), TABLE(true)};
#undef TABLE
#undef ROWS_OF
