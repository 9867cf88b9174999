// A Gated DeltaNet layer between its two projections, for the 1..16 rows of one verify step, in one kernel: gates,
// convolution, norms of q and k, replay of the rows accepted last time, recurrence, gated norm.
//
// Work. A CTA owns COLUMNS columns of one value head's state, a warp eight of them: lane (g = lane / 2, c = lane % 2) keeps
// columns 4c .. 4c + 3 of keys g * KEYS .. in registers, so that a sum over keys is four shuffles. The SPLIT CTAs of a head
// form a cluster; all they exchange is the sum of squares for the gated norm.
// Lazy commit. The rows accepted last time are folded in from their stored k, v, decay and beta and the state is written
// once; this step's rows change registers only. Both go through absorb(), so the state never depends on the grouping.
// Overlap. State, rings and positions are of earlier steps: loading and replaying them comes before the wait for the
// projection. GATES_EARLY: so do the gates; then every launch in front must let this one start only after its own wait, so
// that x, made one launch before the projection, is complete.
// Bits. Products and sums are spelled out (no contraction), no sum depends on M: a row never depends on its company.
//
// Compile-time: M (rows), H (value heads), KEY_HEADS, K, V (head dimensions; powers of two, K <= 128), SPLIT, D (model width),
// TAPS, STRIDE (of the projected rows), GATES_EARLY.
#ifndef EMULATED
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;
#define BLOCK_SHARED(type, name) __shared__ type name
#define FULL 0xffffffffu

__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ float exp_of(float x) { return __expf(x); }
__device__ __forceinline__ float ratio(float a, float b) { return __fdividef(a, b); }
__device__ __forceinline__ float shuffle_xor(float v, int mask) { return __shfl_xor_sync(FULL, v, mask); }
__device__ __forceinline__ float shuffle(float v, int lane) { return __shfl_sync(FULL, v, lane); }
__device__ __forceinline__ void sync_warp() { __syncwarp(); }
__device__ __forceinline__ void sync_block() { __syncthreads(); }

