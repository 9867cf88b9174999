// Runs a CUDA kernel's source on a CPU: every thread of a cluster is a fiber, barriers and shuffles are where fibers change.
// Included before the kernel, which leaves out its own machine instructions when EMULATED is defined.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;
struct float4 { float x, y, z, w; };
struct float2 { float x, y; };
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct Index { int x; };
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

#define __device__ static
#define __align__(n) alignas(n)
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __cluster_dims__(...)

struct Barrier { int arrived = 0, generation = 0; };
struct Copy { void* to; const void* from; bool real; };  // of 16 bytes; zeros unless real
struct Fiber {
    ucontext_t context;
    std::vector<std::vector<Copy>> copies;  // asynchronous ones by group; the last group is still open
    std::vector<char> stack;
    int thread, block;  // block within the cluster
    int cluster_generation;
    bool done;
};
static std::vector<Fiber> fibers;
static std::vector<Barrier> warp_barriers, block_barriers;
static Barrier cluster_barrier;
static std::vector<std::vector<char>> block_memory;
static std::vector<float> exchange;  // a slot a thread
static ucontext_t scheduler;
static Fiber* self;
static Index threadIdx, blockIdx;
static int first_block, block_threads;

// As aligned as on a card, where swizzled tiles need 1,024 bytes.
static char* shared_of(int cta) { return (char*)(((uintptr_t)block_memory[cta].data() + 1023) / 1024 * 1024); }
#define BLOCK_SHARED(type, name) type& name = *(type*)shared_of(self->block)

static void pause_fiber() { swapcontext(&self->context, &scheduler); }
static void arrive(Barrier& b, int members) {
    if (++b.arrived == members) b.arrived = 0, ++b.generation;
}
static void wait_past(Barrier& b, int generation) {
    while (b.generation == generation) pause_fiber();
}
static void meet(Barrier& b, int members) {
    int generation = b.generation;
    arrive(b, members);
    wait_past(b, generation);
}
static int slot_of(int lane) { return self->block * block_threads + threadIdx.x / 32 * 32 + lane; }
static void sync_warp() { meet(warp_barriers[slot_of(0) / 32], 32); }
static void sync_block() { meet(block_barriers[self->block], block_threads); }
static float shuffle(float v, int lane) {
    exchange[slot_of(threadIdx.x % 32)] = v;
    sync_warp();
    float other = exchange[slot_of(lane)];
    sync_warp();
    return other;
}
static float shuffle_xor(float v, int mask) { return shuffle(v, threadIdx.x % 32 ^ mask); }
static u32 shuffle_xor_bits(u32 v, int mask) {
    float bits;
    std::memcpy(&bits, &v, 4);
    bits = shuffle_xor(bits, mask);
    std::memcpy(&v, &bits, 4);
    return v;
}
static void cluster_arrive() {
    self->cluster_generation = cluster_barrier.generation;
    arrive(cluster_barrier, fibers.size());
}
static void cluster_wait() { wait_past(cluster_barrier, self->cluster_generation); }
// Numbers sent from CTA to CTA: the receiver's barrier holds the bytes that are still to come.
typedef unsigned long long u64;
static void expect(u64* barrier, int bytes) { *barrier = bytes; }
template <class T> static T* in_block(T* own, int cta) {
    return (T*)(shared_of(cta) + ((char*)own - shared_of(self->block)));
}
static void send(float* own, u64* barrier, int cta, float v) {
    *in_block(own, cta) = v;
    *in_block(barrier, cta) -= sizeof v;
}
static void await_all(u64* barrier) {
    sync_block();
    while (*barrier) pause_fiber();
}

