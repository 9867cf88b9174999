// A Gated DeltaNet layer between its two projections, for the 1..16 rows of one verify step, in one kernel: gates,
// convolution, norms of q and k, replay of the rows accepted last time, recurrence, gated norm.
//
// Work. A CTA owns COLUMNS columns of one value head's state, a warp eight of them: lane (g = lane / 4, c = lane % 4) keeps
// columns 2c and 2c + 1 of every eighth four keys in registers, so that a sum over keys is three shuffles. The SPLIT CTAs of a head
// form a cluster; all they exchange is the sum of squares for the gated norm.
// Lazy commit. The rows accepted last time are folded in from their stored k, v, decay and beta and the state is written
// once; this step's rows change registers only. Both go through absorb(), so the state never depends on the grouping.
// Overlap. State, rings and positions are of earlier steps: loading and replaying them comes before the wait for the
// projection. GATES_EARLY: so do the gates; then every launch in front must let this one start only after its own wait, so
// that x, made one launch before the projection, is complete.
// Bits. Products and sums are spelled out (no contraction), no sum depends on M: a row never depends on its company.
//
// Compile-time: M (rows), H (value heads), KEY_HEADS, K, V (head dimensions; powers of two, K <= 128), SPLIT, D (model width),
// TAPS, STRIDE (of the projected rows), GATES_EARLY, NEXT_STARTS (0 at once, 1 after the wait, 2 when this step's rows have come),
// SHARED_BYTES.
#ifndef EMULATED
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;
#define BLOCK_SHARED(type, name)                          \
    extern __shared__ __align__(16) char block_memory[]; \
    type& name = *(type*)block_memory
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
__device__ __forceinline__ float2 load2(const float* p) {
    float2 v;
    asm volatile("ld.global.cg.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p));
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
__device__ __forceinline__ uint4 load_halves8(const u16* p) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
__device__ __forceinline__ void copy16(void* to, const void* from) {  // asynchronous, past L1
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void finish_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

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
// The CTAs of a head form a cluster. They meet once at the start; then numbers go from one to the other by asynchronous
// stores that a barrier in the receiver counts: the cluster's own barrier would first wait for every store to global memory.
typedef unsigned long long u64;
__device__ __forceinline__ void expect(u64* barrier, int bytes) {  // by one thread, before the meeting
#if SPLIT > 1
    const u32 at = (u32)__cvta_generic_to_shared(barrier);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
#endif
}
__device__ __forceinline__ void cluster_arrive() {
#if SPLIT > 1
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if SPLIT > 1
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void send(float* own, u64* barrier, int cta, float v) {  // to the same places in a CTA
#if SPLIT > 1
    u32 at, counted;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"((u32)__cvta_generic_to_shared(own)), "r"(cta));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counted) : "r"((u32)__cvta_generic_to_shared(barrier)), "r"(cta));
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(at), "f"(v), "r"(counted) : "memory");
#else
    *own = v;
#endif
}
// All that was expected has come, and so has what this CTA's threads wrote before.
__device__ __forceinline__ void await_all(u64* barrier) {
    sync_block();
#if SPLIT > 1
    asm volatile("{.reg .pred p; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0; @!p bra again;}" ::"r"(
                     (u32)__cvta_generic_to_shared(barrier)) : "memory");
#endif
}
#endif  // EMULATED

#define X_SCALE 0.0625f
#define RING 32
#define LENGTH 0
#define STATE_LENGTH 1
#define COLUMNS (V / SPLIT)
#define WARPS (COLUMNS / 8)
#define THREADS (WARPS * 32)
#ifndef REGISTERS
// A thread's, so that a CTA fits beside one of linear.cu on sm_90: a quarter of an SM has 16,384; five warps of linear.cu at 64
// registers a thread leave room for two of these.
#define REGISTERS 96
#endif
#define BATCH (M > 4 ? M : 4)      // rows of k and v that are staged together
#define KEYS (K / 8)               // of the state, a lane
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

#define INPUTS (2 * K + COLUMNS)  // channels that this CTA convolves: q and k of its key head, its v

struct __align__(16) Shared {
    u64 gates_here, squares_here;
    float k[BATCH][K], q[M][K];
    float conv[TAPS][INPUTS];
    u16 window[TAPS - 1 + M][INPUTS];  // of the convolution: rows before this step, then its own
    u16 z[M][COLUMNS];
    float v[BATCH][COLUMNS];           // of a row, then its output
    float qk[M];
    float gate[V / 8][M][2];        // sums over a warp's part of D, by warp over all CTAs of the head: b, a
    float mean_square[M];           // of the residual stream
    float squares[M][V / 8];        // of the outputs, by warp over all CTAs of the head
};

static_assert(sizeof(Shared) <= SHARED_BYTES, "the launcher asks for too little shared memory");

typedef float State[KEYS][2];

// Key j of a lane's KEYS: fours of all lanes lie side by side, so that loads from shared memory meet no bank twice.
__device__ __forceinline__ int key_of(int g, int j) { return KEYS % 4 == 0 ? j / 4 * 32 + g * 4 + j % 4 : g * KEYS + j; }
__device__ __forceinline__ void load_keys(float* to, const float* row, int g) {
#pragma unroll
    for (int j = 0; j < KEYS; ++j) {
        if (KEYS % 4) {
            to[j] = row[key_of(g, j)];
        } else if (j % 4 == 0) {
            const float4 four = *(const float4*)(row + key_of(g, j));
            to[j] = four.x, to[j + 1] = four.y, to[j + 2] = four.z, to[j + 3] = four.w;
        }
    }
}

// One token of the gated delta rule for this lane's part of the state. With QUERY also its output, from the state before:
// qT(S e^g + k delta) = e^g qT S + (q.k) delta.
template <bool QUERY>
__device__ __forceinline__ void absorb(
    State s, const float* k_row, const float* q_row, int g, float2 v, float decay, float beta, float qk, bool update, float2* out) {
    float k[KEYS], q[KEYS], sum[4] = {0.f, 0.f, 0.f, 0.f};
    load_keys(k, k_row, g);
    if (QUERY) load_keys(q, q_row, g);
#pragma unroll
    for (int j = 0; j < KEYS; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            sum[i] = fma(s[j][i], k[j], sum[i]);
            if (QUERY) sum[2 + i] = fma(s[j][i], q[j], sum[2 + i]);
        }
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2)
#pragma unroll
        for (int i = 0; i < (QUERY ? 4 : 2); ++i) sum[i] = add(sum[i], shuffle_xor(sum[i], mask));
    float delta[2];
    delta[0] = mul(add(v.x, -mul(decay, sum[0])), beta);
    delta[1] = mul(add(v.y, -mul(decay, sum[1])), beta);
    if (QUERY) *out = make_float2(fma(qk, delta[0], mul(decay, sum[2])), fma(qk, delta[1], mul(decay, sum[3])));
    if (update) {
#pragma unroll
        for (int j = 0; j < KEYS; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) s[j][i] = fma(k[j], delta[i], mul(decay, s[j][i]));
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
    for (int cta = lane % 4; cta < SPLIT; cta += 4)
        send(&s.gate[part * WARPS + warp][row][lane / 4 % 2], &s.gates_here, cta, total);
}

// The sums of squares of rows warp, warp + WARPS, ... of the residual stream, and their means.
struct Squares { float of[(M + WARPS - 1) / WARPS][(D / 32 + 31) / 32]; };
__device__ __forceinline__ void load_squares(const Arguments& a, int warp, int lane, Squares& q) {
#pragma unroll
    for (int n = 0; n < (M + WARPS - 1) / WARPS; ++n)
#pragma unroll
        for (int i = 0; i < (D / 32 + 31) / 32; ++i) {
            const int row = warp + n * WARPS, at = i * 32 + lane;
            q.of[n][i] = row < M && at < D / 32 ? load1(a.sumsq + row * (D / 32) + at) : 0.f;
        }
}
__device__ __forceinline__ void mean_squares(Shared& s, const Squares& q, int warp, int lane) {
#pragma unroll
    for (int n = 0; n < (M + WARPS - 1) / WARPS; ++n) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < (D / 32 + 31) / 32; ++i) sum = add(sum, q.of[n][i]);
#pragma unroll
        for (int mask = 16; mask; mask /= 2) sum = add(sum, shuffle_xor(sum, mask));
        if (lane == 0 && warp + n * WARPS < M) s.mean_square[warp + n * WARPS] = ratio(sum, (float)D);
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
}

// Decay e^g and beta of row `lane` (lanes >= M hold what nobody reads).
__device__ __forceinline__ void gates(const Arguments& a, const Shared& s, float a_log, float dt_bias, int lane, float& decay, float& beta) {
    const int row = lane < M ? lane : 0;
    float parts[V / 8][2];
#pragma unroll
    for (int w = 0; w < V / 8; ++w) parts[w][0] = s.gate[w][row][0], parts[w][1] = s.gate[w][row][1];
#pragma unroll
    for (int step = 1; step < V / 8; step *= 2)
#pragma unroll
        for (int w = 0; w < V / 8; w += 2 * step)
            parts[w][0] = add(parts[w][0], parts[w + step][0]), parts[w][1] = add(parts[w][1], parts[w + step][1]);
    const float b = parts[0][0], d = parts[0][1];
    const float gain = ratio(rsqrtf(add(s.mean_square[row], a.eps)), X_SCALE);
    const float t = fma(d, gain, dt_bias);
    const float softplus = t > 20.f ? t : log1pf(expf(t));  // accurate: an error here grows with every token
    decay = expf(-mul(expf(a_log), softplus));
    beta = ratio(1.f, add(1.f, exp_of(-mul(b, gain))));
}

__device__ __forceinline__ float silu(float x) { return ratio(x, add(1.f, exp_of(-x))); }

// Where input channel i of this CTA lies among all.
__device__ __forceinline__ int channel_of(int i, int head, int part) {
    const int key_head = head / GROUP;
    return i < K ? key_head * K + i : i < 2 * K ? (KEY_HEADS - 1 + key_head) * K + i : 2 * KEY_HEADS * K + head * V + part * COLUMNS + i - 2 * K;
}
// The convolution's weights and the rows before this step.
__device__ __forceinline__ void stage_window(const Arguments& a, Shared& s, int head, int part, int length) {
#pragma unroll
    for (int i = threadIdx.x; i < INPUTS; i += THREADS)
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) s.conv[tap][i] = a.conv[channel_of(i, head, part) * TAPS + tap];
#pragma unroll
    for (int i = threadIdx.x; i < (TAPS - 1) * (INPUTS / 8); i += THREADS) {
        const int row = i / (INPUTS / 8), input = i % (INPUTS / 8) * 8, position = length - (TAPS - 1) + row;
        uint4* const to = (uint4*)(s.window[row] + input);
        if (position >= 0) copy16(to, a.raw + position % RING * C + channel_of(input, head, part));
        else *to = make_uint4(0, 0, 0, 0);
    }
}
// This step's rows of the projection, and what the norm before it needs.
__device__ __forceinline__ void stage_rows(const Arguments& a, Shared& s, int head, int part) {
    const int inputs = INPUTS / 8, pieces = inputs + COLUMNS / 8;  // of eight halves, a row: then z
#pragma unroll
    for (int pass = 0; pass < (M * pieces + THREADS - 1) / THREADS; ++pass) {
        const int i = pass * THREADS + threadIdx.x, row = i / pieces, piece = i % pieces;
        if (row >= M) continue;
        const bool is_z = piece >= inputs;
        const int at = (is_z ? piece - inputs : piece) * 8;
        const int from = is_z ? C + head * V + part * COLUMNS + at : channel_of(at, head, part);
        copy16(is_z ? s.z[row] + at : s.window[TAPS - 1 + row] + at, a.rows + row * STRIDE + from);
    }
}

// Convolution and silu of four input channels of a row, rounded to fp16 as the projection's dtype is; `channel` >= 0: where
// the row itself belongs in the ring.
__device__ __forceinline__ float4 conv4(const Arguments& a, const Shared& s, int row, int input, int slot, int channel) {
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap) {
        const uint2 x = *(const uint2*)(s.window[row + tap] + input);
        const float4 weight = *(const float4*)(s.conv[tap] + input);
        sum[0] = fma(from_half(x.x & 0xffff), weight.x, sum[0]), sum[1] = fma(from_half(x.x >> 16), weight.y, sum[1]);
        sum[2] = fma(from_half(x.y & 0xffff), weight.z, sum[2]), sum[3] = fma(from_half(x.y >> 16), weight.w, sum[3]);
        if (tap == TAPS - 1 && channel >= 0) *(uint2*)(a.raw + slot * C + channel) = x;
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
        const int slot = (length + row) % RING, channel = key_head * K + lane * 4;
        q = conv4(a, s, row, lane * 4, slot, owner ? channel : -1);
        k = conv4(a, s, row, K + lane * 4, slot, owner ? KEY_HEADS * K + channel : -1);
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
                const int slot = (length + row) % RING, channel = head * V + part * COLUMNS + column;
                const float4 v = conv4(a, s, row, 2 * K + column, slot, 2 * KEY_HEADS * K + channel);
                *(float4*)(s.v[row] + column) = v;
                *(float4*)(a.v + slot * (H * V) + channel) = v;
            }
        }
    }
}