__device__ __forceinline__ float from_bf16(u32 bits) { return __uint_as_float(bits << 16); }
__device__ __forceinline__ float from_half(u32 bits) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)bits));
    return f;
}
__device__ __forceinline__ u32 to_half(float v) {  // clamped to the finite range; NaN stays NaN
    v = v > 65504.f ? 65504.f : (v < -65504.f ? -65504.f : v);
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(v));
    return h;
}
// What another kernel wrote comes through L2: a line left in this SM's L1 may be stale.
__device__ __forceinline__ float4 load4(const float* p) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
    return v;
}
__device__ __forceinline__ float load1(const float* p) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p));
    return v;
}
__device__ __forceinline__ int load1(const int* p) {
    int v;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
__device__ __forceinline__ u16 load_half(const u16* p) {
    u16 v;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}
__device__ __forceinline__ uint2 load_halves4(const u16* p) {
    uint2 v;
    asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
__device__ __forceinline__ uint4 load_halves8(const u16* p) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
__device__ __forceinline__ void ask_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The CTAs of a head. arrive publishes what this thread wrote, wait sees what the others did.
__device__ __forceinline__ void cluster_arrive() {
#if SPLIT > 1
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if SPLIT > 1
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void store_in(float* own, int cta, float v) {  // the same place in the shared memory of a CTA
#if SPLIT > 1
    u32 at;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"((u32)__cvta_generic_to_shared(own)), "r"(cta));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
#else
    *own = v;
#endif
}
__device__ __forceinline__ void sync_cluster() {
    if (SPLIT == 1) sync_block();
    cluster_arrive();
    cluster_wait();
}
#endif  // EMULATED

#define X_SCALE 0.0625f
#define RING 32
#define LENGTH 0
#define STATE_LENGTH 1
#define COLUMNS (V / SPLIT)
#define WARPS (COLUMNS / 8)
#define THREADS (WARPS * 32)
#ifndef MIN_CTAS
#define MIN_CTAS (THREADS < 512 ? 512 / THREADS : 1)  // 128 registers a thread, so that a product fits beside this kernel
#endif
#define KEYS (K / 16)              // of the state, a lane
#define C (2 * KEY_HEADS * K + H * V)
#define GROUP (H / KEY_HEADS)      // value heads a key head
#define OUTPUTS ((M + 3) / 4)      // of the gated norm, a thread: THREADS = 4 * COLUMNS

struct Arguments {
    const u16* rows;       // fp16 [M, STRIDE]: q | k | v before the convolution, then z
    const u16* x;          // fp16 [M, D]: the residual stream * (1 + w) * X_SCALE
    const float* sumsq;    // [M, D / 32]
    const u16* w_b;        // bf16 [H, D]
    const u16* w_a;        // bf16 [H, D]
    const float* a_log;    // [H]
    const float* dt_bias;  // [H]
    const float* conv;     // [C, TAPS]
    const u16* norm;       // bf16 [V]
    float* state;          // [H, K, V]
    u16* raw;              // rings by position: fp16 [RING, C]
    float* k;              // [RING, KEY_HEADS, K]
    float* v;              // [RING, H, V]
    float* decay;          // [RING, H]
    float* beta;           // [RING, H]
    const int* positions;
    u16* out;              // fp16 [M, H * V]
    float eps, q_scale;
};

struct Shared {
    float k[16][K], q[M][K];
    float v[16][COLUMNS];           // of a row, then its output
    float qk[M];
    float gate[V / 8][M][2];        // sums over a warp's part of D, by warp over all CTAs of the head: b, a
    float mean_square[M];           // of the residual stream
    float squares[M][V / 8];        // of the outputs, by warp over all CTAs of the head
};

typedef float State[KEYS][4];

// KEYS numbers of a key vector.
__device__ __forceinline__ void load_keys(float* to, const float* from) {
#pragma unroll
    for (int j = 0; j < KEYS; j += 4) {
        if (KEYS % 4 == 0) {
            float4 four = *(const float4*)(from + j);
            to[j] = four.x, to[j + 1] = four.y, to[j + 2] = four.z, to[j + 3] = four.w;
        } else {
#pragma unroll
            for (int i = j; i < KEYS; ++i) to[i] = from[i];
        }
    }
}

// One token of the gated delta rule for this lane's part of the state. With QUERY also its output, from the state before:
// qT(S e^g + k delta) = e^g qT S + (q.k) delta.
template <bool QUERY>
__device__ __forceinline__ void absorb(
    State s, const float* k_row, const float* q_row, float4 v, float decay, float beta, float qk, bool update, float4* out) {
    float k[KEYS], q[KEYS], sum[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    load_keys(k, k_row);
    if (QUERY) load_keys(q, q_row);
#pragma unroll
    for (int j = 0; j < KEYS; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sum[i] = fma(s[j][i], k[j], sum[i]);
            if (QUERY) sum[4 + i] = fma(s[j][i], q[j], sum[4 + i]);
        }
#pragma unroll
    for (int mask = 2; mask < 32; mask *= 2)
#pragma unroll
        for (int i = 0; i < (QUERY ? 8 : 4); ++i) sum[i] = add(sum[i], shuffle_xor(sum[i], mask));
    const float value[4] = {v.x, v.y, v.z, v.w};
    float delta[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) delta[i] = mul(add(value[i], -mul(decay, sum[i])), beta);
    if (QUERY) {
        out->x = fma(qk, delta[0], mul(decay, sum[4]));
        out->y = fma(qk, delta[1], mul(decay, sum[5]));
        out->z = fma(qk, delta[2], mul(decay, sum[6]));
        out->w = fma(qk, delta[3], mul(decay, sum[7]));
    }
    if (update) {
#pragma unroll
        for (int j = 0; j < KEYS; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[j][i] = fma(k[j], delta[i], mul(decay, s[j][i]));
    }
}

// Sums of eight values over the lanes of a warp; lane l keeps value l / 4. The tree is that of a full butterfly.
__device__ __forceinline__ float sum_eight(float* v, int lane) {
#pragma unroll
    for (int half = 4; half; half /= 2) {  // lanes 16, 8, 4 apart
        const bool upper = lane & (half * 4);
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float keep = upper ? v[half + i] : v[i], give = upper ? v[i] : v[half + i];
            v[i] = add(keep, shuffle_xor(give, half * 4));
        }
    }
    v[0] = add(v[0], shuffle_xor(v[0], 2));
    return add(v[0], shuffle_xor(v[0], 1));
}

// Gate products. D is dealt to all threads of the head's CTAs in chunks of eight columns.
#define PASSES ((D / 8 + SPLIT * THREADS - 1) / (SPLIT * THREADS))
struct GateWeights { uint4 b[PASSES], a[PASSES]; };
struct GateRows { uint4 x[PASSES][4]; };  // of four rows
__device__ __forceinline__ int gate_chunk(int part, int pass) { return (pass * THREADS + threadIdx.x) * SPLIT + part; }
__device__ __forceinline__ uint4 chunk_of(const u16* p, bool real) { return real ? load_halves8(p) : make_uint4(0, 0, 0, 0); }

__device__ __forceinline__ void load_gate_weights(const Arguments& a, int head, int part, GateWeights& w) {
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const int chunk = gate_chunk(part, pass);
        w.b[pass] = chunk_of(a.w_b + (i64)head * D + chunk * 8, chunk < D / 8);
        w.a[pass] = chunk_of(a.w_a + (i64)head * D + chunk * 8, chunk < D / 8);
    }
}
__device__ __forceinline__ void load_gate_rows(const Arguments& a, int part, int first, GateRows& r) {
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int chunk = gate_chunk(part, pass);
            r.x[pass][i] = chunk_of(a.x + (first + i) * D + chunk * 8, chunk < D / 8 && first + i < M);
        }
}
__device__ __forceinline__ float half_at(uint4 v, int e) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
    return from_half(words[e / 2] >> (e % 2 * 16) & 0xffff);
}
__device__ __forceinline__ float bf16_at(uint4 v, int e) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
    return from_bf16(words[e / 2] >> (e % 2 * 16) & 0xffff);
}
// This warp's sums over its chunks for rows first .. first + 3, to every CTA of the head.
__device__ __forceinline__ void gate_parts(Shared& s, const GateWeights& w, const GateRows& r, int first, int part, int warp, int lane) {
    float sum[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};  // of row first + i: 2i is b, 2i + 1 is a
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const float b = bf16_at(w.b[pass], e), a = bf16_at(w.a[pass], e);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float x = half_at(r.x[pass][i], e);
                sum[2 * i] = fma(x, b, sum[2 * i]);
                sum[2 * i + 1] = fma(x, a, sum[2 * i + 1]);
            }
        }
    const float total = sum_eight(sum, lane);
    const int row = first + lane / 8;
    if (row >= M) return;
    for (int cta = lane % 4; cta < SPLIT; cta += 4) store_in(&s.gate[part * WARPS + warp][row][lane / 4 % 2], cta, total);
}

