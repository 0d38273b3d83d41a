// Writes one byte value all over many runs, in one launch: how memory is wiped. A run's `source` is not used.
#include "runs.cuh"

DEVICE void fill_bytes(u64 target, u64 length, u8 value) {
    for (u64 i = threadIdx.x; i < length; i += blockDim.x) reinterpret_cast<u8*>(target)[i] = value;
}

extern "C" __global__ void __launch_bounds__(RUN_THREADS, 2)
    fill_runs(const Run* runs, u64 count, u64 tiles, u64 value) {
    const u64 word = (value & 0xff) * 0x0101010101010101ull;
    for (u64 number = blockIdx.x; number < tiles; number += gridDim.x) {
        const Tile tile = find_tile(runs, u32(count), number);
        const u64 head = head_of(tile.target, tile.length), wide = (tile.length - head) / 16, done = head + 16 * wide;
        fill_bytes(tile.target, head, u8(value));
        for (u64 i = threadIdx.x; i < wide; i += blockDim.x) store_wide(tile.target + head + 16 * i, {word, word});
        fill_bytes(tile.target + done, tile.length - done, u8(value));
    }
}
