// y[m, n] = sum_k x[m, k] * W[n, k] for 1..16 rows of x: weights are streamed once, everything else is hidden behind them.
//
// Layout. Weights are cut into chunks of 16 KiB: 128 rows x 128 columns of FP8 or 64 of bf16, stored one after the other,
// each in the order in which the tensor cores want it. Warp w owns rows [32 (w / 4), +32) and the (w % 4)-th quarter of the
// columns; in each of its two units of 16 rows, lane (g = lane / 4, t = lane % 4) owns the t-th quarter of those columns in
// rows g and g + 8. So every load is 16 bytes a thread, contiguous over the CTA, read back by the thread that fetched it:
// no barrier, no shuffle.
// Schedule. A CTA walks an equal, contiguous share of all chunks (tile-major), so it needs few columns of x where a tile
// spans several CTAs. Their parts meet through scratch after the last chunk: the CTA with the first part adds the others in
// their order. Neither timing nor the number of rows of x changes any sum. A part is a number and a mark in one 8-byte
// word, so that its reader waits for the word itself: no fence, no counter, half the way through L2 and back.
// Ring. On sm_90 a warp of its own fills it, one bulk copy a chunk, IN_FLIGHT of them under way: fewer leave memory idle;
// more do not arrive sooner, but whatever else an SM asks of L2 (parts, x) queues behind them. The ring is deeper than
// that, since warps drift apart.
// Overlap. A CTA lets the next kernel start as soon as it runs itself (later was measured slower: the launch takes longer
// than a tail); NEXT_READS_X: once x is complete, for a next kernel that reads x before its own wait. What does not depend
// on the previous kernel comes before the wait for it: the ring and the scales.
// Norm. RMSNorm before the product is x * rstd * (1 + w): whoever made x has multiplied by (1 + w) * X_SCALE in fp16, and
// rstd, one number a row, is multiplied into the finished sum.
//
// Compile-time: N (weight rows), TILES, CHUNKS (a tile), K, KB (scale blocks a row), M (rows of x), CTAS, FP8 (8 bits under
// scales, int8 where INT8; else bf16),
// SCALES (0 one scale a chunk, 1 one each for rows 0..7 and 8..15 of a unit, 2 one each for every half unit),
// X_TYPE and OUT_TYPE (0 fp16, 1 bf16, 2 fp32), NORM, EPILOGUE, NEXT_READS_X, DEPTH, SLOTS, IN_FLIGHT.
#define BULK (__CUDA_ARCH__ >= 900)
#define X_SCALE 0.0625f  // exact; keeps un-normalised activations up to a million inside fp16
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;
typedef unsigned long long u64;

#define THREADS 512
#define NT (M > 8 ? 2 : 1)
#define LANE_COLUMNS (FP8 ? 8 : 4)
#define COLUMNS (16 * LANE_COLUMNS)  // of a chunk
#define STAGE_BYTES (THREADS * 32)
#define TOTAL ((u32)TILES * CHUNKS)
#define SHARE ((TOTAL + CTAS - 1) / CTAS)          // the most chunks a CTA walks
#define X_CHUNKS (SHARE < CHUNKS ? SHARE : CHUNKS)  // the most columns of x it needs, in chunks
#define STAGED_AHEAD 6  // loads of x a thread has under way
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
#if __CUDA_ARCH__ >= 890 || INT8
#define BYTE_GAIN 1.f
#else
#define BYTE_GAIN 256.f
#endif
// Four int8 -> two fp16 pairs: the byte + 128 in the low bits of 1024 is exact, and so is the difference.
__device__ __forceinline__ void int8_to_half(u32 q, u32& lo, u32& hi) {
    q ^= 0x80808080u;
    lo = __byte_perm(q, 0x64646464u, 0x5140);
    hi = __byte_perm(q, 0x64646464u, 0x5342);
    asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(lo) : "r"(0x64806480u));
    asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(hi) : "r"(0x64806480u));
}
__device__ __forceinline__ void byte_to_half(u32 q, u32& lo, u32& hi) {
    if (INT8) int8_to_half(q, lo, hi);
    else e4m3_to_half(q, lo, hi);
}

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
    u64* scratch;              // [TILES, SLOTS, M * 128] parts, unmarked between calls
    i64* candidates;           // ARGMAX: [CTAS, M]
    u32* counter;              // ARGMAX: CTAs that have finished, zero between calls
    float eps;
};

