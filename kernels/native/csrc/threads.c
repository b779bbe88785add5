// A pool of threads. The caller of `share` begins at once; the others, which sleep or have just finished something, join while
// there is work.
//
// Where another program has taken a core, the thread that was to run on it comes late or not at all, and the others do its tasks.
// OpenMP, which torch has, waits for each of its threads at the end. A thread that has finished looks for new work for some
// microseconds, then sleeps. After fork a child has no threads, and makes new ones. A second caller at the same time works alone.

#include "threads.h"
#include <pthread.h>
#include <string.h>

#ifdef _WIN32
#define getpid() 0                       // no fork
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#define sched_yield() SwitchToThread()
#else
#include <sched.h>
#include <signal.h>
#include <unistd.h>
#endif

enum {
    LOOKS = 1000,                        // for new work, before a thread sleeps: 20 to 50 us
    MOST_THREADS = 1024,
};
static const int64_t CLOSED = (int64_t)1 << 32;          // in `inside`: nobody may join

static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int64_t process, started;            // threads that have been started, in this process
    int busy;
    uint64_t jobs;                       // which there have been; threads wait for the next one
    int64_t inside;                      // how many threads have joined, and CLOSED
    work_function *work;
    struct tasks *tasks;
    int64_t n;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .inside = (int64_t)1 << 32};

static void pause_briefly(void) {
#ifdef __x86_64__
    __builtin_ia32_pause();
#else
    __asm__ volatile("isb" ::: "memory");
#endif
}

void wait_a_little(int64_t look) {
    if (look < LOOKS) pause_briefly();
    else sched_yield();
}

static uint64_t next_job(uint64_t seen) {
    uint64_t jobs;
    for (int look = 0; look < LOOKS; look++) {
        if ((jobs = __atomic_load_n(&pool.jobs, __ATOMIC_ACQUIRE)) != seen) return jobs;
        pause_briefly();
    }
    pthread_mutex_lock(&pool.lock);
    while ((jobs = __atomic_load_n(&pool.jobs, __ATOMIC_ACQUIRE)) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    return jobs;
}

static void *wait_and_work(void *number) {
    int64_t thread = (intptr_t)number;
    for (uint64_t seen = 0;;) {
        seen = next_job(seen);
        if (!(__atomic_fetch_add(&pool.inside, 1, __ATOMIC_ACQ_REL) & CLOSED) && thread < pool.n) pool.work(pool.tasks, thread);
        __atomic_fetch_sub(&pool.inside, 1, __ATOMIC_ACQ_REL);
    }
    return 0;
}

// Signals are for the threads of the program.
static int start(int64_t thread) {
    pthread_t handle;
#ifdef _WIN32
    return pthread_create(&handle, 0, wait_and_work, (void *)(intptr_t)thread) || pthread_detach(handle);
#else
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&handle, 0, wait_and_work, (void *)(intptr_t)thread) || pthread_detach(handle);
    pthread_sigmask(SIG_SETMASK, &before, 0);
    return failed;
#endif
}

static void begin_anew_in_a_child(void) {
    int64_t process = getpid();
    if (pool.process == process) return;
    if (pool.process) {                  // forked: locks and counters are as some thread had left them
        pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
        pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
        pool.lock = lock, pool.wake = wake;
        pool.started = 0, pool.jobs = 0, pool.inside = CLOSED;
        __atomic_store_n(&pool.busy, 0, __ATOMIC_RELEASE);
    }
    pool.process = process;
}

void share(work_function *work, const void *call, int64_t n) {
    struct tasks tasks = {call, 0};
    if (n > 1) begin_anew_in_a_child();
    if (n <= 1 || __atomic_exchange_n(&pool.busy, 1, __ATOMIC_ACQUIRE)) {
        work(&tasks, 0);
        return;
    }
    n = n < MOST_THREADS ? n : MOST_THREADS;
    while (pool.started < n - 1 && !start(pool.started + 1)) pool.started++;
    pool.work = work, pool.tasks = &tasks, pool.n = n;
    for (int64_t closed = CLOSED; !__atomic_compare_exchange_n(&pool.inside, &closed, 0, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
         closed = CLOSED) pause_briefly();               // one that came too late is about to leave
    pthread_mutex_lock(&pool.lock);
    __atomic_fetch_add(&pool.jobs, 1, __ATOMIC_ACQ_REL);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    work(&tasks, 0);
    __atomic_fetch_or(&pool.inside, CLOSED, __ATOMIC_ACQ_REL);
    for (int64_t look = 0; __atomic_load_n(&pool.inside, __ATOMIC_ACQUIRE) != CLOSED; look++) wait_a_little(look);
    __atomic_store_n(&pool.busy, 0, __ATOMIC_RELEASE);
}
