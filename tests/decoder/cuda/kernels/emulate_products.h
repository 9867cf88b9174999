// The tensor cores' instructions for emulate.h, which includes this.
#pragma once

// Tensor core instructions, by their fragment layouts: lane 4 g + t holds row g, columns 2 t and 2 t + 1 of an 8 x 8 tile.
static std::vector<const u16*> exchange_rows;
static std::vector<u32> exchange_words;  // eight a thread
static void load_tiles(u32* r, const void* row, int tiles, bool turned) {
    int lane = threadIdx.x % 32;
    exchange_rows[slot_of(lane)] = (const u16*)row;
    sync_warp();
    for (int i = 0; i < tiles; ++i) {
        u32 half[2];
        for (int e = 0; e < 2; ++e) {
            int y = turned ? lane % 4 * 2 + e : lane / 4, x = turned ? lane / 4 : lane % 4 * 2 + e;
            half[e] = exchange_rows[slot_of(i * 8 + y)][x];
        }
        r[i] = half[0] | half[1] << 16;
    }
    sync_warp();
}
static void load_tiles4(u32* r, const void* row) { load_tiles(r, row, 4, false); }
static void load_tiles2(u32* r, const void* row) { load_tiles(r, row, 2, false); }
static void load_turned_tiles2(u32* r, const void* row) { load_tiles(r, row, 2, true); }
static void load_turned_tiles4(u32* r, const void* row) { load_tiles(r, row, 4, true); }
static u32 turn_tile(u32 v) {
    int lane = threadIdx.x % 32;
    exchange_words[slot_of(lane) * 8] = v;
    sync_warp();
    u32 half[2];
    for (int e = 0; e < 2; ++e) half[e] = exchange_words[slot_of((lane % 4 * 2 + e) * 4 + lane / 8) * 8] >> (lane / 4 % 2 * 16) & 0xffff;
    sync_warp();
    return half[0] | half[1] << 16;
}
static void mma(float* d, const u32* a, const u32* b) {
    int lane = threadIdx.x % 32;
    u32* mine = &exchange_words[slot_of(lane) * 8];
    std::memcpy(mine, a, 16);
    std::memcpy(mine + 4, b, 8);
    sync_warp();
    for (int i = 0; i < 4; ++i) {
        int m = lane / 4 + i / 2 * 8, n = lane % 4 * 2 + i % 2;
        double sum = d[i];
        for (int k = 0; k < 16; ++k) {
            u32 x = exchange_words[slot_of(m % 8 * 4 + k % 8 / 2) * 8 + m / 8 + k / 8 * 2];
            u32 y = exchange_words[slot_of(n * 4 + k % 8 / 2) * 8 + 4 + k / 8];
            sum += (double)from_half(x >> (k % 2 * 16) & 0xffff) * from_half(y >> (k % 2 * 16) & 0xffff);
        }
        d[i] = sum;
    }
    sync_warp();
}

// Warp group products of e4m3 on swizzled tiles in shared memory: done at once, by every lane for what it holds.
static float from_e4m3(u8 bits) {
    int exponent = bits >> 3 & 15, fraction = bits & 7;
    float v = exponent ? std::ldexp(1.f + fraction / 8.f, exponent - 7) : std::ldexp(fraction / 8.f, -6);
    if ((bits & 0x7f) == 0x7f) v = NAN;
    return bits & 0x80 ? -v : v;
}
static u64 matrix(const void* p) { return (uintptr_t)p >> 4; }
static float swizzled(u64 matrix, int row, int byte) {
    uintptr_t p = (matrix << 4) + row / 8 * 1024 + row % 8 * 128 + byte;
    return from_e4m3(*(u8*)(p ^ (p >> 3 & 0x70)));
}
static void multiply(float (&d)[64], u64 x, u64 w, int add) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    for (int i = 0; i < 64; ++i) {
        int row = warp * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (!add) d[i] = 0;
        for (int k = 0; k < 32; ++k) d[i] += swizzled(x, row, k) * swizzled(w, column, k);
    }
}
static u32 to_e4m3(float v) {  // to nearest even, saturating
    u32 sign = std::signbit(v) ? 0x80 : 0;
    v = std::fabs(v);
    if (std::isnan(v)) return sign | 0x7f;
    if (v >= 448.f) return sign | 0x7e;
    int exponent = std::max(v > 0 ? std::ilogb(v) : -6, -6);
    int steps = std::nearbyint(std::ldexp(v, 3 - exponent));  // of an eighth; below 8 it is subnormal
    return sign | (exponent + 6) * 8 + steps;
}
static u32 pair_of_e4m3(float low, float high) { return to_e4m3(low) | to_e4m3(high) << 8; }
static float reciprocal(float x) { return 1.f / x; }
static void products_begin() {}
static void products_commit() {}
static void products_wait() {}
static void pin(float&) {}
