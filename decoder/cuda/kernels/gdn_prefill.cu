// The gated delta rule over many rows of a prompt, in two kernels over chunks of 64 tokens (gdn_prefill.py has the formulas).
//
// chunk (WALK 0): a CTA a chunk and key head, which reads q and k once for all value heads of the key head. The triangular
// system is inverted by blocks of 16: diagonal blocks by forward substitution in fp32, which stays accurate where keys repeat,
// then a block column a warp, X_ab = -D_a sum_m A_am X_mb. Those products are of fp16 halves split in two (22 bits): no entry of
// the inverse exceeds 1, since every token's update of the state is a contraction, and nor do those of A, so fp16 holds them.
// beta and the decays go into the columns of the inverse, not into k and v.
// walk (WALK 1): a CTA VB columns of a head's state, a warp 16 of them, from the first chunk to the last. Everything is computed
// transposed (rows of a tile are columns of the state), so that what a tensor core instruction leaves in registers, S, then v',
// is what the next one takes: no shared memory and no barrier but the ring's between the steps of a chunk.
// u, w and the scores lie in memory as the walk's lanes take them, 16 bytes a lane: chunk's lanes hold exactly those.
//
// Fragments: lane (g = lane / 4, t = lane % 4) of a tile of 8 x 8 holds row g, columns 2t and 2t + 1.
// Bits. A fixed order of sums, no atomics: two runs are equal to the bit. Rows past the end have q, k, v, beta and g of zero.
//
// Compile-time: WALK, KEY_HEADS, H (value heads), K, V (head dimensions; multiples of 16), VB (divides V), STAGES, BULK (sm_90's copies), THREADS,
// SHARED_BYTES.
#ifndef EMULATED
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;
typedef unsigned long long u64;
#define BLOCK_SHARED(type, name)                          \
    extern __shared__ __align__(16) char block_memory[]; \
    type& name = *(type*)block_memory
#define FULL 0xffffffffu