__device__ __forceinline__ int warp_of_thread() { return threadIdx.x / 32; }
__device__ __forceinline__ u32 share_begin(u32 cta) { return cta * TOTAL / CTAS; }
// Which CTA walks flat chunk q: the inverse of the floor division above.
__device__ __forceinline__ u32 cta_of(u32 q) { return ((q + 1) * CTAS - 1) / TOTAL; }

// All threads but those of the warp that fills the ring.
__device__ __forceinline__ void sync_walkers() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

#if BULK
struct Ring {
    u32 data, full, empty;  // shared addresses: stages, and a barrier a stage for each direction
    u32 slot, parity;       // of the next chunk to read
};
__device__ __forceinline__ void await(u32 barrier, u32 parity) {
    asm volatile("{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again;}" ::"r"(barrier), "r"(parity) : "memory");
}
// All chunks of the share, one after the other, by one thread.
__device__ __forceinline__ void fill_ring(const Ring& r, const char* from, u32 chunks) {
    u32 slot = 0, lap = 0, arrived_slot = 0, arrived_lap = 0;
    for (u32 i = 0; i < chunks; ++i, from += STAGE_BYTES) {
        if (lap) await(r.empty + slot * 8, (lap - 1) & 1);
        if (i >= IN_FLIGHT) {
            await(r.full + arrived_slot * 8, arrived_lap & 1);
            if (++arrived_slot == DEPTH) { arrived_slot = 0; ++arrived_lap; }
        }
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(r.full + slot * 8), "n"(STAGE_BYTES) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
            ::"r"(r.data + slot * STAGE_BYTES), "l"(from), "n"(STAGE_BYTES), "r"(r.full + slot * 8) : "memory");
        if (++slot == DEPTH) { slot = 0; ++lap; }
    }
}
// False for the threads of the warp that fills the ring; they are done.
__device__ __forceinline__ bool open_ring(Ring& r, const char* from, u32 chunks, u32 data) {
    __shared__ u64 barriers[2 * DEPTH];
    r = Ring{data, smem_address(barriers), smem_address(barriers + DEPTH), 0, 0};
    if (threadIdx.x == THREADS) {
        for (int i = 0; i < DEPTH; ++i) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(r.full + i * 8));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(r.empty + i * 8), "n"(THREADS / 32));
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x == THREADS) fill_ring(r, from, chunks);
    return threadIdx.x < THREADS;
}
// This thread's 32 bytes of the next chunk.
__device__ __forceinline__ void take_chunk(Ring& r, uint4* w) {
    await(r.full + r.slot * 8, r.parity);
    const u32 at = r.data + r.slot * STAGE_BYTES + threadIdx.x * 16;
    w[0] = load_shared(at);
    w[1] = load_shared(at + THREADS * 16);
    __syncwarp();
    if (threadIdx.x % 32 == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(r.empty + r.slot * 8) : "memory");
    if (++r.slot == DEPTH) { r.slot = 0; r.parity ^= 1; }
}
#else
struct Ring {
    u32 data;
    int slot;
    const char* from;  // DEPTH - 1 chunks ahead
    const char* stop;
};
__device__ __forceinline__ void fetch_chunk(Ring& r, int slot) {
    if (r.from < r.stop) {
        copy_async(r.data + slot * STAGE_BYTES, r.from);
        copy_async(r.data + slot * STAGE_BYTES + THREADS * 16, r.from + THREADS * 16);
    }
    r.from += STAGE_BYTES;
    commit();
}
__device__ __forceinline__ bool open_ring(Ring& r, const char* from, u32 chunks, u32 data) {
    from += threadIdx.x * 16;
    r = Ring{data + threadIdx.x * 16, 0, from, from + (i64)chunks * STAGE_BYTES};
    for (int i = 0; i < DEPTH - 1; ++i) fetch_chunk(r, i);
    return true;
}
__device__ __forceinline__ void take_chunk(Ring& r, uint4* w) {
    wait<DEPTH - 2>();
    w[0] = load_shared(r.data + r.slot * STAGE_BYTES);
    w[1] = load_shared(r.data + r.slot * STAGE_BYTES + THREADS * 16);
    fetch_chunk(r, r.slot == 0 ? DEPTH - 1 : r.slot - 1);
    r.slot = r.slot + 1 == DEPTH ? 0 : r.slot + 1;
}
#endif

