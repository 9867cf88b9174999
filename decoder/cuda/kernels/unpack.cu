// Packed weights (packing.py) back into a dense row-major matrix, for the products of prefill.
//
// A chunk is 16 KiB: 128 rows of 128 bytes, in the order 16-row unit of a pair, row group of 32, column slice of 32
// bytes, row g of eight, 8-byte group t of the slice, half of the unit. So lane 4g + t of a warp reads 16 contiguous
// bytes and holds the same 8 bytes of columns of rows g and g + 8. One warp a unit and row group, eight warps a chunk.
// OUT: 0 the bytes as they are, 1 bf16, 2 fp32, 3 the bytes in tiles (fp8_rows.py), whole ones.
// FP8: e4m3 with scales, widened by its bits so that sm_80 runs the same; otherwise the weights are bf16.

#ifndef EMULATED
typedef unsigned int u32;
typedef unsigned short u16;
__device__ __forceinline__ float from_bf16(u32 bits) { return __uint_as_float(bits << 16); }
__device__ __forceinline__ float from_half(u32 bits) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)bits));
    return f;
}
__device__ __forceinline__ u32 pair_of_bf16(float low, float high) {
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
#endif

#define TILE 128
#define CHUNK_BYTES 16384
#define THREADS 256
#define ELEMENTS (FP8 ? 8 : 4)  // of the eight bytes that a lane holds of a row and slice

struct Arguments {
    const unsigned char* packed;
    const float* scales;    // [scale rows, chunks]
    const int* scale_rows;  // [tiles, 8 units, 2 halves]
    unsigned char* out;     // [rows, columns], or tiles of them
    int rows, columns, chunks;
};
#ifdef EMULATED
struct Shared {};
#endif

__device__ __forceinline__ float element(u32 low, u32 high, int e) {
    if (!FP8) return from_bf16((e < 2 ? low : high) >> e % 2 * 16 & 0xffff);
    const u32 byte = (e < 4 ? low : high) >> e % 4 * 8;
    return from_half((byte & 0x80) << 8 | (byte & 0x7f) << 7);  // value · 2^-8
}

// Eight bytes of one row, which start at element `column`.
__device__ __forceinline__ void store(const Arguments& a, int row, int column, u32 low, u32 high, float scale) {
    unsigned char* to = a.out + ((long long)row * a.columns + column) * (OUT == 2 ? 4 : OUT == 1 ? 2 : 1);
    if (OUT == 3) {
        const long long tile = (long long)(row / TILE) * (a.columns / TILE) + column / TILE;
        to = a.out + tile * TILE * TILE + row % TILE * TILE + (column % TILE / 16 ^ row % 8) * 16 + column % 16;
    }
    if (OUT == 0 || OUT == 3) {
        *(uint2*)to = make_uint2(low, high);
        return;
    }
    float v[ELEMENTS];
#pragma unroll
    for (int e = 0; e < ELEMENTS; ++e) v[e] = FP8 ? element(low, high, e) * scale : element(low, high, e);
    if (OUT == 2) {
#pragma unroll
        for (int e = 0; e < ELEMENTS; e += 4) ((float4*)to)[e / 4] = make_float4(v[e], v[e + 1], v[e + 2], v[e + 3]);
    } else if (!FP8) {
        *(uint2*)to = make_uint2(low, high);
    } else {
        *(uint4*)to = make_uint4(pair_of_bf16(v[0], v[1]), pair_of_bf16(v[2], v[3]), pair_of_bf16(v[4], v[5]),
                                 pair_of_bf16(v[6], v[7]));
    }
}

extern "C" __global__ __launch_bounds__(THREADS) void unpack(const __grid_constant__ Arguments a) {
    const int tile = blockIdx.x / a.chunks, chunk = blockIdx.x % a.chunks;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int unit = warp / 4, group = warp % 4, g = lane / 4, t = lane % 4;
    const uint4* from = (const uint4*)(a.packed + (long long)blockIdx.x * CHUNK_BYTES + warp * 2048) + lane;
    uint4 raw[4];
#pragma unroll
    for (int slice = 0; slice < 4; ++slice) raw[slice] = from[slice * 32];
    float scale[2] = {1.f, 1.f};
#pragma unroll
    for (int half = 0; FP8 && OUT && half < 2; ++half)
        scale[half] = 256.f * a.scales[a.scale_rows[(tile * 8 + group * 2 + unit) * 2 + half] * a.chunks + chunk];
    const int first = tile * TILE + group * 32 + unit * 16;  // row of the unit as it is packed
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (first + half * 8 + g >= a.rows) continue;
        const int row = INTERLEAVED ? half * (a.rows / 2) + first / 2 + g : first + half * 8 + g;
#pragma unroll
        for (int slice = 0; slice < 4; ++slice) {
            const int column = (chunk * 16 + slice * 4 + t) * ELEMENTS;
            if (column >= a.columns) continue;
            const uint4 r = raw[slice];
            store(a, row, column, half ? r.z : r.x, half ? r.w : r.y, scale[half]);
        }
    }
}
