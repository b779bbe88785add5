// The threads of the library: the caller's own and those that wait for it (threads.c).

#pragma once
#include <stdint.h>

// A piece of work that threads share: `work(job, thread)` takes tasks from a counter of the job until there are none. 0 <= thread < n.
typedef void work_function(void *job, int64_t thread);

// Runs the work on up to n threads, the caller's included, and returns when all tasks are done. A thread that comes too late does not
// take part, and nobody waits for it: `work` must not count on more than one thread.
void share(work_function *work, void *job, int64_t n);