static float mul(float a, float b) { return a * b; }
static float add(float a, float b) { return a + b; }
static float fma(float a, float b, float c) { return std::fmaf(a, b, c); }
static float exp_of(float x) { return std::exp(x); }
static float exp2_of(float x) { return std::exp2(x); }
static float ratio(float a, float b) { return a / b; }
static float rsqrtf(float x) { return 1.f / std::sqrt(x); }
static float from_bf16(u32 bits) {
    bits <<= 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
static float from_half(u32 bits) {
    u16 low = bits;
    _Float16 h;
    std::memcpy(&h, &low, 2);
    return h;
}
static u32 to_half(float v) {
    v = v > 65504.f ? 65504.f : (v < -65504.f ? -65504.f : v);
    _Float16 h = v;
    u16 bits;
    std::memcpy(&bits, &h, 2);
    return bits;
}
static u32 pack(float low, float high) {  // two fp16, not clamped
    _Float16 halves[2] = {(_Float16)low, (_Float16)high};
    u32 pair;
    std::memcpy(&pair, halves, 4);
    return pair;
}
static u32 pair_of_bf16(float low, float high) {  // to nearest even; no NaN
    u32 bits[2];
    std::memcpy(&bits[0], &low, 4);
    std::memcpy(&bits[1], &high, 4);
    for (u32& b : bits) b = b + 0x7fff + (b >> 16 & 1) >> 16;
    return bits[0] | bits[1] << 16;
}
template <class Out, class In> static Out read(const In* p) {
    Out v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
static float4 load4(const float* p) { return read<float4>(p); }
static float2 load2(const float* p) { return read<float2>(p); }
static float load1(const float* p) { return *p; }
static int load1(const int* p) { return *p; }
static u16 load_half(const u16* p) { return *p; }
static uint4 load_halves8(const u16* p) { return read<uint4>(p); }
// Asynchronous copies: an odd thread's arrive at once, an even thread's only when it waits for them, so that neither a copy into
// what is still being read nor a read of what has not come goes unseen.
static void arrive_copy(const Copy& c) {
    if (c.real) std::memcpy(c.to, c.from, 16);
    else std::memset(c.to, 0, 16);
}
static void copy16(void* to, const void* from, bool real = true) {
    if (threadIdx.x % 2) arrive_copy({to, from, real});
    else self->copies.back().push_back({to, from, real});
}
static void commit() { self->copies.emplace_back(); }
template <int LEFT> static void wait_copies() {
    while ((int)self->copies.size() - 1 > LEFT) {  // the last group is not committed yet
        for (const Copy& c : self->copies.front()) arrive_copy(c);
        self->copies.erase(self->copies.begin());
    }
}
static void finish_copies() {
    commit();
    wait_copies<0>();
}
// Barriers that count arrivals and bytes, and bulk copies: of odd threads at once, of even ones when somebody waits.
struct Counted { unsigned char arrivals, left, phase; int bytes; };
struct BulkCopy { void* to; const void* from; int bytes; u64* barrier; };
static std::vector<BulkCopy> bulk_copies;
static void settle(u64* barrier) {
    Counted& c = *(Counted*)barrier;
    if (c.left == 0 && c.bytes == 0) c.phase ^= 1, c.left = c.arrivals;
}
static void barrier_init(u64* barrier, int arrivals) { *(Counted*)barrier = {(unsigned char)arrivals, (unsigned char)arrivals, 0, 0}; }
static void barriers_ready() {}
static void arrive_expecting(u64* barrier, int bytes) {
    Counted& c = *(Counted*)barrier;
    c.bytes += bytes, --c.left;
    settle(barrier);
}
static void arrive(u64* barrier) { arrive_expecting(barrier, 0); }
static void deliver(const BulkCopy& c) {
    std::memcpy(c.to, c.from, c.bytes);
    ((Counted*)c.barrier)->bytes -= c.bytes;
    settle(c.barrier);
}
static void bulk_copy(void* to, const void* from, int bytes, u64* barrier) {
    if (threadIdx.x % 2) deliver({to, from, bytes, barrier});
    else bulk_copies.push_back({to, from, bytes, barrier});
}
static void wait_phase(u64* barrier, int parity) {
    while (((Counted*)barrier)->phase == parity) {
        if (!bulk_copies.empty()) {
            deliver(bulk_copies.front());
            bulk_copies.erase(bulk_copies.begin());
        }
        pause_fiber();
    }
}
static void arrive_in(u64* barrier, int cta) { arrive(in_block(barrier, cta)); }
static void bulk_copy_to_both(void* to, const void* from, int bytes, u64* barrier) {
    for (int cta = 0; cta < 2; ++cta) bulk_copy(in_block((char*)to, cta), from, bytes, in_block(barrier, cta));
}
static void sync_cluster() {
    cluster_arrive();
    cluster_wait();
}
static int cluster_rank() { return self->block; }
template <int COUNT> static void take_registers() {}
template <int COUNT> static void give_registers() {}
static u32 count_arrival(u32* counter) { return (*counter)++; }
static void wait_for_arrivals(const u32* counter, u32 count) {
    while (*counter < count) pause_fiber();
}
#define MINUS_INFINITY (-INFINITY)

#include "emulate_products.h"

static void let_next_start() {}
static void wait_for_previous() {}

// Run `entry` as `clusters` clusters of `blocks` CTAs of `threads` threads, one cluster after the other; shared memory
// starts as NaN. Round robin from a moving start, so that no order of threads is the only one tried.
static void run_clusters(void (*entry)(), int clusters, int blocks, int threads, size_t shared_bytes) {
    block_threads = threads;
    for (int cluster = 0; cluster < clusters; ++cluster) {
        first_block = cluster * blocks;
        cluster_barrier = {};
        warp_barriers.assign(blocks * threads / 32, {});
        block_barriers.assign(blocks, {});
        block_memory.assign(blocks, std::vector<char>(shared_bytes + 1023, (char)0xff));
        exchange.assign(blocks * threads, NAN);
        exchange_rows.assign(blocks * threads, nullptr);
        exchange_words.assign(blocks * threads * 8, 0);
        fibers.clear();
        fibers.resize(blocks * threads);
        for (int i = 0; i < blocks * threads; ++i) {
            Fiber& f = fibers[i];
            f.thread = i % threads, f.block = i / threads, f.done = false;
            f.copies.resize(1);
            f.stack.resize(64 << 10);
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = f.stack.data();
            f.context.uc_stack.ss_size = f.stack.size();
            f.context.uc_link = &scheduler;
            makecontext(&f.context, entry, 0);
        }
        int left = fibers.size();
        for (size_t turn = 0; left > 0; ++turn) {
            for (size_t i = 0; i < fibers.size(); ++i) {
                Fiber& f = fibers[(i + turn * 7) % fibers.size()];
                if (f.done || (f.block == 1 && turn % 16 && !fibers[0].done)) continue;  // one CTA lags: none may count on it
                self = &f;
                threadIdx.x = f.thread;
                blockIdx.x = first_block + f.block;
                swapcontext(&scheduler, &f.context);
                left -= f.done;
            }
        }
    }
}
