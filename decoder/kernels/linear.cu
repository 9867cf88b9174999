// y[m, n] = sum_k x[m, k] * W[n, k] for 1..16 rows of x: weights are streamed once, everything else is hidden behind them.
//
// Layout. Weights are cut into chunks of 16 KiB: 128 rows x 128 columns of FP8 or 64 of bf16, stored one after the other,
// each in the order in which the tensor cores want it. Warp w owns rows [32 (w / 4), +32) and the (w % 4)-th quarter of the
// columns; in each of its two units of 16 rows, lane (g = lane / 4, t = lane % 4) owns the t-th quarter of those columns in
// rows g and g + 8. So every load is 16 bytes a thread, contiguous over the CTA, read back by the thread that fetched it:
// no barrier, no shuffle.
// Schedule. A CTA walks an equal, contiguous share of all chunks (tile-major), so it needs few columns of x where a tile
// spans several CTAs. Their parts meet through scratch after the last chunk: whoever arrives last adds them in their fixed
// order. Neither timing nor the number of rows of x changes any sum.
// Overlap. A CTA lets the next kernel start as soon as it runs itself (later was measured slower: the launch takes longer
// than a tail). What does not depend on the previous kernel comes before the wait for it: the ring and the scales.
// Norm. RMSNorm before the product is x * rstd * (1 + w): whoever made x has multiplied by (1 + w) * X_SCALE in fp16, and
// rstd, one number a row, is multiplied into the finished sum.
//
// Compile-time: N (weight rows), TILES, CHUNKS (a tile), K, KB (scale blocks a row), M (rows of x), CTAS, FP8 (else bf16),
// SCALES (0 one scale a chunk, 1 one each for rows 0..7 and 8..15 of a unit, 2 one each for every half unit),
// X_TYPE and OUT_TYPE (0 fp16, 1 bf16, 2 fp32), NORM, EPILOGUE, DEPTH, SLOTS, MIN_CTAS.
#define X_SCALE 0.0625f  // exact; keeps un-normalised activations up to a million inside fp16
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

#define THREADS 512
#define NT (M > 8 ? 2 : 1)
#define LANE_COLUMNS (FP8 ? 8 : 4)
#define COLUMNS (16 * LANE_COLUMNS)  // of a chunk
#define STAGE_BYTES (THREADS * 32)
#define TOTAL ((u32)TILES * CHUNKS)
#define SHARE ((TOTAL + CTAS - 1) / CTAS)          // the most chunks a CTA walks
#define X_CHUNKS (SHARE < CHUNKS ? SHARE : CHUNKS)  // the most columns of x it needs, in chunks
#define OUTPUTS ((M * 128 + THREADS - 1) / THREADS)  // outputs of a tile a thread finishes

#define STORE 0
#define RESIDUAL 1
#define SWIGLU 2
#define ARGMAX 3

__device__ __forceinline__ u32 smem_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void copy_async(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int LEFT> __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT)); }

__device__ __forceinline__ uint4 load_shared(u32 from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
    return v;
}
__device__ __forceinline__ uint4 load_shared_8(u32 from) {
    uint4 v = make_uint4(0, 0, 0, 0);
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from));
    return v;
}
// Activations come through L2: a line that an earlier kernel left in this SM's L1 may be stale.
__device__ __forceinline__ uint4 load_l2(const void* p) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
__device__ __forceinline__ float load_l2(const float* p) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p));
    return v;
}

// float -> fp16 bits, clamped to the finite range; NaN stays NaN.
__device__ __forceinline__ u32 to_half(float v) {
    v = v > 65504.f ? 65504.f : (v < -65504.f ? -65504.f : v);
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(v));
    return h;
}
__device__ __forceinline__ u32 to_bf16(float v) {
    u16 h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(v));
    return h;
}
__device__ __forceinline__ u32 to_operand(float v) { return FP8 ? to_half(v) : to_bf16(v); }
__device__ __forceinline__ float from_bf16(u32 bits) { return __uint_as_float(bits << 16); }
__device__ __forceinline__ float from_half(u32 bits) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)bits));
    return f;
}