__device__ __forceinline__ float shuffle(float v, int lane) { return __shfl_sync(FULL, v, lane); }
__device__ __forceinline__ u32 shuffle_xor_bits(u32 v, int mask) { return __shfl_xor_sync(FULL, v, mask); }
__device__ __forceinline__ void sync_warp() { __syncwarp(); }
__device__ __forceinline__ void sync_block() { __syncthreads(); }
__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float from_half(u32 bits) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)bits));
    return f;
}
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy16(void* to, const void* from, bool real = true) {  // zeros unless real
    const int size = real ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(size) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
#if BULK
// Barriers that count arrivals and bytes; a wait ends when the phase of that parity is complete.
__device__ __forceinline__ void barrier_init(u64* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void arrive_expecting(u64* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_phase(u64* barrier, int parity) {
    asm volatile(
        "{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again;}" ::"r"(shared_address(barrier)), "r"(parity)
        : "memory");
}
__device__ __forceinline__ void bulk_copy(void* to, const void* from, int bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
#endif
__device__ __forceinline__ void load_tiles4(u32* r, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void load_turned_tiles4(u32* r, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ u32 turn_tile(u32 v) {  // a tile of 8 x 8 over the warp, transposed
    u32 turned;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(v));
    return turned;
}
__device__ __forceinline__ void mma(float* d, const u32* a, const u32* b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif  // EMULATED

#define N 64               // tokens of a chunk
#define BLOCKS 4           // of 16 tokens
#define GROUP (H / KEY_HEADS)
#define KEY_STRIDE (K + 8)  // of rows of q and k, in halves, so that eight rows in shared memory meet no bank twice
#define KEY_TILE (N * KEY_STRIDE)
#define VALUE_STRIDE (V + 8)
#define LOG2_E 1.44269504f

struct Arguments {
    const u16* q;       // fp16 [KEY_HEADS, chunks * N, KEY_STRIDE], unit length times K^-0.5; zeros past the end
    const u16* k;       // fp16 [KEY_HEADS, chunks * N, KEY_STRIDE], unit length; zeros past the end
    const u16* v;       // fp16 [rows, H, V]
    const float* g;     // [rows, H] log decay
    const float* beta;  // [rows, H]
    uint4* u;           // [chunks, H, V / 16, BLOCKS, 32]: columns x tokens, 16 x 16 a warp
    uint4* w;           // [chunks, H, BLOCKS, K / 16, 32]: tokens x keys, negated
    uint4* scores;      // [chunks, H, 10, 32]: blocks of tokens on and below the diagonal, by rows
    float* decays;      // [chunks, H, 2, N]: from the chunk's start to a token, from a token to the chunk's end
    float* state;       // [H, K, V]
    u16* out;           // fp16 [rows, H, V]
    int rows;
};

// Where a lane's part of a load of 16 rows x 16 columns begins, as four tiles: rows 0..7 and 8..15 of columns 0..7, then of columns
// 8..15 (down), or columns first (across). Operands must lie in consecutive registers, so the order saves moves.
__device__ __forceinline__ const u16* tiles_down(const u16* base, int stride, int row, int column, int lane) {
    return base + (row + lane % 16) * stride + column + lane / 16 * 8;
}
__device__ __forceinline__ const u16* tiles_across(const u16* base, int stride, int row, int column, int lane) {
    return base + (row + lane % 8 + lane / 16 * 8) * stride + column + lane / 8 % 2 * 8;
}
__device__ __forceinline__ void mma(float* d, const u32* a, u32 b0, u32 b1) {
    const u32 b[2] = {b0, b1};
    mma(d, a, b);
}
#if !WALK

struct __align__(16) Shared {
    u16 k[N][KEY_STRIDE];
    u16 v[N][VALUE_STRIDE];
    union {
        u16 q[N][KEY_STRIDE];       // until its products with k are made
        struct {
            uint4 below[6][2][32];      // blocks of the system below the diagonal: high and low halves
            uint4 inverse[10][2][32];   // its inverse times beta, and times -beta and the decay from the chunk's start
        };
    };
    float diagonal[BLOCKS][16][20];  // blocks of the system, then of its inverse
    float sums[GROUP][N];            // of g / ln 2
    float beta[GROUP][N];
};

// Rows of v; those that do not exist are zeros. Unrolled, loops like this would keep addresses in registers that the products need.
__device__ __forceinline__ void stage_values(u16* to, const u16* from, int real_rows) {
#pragma unroll 1
    for (int i = threadIdx.x; i < N * (V / 8); i += THREADS) {
        const int row = i / (V / 8), column = i % (V / 8) * 8;
        const bool real = row < real_rows;
        copy16(to + row * VALUE_STRIDE + column, from + (real ? (i64)row * (H * V) + column : 0), real);
    }
}
__device__ __forceinline__ void stage_keys(u16* to, const u16* from) {
#pragma unroll 1
    for (int i = threadIdx.x * 8; i < KEY_TILE; i += THREADS * 8) copy16(to + i, from + i);
}

// Two numbers as fp16 and what is left of them: 22 bits.
__device__ __forceinline__ void split(float x, float y, u32& high, u32& low) {
    high = pack(x, y);
    low = pack(x - from_half(high & 0xffff), y - from_half(high >> 16));
}
// Two tiles of a product, rows x 16 columns, as the first operand of the next one.
__device__ __forceinline__ void split_operand(const float d[2][4], u32* high, u32* low) {
#pragma unroll
    for (int i = 0; i < 4; ++i) split(d[i / 2][i % 2 * 2], d[i / 2][i % 2 * 2 + 1], high[i], low[i]);
}

// Sums of g of one value head over a chunk, and beta, by one warp.
__device__ __forceinline__ void stage_gates(const Arguments& a, Shared& s, int first, int head, int of_group, int lane) {
    float two[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = lane * 2 + i;
        const bool real = first + row < a.rows;
        two[i] = real ? a.g[(i64)(first + row) * H + head] * LOG2_E : 0.f;
        s.beta[of_group][row] = real ? a.beta[(i64)(first + row) * H + head] : 0.f;
    }
    float sum = two[0] + two[1];
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const float before = shuffle(sum, lane >= apart ? lane - apart : lane);
        if (lane >= apart) sum += before;
    }
    s.sums[of_group][lane * 2] = sum - two[1];
    s.sums[of_group][lane * 2 + 1] = sum;
}

// k kT and q kT of this warp's 16 rows on and below the diagonal.
__device__ __forceinline__ void products(const Shared& s, int band, int lane, float kk[8][4], float qk[8][4]) {
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) kk[n][i] = qk[n][i] = 0.f;
#pragma unroll
    for (int step = 0; step < K / 16; ++step) {
        u32 k_rows[4], q_rows[4], b[4];
        load_tiles4(k_rows, tiles_down(s.k[0], KEY_STRIDE, band * 16, step * 16, lane));
        load_tiles4(q_rows, tiles_down(s.q[0], KEY_STRIDE, band * 16, step * 16, lane));
#pragma unroll
        for (int pair = 0; pair < BLOCKS; ++pair) {
            if (pair > band) continue;
            load_tiles4(b, tiles_across(s.k[0], KEY_STRIDE, pair * 16, step * 16, lane));
            mma(kk[2 * pair], k_rows, b[0], b[1]);
            mma(kk[2 * pair + 1], k_rows, b[2], b[3]);
            mma(qk[2 * pair], q_rows, b[0], b[1]);
            mma(qk[2 * pair + 1], q_rows, b[2], b[3]);
        }
    }
}

// This warp's 16 rows of the system and of the scores of one value head.
__device__ __forceinline__ void system_and_scores(
    Shared& s, int band, int lane, int of_group, const float kk[8][4], const float qk[8][4], uint4* scores) {
    const int g = lane / 4, t = lane % 4, row = band * 16 + g;
    const float sum[2] = {s.sums[of_group][row], s.sums[of_group][row + 8]};
    const float beta[2] = {s.beta[of_group][row], s.beta[of_group][row + 8]};
#pragma unroll
    for (int pair = 0; pair < BLOCKS; ++pair) {
        if (pair > band) continue;
        u32 score[4], high[4], low[4];
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const int n = pair * 2 + tile, column = n * 8 + t * 2;
            const float2 sums = *(const float2*)&s.sums[of_group][column];
#pragma unroll
            for (int lower = 0; lower < 2; ++lower) {  // rows g, g + 8
                const int i = row + lower * 8;
                // masked before the power: above the diagonal the difference is positive and may be large
                const float first = exp2_of(column <= i ? sum[lower] - sums.x : 0.f);
                const float second = exp2_of(column + 1 <= i ? sum[lower] - sums.y : 0.f);
                score[lower * 2 + tile] = pack(
                    column <= i ? qk[n][lower * 2] * first : 0.f, column + 1 <= i ? qk[n][lower * 2 + 1] * second : 0.f);
                const float x = column < i ? beta[lower] * kk[n][lower * 2] * first : 0.f;
                const float y = column + 1 < i ? beta[lower] * kk[n][lower * 2 + 1] * second : 0.f;
                if (pair == band) *(float2*)&s.diagonal[band][g + lower * 8][tile * 8 + t * 2] = make_float2(x, y);
                else split(x, y, high[lower * 2 + tile], low[lower * 2 + tile]);
            }
        }
        scores[(band * (band + 1) / 2 + pair) * 32 + lane] = make_uint4(score[0], score[1], score[2], score[3]);
        if (pair < band) {
            s.below[band * (band - 1) / 2 + pair][0][lane] = make_uint4(high[0], high[1], high[2], high[3]);
            s.below[band * (band - 1) / 2 + pair][1][lane] = make_uint4(low[0], low[1], low[2], low[3]);
        }
    }
}

// A diagonal block of the system becomes its inverse: a lane a column, forward substitution.
__device__ __forceinline__ void invert_diagonal(float block[16][20], int lane) {
    float x[16];
    sync_warp();
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        float line[16], sum = lane % 16 == i ? 1.f : 0.f;
#pragma unroll
        for (int j = 0; j < (i + 3) / 4; ++j) {
            const float4 four = *(const float4*)&block[i][j * 4];
            line[j * 4] = four.x, line[j * 4 + 1] = four.y, line[j * 4 + 2] = four.z, line[j * 4 + 3] = four.w;
        }
#pragma unroll
        for (int j = 0; j < i; ++j) sum -= line[j] * x[j];
        x[i] = sum;
    }
    sync_warp();
    if (lane < 16) {
#pragma unroll
        for (int i = 0; i < 16; ++i) block[i][lane] = x[i];
    }
}

// A block of the inverse, transposed as two tiles (rows are its columns), times a factor a column: as the second operand of the
// product with v (version 0) and the first of that with k (version 1).
__device__ __forceinline__ void keep_block(Shared& s, int block, int version, const float x[2][4], float upper, float lower, int lane) {
    const u32 a0 = turn_tile(pack(x[0][0] * upper, x[0][1] * upper)), a1 = turn_tile(pack(x[1][0] * upper, x[1][1] * upper));
    const u32 a2 = turn_tile(pack(x[0][2] * lower, x[0][3] * lower)), a3 = turn_tile(pack(x[1][2] * lower, x[1][3] * lower));
    s.inverse[block][version][lane] = version ? make_uint4(a0, a1, a2, a3) : make_uint4(a0, a2, a1, a3);
}

// Block column `band` of the inverse, from the diagonal down.
__device__ __forceinline__ void invert_below(Shared& s, int band, int lane, int of_group) {
    const int g = lane / 4, t = lane % 4, column = band * 16 + g;
    const float beta[2] = {s.beta[of_group][column], s.beta[of_group][column + 8]};
    const float faded[2] = {-beta[0] * exp2_of(s.sums[of_group][column]), -beta[1] * exp2_of(s.sums[of_group][column + 8])};
    u32 x_high[3][4], x_low[3][4];
    float x[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i / 4][i % 4] = s.diagonal[band][i / 4 * 8 + t * 2 + i % 2][g + i % 4 / 2 * 8];
    keep_block(s, band * (band + 1) / 2 + band, 0, x, beta[0], beta[1], lane);
    keep_block(s, band * (band + 1) / 2 + band, 1, x, faded[0], faded[1], lane);
    split_operand(x, x_high[0], x_low[0]);
#pragma unroll
    for (int down = 1; down < BLOCKS; ++down) {
        const int row = band + down;
        if (row >= BLOCKS) continue;
        float y[2][4] = {};
#pragma unroll
        for (int i = 0; i < down; ++i) {
            const int at = row * (row - 1) / 2 + band + i;
            const uint4 high = s.below[at][0][lane], low = s.below[at][1][lane];
            mma(y[0], x_low[i], high.x, high.y), mma(y[1], x_low[i], high.z, high.w);
            mma(y[0], x_high[i], low.x, low.y), mma(y[1], x_high[i], low.z, low.w);
            mma(y[0], x_high[i], high.x, high.y), mma(y[1], x_high[i], high.z, high.w);
        }
        u32 y_high[4], y_low[4];
        split_operand(y, y_high, y_low);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const float2 first = *(const float2*)&s.diagonal[row][tile * 8 + g][t * 2];
            const float2 second = *(const float2*)&s.diagonal[row][tile * 8 + g][8 + t * 2];
            u32 high[2], low[2];
            split(-first.x, -first.y, high[0], low[0]);
            split(-second.x, -second.y, high[1], low[1]);
#pragma unroll
            for (int i = 0; i < 4; ++i) x[tile][i] = 0.f;
            mma(x[tile], y_low, high), mma(x[tile], y_high, low), mma(x[tile], y_high, high);
        }
        keep_block(s, row * (row + 1) / 2 + band, 0, x, beta[0], beta[1], lane);
        keep_block(s, row * (row + 1) / 2 + band, 1, x, faded[0], faded[1], lane);
        if (down < BLOCKS - 1) split_operand(x, x_high[down], x_low[down]);
    }
}

// This warp's 16 rows of a version of the inverse.
__device__ __forceinline__ void load_rows(const Shared& s, int band, int version, int lane, u32 rows[BLOCKS][4]) {
#pragma unroll
    for (int step = 0; step < BLOCKS; ++step) {
        if (step > band) continue;
        const uint4 four = s.inverse[band * (band + 1) / 2 + step][version][lane];
        rows[step][0] = four.x, rows[step][1] = four.y, rows[step][2] = four.z, rows[step][3] = four.w;
    }
}
// This warp's 16 tokens of w, as the walk takes them.
__device__ __forceinline__ void make_w(const Shared& s, int band, int lane, uint4* w) {
    u32 faded[BLOCKS][4];
    load_rows(s, band, 1, lane, faded);
#pragma unroll 4
    for (int at = 0; at < K / 16; ++at) {
        float d[2][4] = {};
#pragma unroll
        for (int step = 0; step < BLOCKS; ++step) {
            if (step > band) continue;
            u32 r[4];
            load_turned_tiles4(r, tiles_down(s.k[0], KEY_STRIDE, step * 16, at * 16, lane));
            mma(d[0], faded[step], r[0], r[1]);
            mma(d[1], faded[step], r[2], r[3]);
        }
        w[(band * (K / 16) + at) * 32 + lane] =
            make_uint4(pack(d[0][0], d[0][1]), pack(d[1][0], d[1][1]), pack(d[0][2], d[0][3]), pack(d[1][2], d[1][3]));
    }
}
// And of u.
__device__ __forceinline__ void make_u(const Shared& s, int band, int lane, uint4* u) {
    u32 with_beta[BLOCKS][4];
    load_rows(s, band, 0, lane, with_beta);
#pragma unroll 4
    for (int at = 0; at < V / 16; ++at) {
        float d[2][4] = {};
#pragma unroll
        for (int step = 0; step < BLOCKS; ++step) {
            if (step > band) continue;
            u32 r[4];
            load_turned_tiles4(r, tiles_across(s.v[0], VALUE_STRIDE, step * 16, at * 16, lane));
            mma(d[0], r, with_beta[step][0], with_beta[step][1]);
            mma(d[1], r, with_beta[step][2], with_beta[step][3]);
        }
        u[(at * BLOCKS + band) * 32 + lane] =
            make_uint4(pack(d[0][0], d[0][1]), pack(d[0][2], d[0][3]), pack(d[1][0], d[1][1]), pack(d[1][2], d[1][3]));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) chunk(const __grid_constant__ Arguments a) {
    BLOCK_SHARED(Shared, s);
    static_assert(sizeof(Shared) <= SHARED_BYTES, "the launcher asks for too little shared memory");
    const int chunk_index = blockIdx.x / KEY_HEADS, key_head = blockIdx.x % KEY_HEADS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int band = (warp + blockIdx.x) % BLOCKS;  // later rows cost more: not always on the same quarter of an SM
    const int first = chunk_index * N, left = a.rows - first;
    const i64 tile = ((i64)key_head * ((a.rows + N - 1) / N) + chunk_index) * KEY_TILE;
    stage_keys(s.k[0], a.k + tile);
    stage_keys(s.q[0], a.q + tile);
    commit();
    for (int i = warp; i < GROUP; i += BLOCKS) stage_gates(a, s, first, key_head * GROUP + i, i, lane);
    stage_values(s.v[0], a.v + ((i64)first * H + key_head * GROUP) * V, left);
    commit();
    wait_copies<1>();
    sync_block();
    float kk[8][4], qk[8][4];
    products(s, band, lane, kk, qk);
    sync_block();  // q's place is free
#pragma unroll 1
    for (int i = 0; i < GROUP; ++i) {
        const int head = key_head * GROUP + i;
        const i64 part = (i64)chunk_index * H + head;
        system_and_scores(s, band, lane, i, kk, qk, a.scores + part * (10 * 32));
        invert_diagonal(s.diagonal[band], lane);
        if (threadIdx.x < N) {
            const float sum = s.sums[i][threadIdx.x];
            a.decays[part * (2 * N) + threadIdx.x] = exp2_of(sum);
            a.decays[part * (2 * N) + N + threadIdx.x] = exp2_of(s.sums[i][N - 1] - sum);
        }
        sync_block();
        invert_below(s, band, lane, i);
        wait_copies<0>();
        sync_block();
        make_w(s, band, lane, a.w + part * (K * N / 8));
        make_u(s, band, lane, a.u + part * (V * N / 8));
        sync_block();  // v's place is free
        if (i + 1 < GROUP) stage_values(s.v[0], a.v + ((i64)first * H + head + 1) * V, left);
        commit();
    }
}

#else  // WALK
#define WARPS (VB / 16)
static_assert(THREADS == WARPS * 32 + 32, "the last warp only fills the ring");

struct __align__(16) Stage {
    uint4 w[BLOCKS][K / 16][32];
    uint4 u[WARPS][BLOCKS][32];
    uint4 scores[10][32];
    u16 q[N][KEY_STRIDE], k[N][KEY_STRIDE];
    float decays[2][N];
};
struct __align__(16) Shared {
    Stage stages[STAGES];
    u64 full[STAGES], empty[STAGES];  // BULK: a stage's bytes have come; all warps have left it
};

template <int BYTES> __device__ __forceinline__ void stage_bytes(void* to, const void* from, int lane, u64* barrier) {
#if BULK
    if (lane == 0) bulk_copy(to, from, BYTES, barrier);
#else
#pragma unroll 8
    for (int i = 0; i < BYTES / 512; ++i) copy16((uint4*)to + i * 32 + lane, (const uint4*)from + i * 32 + lane);
#endif
}
__device__ __forceinline__ void stage_chunk(
    const Arguments& a, Stage& s, int chunk_index, int chunks, int head, int column, int lane, u64* barrier) {
    const i64 part = (i64)chunk_index * H + head, tile = ((i64)(head / GROUP) * chunks + chunk_index) * KEY_TILE;
#if BULK
    if (lane == 0) arrive_expecting(barrier, sizeof(Stage));
#endif
    stage_bytes<sizeof(s.w)>(s.w, a.w + part * (K * N / 8), lane, barrier);
    stage_bytes<sizeof(s.u)>(s.u, a.u + part * (V * N / 8) + column * (N / 8), lane, barrier);
    stage_bytes<sizeof(s.decays)>(s.decays, a.decays + part * (2 * N), lane, barrier);
    stage_bytes<sizeof(s.q)>(s.q, a.q + tile, lane, barrier);
    stage_bytes<sizeof(s.scores)>(s.scores, a.scores + part * (10 * 32), lane, barrier);
    stage_bytes<sizeof(s.k)>(s.k, a.k + tile, lane, barrier);
}

// What the last warp does: a chunk into each stage that is free.
__device__ __forceinline__ void fill_ring(const Arguments& a, Shared& shared, int chunks, int head, int column, int lane) {
#if BULK
#pragma unroll 1
    for (int chunk_index = 0; chunk_index < chunks; ++chunk_index) {
        const int at = chunk_index % STAGES, round = chunk_index / STAGES;
        if (round > 0) wait_phase(&shared.empty[at], (round - 1) % 2);
        stage_chunk(a, shared.stages[at], chunk_index, chunks, head, column, lane, &shared.full[at]);
    }
#else
#pragma unroll 1
    for (int chunk_index = 0; chunk_index < chunks + STAGES - 1; ++chunk_index) {
        if (chunk_index >= STAGES - 1) {
            wait_copies<STAGES - 2>();
            sync_block();  // the chunk STAGES - 1 back has come, and all warps have left the one before it
        }
        if (chunk_index < chunks) stage_chunk(a, shared.stages[chunk_index % STAGES], chunk_index, chunks, head, column, lane, nullptr);
        commit();
    }
#endif
}

// Two tiles, 16 columns of the state x 16 others, as the first operand of the next product.
__device__ __forceinline__ void operand(const float d[2][4], u32* a) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = pack(d[i / 2][i % 2 * 2], d[i / 2][i % 2 * 2 + 1]);
}

// Columns x tokens -> rows of the output.
__device__ __forceinline__ void store_rows(const Arguments& a, const float o[8][4], int first, int head, int column, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        const u32 left = turn_tile(pack(o[n][0], o[n][1])), right = turn_tile(pack(o[n][2], o[n][3]));
        const u32 other = shuffle_xor_bits(t % 2 ? left : right, 1);  // so that a lane holds four columns, four lanes 32 bytes
        const uint2 four = t % 2 ? make_uint2(other, right) : make_uint2(left, other);
        const int row = first + n * 8 + g;
        if (row < a.rows) *(uint2*)(a.out + ((i64)row * H + head) * V + column + t % 2 * 8 + t / 2 * 4) = four;
    }
}

