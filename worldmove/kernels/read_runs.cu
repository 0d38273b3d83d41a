// Reads many runs and does next to nothing with them: what a kernel can read at most, the yardstick of the digest.
// Runs begin at 16-byte addresses and are multiples of 16 long. `sums`: one u64 for each thread of the grid.
#include "runs.cuh"

extern "C" __global__ void __launch_bounds__(RUN_THREADS, 2)
    read_runs(const Run* runs, u64 count, u64 tiles, u64* sums) {
    u64 sum = 0;
    for (u64 number = blockIdx.x; number < tiles; number += gridDim.x) {
        const Tile tile = find_tile(runs, u32(count), number);
        const u64 wide = tile.length / 16;
        u64 at = threadIdx.x;
        for (; at + (RUN_LOADS - 1) * RUN_THREADS < wide; at += RUN_LOADS * RUN_THREADS) {
            Wide data[RUN_LOADS];
#pragma unroll
            for (int i = 0; i < RUN_LOADS; ++i) data[i] = load_wide(tile.source + 16 * at + 16 * RUN_THREADS * i);
#pragma unroll
            for (int i = 0; i < RUN_LOADS; ++i) sum ^= data[i].low ^ data[i].high;
        }
        for (; at < wide; at += RUN_THREADS) {
            const Wide data = load_wide(tile.source + 16 * at);
            sum ^= data.low ^ data.high;
        }
    }
    sums[u64(blockIdx.x) * blockDim.x + threadIdx.x] = sum;
}