// The stored k and v of `count` tokens that the state still lacks.
__device__ __forceinline__ void stage_replays(const Arguments& a, Shared& s, int head, int part, int first, int count) {
    for (int i = threadIdx.x; i < count * (K / 4); i += THREADS) {
        const int row = i / (K / 4), key = i % (K / 4) * 4;
        copy16(s.k[row] + key, a.k + ((first + row) % RING * KEY_HEADS + head / GROUP) * K + key);
    }
    for (int i = threadIdx.x; i < count * (COLUMNS / 4); i += THREADS) {
        const int row = i / (COLUMNS / 4), column = i % (COLUMNS / 4) * 4;
        copy16(s.v[row] + column, a.v + ((first + row) % RING * H + head) * V + part * COLUMNS + column);
    }
}

#if SPLIT > 1
extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __maxnreg__(REGISTERS) gdn(const __grid_constant__ Arguments a) {
#else
extern "C" __global__ void __maxnreg__(REGISTERS) gdn(const __grid_constant__ Arguments a) {
#endif
    BLOCK_SHARED(Shared, s);
    const int head = blockIdx.x / SPLIT, part = blockIdx.x % SPLIT;
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
#if NEXT_STARTS == 0
    let_next_start();
#endif
    if (tid == 0) {
        expect(&s.gates_here, V / 8 * M * 2 * 4);
        expect(&s.squares_here, V / 8 * M * 4);
    }
    cluster_arrive();

    // What belongs to earlier steps, and weights.
    State state;
    const int g = lane / 4, c = lane % 4;
    float* const own_state = a.state + (i64)head * K * V + part * COLUMNS + warp * 8 + c * 2;
#pragma unroll
    for (int j = 0; j < KEYS; ++j) {
        const float2 two = load2(own_state + key_of(g, j) * V);
        state[j][0] = two.x, state[j][1] = two.y;
    }
    const int start = load1(a.positions + STATE_LENGTH), length = load1(a.positions + LENGTH), replays = length - start;
    stage_replays(a, s, head, part, start, replays < BATCH ? replays : BATCH);
    float decay = 0.f, beta = 0.f;  // of row `lane`
    if (lane < replays) {
        decay = load1(a.decay + (start + lane) % RING * H + head);
        beta = load1(a.beta + (start + lane) % RING * H + head);
    }
    GateWeights gate_weights;
    load_gate_weights(a, head, part, gate_weights);
    stage_window(a, s, head, part, length);
    const float a_log = a.a_log[head], dt_bias = a.dt_bias[head];
    const int column = tid % COLUMNS;  // of the outputs this thread finishes
    const float norm = from_bf16(a.norm[part * COLUMNS + column]);
    cluster_wait();
#if GATES_EARLY
    GateRows gate_rows;
    load_gate_rows(a, part, 0, gate_rows);
    Squares squares;
    load_squares(a, warp, lane, squares);
    finish_gates(a, s, gate_weights, gate_rows, part, warp, lane);
    mean_squares(s, squares, warp, lane);
#endif
    for (int first = 0; first < replays; first += BATCH) {
        const int count = replays - first < BATCH ? replays - first : BATCH;
        if (first > 0) stage_replays(a, s, head, part, start + first, count);
        finish_copies();
        sync_block();
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const float2 v = *(const float2*)(s.v[i] + warp * 8 + c * 2);
            absorb<false>(state, s.k[i], nullptr, g, v, shuffle(decay, first + i), shuffle(beta, first + i), 0.f, true, nullptr);
        }
        sync_block();
    }
    if (replays > 0) {
#pragma unroll
        for (int j = 0; j < KEYS; ++j) *(float2*)(own_state + key_of(g, j) * V) = make_float2(state[j][0], state[j][1]);
    }
    wait_for_previous();
#if NEXT_STARTS == 1
    let_next_start();
#endif

    // One journey to memory: everything that the kernels before left for this step.
#if !GATES_EARLY
    GateRows gate_rows;
    load_gate_rows(a, part, 0, gate_rows);
    Squares squares;
    load_squares(a, warp, lane, squares);
#endif
    stage_rows(a, s, head, part);
#if !GATES_EARLY
    finish_gates(a, s, gate_weights, gate_rows, part, warp, lane);
    mean_squares(s, squares, warp, lane);
#endif
    finish_copies();
    sync_block();
#if NEXT_STARTS == 2
    let_next_start();
#endif
    make_rows(a, s, head, part, length, warp, lane);
    await_all(&s.gates_here);
    gates(a, s, a_log, dt_bias, lane, decay, beta);
#pragma unroll 1
    for (int i = 0; i < M; ++i) {
        float* const at = s.v[i] + warp * 8 + c * 2;
        const float2 v = *(const float2*)at;
        float2 o;
        absorb<true>(state, s.k[i], s.q[i], g, v, shuffle(decay, i), shuffle(beta, i), s.qk[i], i + 1 < M, &o);
        float square = fma(o.y, o.y, mul(o.x, o.x));
        square = add(square, shuffle_xor(square, 1));
        square = add(square, shuffle_xor(square, 2));
        sync_warp();  // all lanes have read v
        if (g == 0) *(float2*)at = o;
        if (lane < SPLIT) send(&s.squares[i][part * WARPS + warp], &s.squares_here, lane, square);
    }
    if (warp == 0 && part == 0 && lane < M) {
        a.decay[(length + lane) % RING * H + head] = decay;
        a.beta[(length + lane) % RING * H + head] = beta;
    }
    await_all(&s.squares_here);
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) {
        const int row = tid / COLUMNS + i * 4;
        if (row >= M) continue;
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < V / 8; ++w) sum = add(sum, s.squares[row][w]);
        const float o = mul(s.v[row][column], rsqrtf(add(ratio(sum, (float)V), a.eps)));
        const float y = mul(mul(o, norm), silu(from_half(s.z[row][column])));
        a.out[row * (H * V) + head * V + part * COLUMNS + column] = (u16)to_half(y);
    }
}