// One chunk by one warp. state: columns x keys.
__device__ __forceinline__ void take_chunk(const Arguments& a, const Stage& s, float state[K / 8][4], int first, int head, int column, int warp, int lane) {
    const int t = lane % 4;
    u32 narrow[K / 16][4];
    float v[8][4], o[8][4];
#pragma unroll
    for (int step = 0; step < K / 16; ++step) operand(&state[2 * step], narrow[step]);
#pragma unroll
    for (int pair = 0; pair < BLOCKS; ++pair) {
        const uint4 u = s.u[warp][pair][lane];
        const u32 words[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            v[pair * 2 + i / 4][i % 4] = from_half(words[i / 2] >> (i % 2 * 16) & 0xffff);
            o[pair * 2 + i / 4][i % 4] = 0.f;
        }
    }
#pragma unroll
    for (int step = 0; step < K / 16; ++step)  // v' = u - w S
#pragma unroll
        for (int pair = 0; pair < BLOCKS; ++pair) {
            const uint4 w = s.w[pair][step][lane];
            mma(v[2 * pair], narrow[step], w.x, w.y);
            mma(v[2 * pair + 1], narrow[step], w.z, w.w);
        }
#pragma unroll
    for (int step = 0; step < K / 16; ++step)  // o = q S
#pragma unroll
        for (int pair = 0; pair < BLOCKS; ++pair) {
            u32 r[4];
            load_tiles4(r, tiles_across(s.q[0], KEY_STRIDE, pair * 16, step * 16, lane));
            mma(o[2 * pair], narrow[step], r[0], r[1]);
            mma(o[2 * pair + 1], narrow[step], r[2], r[3]);
        }
    u32 values[BLOCKS][4], faded[BLOCKS][4];
#pragma unroll
    for (int pair = 0; pair < BLOCKS; ++pair) {
        operand(&v[2 * pair], values[pair]);
#pragma unroll
        for (int tile = pair * 2; tile < pair * 2 + 2; ++tile) {
            const float2 since = *(const float2*)&s.decays[0][tile * 8 + t * 2], until = *(const float2*)&s.decays[1][tile * 8 + t * 2];
            o[tile][0] *= since.x, o[tile][1] *= since.y, o[tile][2] *= since.x, o[tile][3] *= since.y;
            v[tile][0] *= until.x, v[tile][1] *= until.y, v[tile][2] *= until.x, v[tile][3] *= until.y;
        }
        operand(&v[2 * pair], faded[pair]);
    }
    const float whole = s.decays[0][N - 1];
#pragma unroll
    for (int n = 0; n < K / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) state[n][i] *= whole;
#pragma unroll
    for (int step = 0; step < BLOCKS; ++step)  // o += scores v'
#pragma unroll
        for (int pair = step; pair < BLOCKS; ++pair) {
            const uint4 score = s.scores[pair * (pair + 1) / 2 + step][lane];
            mma(o[2 * pair], values[step], score.x, score.y);
            mma(o[2 * pair + 1], values[step], score.z, score.w);
        }
    store_rows(a, o, first, head, column, lane);
#pragma unroll
    for (int step = 0; step < BLOCKS; ++step)  // S = S e^G + kT v'
#pragma unroll
        for (int n = 0; n < K / 16; ++n) {
            u32 r[4];
            load_turned_tiles4(r, tiles_down(s.k[0], KEY_STRIDE, step * 16, n * 16, lane));
            mma(state[2 * n], faded[step], r[0], r[1]);
            mma(state[2 * n + 1], faded[step], r[2], r[3]);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) walk(const __grid_constant__ Arguments a) {
    BLOCK_SHARED(Shared, shared);
    static_assert(sizeof(Shared) <= SHARED_BYTES, "the launcher asks for too little shared memory");
    const int head = blockIdx.x / (V / VB), block_column = blockIdx.x % (V / VB) * VB;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunks = (a.rows + N - 1) / N;
#if BULK
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < STAGES; ++i) barrier_init(&shared.full[i], 1), barrier_init(&shared.empty[i], WARPS);
        barriers_ready();
    }
    sync_block();
#endif
    if (warp == WARPS) {
        fill_ring(a, shared, chunks, head, block_column, lane);
        return;
    }
    const int column = block_column + warp * 16;
    float* const own = a.state + ((i64)head * K + lane % 4 * 2) * V + column + lane / 4;
    float state[K / 8][4];
#pragma unroll
    for (int n = 0; n < K / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) state[n][i] = own[(n * 8 + i % 2) * V + i / 2 * 8];
    int at = 0, parity = 0;
#pragma unroll 1
    for (int chunk_index = 0; chunk_index < chunks; ++chunk_index) {
#if BULK
        wait_phase(&shared.full[at], parity);
#else
        sync_block();
#endif
        take_chunk(a, shared.stages[at], state, chunk_index * N, head, column, warp, lane);
#if BULK
        sync_warp();
        if (lane == 0) arrive(&shared.empty[at]);
#endif
        at = at + 1 < STAGES ? at + 1 : 0;
        parity ^= at == 0;
    }
#pragma unroll
    for (int n = 0; n < K / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) own[(n * 8 + i % 2) * V + i / 2 * 8] = state[n][i];
}
#endif  // WALK
