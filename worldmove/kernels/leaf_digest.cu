// XXH3-128 of every leaf (leaf_digest.py has the reference, pieces.py the planning).
#include "xxh3.cuh"

#ifndef LEAF_THREADS
#define LEAF_THREADS 128
#endif
// Thread blocks that a multiprocessor must have room for: bounds the registers. From sm_100 on, five would spill.
constexpr int OTHER_BLOCKS = 4;
#ifndef LEAF_BLOCKS
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define LEAF_BLOCKS 4
#else
#define LEAF_BLOCKS 5
#endif
#endif

// pieces.py has the same layout. `first`: number of the piece's first leaf within the launch.
struct Piece {
    u64 address, length, leaf_bytes, first_leaf, first, target;
};

struct Leaf {
    u64 address, length, row, target;
};

DEVICE Leaf find_leaf(const Piece* pieces, u32 count, u64 number) {
    const Piece& piece = pieces[find(pieces, count, number)];
    const u64 index = number - piece.first, start = index * piece.leaf_bytes, rest = piece.length - start;
    return {piece.address + start, rest < piece.leaf_bytes ? rest : piece.leaf_bytes, piece.first_leaf + index,
            piece.target + start};
}

// The threads of this warp that work on the same leaf: SIZE neighbours.
template <int SIZE>
DEVICE u32 group_mask() {
    return (0xffffffffu >> (32 - SIZE)) << (threadIdx.x % 32 / SIZE * SIZE);
}

// Four threads carry a leaf's eight lanes; QUADS such fours share its stripes, which is possible since a block's
// stripes are only added up. So 16 threads read 256 neighbouring bytes, QUADS blocks at a time, with 16 loads of 16
// bytes in flight each. (Four threads a leaf are slower: less of a row at once, and too few of them for large leaves.)
constexpr int QUADS = 4, MEMBERS = 4 * QUADS;
constexpr int OWN_STRIPES = BLOCK_STRIPES / QUADS;
constexpr u64 STEP_BYTES = QUADS * STRIPE_BYTES;

// What the fours of a leaf have added up, together; every thread gets it.
DEVICE Lanes sum_of_quads(Lanes sum, u32 mask) {
    return {sum_over_group<MEMBERS>(sum.even, mask, 4), sum_over_group<MEMBERS>(sum.odd, mask, 4)};
}

// One of the threads of a leaf: `pair` says which two of the eight lanes it carries, `quad` which stripes.
struct Member {
    int pair, quad;
    u32 mask;
    const u64* keys;      // of its first stripe
    const u64* scramble;  // keys of the end of a block
    u64 delta;            // from where it reads to where a digesting copy writes
};

// COUNT blocks: every thread has all its loads on their way before it needs the first.
template <int COUNT, bool COPY>
DEVICE void take_blocks(Lanes& lanes, u64 at, const Member& me) {
    Wide data[COUNT][OWN_STRIPES];
#pragma unroll
    for (int b = 0; b < COUNT; ++b)
#pragma unroll
        for (int i = 0; i < OWN_STRIPES; ++i) data[b][i] = load_wide(at + b * BLOCK_BYTES + i * STEP_BYTES);
#pragma unroll
    for (int b = 0; b < COUNT; ++b) {
        Lanes sum = {0, 0};
#pragma unroll
        for (int i = 0; i < OWN_STRIPES; ++i) {
            accumulate(sum, data[b][i], me.keys[QUADS * i], me.keys[QUADS * i + 1]);
            if (COPY) store_wide(at + me.delta + b * BLOCK_BYTES + i * STEP_BYTES, data[b][i]);
        }
        lanes = lanes + sum_of_quads(sum, me.mask);
        scramble(lanes, me.scramble[0], me.scramble[1]);
    }
}

// The last block has 4, 8, 12 or 16 stripes, of which the last has its own place in the secret.
template <bool COPY>
DEVICE void take_last(Lanes& lanes, u64 at, int stripes, const u64* secret, const Member& me) {
    const u64 last_even = secret_at(secret, SECRET_LAST + 16 * me.pair);
    const u64 last_odd = secret_at(secret, SECRET_LAST + 16 * me.pair + 8);
    Wide data[OWN_STRIPES];
    Lanes sum = {0, 0};
#pragma unroll
    for (int i = 0; i < OWN_STRIPES; ++i)
        if (me.quad + QUADS * i < stripes) data[i] = load_wide(at + i * STEP_BYTES);
#pragma unroll
    for (int i = 0; i < OWN_STRIPES; ++i) {
        const int stripe = me.quad + QUADS * i;
        if (stripe < stripes) {
            const bool last = stripe == stripes - 1;
            accumulate(sum, data[i], last ? last_even : me.keys[QUADS * i], last ? last_odd : me.keys[QUADS * i + 1]);
            if (COPY) store_wide(at + me.delta + i * STEP_BYTES, data[i]);
        }
    }
    lanes = lanes + sum_of_quads(sum, me.mask);
}

