// Which leaves do two tables not prove equal? Two launches, nothing for the host to wait for in between: the first
// marks and counts, the second writes the list in ascending order (table_diff.py has the reference).
#include "device.cuh"

// A thread block looks at as many leaves as it has threads: 32 warps, so that one warp can add up their counts.
constexpr u32 DIFF_THREADS = 1024;

// `marks`: a bit for each leaf; `counts`: one for each thread block.
extern "C" __global__ void __launch_bounds__(DIFF_THREADS)
    table_diff_mark(const ulonglong2* mine, const ulonglong2* theirs, const u8* known_mine, const u8* known_theirs,
                    u64 leaves, u32* marks, u32* counts) {
    __shared__ u32 in_warp[32];
    const u64 leaf = u64(blockIdx.x) * DIFF_THREADS + threadIdx.x;
    bool differs = false;
    if (leaf < leaves) {
        const ulonglong2 a = mine[leaf], b = theirs[leaf];
        differs = a.x != b.x || a.y != b.y || !known_mine[leaf] || !known_theirs[leaf];
    }
    const u32 bits = __ballot_sync(0xffffffffu, differs), warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) {
        marks[leaf / 32] = bits;
        in_warp[warp] = __popc(bits);
    }
    __syncthreads();
    if (warp > 0) return;
    u32 sum = in_warp[threadIdx.x];
    for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (threadIdx.x == 0) counts[blockIdx.x] = sum;
}

// `list`: room for every leaf; `total`: how many it holds then. `base` is added to every leaf's number.
extern "C" __global__ void __launch_bounds__(DIFF_THREADS)
    table_diff_list(const u32* marks, const u32* counts, u64 leaves, u64 base, u64* list, u64* total) {
    __shared__ u64 before;
    __shared__ u32 in_warp[32];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u64 leaf = u64(blockIdx.x) * DIFF_THREADS + threadIdx.x;
    const u32 bits = marks[leaf / 32];
    if (lane == 0) in_warp[warp] = __popc(bits);
    if (warp == 0) {
        u64 sum = 0;
        for (u32 i = lane; i < blockIdx.x; i += 32) sum += counts[i];
        for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (lane == 0) before = sum;
    }
    __syncthreads();
    u64 place = before + __popc(bits & ((1u << lane) - 1));
    for (u32 i = 0; i < warp; ++i) place += in_warp[i];
    if (bits >> lane & 1) list[place] = base + leaf;
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) *total = before + counts[blockIdx.x];
}
