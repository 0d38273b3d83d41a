// Copies many runs in one launch (runs.py has the reference). Source and target may lie in any memory that this
// device can reach: its own, a peer's (then this is a pull or a push over NVLink), or pinned host memory.
#include "runs.cuh"

DEVICE void copy_bytes(u64 source, u64 target, u64 length) {
    for (u64 i = threadIdx.x; i < length; i += blockDim.x)
        reinterpret_cast<u8*>(target)[i] = reinterpret_cast<const u8*>(source)[i];
}

// All loads of a round are on their way before the first store: a peer answers after microseconds.
DEVICE void copy_wide(u64 source, u64 target, u64 count) {
    u64 at = threadIdx.x;
    for (; at + (RUN_LOADS - 1) * RUN_THREADS < count; at += RUN_LOADS * RUN_THREADS) {
        Wide data[RUN_LOADS];
#pragma unroll
        for (int i = 0; i < RUN_LOADS; ++i) data[i] = load_wide(source + 16 * at + 16 * RUN_THREADS * i);
#pragma unroll
        for (int i = 0; i < RUN_LOADS; ++i) store_wide(target + 16 * at + 16 * RUN_THREADS * i, data[i]);
    }
#pragma unroll 4
    for (; at < count; at += RUN_THREADS) store_wide(target + 16 * at, load_wide(source + 16 * at));
}

extern "C" __global__ void __launch_bounds__(RUN_THREADS, 2)
    copy_runs(const Run* runs, u64 count, u64 tiles) {
    for (u64 number = blockIdx.x; number < tiles; number += gridDim.x) {
        const Tile tile = find_tile(runs, u32(count), number);
        if ((tile.source ^ tile.target) & 15) {
            copy_bytes(tile.source, tile.target, tile.length);
            continue;
        }
        const u64 head = head_of(tile.target, tile.length), wide = (tile.length - head) / 16, done = head + 16 * wide;
        copy_bytes(tile.source, tile.target, head);
        copy_wide(tile.source + head, tile.target + head, wide);
        copy_bytes(tile.source + done, tile.target + done, tile.length - done);
    }
}
