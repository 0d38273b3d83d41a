// Runs of bytes, dealt to thread blocks in tiles of 64 KiB, so that one launch of a grid of any size takes
// thousands of runs of very different lengths.
#pragma once
#include "device.cuh"

// Threads of a block, whatever is launched: known beforehand, so that offsets are constants.
#ifndef RUN_THREADS
#define RUN_THREADS 512
#endif
#ifndef RUN_LOADS
#define RUN_LOADS 8
#endif
constexpr u64 TILE_BYTES = 65536;

// runs.py has the same layout. `first`: number of the run's first tile within the launch.
struct Run {
    u64 source, target, length, first;
};

// Part of a run: at most TILE_BYTES.
struct Tile {
    u64 source, target, length;
};

DEVICE Tile find_tile(const Run* runs, u32 count, u64 number) {
    const Run& run = runs[find(runs, count, number)];
    const u64 start = (number - run.first) * TILE_BYTES, rest = run.length - start;
    return {run.source + start, run.target + start, rest < TILE_BYTES ? rest : TILE_BYTES};
}

// Bytes before the next 16-byte boundary, at most `length`.
DEVICE u64 head_of(u64 address, u64 length) {
    const u64 head = (0 - address) & 15;
    return head < length ? head : length;
}
