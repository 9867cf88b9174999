// What this machine can do at best: the two numbers that floor.py divides by.
#include <chrono>

#include "gemm.h"
#include "team.h"

#define API extern "C" __attribute__((visibility("default")))

static double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The fastest of `repeats` runs of f.
template <class F>
static double fastest(int repeats, F&& f) {
  double best = 1e30;
  for (int i = 0; i < repeats; ++i) {
    const double start = seconds();
    f();
    const double took = seconds() - start;
    best = took < best ? took : best;
  }
  return best;
}

// fp32 GFLOP/s of fused multiply-adds that never leave the registers, on `threads` threads together.
API double kernarc_measure_arithmetic(int threads) {
  constexpr int CHAINS = 24, ROUNDS = 200000;
  Team team(threads);
  float kept = 0.0f;
  const double took = fastest(20, [&] {
    team.run([&](int member) {
      F16 acc[CHAINS];
      const F16 factor = set1(0.9999f), term = set1(1e-3f);
      for (F16& chain : acc) chain = set1(static_cast<float>(member));
      for (int round = 0; round < ROUNDS; ++round)
#pragma GCC unroll 24
        for (F16& chain : acc) chain = fma(chain, factor, term);
      F16 total = acc[0];
      for (int i = 1; i < CHAINS; ++i) total = total + acc[i];
      if (sum(total) == 1.0f) kept = 1.0f;  // so that nothing is optimised away
    });
  });
  return 2.0 * LANES * CHAINS * ROUNDS * threads / took * 1e-9 + 0.0 * kept;
}

// GB/s at which one thread sums `floats` floats again and again, from whatever cache they fit into.
API double kernarc_measure_reading(const float* from, int64_t floats) {
  constexpr int CHAINS = 16;
  float kept = 0.0f;
  const double took = fastest(60, [&] {
    F16 acc[CHAINS] = {};
    for (int64_t i = 0; i + CHAINS * LANES <= floats; i += CHAINS * LANES)
#pragma GCC unroll 16
      for (int c = 0; c < CHAINS; ++c) acc[c] = acc[c] + load(from + i + c * LANES);
    for (int c = 0; c < CHAINS; ++c) kept += sum(acc[c]);
  });
  return floats * sizeof(float) / took * 1e-9 + 0.0 * kept;
}

// GFLOP/s of one thread multiplying rows [rows, k] with a packed matrix [n, k], as a step or a prefill does.
API double kernarc_measure_product(const Matrix* matrix, const float* x, int rows, float* out) {
  const double took = fastest(60, [&] {
    linear(*matrix, x, matrix->k, rows, out, round_up(matrix->n, LANES));
  });
  return 2.0 * rows * matrix->n * matrix->k / took * 1e-9;
}
