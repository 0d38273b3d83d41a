// What every kernel uses. No header of CUDA's is needed: NVRTC knows the built-in names, and the CPU tests
// supply them (tests/kernels_host_shim.hpp).
#pragma once

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE static __device__ __forceinline__

// 16 bytes, read once or written once: they need no room in the caches.
struct Wide {
    u64 low, high;
};

DEVICE Wide load_wide(u64 address) {
    const ulonglong2 data = __ldcs(reinterpret_cast<const ulonglong2*>(address));
    return {data.x, data.y};
}

DEVICE void store_wide(u64 address, Wide data) {
    __stcs(reinterpret_cast<ulonglong2*>(address), make_ulonglong2(data.low, data.high));
}

// Index of the last of `count` > 0 records whose `first` is at most `number`, where the first record's is 0
// and they never fall: which record does a piece of work belong to?
template <typename Record>
DEVICE u32 find(const Record* records, u32 count, u64 number) {
    u32 low = 0, high = count;
    while (high - low > 1) {
        const u32 middle = low + (high - low) / 2;
        if (records[middle].first <= number) low = middle;
        else high = middle;
    }
    return low;
}
