// Many rows of a prompt before the delta rule: causal depthwise convolution, silu, and unit length of q and k.
//
// A lane owns eight neighbouring channels and walks down ROWS rows, so that a row is loaded once and the TAPS - 1 before it stay in
// registers; K / 8 lanes side by side own a head of q or k, whose length is a few shuffles. Memory is all that counts: 16 bytes a
// lane in and out, AHEAD rows under way.
//
// Compile-time: KEY_HEADS, H, K (8 to 256, a power of two), V (a multiple of 8), STRIDE (of the projected rows), BF16 (they are bf16,
// else fp16), THREADS.
#ifndef EMULATED
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;
#define FULL 0xffffffffu

__device__ __forceinline__ float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ float exp_of(float x) { return __expf(x); }
__device__ __forceinline__ float ratio(float a, float b) { return __fdividef(a, b); }
__device__ __forceinline__ float shuffle_xor(float v, int mask) { return __shfl_xor_sync(FULL, v, mask); }
__device__ __forceinline__ float from_bf16(u32 bits) { return __uint_as_float(bits << 16); }
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
__device__ __forceinline__ uint4 load_halves8(const u16* p) { return *(const uint4*)p; }
#endif  // EMULATED

#define ROWS 64
#define TAPS 4
#define AHEAD 4
#define RING 32
#define KEY_STRIDE (K + 8)  // as gdn_prefill.cu wants it
#define KEYS (KEY_HEADS * K)
#define C (2 * KEYS + H * V)
#define COLUMN_BLOCKS ((C + THREADS * 8 - 1) / (THREADS * 8))

struct Shared { char nothing; };
struct Arguments {
    const u16* rows;    // [rows, STRIDE]: q | k | v before the convolution; what follows is not read
    const u16* raw;     // fp16 [RING, C]: earlier rows by position
    const float* conv;  // [C, TAPS]
    u16* q;             // fp16 [KEY_HEADS, rows up to a multiple of ROWS, KEY_STRIDE]: zeros past the end
    u16* k;             // the same
    u16* v;             // fp16 [rows, H, V]
    float q_scale;
    int start, count;   // position of the first row, rows
};

__device__ __forceinline__ void unpack8(uint4 v, bool bf16, float* to) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const u32 bits = words[i / 2] >> (i % 2 * 16) & 0xffff;
        to[i] = bf16 ? from_bf16(bits) : from_half(bits);
    }
}

// Rows before the first of these may be of this call, of an earlier one, or before the prompt.
__device__ __forceinline__ void load_before(const Arguments& a, int row, int channel, float* to) {
    const int position = a.start + row;
    if (row >= 0) unpack8(load_halves8(a.rows + (i64)row * STRIDE + channel), BF16, to);
    else if (position >= 0) unpack8(load_halves8(a.raw + position % RING * C + channel), false, to);
    else {
#pragma unroll
        for (int i = 0; i < 8; ++i) to[i] = 0.f;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) convolve(const __grid_constant__ Arguments a) {
    const int column = (blockIdx.x % COLUMN_BLOCKS * THREADS + threadIdx.x) * 8, first = blockIdx.x / COLUMN_BLOCKS * ROWS;
    const bool held = column < C;
    const int channel = held ? column : 0;  // all lanes take part in the shuffles
    const int left = a.count - first < ROWS ? a.count - first : ROWS;
    const bool is_q = channel < KEYS, is_key = channel < 2 * KEYS;
    const int key_channel = is_q ? channel : channel - KEYS, padded = (a.count + ROWS - 1) / ROWS * ROWS;
    const i64 key_at = (i64)(key_channel / K) * padded * KEY_STRIDE + key_channel % K;
    u16* const to = is_q ? a.q + key_at : is_key ? a.k + key_at : a.v + channel - 2 * KEYS;
    const bool warp_has_keys = column - (int)(threadIdx.x % 32) * 8 < 2 * KEYS;  // the same for all lanes
    const int pitch = is_key ? KEY_STRIDE : H * V;
    const float scale = is_q ? a.q_scale : 1.f;

    float weight[TAPS][8], window[TAPS][8];  // the row at hand goes to window[row % TAPS]
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float4 four = *(const float4*)(a.conv + (channel + i) * TAPS);
        weight[0][i] = four.x, weight[1][i] = four.y, weight[2][i] = four.z, weight[3][i] = four.w;
    }
#pragma unroll
    for (int i = 1; i < TAPS; ++i) load_before(a, first - TAPS + i, channel, window[i]);
    const u16* const from = a.rows + (i64)first * STRIDE + channel;
    uint4 coming[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) coming[i] = load_halves8(from + (i < left ? i : 0) * (i64)STRIDE);
#pragma unroll 1
    for (int block = 0; block < left; block += TAPS) {
#pragma unroll
        for (int i = 0; i < TAPS; ++i) {
            const int row = block + i, next = row + AHEAD;
            unpack8(coming[i], BF16, window[i]);
            coming[i] = load_halves8(from + (next < left ? next : 0) * (i64)STRIDE);
            float y[8], square = 0.f;
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                float sum = 0.f;
#pragma unroll
                for (int tap = 0; tap < TAPS; ++tap) sum = fma(window[(i + 1 + tap) % TAPS][e], weight[tap][e], sum);
                y[e] = ratio(sum, 1.f + exp_of(-sum));
            }
            u32 words[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) words[e] = pack(y[2 * e], y[2 * e + 1]);  // as the projection's dtype would round
            if (warp_has_keys) {
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    y[e] = from_half(words[e / 2] >> (e % 2 * 16) & 0xffff);
                    square = fma(y[e], y[e], square);
                }
#pragma unroll
                for (int mask = 1; mask < K / 8; mask *= 2) square += shuffle_xor(square, mask);
                const float gain = rsqrtf(square + 1e-6f) * scale;
#pragma unroll
                for (int e = 0; e < 4; ++e) words[e] = is_key ? pack(y[2 * e] * gain, y[2 * e + 1] * gain) : words[e];
            }
            if (held && row < left) *(uint4*)(to + (i64)(first + row) * pitch) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
    if (held && is_key)
        for (int row = left; row < ROWS; ++row) *(uint4*)(to + (i64)(first + row) * pitch) = make_uint4(0, 0, 0, 0);
}