// The mean square of rows warp, warp + WARPS, ... of the residual stream.
__device__ __forceinline__ void mean_squares(const Arguments& a, Shared& s, int warp, int lane) {
    for (int row = warp; row < M; row += WARPS) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < (D / 32 + 31) / 32; ++i)
            if (i * 32 + lane < D / 32) sum = add(sum, load1(a.sumsq + row * (D / 32) + i * 32 + lane));
#pragma unroll
        for (int mask = 16; mask; mask /= 2) sum = add(sum, shuffle_xor(sum, mask));
        if (lane == 0) s.mean_square[row] = ratio(sum, (float)D);
    }
}

// All rows' sums, of which `r` holds the inputs of the first four.
__device__ __forceinline__ void finish_gates(const Arguments& a, Shared& s, const GateWeights& w, GateRows& r, int part, int warp, int lane) {
    gate_parts(s, w, r, 0, part, warp, lane);
#pragma unroll 1
    for (int first = 4; first < M; first += 4) {
        load_gate_rows(a, part, first, r);
        gate_parts(s, w, r, first, part, warp, lane);
    }
    mean_squares(a, s, warp, lane);
}

// Decay e^g and beta of row `lane` (lanes >= M hold what nobody reads).
__device__ __forceinline__ void gates(const Arguments& a, const Shared& s, int head, int lane, float& decay, float& beta) {
    const int row = lane < M ? lane : 0;
    float b = 0.f, d = 0.f;
#pragma unroll
    for (int w = 0; w < V / 8; ++w) {
        b = add(b, s.gate[w][row][0]);
        d = add(d, s.gate[w][row][1]);
    }
    const float gain = ratio(rsqrtf(add(s.mean_square[row], a.eps)), X_SCALE);
    const float t = fma(d, gain, a.dt_bias[head]);
    const float softplus = t > 20.f ? t : log1pf(expf(t));  // accurate: an error here grows with every token
    decay = expf(-mul(expf(a.a_log[head]), softplus));
    beta = ratio(1.f, add(1.f, exp_of(-mul(b, gain))));
}

