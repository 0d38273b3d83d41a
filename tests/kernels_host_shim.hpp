// Runs CUDA kernels on the CPU, thread for thread: enough of the language for worldmove/kernels, and no more.
// Every thread of a block is a coroutine; those that wait for each other (a barrier, a shuffle) take turns. Blocks run
// one after another, so what only goes wrong between blocks or in the memory system isn't found here.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct ulonglong2 {
    unsigned long long x, y;
} __attribute__((aligned(16)));
struct Index {
    unsigned x;
};

namespace host {
constexpr size_t STACK_BYTES = 64 * 1024;

// Where threads meet: whoever comes last lets the others go.
struct Meeting {
    unsigned here = 0, round = 0;
};

struct Thread {
    ucontext_t context;  // how it begins
    jmp_buf place;       // where it goes on: a jump costs no system call, unlike swapcontext
    std::unique_ptr<char[]> stack;
    bool begun = false, done = false;
    unsigned exchange = 0;
    unsigned long long value[2] = {};
};

struct Block {
    std::vector<Thread> threads;
    std::vector<Meeting> groups;
    std::function<void()> body;
    Meeting all;
    unsigned alive = 0, current = 0;
    jmp_buf scheduler;
};

inline Block block;
inline Index block_index, block_size, grid_size;

inline void yield() {
    if (!_setjmp(block.threads[block.current].place)) _longjmp(block.scheduler, 1);
}

inline void go_on(Thread& thread) {
    if (_setjmp(block.scheduler)) return;
    if (thread.begun) _longjmp(thread.place, 1);
    thread.begun = true;
    setcontext(&thread.context);
}

inline void meet(Meeting& meeting, const unsigned& members) {
    const unsigned round = meeting.round;
    ++meeting.here;
    while (meeting.round == round) {
        if (meeting.here >= members) {
            meeting.here = 0;
            ++meeting.round;
        } else {
            yield();
        }
    }
}

// The threads of a mask meet; a group is known by its lowest thread, which is the same for all of them.
inline void meet_group(unsigned mask) {
    const unsigned members = unsigned(__builtin_popcount(mask));
    const unsigned lowest = block.current / 32 * 32 + unsigned(__builtin_ctz(mask));
    meet(block.groups[lowest], members);
}

// Shows a value to the group, and returns where in `value` to find those of the others. There are two places by
// turns, since one thread may offer its next value before another has read this one.
inline unsigned offer(unsigned mask, unsigned long long value) {
    Thread& me = block.threads[block.current];
    const unsigned turn = me.exchange++ % 2;
    me.value[turn] = value;
    meet_group(mask);
    return turn;
}

inline void enter() {
    block.body();
    block.threads[block.current].done = true;
    --block.alive;
    yield();
}

inline void run_block(unsigned size) {
    block.threads.resize(size);
    block.groups.assign(size + 32, Meeting{});
    block.all = Meeting{};
    block.alive = size;
    for (Thread& thread : block.threads) {
        if (!thread.stack) thread.stack = std::make_unique<char[]>(STACK_BYTES);
        thread.begun = thread.done = false;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.get();
        thread.context.uc_stack.ss_size = STACK_BYTES;
        thread.context.uc_link = nullptr;
        makecontext(&thread.context, enter, 0);
    }
    while (block.alive)
        for (block.current = 0; block.current < size; ++block.current)
            if (!block.threads[block.current].done)
                go_on(block.threads[block.current]);
}

template <class... Arguments, size_t... Places>
void call(void (*kernel)(Arguments...), const uint64_t* arguments, std::index_sequence<Places...>) {
    kernel((Arguments)arguments[Places]...);
}

// What `kernel<<<grid, size>>>(arguments...)` does; every argument is a 64-bit number or a pointer.
template <class... Arguments>
void launch(void (*kernel)(Arguments...), unsigned grid, unsigned size, const uint64_t* arguments) {
    grid_size.x = grid;
    block_size.x = size;
    block.body = [=] { call(kernel, arguments, std::index_sequence_for<Arguments...>{}); };
    for (block_index.x = 0; block_index.x < grid; ++block_index.x) run_block(size);
}
}  // namespace host

// The kernel as a C function of the grid, the block and the arguments.
#define HOST_KERNEL(space, name)                                                               \
    extern "C" void host_##name(unsigned grid, unsigned size, const uint64_t* arguments) {     \
        host::launch(space::name, grid, size, arguments);                                      \
    }

#define threadIdx (Index{host::block.current})
#define blockIdx host::block_index
#define blockDim host::block_size
#define gridDim host::grid_size

inline void __syncthreads() { host::meet(host::block.all, host::block.alive); }

template <class Value>
Value __shfl_xor_sync(unsigned mask, Value value, int other) {
    const unsigned turn = host::offer(mask, value);
    return Value(host::block.threads[host::block.current ^ unsigned(other)].value[turn]);
}

inline unsigned __ballot_sync(unsigned mask, bool vote) {
    const unsigned turn = host::offer(mask, vote);
    unsigned bits = 0;
    for (unsigned lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) bits |= unsigned(host::block.threads[host::block.current / 32 * 32 + lane].value[turn]) << lane;
    return bits;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }
inline ulonglong2 __ldcs(const ulonglong2* address) { return *address; }
inline void __stcs(ulonglong2* address, ulonglong2 value) { *address = value; }