// Eight columns of x from k as packed operands.
__device__ __forceinline__ uint4 load_x(const Arguments& a, int m, int k) {
    if (k >= K) return make_uint4(0, 0, 0, 0);
    if (X_TYPE == (FP8 ? 0 : 1)) return load_l2((const void*)((const u16*)a.x + (i64)m * K + k));
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
// are on their way, rstd of each row. Plain loads: waiting for an asynchronous copy would wait for the ring too.
__device__ __forceinline__ void stage_x(const Arguments& a, u32 begin, u32 end, u16* xs, float* row_gain) {
    const bool whole = SHARE >= CHUNKS;  // then by column, else from the first chunk on
    const int first = whole ? 0 : begin % CHUNKS, chunks = whole ? CHUNKS : end - begin;
    const int groups = COLUMNS / 8;  // of eight columns, a chunk
    const int items = chunks * groups * M;
    for (int i0 = threadIdx.x; i0 < items; i0 += THREADS * STAGED_AHEAD) {
        uint4 v[STAGED_AHEAD];
#pragma unroll
        for (int j = 0; j < STAGED_AHEAD; ++j) {
            const int i = i0 + j * THREADS, m = i / (chunks * groups), at = i % (chunks * groups), chunk = first + at / groups;
            if (i < items) v[j] = load_x(a, m, (chunk < CHUNKS ? chunk : chunk - CHUNKS) * COLUMNS + at % groups * 8);
        }
#pragma unroll
        for (int j = 0; j < STAGED_AHEAD; ++j) {
            const int i = i0 + j * THREADS, m = i / (chunks * groups), at = i % (chunks * groups);
            const int slice = at * 8 / (COLUMNS / 4), within = at * 8 % (COLUMNS / 4);
            if (i < items) *(uint4*)(xs + (slice * M + m) * (COLUMNS / 4) + within) = v[j];
        }
    }
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
    sync_walkers();
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

__device__ __forceinline__ void store_part(u64* to, float v) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"((u64)__float_as_uint(v) | 1ull << 32) : "memory");
}
__device__ __forceinline__ u64 load_part(const u64* from) {
    u64 v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
    return v;
}

// One element of a shared tile: its first part, and the others in their order as they come. They are unmarked again for the
// next call, which begins after this one has ended.
__device__ __forceinline__ float add_parts(float v, u64* first, u32 parts) {
    constexpr int BATCH = SLOTS - 1 < 7 ? (SLOTS > 1 ? SLOTS - 1 : 1) : 7;
    for (u32 p0 = 1; p0 < parts; p0 += BATCH) {
        u64 part[BATCH];
        bool all;
        do {
            all = true;
#pragma unroll
            for (int j = 0; j < BATCH; ++j) {
                part[j] = p0 + j < parts ? load_part(first + (p0 + j) * (M * 128)) : 1ull << 32;
                all = all && part[j] >> 32;
            }
        } while (!all);
#pragma unroll
        for (int j = 0; j < BATCH; ++j)
            if (p0 + j < parts) {
                v += __uint_as_float((u32)part[j]);
                first[(p0 + j) * (M * 128)] = 0;
            }
    }
    return v;
}

#if EPILOGUE == ARGMAX
struct Candidate { float value; int n; };
__device__ __forceinline__ void better(float& v, int& n, float v2, int n2) {
    if (v2 > v || (v2 == v && n2 < n)) { v = v2; n = n2; }
}
// The best of this CTA's tiles, then, in the last CTA to come, the best of all; the lowest id wins a tie.
__device__ __forceinline__ void finish_argmax(const Arguments& a, const float* best, const int* best_n, Candidate* by_warp, u32* flag) {
    Candidate* all = (Candidate*)a.candidates;
    int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    sync_walkers();
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) {
        float v = best[i];
        int n = best_n[i];
        for (int o = 16; o; o >>= 1) better(v, n, __shfl_xor_sync(~0u, v, o), __shfl_xor_sync(~0u, n, o));
        if (lane == 0 && (tid + i * THREADS) / 128 < M) by_warp[(tid + i * THREADS) / 32] = Candidate{v, n};
    }
    sync_walkers();
    if (tid < M) {
        Candidate c = by_warp[tid * 4];
        for (int i = 1; i < 4; ++i) better(c.value, c.n, by_warp[tid * 4 + i].value, by_warp[tid * 4 + i].n);
        all[blockIdx.x * M + tid] = c;
        __threadfence();
    }
    sync_walkers();
    if (tid == 0) {
        flag[0] = atomicAdd(a.counter, 1u) == CTAS - 1;
        if (flag[0]) *a.counter = 0;
    }
    sync_walkers();
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
        to[i] = a.scales[(i64)row * KB + q % CHUNKS] * BYTE_GAIN;
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS + 32 * BULK, 1) linear(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) char smem[];
    char* ring = smem;                                  // [DEPTH][STAGE_BYTES]
    float* red = (float*)(smem + DEPTH * STAGE_BYTES);  // [4 column slices][M][128]
    u16* xs = (u16*)(red + 4 * M * 128);                // [X_CHUNKS][4][M][COLUMNS / 4]