// Leaves of whole 256 bytes at 16-byte addresses. COPY writes what was read to `target` as well.
template <bool COPY>
DEVICE void digest_aligned(const Piece* pieces, u32 count, u64 leaves, u64 seed, u64 table) {
    __shared__ u64 secret[SECRET_WORDS];
    derive_secret(secret, seed);
    const u64 number = (u64(blockIdx.x) * blockDim.x + threadIdx.x) / MEMBERS;
    if (number >= leaves) return;
    const Leaf leaf = find_leaf(pieces, count, number);
    const int pair = threadIdx.x % 4, quad = threadIdx.x % MEMBERS / 4;
    const Member me = {pair,
                       quad,
                       group_mask<MEMBERS>(),
                       secret + quad + 2 * pair,
                       secret + SCRAMBLE_WORD + 2 * pair,
                       leaf.target - leaf.address};
    u64 at = leaf.address + quad * STRIPE_BYTES + pair * 16;
    u64 blocks = (leaf.length - 1) / BLOCK_BYTES;
    const int stripes = int((leaf.length - blocks * BLOCK_BYTES) / STRIPE_BYTES);
    Lanes lanes = {INITIAL[2 * pair], INITIAL[2 * pair + 1]};
    for (; blocks >= QUADS; blocks -= QUADS, at += QUADS * BLOCK_BYTES) take_blocks<QUADS, COPY>(lanes, at, me);
    for (; blocks > 0; --blocks, at += BLOCK_BYTES) take_blocks<1, COPY>(lanes, at, me);
    take_last<COPY>(lanes, at, stripes, secret, me);
    const Hash hash = merge(lanes, secret, leaf.length, pair, me.mask);
    if (threadIdx.x % MEMBERS == 0) store_hash(table + leaf.row * 16, hash);
}

DEVICE Wide load_any(u64 address) { return {read64(address), read64(address + 8)}; }

// Over 240 bytes at any address, by four threads.
DEVICE Hash hash_long(u64 address, u64 length, const u64* secret, int pair, u32 mask) {
    const u64* keys = secret + 2 * pair;
    const u64 blocks = (length - 1) / BLOCK_BYTES;
    u64 at = address + 16 * pair;
    Lanes lanes = {INITIAL[2 * pair], INITIAL[2 * pair + 1]};
    for (u64 block = 0; block < blocks; ++block, at += BLOCK_BYTES) {
#pragma unroll 8
        for (int i = 0; i < BLOCK_STRIPES; ++i)
            accumulate(lanes, load_any(at + i * STRIPE_BYTES), keys[i], keys[i + 1]);
        scramble(lanes, secret[SCRAMBLE_WORD + 2 * pair], secret[SCRAMBLE_WORD + 2 * pair + 1]);
    }
    const int stripes = int((length - 1 - blocks * BLOCK_BYTES) / STRIPE_BYTES);
#pragma unroll 4
    for (int i = 0; i < stripes; ++i, at += STRIPE_BYTES) accumulate(lanes, load_any(at), keys[i], keys[i + 1]);
    accumulate(lanes, load_any(address + length - STRIPE_BYTES + 16 * pair),
               secret_at(secret, SECRET_LAST + 16 * pair), secret_at(secret, SECRET_LAST + 16 * pair + 8));
    return merge(lanes, secret, length, pair, mask);
}

// `leaves`: of all pieces together. `table`: address of 16 bytes a leaf, 16-byte aligned.
extern "C" __global__ void __launch_bounds__(LEAF_THREADS, LEAF_BLOCKS)
    leaf_digest(const Piece* pieces, u64 count, u64 leaves, u64 seed, u64 table) {
    digest_aligned<false>(pieces, u32(count), leaves, seed, table);
}

extern "C" __global__ void __launch_bounds__(LEAF_THREADS, OTHER_BLOCKS)
    leaf_digest_copy(const Piece* pieces, u64 count, u64 leaves, u64 seed, u64 table) {
    digest_aligned<true>(pieces, u32(count), leaves, seed, table);
}

extern "C" __global__ void __launch_bounds__(LEAF_THREADS, OTHER_BLOCKS)
    leaf_digest_any(const Piece* pieces, u64 count, u64 leaves, u64 seed, u64 table) {
    __shared__ u64 secret[SECRET_WORDS];
    derive_secret(secret, seed);
    const u64 number = (u64(blockIdx.x) * blockDim.x + threadIdx.x) / 4;
    if (number >= leaves) return;
    const Leaf leaf = find_leaf(pieces, u32(count), number);
    const int pair = threadIdx.x % 4;
    const Hash hash = leaf.length > SHORT_BYTES ? hash_long(leaf.address, leaf.length, secret, pair, group_mask<4>())
                                                : hash_short(leaf.address, leaf.length, seed);
    if (pair == 0) store_hash(table + leaf.row * 16, hash);
}