// Four e4m3 bytes -> two fp16 pairs. sm_80 has no such conversion: shifting the bits gives value * 2^-8 (undone in the
// scale); e4m3 NaN would become 1.875 there, so packing refuses it.
__device__ __forceinline__ void e4m3_to_half(u32 q, u32& lo, u32& hi) {
#if __CUDA_ARCH__ >= 890
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b;}"
        : "=r"(lo), "=r"(hi) : "r"(q));
#else
    u32 a = __byte_perm(q, 0, 0x1404), b = __byte_perm(q, 0, 0x3424);
    lo = (a & 0x80008000u) | ((a & 0x7f007f00u) >> 1);
    hi = (b & 0x80008000u) | ((b & 0x7f007f00u) >> 1);
#endif
}
#if __CUDA_ARCH__ >= 890
#define E4M3_GAIN 1.f
#else
#define E4M3_GAIN 256.f
#endif

__device__ __forceinline__ void mma(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if FP8
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

struct Arguments {
    const char* weights;
    const float* scales;       // [scale rows, KB]
    const int2* scale_rows;    // [TILES, 8] scale rows of weight rows 0..7 and 8..15 of each unit
    const char* x;             // [M, K] X_TYPE; NORM: the residual stream * (1 + w) * X_SCALE
    const float* x_sumsq;      // NORM: [M, K / 32] sums of squares of the residual stream, 32 columns each
    void* out;                 // [M, N] OUT_TYPE; SWIGLU: fp16 [M, N / 2]; ARGMAX: int64 [M]; RESIDUAL: fp16 [M, N], a next x
    float* residual;           // RESIDUAL: fp32 [M, N], read and written
    float* out_sumsq;          // RESIDUAL: [M, N / 32]
    const u16* next_norm;      // RESIDUAL: [N] bf16 weight of the next norm, used as 1 + w
    float* scratch;            // [TILES, SLOTS, M * 128]; ARGMAX: also [CTAS, M] pairs behind it
    u32* counters;             // [TILES + 1], zero between calls
    float eps;
};

__device__ __forceinline__ int warp_of_thread() { return threadIdx.x / 32; }
__device__ __forceinline__ u32 share_begin(u32 cta) { return cta * TOTAL / CTAS; }
// Which CTA walks flat chunk q: the inverse of the floor division above.
__device__ __forceinline__ u32 cta_of(u32 q) { return ((q + 1) * CTAS - 1) / TOTAL; }

// Eight columns of x from k as packed operands, where x is not stored as such.
__device__ __forceinline__ uint4 convert_x(const Arguments& a, int m, int k) {
    float f[8];
    if (X_TYPE == 2) {
        const float* p = (const float*)a.x + (i64)m * K + k;
        *(uint4*)f = load_l2((const void*)p);
        *(uint4*)(f + 4) = load_l2((const void*)(p + 4));
    } else {
        uint4 q = load_l2((const void*)((const u16*)a.x + (i64)m * K + k));
        const u16* h = (const u16*)&q;
#pragma unroll
        for (int e = 0; e < 8; ++e) f[e] = X_TYPE ? from_bf16(h[e]) : from_half(h[e]);
    }
    u32 v[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) v[e] = to_operand(f[2 * e]) | to_operand(f[2 * e + 1]) << 16;
    return make_uint4(v[0], v[1], v[2], v[3]);
}

// The columns of x that this CTA needs -> shared memory as [chunk][4 slices][M][COLUMNS / 4] 16-bit values; and, while they
// are on their way, rstd of each row.
__device__ __forceinline__ void stage_x(const Arguments& a, u32 begin, u32 end, u16* xs, float* row_gain) {
    const bool whole = SHARE >= CHUNKS;  // then by column, else from the first chunk on
    const int first = whole ? 0 : begin % CHUNKS, chunks = whole ? CHUNKS : end - begin;
    const int groups = COLUMNS / 8;  // of eight columns, a chunk
#pragma unroll 4
    for (int i = threadIdx.x; i < chunks * groups * M; i += THREADS) {
        int m = i / (chunks * groups), at = i % (chunks * groups), chunk = first + at / groups;
        int k = (chunk < CHUNKS ? chunk : chunk - CHUNKS) * COLUMNS + at % groups * 8;
        int slice = at * 8 / (COLUMNS / 4), within = at * 8 % (COLUMNS / 4);
        u16* to = xs + (slice * M + m) * (COLUMNS / 4) + within;
        if (k >= K) *(uint4*)to = make_uint4(0, 0, 0, 0);
        else if (X_TYPE == (FP8 ? 0 : 1)) copy_async(smem_address(to), (const u16*)a.x + (i64)m * K + k);
        else *(uint4*)to = convert_x(a, m, k);
    }
    commit();
#if NORM
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < M) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < (K / 32 + 31) / 32; ++i)
            if (i * 32 + lane < K / 32) sum += load_l2(a.x_sumsq + warp * (K / 32) + i * 32 + lane);
        for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
        if (lane == 0) row_gain[warp] = rsqrtf(sum / K + a.eps) / X_SCALE;
    }
