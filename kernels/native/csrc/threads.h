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
