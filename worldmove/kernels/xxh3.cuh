// XXH3-128 with a seed: what the specification (github.com/Cyan4973/xxHash, doc/xxhash_spec.md) fixes.
// Names follow it. Inputs up to 240 bytes have variants of their own; longer ones run in stripes of 64 bytes
// over eight 64-bit lanes, of which one thread carries two neighbours.
#pragma once
#include "device.cuh"

constexpr u64 PRIME32_1 = 0x9E3779B1, PRIME32_2 = 0x85EBCA77, PRIME32_3 = 0xC2B2AE3D;
constexpr u64 PRIME64_1 = 0x9E3779B185EBCA87, PRIME64_2 = 0xC2B2AE3D27D4EB4F, PRIME64_3 = 0x165667B19E3779F9,
              PRIME64_4 = 0x85EBCA77C2B2AE63, PRIME64_5 = 0x27D4EB2F165667C5;
constexpr u64 PRIME_MX1 = 0x165667919E3779F9, PRIME_MX2 = 0x9FB21C651E98DF25;

constexpr int SECRET_WORDS = 24;
constexpr u64 STRIPE_BYTES = 64, BLOCK_BYTES = 1024, SHORT_BYTES = 240;
constexpr int BLOCK_STRIPES = 16;
// Offsets into the secret, in bytes.
constexpr int SECRET_LAST = 121, SECRET_MERGE_LOW = 11, SECRET_MERGE_HIGH = 117, SCRAMBLE_WORD = 16;

// The default secret as little-endian words.
__constant__ const u64 SECRET[SECRET_WORDS] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
    0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
    0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
    0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
};

__constant__ const u64 INITIAL[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                     PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};

struct Hash {
    u64 low, high;
};

DEVICE u32 swap32(u32 x) { return x << 24 | (x & 0xff00u) << 8 | (x >> 8 & 0xff00u) | x >> 24; }
DEVICE u64 swap64(u64 x) { return u64(swap32(u32(x))) << 32 | swap32(u32(x >> 32)); }
DEVICE u64 fold(u64 a, u64 b) { return a * b ^ __umul64hi(a, b); }
DEVICE Hash multiply(u64 a, u64 b) { return {a * b, __umul64hi(a, b)}; }

DEVICE u64 avalanche(u64 h) {
    h = (h ^ h >> 37) * PRIME_MX1;
    return h ^ h >> 32;
}

DEVICE u64 avalanche64(u64 h) {
    h = (h ^ h >> 33) * PRIME64_2;
    h = (h ^ h >> 29) * PRIME64_3;
    return h ^ h >> 32;
}

// Eight bytes at any address. Only aligned words that hold one of them are read: never past a page.
DEVICE u64 read64(u64 address) {
    const u64* words = reinterpret_cast<const u64*>(address & ~7ull);
    const int shift = int(address & 7) * 8;
    return shift ? words[0] >> shift | words[1] << (64 - shift) : words[0];
}

DEVICE u64 read8(u64 address) { return *reinterpret_cast<const u8*>(address); }
DEVICE u32 read32(u64 at) { return u32(read8(at) | read8(at + 1) << 8 | read8(at + 2) << 16 | read8(at + 3) << 24); }

// A word at any byte of a secret; the offset isn't a multiple of 8.
DEVICE u64 secret_at(const u64* secret, int offset) {
    const int word = offset / 8, shift = offset % 8 * 8;
    return secret[word] >> shift | secret[word + 1] << (64 - shift);
}

DEVICE Hash hash_0(u64 seed) {
    return {avalanche64(seed ^ SECRET[8] ^ SECRET[9]), avalanche64(seed ^ SECRET[10] ^ SECRET[11])};
}

DEVICE Hash hash_1_to_3(u64 at, u32 length, u64 seed) {
    const u32 first = u32(read8(at)), second = u32(read8(at + length / 2)), last = u32(read8(at + length - 1));
    const u32 low = first << 16 | second << 24 | last | length << 8;
    const u32 swapped = swap32(low), high = swapped << 13 | swapped >> 19;
    const u64 key_low = (u32(SECRET[0]) ^ u32(SECRET[0] >> 32)) + seed;
    const u64 key_high = (u32(SECRET[1]) ^ u32(SECRET[1] >> 32)) - seed;
    return {avalanche64(low ^ key_low), avalanche64(high ^ key_high)};
}

DEVICE Hash hash_4_to_8(u64 at, u32 length, u64 seed) {
    seed ^= u64(swap32(u32(seed))) << 32;
    const u64 data = read32(at) + (u64(read32(at + length - 4)) << 32);
    Hash h = multiply(data ^ ((SECRET[2] ^ SECRET[3]) + seed), PRIME64_1 + (length << 2));
    h.high += h.low << 1;
    h.low ^= h.high >> 3;
    h.low = (h.low ^ h.low >> 35) * PRIME_MX2;
    return {h.low ^ h.low >> 28, avalanche(h.high)};
}

DEVICE Hash hash_9_to_16(u64 at, u32 length, u64 seed) {
    const u64 low = read64(at);
    u64 high = read64(at + length - 8);
    Hash h = multiply(low ^ high ^ ((SECRET[4] ^ SECRET[5]) - seed), PRIME64_1);
    h.low += u64(length - 1) << 54;
    high ^= (SECRET[6] ^ SECRET[7]) + seed;
    h.high += high + u64(u32(high)) * (PRIME32_2 - 1);
    h.low ^= swap64(h.high);
    const Hash mixed = multiply(h.low, PRIME64_2);
    return {avalanche(mixed.low), avalanche(mixed.high + h.high * PRIME64_2)};
}