#endif
    wait<0>();
    __syncthreads();
}

// What a finished output needs besides its sum. Element e = thread + 512 i is row e / 128 of x, weight row e % 128 of the tile.
struct Target {
    int m, n;
    bool real;
    float before, gain;  // RESIDUAL: the stream's value, and (1 + w) * X_SCALE of the next norm
};
__device__ __forceinline__ Target target_of(const Arguments& a, int tile, int i) {
    const int e = threadIdx.x + i * THREADS;
    Target o = {e / 128, tile * 128 + e % 128, false, 0.f, 0.f};
    o.real = o.m < M && o.n < N;
#if EPILOGUE == RESIDUAL
    if (o.real) {
        o.before = load_l2(a.residual + (i64)o.m * N + o.n);
        o.gain = (1.f + from_bf16(a.next_norm[o.n])) * X_SCALE;
    }
#endif
    return o;
}

__device__ __forceinline__ void write_out(const Arguments& a, const Target& o, float v, const float* row_gain, float& best, int& best_n) {
#if NORM
    v *= row_gain[o.real ? o.m : 0];
#endif
#if EPILOGUE == STORE
    if (o.real) {
        if (OUT_TYPE == 2) ((float*)a.out)[(i64)o.m * N + o.n] = v;
        else ((u16*)a.out)[(i64)o.m * N + o.n] = (u16)(OUT_TYPE ? to_bf16(v) : to_half(v));
    }
#elif EPILOGUE == RESIDUAL
    const float r = o.real ? o.before + v : 0.f;
    if (o.real) {
        a.residual[(i64)o.m * N + o.n] = r;
        ((u16*)a.out)[(i64)o.m * N + o.n] = (u16)to_half(r * o.gain);
    }
    float sq = r * r;
    for (int d = 16; d; d >>= 1) sq += __shfl_xor_sync(~0u, sq, d);
    if (o.real && o.n % 32 == 0) a.out_sumsq[o.m * (N / 32) + o.n / 32] = sq;
#elif EPILOGUE == SWIGLU
    // rows 0..7 of a unit are gate, 8..15 their up
    const float up = __shfl_down_sync(~0u, v, 8);
    const u16 h = (u16)to_half(v / (1.f + __expf(-v)) * up);
    if (o.real && o.n % 16 < 8) ((u16*)a.out)[(i64)o.m * (N / 2) + o.n / 16 * 8 + o.n % 8] = h;
#else
    if (o.real && v > best) { best = v; best_n = o.n; }
#endif
}