#if FP8
    float* scales = (float*)(xs + X_CHUNKS * COLUMNS * M);  // [SHARE][CHUNK_SCALES]
    const float* scale_from = scales + (SCALES == 2 ? warp_of_thread() / 4 * 4 : 0);
#endif
    __shared__ float row_gain[16];
#if EPILOGUE == ARGMAX
    __shared__ u32 flag[1];
    __shared__ Candidate by_warp[4 * M];
#endif
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
    const u32 begin = share_begin(blockIdx.x), end = share_begin(blockIdx.x + 1);
    int tile = begin / CHUNKS, chunk = begin % CHUNKS;

    Ring r;
    if (!open_ring(r, a.weights + (i64)begin * STAGE_BYTES, end - begin, smem_address(ring))) return;
#if FP8
    stage_scales(a, begin, end, scales);
#endif
#if __CUDA_ARCH__ >= 900
#if NEXT_READS_X  // before its own wait: it may start only when the kernel before this one has written x
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#else
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
#endif
    stage_x(a, begin, end, xs, row_gain);

    float acc[2][NT][4] = {};  // [unit][8 rows of x][fragment]
    float best[OUTPUTS];
    int best_n[OUTPUTS];
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) { best[i] = __int_as_float(0xff800000); best_n[i] = 0x7fffffff; }
    Target owed[OUTPUTS];  // of the last tile, where others hold parts of it
    float own[OUTPUTS];
    const u32 xs_at = smem_address(xs) + (warp % 4 * M + g) * (COLUMNS / 2) + t * (2 * LANE_COLUMNS);
    int x_chunk = SHARE >= CHUNKS ? chunk : 0;

    for (u32 q = begin; q < end; ++q) {
        uint4 w[2];  // a unit each
        take_chunk(r, w);
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
                byte_to_half(w[u].x, lo[0], lo[1]);
                byte_to_half(w[u].y, lo[2], lo[3]);
                byte_to_half(w[u].z, hi[0], hi[1]);
                byte_to_half(w[u].w, hi[2], hi[3]);
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
            sync_walkers();  // everyone is done with the previous tile's `red`
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
            sync_walkers();
            const u32 mine = shared ? blockIdx.x - cta_of(tile * CHUNKS) : 0;
#pragma unroll
            for (int i = 0; i < OUTPUTS; ++i) {
                int e = tid + i * THREADS;
                float v = 0.f;
                if (e < M * 128) v = red[e] + red[M * 128 + e] + red[2 * M * 128 + e] + red[3 * M * 128 + e];
                if (!shared) write_out(a, target_of(a, tile, i), v, row_gain, best[i], best_n[i]);
                else if (mine && e < M * 128) store_part(a.scratch + ((i64)tile * SLOTS + mine) * (M * 128) + e, v);
                own[i] = v;
            }
            chunk = 0;
            if (SHARE >= CHUNKS) x_chunk = 0;
            ++tile;
        }
    }
    // The end that the next kernel waits for: what this CTA's last tile still lacks, where it has the first part of it.
    const u32 last = (end - 1) / CHUNKS, parts = cta_of((last + 1) * CHUNKS - 1) - blockIdx.x + 1;
    if (parts > 1 && cta_of(last * CHUNKS) == blockIdx.x) {
#pragma unroll
        for (int i = 0; i < OUTPUTS; ++i) owed[i] = target_of(a, last, i);
#pragma unroll
        for (int i = 0; i < OUTPUTS; ++i) {
            const int e = tid + i * THREADS;
            if (e < M * 128) own[i] = add_parts(own[i], a.scratch + (i64)last * SLOTS * (M * 128) + e, parts);
        }
#pragma unroll
        for (int i = 0; i < OUTPUTS; ++i) write_out(a, owed[i], own[i], row_gain, best[i], best_n[i]);
    }
#if EPILOGUE == ARGMAX
    finish_argmax(a, best, best_n, by_warp, flag);
#endif
}
