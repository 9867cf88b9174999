// What a prompt's MLP multiplies first: silu(x gate^T) (x up^T), e4m3 by e4m3, in e4m3 again. sm_90's warp group instructions sum
// a block of 128 columns in registers of its own, which is then added to the scaled sum in fp32:
// y = sum over blocks b of x_scale[t, b] * w_scale[n / 128, b] * (x8[t, b] . w8[n, b]).
//
// A CTA multiplies 128 rows of x by a tile of 128 rows of the gate and the tile of up for the same columns of the result, so that
// both factors of it meet in one thread and a row's largest value in four lanes. A warp fetches (a ring of STAGES blocks of columns),
// two warp groups multiply 64 rows each. A cluster is two CTAs with the same tiles of w: each fetches one for both.
// x and w lie in tiles of 128 rows x 128 bytes, 16 KiB, a tile's rows swizzled as the instruction reads them: the 16 bytes u of row r
// at place u ^ (r % 8): one bulk copy fetches a tile (fp8_rows.py). Bits: a fixed order of sums, two runs are equal to the bit.
//
// own features: sm_90a. Compile-time: STAGES.
#ifndef EMULATED
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;
typedef unsigned long long u64;
#define BLOCK_SHARED(type, name)                           \
    extern __shared__ __align__(1024) char block_memory[]; \
    type& name = *(type*)block_memory
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void barrier_init(u64* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Without .release.cluster, which would order all of global memory (MEMBAR.GPU every block): what a stage is let go of was only read,
// and by instructions that have ended.
__device__ __forceinline__ void arrive_in(u64* barrier, int cta) {
    asm volatile(
        "{.reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [remote];}" ::"r"(
            shared_address(barrier)), "r"(cta) : "memory");
}
__device__ __forceinline__ void arrive_expecting(u64* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_phase(u64* barrier, int parity) {
    asm volatile(
        "{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again;}" ::"r"(shared_address(barrier)),
        "r"(parity) : "memory");
}
__device__ __forceinline__ void bulk_copy(void* to, const void* from, int bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void bulk_copy_to_both(void* to, const void* from, int bytes, u64* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier)), "h"((u16)3) : "memory");
}
__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ int cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
template <int COUNT> __device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> __device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
__device__ __forceinline__ void sync_warp() { __syncwarp(); }
__device__ __forceinline__ u32 shuffle_xor_bits(u32 v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
// Rows of 128 bytes, groups of eight rows 1,024 bytes apart, swizzled over 128 bytes.
__device__ __forceinline__ u64 matrix(const void* p) { return (u64)(shared_address(p) >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62; }
// d [64 x 128, fp32] (+)= x [64, 32] . w [128, 32]^T, by the four warps of a group; lane 4g + t of warp v has, of columns 8j + 2t + e,
// rows 16v + g (d[4j + e]) and 16v + g + 8 (d[4j + 2 + e]).
#define EIGHT(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
__device__ __forceinline__ void multiply(float (&d)[64], u64 x, u64 w, int add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7,"
        "%8, %9, %10, %11, %12, %13, %14, %15,"
        "%16, %17, %18, %19, %20, %21, %22, %23,"
        "%24, %25, %26, %27, %28, %29, %30, %31,"
        "%32, %33, %34, %35, %36, %37, %38, %39,"
        "%40, %41, %42, %43, %44, %45, %46, %47,"
        "%48, %49, %50, %51, %52, %53, %54, %55,"
        "%56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, p, 1, 1;}"
        : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16), EIGHT(d, 24), EIGHT(d, 32), EIGHT(d, 40), EIGHT(d, 48), EIGHT(d, 56)
        : "l"(x), "l"(w), "r"(add));
}
__device__ __forceinline__ u32 pair_of_e4m3(float low, float high) {  // saturates
    u16 bits;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
    return bits;
}
__device__ __forceinline__ float exp_of(float x) { return __expf(x); }
__device__ __forceinline__ float reciprocal(float x) { return __fdividef(1.f, x); }
__device__ __forceinline__ float shuffle_xor(float v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
__device__ __forceinline__ void pin(float& v) { asm volatile("" : "+f"(v)::"memory"); }
__device__ __forceinline__ float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
#endif

#define TILE 128
#define TILE_BYTES 16384
#define CLUSTER 2
#define ROWS (CLUSTER * TILE)  // of x, a cluster
#define GROUP_ROWS 64          // of x, a warp group
#define NEIGHBOURS 8           // row blocks that go through the same tiles of w at a time, from L2
#define THREADS 384
#define RELEASES (CLUSTER * 8)  // warps that let go of a stage
#define E4M3_MAX 448.f

struct Arguments {
    const u8* x;           // [row tiles, column blocks, TILE_BYTES], row tiles even
    const float* x_scale;  // [column blocks, row tiles * TILE]
    const u8* w;           // [gate and up, tiles of the result, column blocks, TILE_BYTES]
    const float* w_scale;  // [gate and up, tiles of the result, column blocks]
    u8* out;               // e4m3 [rows, tiles of the result * TILE]
    float* out_scale;      // [tiles of the result, out_rows]
    int rows, row_blocks, tiles, column_blocks, out_rows, clusters;
};

struct __align__(1024) Stage {
    u8 x[TILE_BYTES];
    u8 w[2][TILE_BYTES];
    float scale[TILE];
};
struct __align__(1024) Shared {
    Stage stages[STAGES];
    u64 full[STAGES], empty[STAGES];
};
#define STAGE_BYTES (3 * TILE_BYTES + TILE * 4)  // that arrive

struct Place {
    int row_block, tile;
};
__device__ __forceinline__ Place place_of(const Arguments& a, int task) {
    const int whole = NEIGHBOURS * a.tiles;
    const int first = task / whole * NEIGHBOURS, inside = task % whole;
    const int height = a.row_blocks - first < NEIGHBOURS ? a.row_blocks - first : NEIGHBOURS;
    return {first + inside % height, inside / height};
}

__device__ __forceinline__ void fetch(const Arguments& a, Shared& s, int rank) {
    const int tasks = a.row_blocks * a.tiles;
    int step = 0;
    for (int task = blockIdx.x / CLUSTER; task < tasks; task += a.clusters) {
        const Place p = place_of(a, task);
        const u8* x = a.x + (i64)(p.row_block * CLUSTER + rank) * a.column_blocks * TILE_BYTES;
        const u8* w = a.w + (i64)(rank * a.tiles + p.tile) * a.column_blocks * TILE_BYTES;
        const float* scale = a.x_scale + p.row_block * ROWS + rank * TILE;
        for (int block = 0; block < a.column_blocks; ++block, ++step) {
            Stage& stage = s.stages[step % STAGES];
            u64* const full = &s.full[step % STAGES];
            wait_phase(&s.empty[step % STAGES], (step / STAGES & 1) ^ 1);
            arrive_expecting(full, STAGE_BYTES);
            bulk_copy_to_both(stage.w[rank], w + block * TILE_BYTES, TILE_BYTES, full);
            bulk_copy(stage.x, x + block * TILE_BYTES, TILE_BYTES, full);
            bulk_copy(stage.scale, scale + (i64)block * a.row_blocks * ROWS, TILE * 4, full);
        }
    }
}

// v[g], two 16-bit halves, of lane t of four becomes v[t] of lane g.
__device__ __forceinline__ void turn(u32* v, int t) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 other = shuffle_xor_bits(t & 1 ? v[i] : v[i + 1], 1);
        (t & 1 ? v[i] : v[i + 1]) = other;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 other = shuffle_xor_bits(t & 2 ? v[i] : v[i + 2], 2);
        (t & 2 ? v[i] : v[i + 2]) = other;
    }
}