__device__ __forceinline__ float silu(float x) { return ratio(x, add(1.f, exp_of(-x))); }

// Convolution and silu of four channels of a row, rounded to fp16 as the projection's dtype is; `store`: put the row into the ring.
__device__ __forceinline__ float4 conv4(const Arguments& a, int row, int channel, int length, bool store) {
    float sum[4] = {0.f, 0.f, 0.f, 0.f}, weight[4 * TAPS];
#pragma unroll
    for (int i = 0; i < TAPS; ++i) *(float4*)(weight + 4 * i) = *(const float4*)(a.conv + channel * TAPS + 4 * i);
    uint2 x[TAPS];
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap) {
        const int source = row - (TAPS - 1) + tap, position = length + source;
        x[tap] = make_uint2(0, 0);
        if (source >= 0) x[tap] = load_halves4(a.rows + source * STRIDE + channel);
        else if (position >= 0) x[tap] = load_halves4(a.raw + (position % RING) * C + channel);
    }
    if (store) *(uint2*)(a.raw + (length + row) % RING * C + channel) = x[TAPS - 1];
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 word = i < 2 ? x[tap].x : x[tap].y;
            sum[i] = fma(from_half(word >> (i % 2 * 16) & 0xffff), weight[i * TAPS + tap], sum[i]);
        }
    float4 y;
    y.x = from_half(to_half(silu(sum[0]))), y.y = from_half(to_half(silu(sum[1])));
    y.z = from_half(to_half(silu(sum[2]))), y.w = from_half(to_half(silu(sum[3])));
    return y;
}

__device__ __forceinline__ float dot4(float4 a, float4 b) { return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, mul(a.x, b.x)))); }
__device__ __forceinline__ float4 scale4(float4 a, float b) {
    a.x = mul(a.x, b), a.y = mul(a.y, b), a.z = mul(a.z, b), a.w = mul(a.w, b);
    return a;
}