// The parts of one element of a shared tile, added in their order. All loads are under way before the first addition.
__device__ __forceinline__ float sum_parts(const float* first, u32 parts) {
    float v = 0.f;
    if (SLOTS <= 8) {
        float part[SLOTS <= 8 ? SLOTS : 1];
#pragma unroll
        for (u32 p = 0; p < SLOTS; ++p) part[p] = p < parts ? load_l2(first + p * (M * 128)) : 0.f;
#pragma unroll
        for (u32 p = 0; p < SLOTS; ++p)
            if (p < parts) v += part[p];
    } else {
#pragma unroll 8
        for (u32 p = 0; p < parts; ++p) v += load_l2(first + p * (M * 128));
    }
    return v;
}

// Arrive at each shared tile; the last to come adds the parts in their order and finishes the tile. This is the end that the
// next kernel waits for, so both tiles go together and what can be loaded beforehand is.
__device__ __forceinline__ void join_parts(const Arguments& a, const int* cut, int cuts, const float* row_gain, float* best, int* best_n, u32* flag) {
    __syncthreads();
    if (threadIdx.x < cuts) {
        int tile = cut[threadIdx.x];
        u32 parts = cta_of((tile + 1) * CHUNKS - 1) - cta_of(tile * CHUNKS) + 1;
        u32 arrived;  // releases what the whole CTA wrote before the barrier, acquires what the others did
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(arrived) : "l"(a.counters + tile) : "memory");
        bool last = arrived == parts - 1;
        if (last) a.counters[tile] = 0;
        flag[threadIdx.x] = last ? parts : 0;
    }
    Target to[2][OUTPUTS];
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int i = 0; i < OUTPUTS; ++i)
            if (c < cuts) to[c][i] = target_of(a, cut[c], i);
    __syncthreads();
    float sum[2][OUTPUTS];
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int i = 0; i < OUTPUTS; ++i)
            if (c < cuts && flag[c]) {
                const int e = threadIdx.x + i * THREADS;
                if (e < M * 128) sum[c][i] = sum_parts(a.scratch + (i64)cut[c] * SLOTS * (M * 128) + e, flag[c]);
            }
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int i = 0; i < OUTPUTS; ++i)
            if (c < cuts && flag[c]) write_out(a, to[c][i], sum[c][i], row_gain, best[i], best_n[i]);
}

#if EPILOGUE == ARGMAX
struct Candidate { float value; int n; };
__device__ __forceinline__ void better(float& v, int& n, float v2, int n2) {
    if (v2 > v || (v2 == v && n2 < n)) { v = v2; n = n2; }
}
// The best of this CTA's tiles, then, in the last CTA to come, the best of all; the lowest id wins a tie.
__device__ __forceinline__ void finish_argmax(const Arguments& a, const float* best, const int* best_n, Candidate* by_warp, u32* flag) {
    Candidate* all = (Candidate*)(a.scratch + (i64)TILES * SLOTS * (M * 128));
    int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) {
        float v = best[i];
        int n = best_n[i];
        for (int o = 16; o; o >>= 1) better(v, n, __shfl_xor_sync(~0u, v, o), __shfl_xor_sync(~0u, n, o));
        if (lane == 0 && (tid + i * THREADS) / 128 < M) by_warp[(tid + i * THREADS) / 32] = Candidate{v, n};
    }
    __syncthreads();
    if (tid < M) {
        Candidate c = by_warp[tid * 4];
        for (int i = 1; i < 4; ++i) better(c.value, c.n, by_warp[tid * 4 + i].value, by_warp[tid * 4 + i].n);
        all[blockIdx.x * M + tid] = c;
        __threadfence();
    }
    __syncthreads();
    if (tid == 0) {
        flag[0] = atomicAdd(a.counters + TILES, 1u) == CTAS - 1;
        if (flag[0]) a.counters[TILES] = 0;
    }
    __syncthreads();
    if (!flag[0] || warp >= M) return;
    __threadfence();
    float v = __int_as_float(0xff800000);
    int n = 0x7fffffff;
    for (int i = lane; i < CTAS; i += 32) {
        i64 raw = __ldcg((const i64*)(all + i * M + warp));
        better(v, n, __int_as_float((int)raw), (int)(raw >> 32));
    }
    for (int o = 16; o; o >>= 1) better(v, n, __shfl_xor_sync(~0u, v, o), __shfl_xor_sync(~0u, n, o));
    if (lane == 0) ((i64*)a.out)[warp] = n == 0x7fffffff ? 0 : n;
}
#endif

