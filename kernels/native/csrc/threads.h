// The threads of the library: the caller's own and those that wait for it (threads.c).

#pragma once
#include <stdint.h>

// The tasks of a call, which are numbered from 0; threads take them one after the other.
struct tasks {
    const void *call;
    int64_t taken;
};

static inline int64_t next_task(struct tasks *tasks) { return __atomic_fetch_add(&tasks->taken, 1, __ATOMIC_RELAXED); }

// What a thread does: take tasks until there are none. 0 <= thread < n.
typedef void work_function(struct tasks *tasks, int64_t thread);

// For who waits for another thread, in a loop: `look` counts from 0. After some microseconds it gives the core to others.
void wait_a_little(int64_t look);

// Lets up to n threads, the caller's included, work, and returns when all tasks are done. A thread that comes too late does not
// take part, and nobody waits for it: `work` must not count on more than one thread.
void share(work_function *work, const void *call, int64_t n);

// Work in phases, none of which begins before all tiles of the one before are done: each thread that works calls next_tile in the
// same loops,
//
//     for (int64_t tile = -1; (tile = next_tile(&turn, tile, total)) >= 0;) ...
//
// takes tiles from a counter, and waits at the end of a loop until the others have done theirs, by spinning, which costs below 1 us.
// A thread that the system has stopped delays the others by the tile that it holds, and one that comes late passes what is done.
struct phases {
    _Alignas(64) int64_t taken;          // the number of the phase times PHASE, and how many of its tiles are taken
    _Alignas(64) int64_t done;           // how many of them are done
};
static const int64_t PHASE = (int64_t)1 << 32;

// Where a thread is: the phases, which are all 0 at first, and the number of the phase that it works in, times PHASE.
struct turn {
    struct phases *phases;
    int64_t phase;
};

// The next tile of the phase, after `tile` is done, if that is none of -1; -1 where all are done. total > 0.
static inline int64_t next_tile(struct turn *turn, int64_t tile, int64_t total) {
    struct phases *phases = turn->phases;
    if (tile >= 0 && __atomic_add_fetch(&phases->done, 1, __ATOMIC_ACQ_REL) == total) {
        phases->done = 0;
        __atomic_store_n(&phases->taken, turn->phase + PHASE, __ATOMIC_RELEASE);
    }
    int64_t taken = __atomic_load_n(&phases->taken, __ATOMIC_ACQUIRE);
    while (taken < turn->phase + total)
        if (__atomic_compare_exchange_n(&phases->taken, &taken, taken + 1, 1, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            return taken - turn->phase;
    turn->phase += PHASE;
    for (int64_t look = 0; __atomic_load_n(&phases->taken, __ATOMIC_ACQUIRE) < turn->phase; look++) wait_a_little(look);
    return -1;
}
