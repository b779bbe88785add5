// Thread pool. The caller of parallel_for starts working immediately; idle workers join as long as tasks are left.
//
// If another program occupies a core, the worker on it joins late or never, and the other threads run its tasks; OpenMP, which
// torch uses, would wait for every thread. An idle worker spins for some microseconds, then sleeps. A forked child has no workers
// and starts its own. If a second thread calls parallel_for at the same time, it runs its tasks without workers.

#include "threads.h"
#include <pthread.h>
#include <string.h>

#ifdef _WIN32
#define getpid() 0                       // Windows has no fork
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#define sched_yield() SwitchToThread()
#else
#include <sched.h>
#include <signal.h>
#include <unistd.h>
#endif

enum {
    SPINS = 1000,                        // iterations before a worker sleeps: 20 to 50 us
    MAX_THREADS = 1024,
};
static const int64_t CLOSED = (int64_t)1 << 32;          // flag in `active`: no worker may join

static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int64_t pid, started;                // process id, and the number of workers started in it
    int busy;
    uint64_t jobs;                       // jobs so far; idle workers wait for this to change
    int64_t active;                      // workers in the current job, plus CLOSED
    work_function *work;
    struct tasks *tasks;
    int64_t n;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .active = (int64_t)1 << 32};

static void cpu_relax(void) {
#ifdef __x86_64__
    __builtin_ia32_pause();
#else
    __asm__ volatile("isb" ::: "memory");
#endif
}

void back_off(int64_t spins) {
    if (spins < SPINS) cpu_relax();
    else sched_yield();
}

static uint64_t wait_for_job(uint64_t seen) {
    uint64_t jobs;
    for (int spins = 0; spins < SPINS; spins++) {
        if ((jobs = __atomic_load_n(&pool.jobs, __ATOMIC_ACQUIRE)) != seen) return jobs;
        cpu_relax();
    }
    pthread_mutex_lock(&pool.lock);
    while ((jobs = __atomic_load_n(&pool.jobs, __ATOMIC_ACQUIRE)) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    return jobs;
}

static void *worker_main(void *index) {
    int64_t thread = (intptr_t)index;
    for (uint64_t seen = 0;;) {
        seen = wait_for_job(seen);
        if (!(__atomic_fetch_add(&pool.active, 1, __ATOMIC_ACQ_REL) & CLOSED) && thread < pool.n) pool.work(pool.tasks, thread);
        __atomic_fetch_sub(&pool.active, 1, __ATOMIC_ACQ_REL);
    }
    return 0;
}

// Workers block all signals: the program's own threads handle them.
static int start_worker(int64_t thread) {
    pthread_t handle;
#ifdef _WIN32
    return pthread_create(&handle, 0, worker_main, (void *)(intptr_t)thread) || pthread_detach(handle);
#else
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&handle, 0, worker_main, (void *)(intptr_t)thread) || pthread_detach(handle);
    pthread_sigmask(SIG_SETMASK, &before, 0);
    return failed;
#endif
}

static void reset_after_fork(void) {
    int64_t pid = getpid();
    if (pool.pid == pid) return;
    if (pool.pid) {                      // after a fork, locks and counters may be in any state
        pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
        pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
        pool.lock = lock, pool.wake = wake;
        pool.started = 0, pool.jobs = 0, pool.active = CLOSED;
        __atomic_store_n(&pool.busy, 0, __ATOMIC_RELEASE);
    }
    pool.pid = pid;
}

void parallel_for(work_function *work, const void *call, int64_t n) {
    struct tasks tasks = {call, 0};
    if (n > 1) reset_after_fork();
    if (n <= 1 || __atomic_exchange_n(&pool.busy, 1, __ATOMIC_ACQUIRE)) {
        work(&tasks, 0);
        return;
    }
    n = n < MAX_THREADS ? n : MAX_THREADS;
    while (pool.started < n - 1 && !start_worker(pool.started + 1)) pool.started++;
    pool.work = work, pool.tasks = &tasks, pool.n = n;
    for (int64_t closed = CLOSED; !__atomic_compare_exchange_n(&pool.active, &closed, 0, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
         closed = CLOSED) cpu_relax();               // wait until a late worker has left
    pthread_mutex_lock(&pool.lock);
    __atomic_fetch_add(&pool.jobs, 1, __ATOMIC_ACQ_REL);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    work(&tasks, 0);
    __atomic_fetch_or(&pool.active, CLOSED, __ATOMIC_ACQ_REL);
    for (int64_t spins = 0; __atomic_load_n(&pool.active, __ATOMIC_ACQUIRE) != CLOSED; spins++) back_off(spins);
    __atomic_store_n(&pool.busy, 0, __ATOMIC_RELEASE);
}