#if FP8
// A chunk's scales: one, two (rows 0..7 and 8..15 of every unit), or one for each of the 16 half units.
#define CHUNK_SCALES (SCALES == 0 ? 1 : SCALES == 1 ? 2 : 16)
__device__ __forceinline__ void stage_scales(const Arguments& a, u32 begin, u32 end, float* to) {
    for (u32 i = threadIdx.x; i < (end - begin) * CHUNK_SCALES; i += THREADS) {
        u32 q = begin + i / CHUNK_SCALES, half = i % CHUNK_SCALES;
        int row = ((const int*)a.scale_rows)[q / CHUNKS * 16 + half];
        to[i] = a.scales[(i64)row * KB + q % CHUNKS] * E4M3_GAIN;
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS) linear(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) char smem[];
    char* ring = smem;                                  // [DEPTH][STAGE_BYTES]
    float* red = (float*)(smem + DEPTH * STAGE_BYTES);  // [4 column slices][M][128]
    u16* xs = (u16*)(red + 4 * M * 128);                // [X_CHUNKS][4][M][COLUMNS / 4]
#if FP8
    float* scales = (float*)(xs + X_CHUNKS * COLUMNS * M);  // [SHARE][CHUNK_SCALES]
    const float* scale_from = scales + (SCALES == 2 ? warp_of_thread() / 4 * 4 : 0);
#endif
    __shared__ float row_gain[16];
    __shared__ u32 flag[2];
    __shared__ int cut[2];  // the tiles this CTA shares with others: at most its first and its last
#if EPILOGUE == ARGMAX
    __shared__ Candidate by_warp[4 * M];
#endif
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
    const u32 begin = share_begin(blockIdx.x), end = share_begin(blockIdx.x + 1);
    int tile = begin / CHUNKS, chunk = begin % CHUNKS;

    // Fill the ring; from here on `from` runs DEPTH - 1 chunks ahead.
    const char* from = a.weights + (i64)begin * STAGE_BYTES + tid * 16;
    const char* const stop = a.weights + (i64)end * STAGE_BYTES;
    const u32 ring_at = smem_address(ring) + tid * 16;
    auto issue = [&](int slot) {
        if (from < stop) {
            copy_async(ring_at + slot * STAGE_BYTES, from);
            copy_async(ring_at + slot * STAGE_BYTES + THREADS * 16, from + THREADS * 16);
        }
        from += STAGE_BYTES;
        commit();
    };
    for (int i = 0; i < DEPTH - 1; ++i) issue(i);
#if FP8
    stage_scales(a, begin, end, scales);
#endif
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    stage_x(a, begin, end, xs, row_gain);

    float acc[2][NT][4] = {};  // [unit][8 rows of x][fragment]
    float best[OUTPUTS];
    int best_n[OUTPUTS];
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) { best[i] = __int_as_float(0xff800000); best_n[i] = 0x7fffffff; }
    int cuts = 0;
    const u32 xs_at = smem_address(xs) + (warp % 4 * M + g) * (COLUMNS / 2) + t * (2 * LANE_COLUMNS);
    int x_chunk = SHARE >= CHUNKS ? chunk : 0, slot = 0;

    for (u32 q = begin; q < end; ++q) {
        wait<DEPTH - 2>();
        uint4 w[2];  // a unit each
        w[0] = load_shared(ring_at + slot * STAGE_BYTES);
        w[1] = load_shared(ring_at + slot * STAGE_BYTES + THREADS * 16);
        issue(slot == 0 ? DEPTH - 1 : slot - 1);
        slot = slot + 1 == DEPTH ? 0 : slot + 1;
        uint4 b[NT];
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            b[n] = make_uint4(0, 0, 0, 0);
            const u32 at = xs_at + (x_chunk * 4 * M + n * 8) * (COLUMNS / 2);
            if (n * 8 + g < M) b[n] = FP8 ? load_shared(at) : load_shared_8(at);
        }