// gate = silu(gate) up. 1 / p and 1 / q from one reciprocal, of p q, which the bound keeps finite; e^-44 is no FP8 value's size.
__device__ __forceinline__ void swiglu(float (&gate)[64], const float (&up)[64]) {
#pragma unroll
    for (int i = 0; i < 64; i += 2) {
        const float p = 1.f + exp_of(-fmaxf(gate[i], -43.f)), q = 1.f + exp_of(-fmaxf(gate[i + 1], -43.f));
        const float both = reciprocal(p * q);
        gate[i] *= up[i] * (both * q);
        gate[i + 1] *= up[i + 1] * (both * p);
    }
}

// y[4 g + 2 half + e] is column 8 g + 2 t + e of row `row` + 8 half: e4m3 under one scale a row, 16 bytes a lane at a time.
__device__ __forceinline__ void store(const Arguments& a, const float (&y)[64], int row, int tile, int t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float largest = 0.f;
#pragma unroll
        for (int i = 0; i < 32; ++i) largest = fmaxf(largest, fabsf(y[i / 2 * 4 + half * 2 + i % 2]));
        largest = fmaxf(largest, shuffle_xor(largest, 1));
        largest = fmaxf(largest, shuffle_xor(largest, 2));
        const float scale = fmaxf(largest / E4M3_MAX, 1e-12f), inverse = 1.f / scale;
        const int here = row + half * 8;
        u8* const to = a.out + ((i64)here * a.tiles + tile) * TILE + t * 16;
        if (t == 0 && here < a.rows) a.out_scale[(i64)tile * a.out_rows + here] = scale;
#pragma unroll
        for (int q = 0; q < 2; ++q) {  // 64 columns
            u32 v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* const low = y + (q * 4 + i) * 8 + half * 2;
                v[i] = pair_of_e4m3(low[0] * inverse, low[1] * inverse) | pair_of_e4m3(low[4] * inverse, low[5] * inverse) << 16;
            }
            turn(v, t);
            const uint4 unit = make_uint4((v[0] & 0xffff) | v[1] << 16, (v[2] & 0xffff) | v[3] << 16,
                                          v[0] >> 16 | (v[1] & 0xffff0000), v[2] >> 16 | (v[3] & 0xffff0000));
            if (here < a.rows) *(uint4*)(to + q * 64) = unit;
        }
    }
}