// q and k of one row by one warp: convolution, unit length, q's scale, and q.k.
__device__ __forceinline__ void make_qk(const Arguments& a, Shared& s, int row, int key_head, bool owner, int length, int lane) {
    const bool held = lane * 4 < K;
    float4 q = {0.f, 0.f, 0.f, 0.f}, k = q;
    if (held) {
        q = conv4(a, row, key_head * K + lane * 4, length, owner);
        k = conv4(a, row, KEY_HEADS * K + key_head * K + lane * 4, length, owner);
    }
    float qq = dot4(q, q), kk = dot4(k, k), qk = dot4(q, k);
#pragma unroll
    for (int mask = 16; mask; mask /= 2) {
        qq = add(qq, shuffle_xor(qq, mask));
        kk = add(kk, shuffle_xor(kk, mask));
        qk = add(qk, shuffle_xor(qk, mask));
    }
    const float q_gain = mul(rsqrtf(add(qq, 1e-6f)), a.q_scale), k_gain = rsqrtf(add(kk, 1e-6f));
    q = scale4(q, q_gain), k = scale4(k, k_gain);
    if (held) {
        *(float4*)(s.q[row] + lane * 4) = q;
        *(float4*)(s.k[row] + lane * 4) = k;
        if (owner) *(float4*)(a.k + ((length + row) % RING * KEY_HEADS + key_head) * K + lane * 4) = k;
    }
    if (lane == 0) s.qk[row] = mul(mul(qk, q_gain), k_gain);
}

// This step's q, k and v. Jobs of a warp: q and k of a row; then v, COLUMNS / 4 lanes a row.
__device__ __forceinline__ void make_rows(const Arguments& a, Shared& s, int head, int part, int length, int warp, int lane) {
    const int rows_a_job = 32 / (COLUMNS / 4) > 0 ? 32 / (COLUMNS / 4) : 1, v_jobs = (M + rows_a_job - 1) / rows_a_job;
    const bool owner = head % GROUP == 0 && part == 0;
    for (int job = warp; job < M + v_jobs; job += WARPS) {
        if (job < M) {
            make_qk(a, s, job, head / GROUP, owner, length, lane);
        } else {
            const int row = (job - M) * rows_a_job + lane / (COLUMNS / 4), column = lane % (COLUMNS / 4) * 4;
            if (row < M) {
                const float4 v = conv4(a, row, 2 * KEY_HEADS * K + head * V + part * COLUMNS + column, length, true);
                *(float4*)(s.v[row] + column) = v;
                *(float4*)(a.v + ((length + row) % RING * H + head) * V + part * COLUMNS + column) = v;
            }
        }
    }
}

// The stored k and v of the tokens from `start` on that the state still lacks.
__device__ __forceinline__ void stage_replays(const Arguments& a, Shared& s, int head, int part, int start, int replays) {
    for (int i = threadIdx.x; i < replays * (K / 4); i += THREADS) {
        const int row = i / (K / 4), key = i % (K / 4) * 4;
        *(float4*)(s.k[row] + key) = load4(a.k + ((start + row) % RING * KEY_HEADS + head / GROUP) * K + key);
    }
    for (int i = threadIdx.x; i < replays * (COLUMNS / 4); i += THREADS) {
        const int row = i / (COLUMNS / 4), column = i % (COLUMNS / 4) * 4;
        *(float4*)(s.v[row] + column) = load4(a.v + ((start + row) % RING * H + head) * V + part * COLUMNS + column);
    }
}