#if FP8
        float scale[2][2];  // [unit][rows 0..7, rows 8..15]
        scale[0][0] = scale_from[0];
        scale[0][1] = SCALES >= 1 ? scale_from[1] : scale[0][0];
        scale[1][0] = SCALES == 2 ? scale_from[2] : scale[0][0];
        scale[1][1] = SCALES == 2 ? scale_from[3] : scale[0][1];
        scale_from += CHUNK_SCALES;
#endif
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            u32 lo[4], hi[4];  // this lane's columns of rows g and g + 8
            if (FP8) {
                e4m3_to_half(w[u].x, lo[0], lo[1]);
                e4m3_to_half(w[u].y, lo[2], lo[3]);
                e4m3_to_half(w[u].z, hi[0], hi[1]);
                e4m3_to_half(w[u].w, hi[2], hi[3]);
            } else {
                lo[0] = w[u].x; lo[1] = w[u].y;
                hi[0] = w[u].z; hi[1] = w[u].w;
            }
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                float d[4] = {0.f, 0.f, 0.f, 0.f};
                float* into = FP8 ? d : acc[u][n];
                mma(into, lo[0], hi[0], lo[1], hi[1], b[n].x, b[n].y);
#if FP8
                    mma(into, lo[2], hi[2], lo[3], hi[3], b[n].z, b[n].w);
#pragma unroll
                    for (int i = 0; i < 4; ++i) acc[u][n][i] += d[i] * scale[u][i / 2];
#endif
            }
        }
        ++x_chunk;
        if (++chunk == CHUNKS || q + 1 == end) {
            const bool shared = chunk != CHUNKS || q + 1 - begin < CHUNKS;  // part of the tile lies in another CTA
            __syncthreads();  // everyone is done with the previous tile's `red`
#pragma unroll
            for (int u = 0; u < 2; ++u)
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        int m = n * 8 + 2 * t + (i & 1), r = warp / 4 * 32 + u * 16 + g + i / 2 * 8;
                        if (m < M) red[(warp % 4 * M + m) * 128 + r] = acc[u][n][i];
                        acc[u][n][i] = 0.f;
                    }
            __syncthreads();
            u32 mine = shared ? blockIdx.x - cta_of(tile * CHUNKS) : 0;
#pragma unroll
            for (int i = 0; i < OUTPUTS; ++i) {
                int e = tid + i * THREADS;
                float v = 0.f;
                if (e < M * 128) v = red[e] + red[M * 128 + e] + red[2 * M * 128 + e] + red[3 * M * 128 + e];
                if (!shared) write_out(a, target_of(a, tile, i), v, row_gain, best[i], best_n[i]);
                else if (e < M * 128) __stcg(a.scratch + ((i64)tile * SLOTS + mine) * (M * 128) + e, v);
            }
            if (shared) {
                if (tid == 0) cut[cuts] = tile;
                ++cuts;
            }
            chunk = 0;
            if (SHARE >= CHUNKS) x_chunk = 0;
            ++tile;
        }
    }
    join_parts(a, cut, cuts, row_gain, best, best_n, flag);
#if EPILOGUE == ARGMAX
    finish_argmax(a, best, best_n, by_warp, flag);
#endif
}