DEVICE u64 mix16(u64 at, u64 key_low, u64 key_high, u64 seed) {
    return fold(read64(at) ^ (key_low + seed), read64(at + 8) ^ (key_high - seed));
}

// `keys` are four words of the secret.
DEVICE void mix32(Hash& h, u64 one, u64 two, const u64* keys, u64 seed) {
    h.low = (h.low + mix16(one, keys[0], keys[1], seed)) ^ (read64(two) + read64(two + 8));
    h.high = (h.high + mix16(two, keys[2], keys[3], seed)) ^ (read64(one) + read64(one + 8));
}

DEVICE Hash finish_middle(Hash h, u64 length, u64 seed) {
    const u64 high = h.low * PRIME64_1 + h.high * PRIME64_4 + (length - seed) * PRIME64_2;
    return {avalanche(h.low + h.high), 0 - avalanche(high)};
}

DEVICE Hash hash_17_to_128(u64 at, u64 length, u64 seed) {
    Hash h = {length * PRIME64_1, 0};
    for (int pair = int(length - 1) / 32; pair >= 0; --pair)
        mix32(h, at + 16 * pair, at + length - 16 * (pair + 1), SECRET + 4 * pair, seed);
    return finish_middle(h, length, seed);
}

// The secret from a byte that is no word's: four words for `mix32`.
DEVICE void mix32_unaligned(Hash& h, u64 one, u64 two, int offset, u64 seed) {
    u64 keys[4];
    for (int i = 0; i < 4; ++i) keys[i] = secret_at(SECRET, offset + 8 * i);
    mix32(h, one, two, keys, seed);
}

DEVICE Hash hash_129_to_240(u64 at, u64 length, u64 seed) {
    Hash h = {length * PRIME64_1, 0};
    for (int i = 0; i < 4; ++i) mix32(h, at + 32 * i, at + 32 * i + 16, SECRET + 4 * i, seed);
    h = {avalanche(h.low), avalanche(h.high)};
    for (int i = 4; i < int(length / 32); ++i)
        mix32_unaligned(h, at + 32 * i, at + 32 * i + 16, 3 + 32 * (i - 4), seed);
    mix32_unaligned(h, at + length - 16, at + length - 32, 136 - 17 - 16, 0 - seed);
    return finish_middle(h, length, seed);
}

// Inputs of 0 to 240 bytes.
DEVICE Hash hash_short(u64 at, u64 length, u64 seed) {
    if (length > 128) return hash_129_to_240(at, length, seed);
    if (length > 16) return hash_17_to_128(at, length, seed);
    if (length > 8) return hash_9_to_16(at, u32(length), seed);
    if (length > 3) return hash_4_to_8(at, u32(length), seed);
    if (length > 0) return hash_1_to_3(at, u32(length), seed);
    return hash_0(seed);
}

// The secret of inputs over 240 bytes, one for the whole thread block.
DEVICE void derive_secret(u64* secret, u64 seed) {
    for (u32 i = threadIdx.x; i < SECRET_WORDS; i += blockDim.x) secret[i] = SECRET[i] + (i % 2 ? 0 - seed : seed);
    __syncthreads();
}

// Two neighbouring lanes.
struct Lanes {
    u64 even, odd;
};

DEVICE Lanes operator+(Lanes a, Lanes b) { return {a.even + b.even, a.odd + b.odd}; }

DEVICE void accumulate(Lanes& lanes, Wide data, u64 key_even, u64 key_odd) {
    const u64 even = data.low ^ key_even, odd = data.high ^ key_odd;
    lanes.even += data.high + u64(u32(even)) * (even >> 32);
    lanes.odd += data.low + u64(u32(odd)) * (odd >> 32);
}

DEVICE void scramble(Lanes& lanes, u64 key_even, u64 key_odd) {
    lanes.even = (lanes.even ^ lanes.even >> 47 ^ key_even) * PRIME32_1;
    lanes.odd = (lanes.odd ^ lanes.odd >> 47 ^ key_odd) * PRIME32_1;
}

// One sum over a group of `SIZE` neighbouring threads (a power of two), `step` apart at first; each gets it.
template <int SIZE>
DEVICE u64 sum_over_group(u64 value, u32 mask, int step) {
    for (; step < SIZE; step *= 2) value += __shfl_xor_sync(mask, value, step);
    return value;
}

// The end of an input over 240 bytes, for the four threads of a leaf (`pair` 0 to 3): each thread gets the result.
DEVICE Hash merge(Lanes lanes, const u64* secret, u64 length, int pair, u32 mask) {
    u64 low = fold(lanes.even ^ secret_at(secret, SECRET_MERGE_LOW + 16 * pair),
                   lanes.odd ^ secret_at(secret, SECRET_MERGE_LOW + 16 * pair + 8));
    u64 high = fold(lanes.even ^ secret_at(secret, SECRET_MERGE_HIGH + 16 * pair),
                    lanes.odd ^ secret_at(secret, SECRET_MERGE_HIGH + 16 * pair + 8));
    low = sum_over_group<4>(low, mask, 1) + length * PRIME64_1;
    high = sum_over_group<4>(high, mask, 1) + ~(length * PRIME64_2);
    return {avalanche(low), avalanche(high)};
}

// The canonical form: 16 bytes, big-endian, the high half first.
DEVICE void store_hash(u64 address, Hash h) {
    *reinterpret_cast<ulonglong2*>(address) = make_ulonglong2(swap64(h.high), swap64(h.low));
}
