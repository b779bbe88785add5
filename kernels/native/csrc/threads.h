// Thread pool of the library (threads.c): parallel loops, and barriers between the phases of a loop.

#pragma once
#include <stdint.h>

// A call's task queue: tasks 0, 1, ... are taken from a shared counter.
struct tasks {
    const void *call;
    int64_t next;
};

static inline int64_t next_task(struct tasks *tasks) { return __atomic_fetch_add(&tasks->next, 1, __ATOMIC_RELAXED); }

// The function that every thread runs: it calls next_task until no tasks are left. 0 <= thread < n.
typedef void work_function(struct tasks *tasks, int64_t thread);

// Spin-wait back-off: call in a loop with spins = 0, 1, ...; after a few microseconds it yields the core.
void back_off(int64_t spins);

// Runs `work` on up to n threads, including the caller; returns when all tasks are done. It does not wait for threads that start
// late, so `work` must finish all tasks even if only one thread runs it.
void parallel_for(work_function *work, const void *call, int64_t n);

// Phases: loops over tiles with a barrier after each. Every thread runs the same loops,
//
//     for (int64_t tile = -1; (tile = next_tile(&phase, tile, total)) >= 0;) ...
//
// which take tiles from a shared counter, and at the end of a phase spin until all of its tiles are done, usually for less than
// 1 us. A descheduled thread delays the others by at most the tile that it works on. A late thread skips completed phases.
struct barrier {
    _Alignas(64) int64_t taken;          // PHASE_STEP times the phase number, plus the tiles of the phase taken so far
    _Alignas(64) int64_t done;           // tiles completed in this phase
};
static const int64_t PHASE_STEP = (int64_t)1 << 32;

// A thread's position in the phases. barrier: shared, initially zero; start: PHASE_STEP times the number of the current phase.
struct phase {
    struct barrier *barrier;
    int64_t start;
};

// Marks `tile` (-1: none) as done and returns the next tile of the phase, or -1 once all tiles are done. total > 0.
static inline int64_t next_tile(struct phase *phase, int64_t tile, int64_t total) {
    struct barrier *barrier = phase->barrier;
    if (tile >= 0 && __atomic_add_fetch(&barrier->done, 1, __ATOMIC_ACQ_REL) == total) {
        barrier->done = 0;
        __atomic_store_n(&barrier->taken, phase->start + PHASE_STEP, __ATOMIC_RELEASE);
    }
    int64_t taken = __atomic_load_n(&barrier->taken, __ATOMIC_ACQUIRE);
    while (taken < phase->start + total)
        if (__atomic_compare_exchange_n(&barrier->taken, &taken, taken + 1, 1, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            return taken - phase->start;
    phase->start += PHASE_STEP;
    for (int64_t spins = 0; __atomic_load_n(&barrier->taken, __ATOMIC_ACQUIRE) < phase->start; spins++) back_off(spins);
    return -1;
}