#if SPLIT > 1
extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(THREADS, MIN_CTAS) gdn(const __grid_constant__ Arguments a) {
#else
extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS) gdn(const __grid_constant__ Arguments a) {
#endif
    BLOCK_SHARED(Shared, s);
    const int head = blockIdx.x / SPLIT, part = blockIdx.x % SPLIT;
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    let_next_start();
    cluster_arrive();  // this CTA runs: its shared memory may be written

    // What belongs to earlier steps, and weights.
    State state;
    const int g = lane / 2, c = lane % 2;
    float* const own_state = a.state + ((i64)head * K + g * KEYS) * V + part * COLUMNS + warp * 8 + c * 4;
#pragma unroll
    for (int j = 0; j < KEYS; ++j) {
        const float4 four = load4(own_state + j * V);
        state[j][0] = four.x, state[j][1] = four.y, state[j][2] = four.z, state[j][3] = four.w;
    }
    const int start = load1(a.positions + STATE_LENGTH), length = load1(a.positions + LENGTH), replays = length - start;
    if (replays > 0) stage_replays(a, s, head, part, start, replays);
    float decay = 0.f, beta = 0.f;  // of row `lane`
    if (lane < replays) {
        decay = load1(a.decay + (start + lane) % RING * H + head);
        beta = load1(a.beta + (start + lane) % RING * H + head);
    }
    GateWeights gate_weights;
    load_gate_weights(a, head, part, gate_weights);
    for (int i = tid; i < (2 * K + COLUMNS) * TAPS / 32; i += THREADS) {
        const int first = i * 32 / TAPS;  // channel among this CTA's q, k and v
        const int channel = first < 2 * K ? first / K * KEY_HEADS * K + head / GROUP * K + first % K
                                          : 2 * KEY_HEADS * K + head * V + part * COLUMNS + first - 2 * K;
        ask_l2(a.conv + channel * TAPS);
    }
    const int column = tid % COLUMNS;  // of the outputs this thread finishes
    const float norm = from_bf16(a.norm[part * COLUMNS + column]);
    cluster_wait();
#if GATES_EARLY
    GateRows gate_rows;
    load_gate_rows(a, part, 0, gate_rows);
    finish_gates(a, s, gate_weights, gate_rows, part, warp, lane);
#endif
    sync_block();
    if (replays > 0) {
#pragma unroll 1
        for (int i = 0; i < replays; ++i) {
            const float4 v = *(const float4*)(s.v[i] + warp * 8 + c * 4);
            absorb<false>(state, s.k[i] + g * KEYS, nullptr, v, shuffle(decay, i), shuffle(beta, i), 0.f, true, nullptr);
        }
#pragma unroll
        for (int j = 0; j < KEYS; ++j)
            *(float4*)(own_state + j * V) = make_float4(state[j][0], state[j][1], state[j][2], state[j][3]);
    }
    sync_block();  // the new rows overwrite the replayed ones
    wait_for_previous();

    u16 z[OUTPUTS];
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) {
        const int row = tid / COLUMNS + i * 4;
        z[i] = row < M ? load_half(a.rows + row * STRIDE + C + head * V + part * COLUMNS + column) : 0;
    }
#if !GATES_EARLY
    GateRows gate_rows;
    load_gate_rows(a, part, 0, gate_rows);
#endif
    make_rows(a, s, head, part, length, warp, lane);
#if !GATES_EARLY
    finish_gates(a, s, gate_weights, gate_rows, part, warp, lane);
#endif
    sync_cluster();
    gates(a, s, head, lane, decay, beta);
    if (warp == 0 && part == 0 && lane < M) {
        a.decay[(length + lane) % RING * H + head] = decay;
        a.beta[(length + lane) % RING * H + head] = beta;
    }
#pragma unroll 1
    for (int i = 0; i < M; ++i) {
        float* const at = s.v[i] + warp * 8 + c * 4;
        const float4 v = *(const float4*)at;
        float4 o;
        absorb<true>(state, s.k[i] + g * KEYS, s.q[i] + g * KEYS, v, shuffle(decay, i), shuffle(beta, i), s.qk[i], i + 1 < M, &o);
        float square = dot4(o, o);
        square = add(square, shuffle_xor(square, 1));
        sync_warp();  // all lanes have read v
        if (g == 0) *(float4*)at = o;
        if (lane < SPLIT) store_in(&s.squares[i][part * WARPS + warp], lane, square);
    }
    sync_cluster();
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) {
        const int row = tid / COLUMNS + i * 4;
        if (row >= M) continue;
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < V / 8; ++w) sum = add(sum, s.squares[row][w]);
        const float o = mul(s.v[row][column], rsqrtf(add(ratio(sum, (float)V), a.eps)));
        const float y = mul(mul(o, norm), silu(from_half(z[i])));
        a.out[row * (H * V) + head * V + part * COLUMNS + column] = (u16)to_half(y);
    }
}