__device__ __forceinline__ void multiply_all(const Arguments& a, Shared& s, int group, int rank) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int tasks = a.row_blocks * a.tiles;
    const int row = group * GROUP_ROWS + warp * 16 + lane / 4;  // of the CTA's tile; this thread has also the one 8 below
    int step = 0;
    float part[64], sum[2][64];
    for (int task = blockIdx.x / CLUSTER; task < tasks; task += a.clusters) {
        const Place p = place_of(a, task);
        const float* const w_scale = a.w_scale + (i64)p.tile * a.column_blocks;
#pragma unroll
        for (int i = 0; i < 64; ++i) sum[0][i] = sum[1][i] = 0.f;
        for (int block = 0; block < a.column_blocks; ++block, ++step) {
            const Stage& stage = s.stages[step % STAGES];
            const float scale_w[2] = {w_scale[block], w_scale[a.tiles * a.column_blocks + block]};
            wait_phase(&s.full[step % STAGES], step / STAGES & 1);
            float scale[2][2];
#pragma unroll
            for (int i = 0; i < 4; ++i) scale[i / 2][i % 2] = stage.scale[row + i % 2 * 8] * scale_w[i / 2];
            const u64 x = matrix(stage.x + group * GROUP_ROWS * TILE);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const u64 w = matrix(stage.w[n]);
#pragma unroll
                for (int i = 0; i < 64; ++i) pin(part[i]);
                products_begin();
#pragma unroll
                for (int k = 0; k < 4; ++k) multiply(part, x + k * 2, w + k * 2, k > 0);
                products_commit();
                products_wait();
#pragma unroll
                for (int i = 0; i < 64; ++i) pin(part[i]);  // what follows depends on the wait
                if (n == 1) sync_warp();
                if (n == 1 && lane < CLUSTER) arrive_in(&s.empty[step % STAGES], lane);
#pragma unroll
                for (int i = 0; i < 64; ++i) sum[n][i] = fma(part[i], scale[n][i / 2 % 2], sum[n][i]);
            }
        }
        swiglu(sum[0], sum[1]);
        store(a, sum[0], p.row_block * ROWS + rank * TILE + row, p.tile, lane % 4);
    }
}

extern "C" __global__ __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) void fp8_swiglu(const __grid_constant__ Arguments a) {
    BLOCK_SHARED(Shared, s);
    const int group = threadIdx.x / 128, rank = cluster_rank();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], RELEASES);
        barriers_ready();
    }
    sync_cluster();
    if (group == 2) {
        give_registers<40>();
        if (threadIdx.x == 256) fetch(a, s, rank);
        sync_warp();
    } else {
        take_registers<232>();
        multiply_all(a, s, group, rank);
    }
    sync_cluster();  // nobody leaves while the other still sends to it
}
