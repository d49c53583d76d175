/* N - 1 workers that spin for a few microseconds after each job, then sleep; OpenMP would clash with torch's runtime.

   A job is published by raising `epoch`; workers and the caller take task indices from one counter. Which thread runs
   a task changes nothing in its result. One job at a time: a second caller waits. */
#define _GNU_SOURCE
#include "pool.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

#define MAX_WORKERS 255
#define SPIN_NANOSECONDS 40000

#if defined(__x86_64__) || defined(__i386__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("yield")
#else
#define RELAX() ((void)0)
#endif

static struct {
    _Alignas(64) atomic_uint epoch;
    _Alignas(64) atomic_llong next;
    _Alignas(64) atomic_int busy;
    atomic_int sleepers;
    atomic_int stop;
    task_fn fn;
    void *argument;
    int64_t tasks;
    int workers;
    pthread_t threads[MAX_WORKERS];
    pthread_mutex_t sleep_lock, job_lock;
    pthread_cond_t wake;
} pool = {.sleep_lock = PTHREAD_MUTEX_INITIALIZER, .job_lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void work(void) {
    int64_t tasks = pool.tasks, i;
    while ((i = atomic_fetch_add_explicit(&pool.next, 1, memory_order_relaxed)) < tasks) pool.fn(pool.argument, i);
}

static unsigned wait_for_job(unsigned seen) {
    int64_t until = now() + SPIN_NANOSECONDS;
    do {
        for (int i = 0; i < 64; i++) {
            unsigned epoch = atomic_load_explicit(&pool.epoch, memory_order_acquire);
            if (epoch != seen) return epoch;
            RELAX();
        }
    } while (now() < until);
    pthread_mutex_lock(&pool.sleep_lock);
    atomic_fetch_add(&pool.sleepers, 1);
    while (atomic_load(&pool.epoch) == seen) pthread_cond_wait(&pool.wake, &pool.sleep_lock);
    atomic_fetch_sub(&pool.sleepers, 1);
    pthread_mutex_unlock(&pool.sleep_lock);
    return atomic_load(&pool.epoch);
}

static void *worker(void *start) {
    unsigned seen = (unsigned)(uintptr_t)start;
    for (;;) {
        seen = wait_for_job(seen);
        if (atomic_load(&pool.stop)) return 0;
        work();
        atomic_fetch_sub_explicit(&pool.busy, 1, memory_order_release);
    }
}

static void publish(void) {
    atomic_fetch_add(&pool.epoch, 1);
    if (atomic_load(&pool.sleepers)) {
        pthread_mutex_lock(&pool.sleep_lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.sleep_lock);
    }
}

void pool_run(task_fn fn, void *argument, int64_t tasks) {
    if (tasks <= 1 || !pool.workers) {
        for (int64_t i = 0; i < tasks; i++) fn(argument, i);
        return;
    }
    pthread_mutex_lock(&pool.job_lock);
    pool.fn = fn, pool.argument = argument, pool.tasks = tasks;
    atomic_store_explicit(&pool.next, 0, memory_order_relaxed);
    atomic_store_explicit(&pool.busy, pool.workers, memory_order_relaxed);
    publish();
    work();
    for (int spins = 0; atomic_load_explicit(&pool.busy, memory_order_acquire); spins++) {
        if (spins > 2000) sched_yield();
        else RELAX();
    }
    pthread_mutex_unlock(&pool.job_lock);
}

int pool_threads(void) { return pool.workers + 1; }

static void after_fork(void) {
    /* Only the forking thread lives on: the child has no workers until it asks for them. */
    pool.workers = 0;
    pthread_mutex_init(&pool.sleep_lock, 0);
    pthread_mutex_init(&pool.job_lock, 0);
    pthread_cond_init(&pool.wake, 0);
    atomic_store(&pool.sleepers, 0);
}

/* Changes the number of threads (the caller's included); returns the number that run. */
int offroad_set_threads(int threads) {
    static int registered;
    pthread_mutex_lock(&pool.job_lock);
    if (!registered) registered = pthread_atfork(0, 0, after_fork) == 0;
    if (pool.workers != threads - 1) {
        atomic_store(&pool.stop, 1);
        publish();
        for (int i = 0; i < pool.workers; i++) pthread_join(pool.threads[i], 0);
        atomic_store(&pool.stop, 0);
        pool.workers = 0;
        uintptr_t epoch = atomic_load(&pool.epoch);
        while (pool.workers < threads - 1 && pool.workers < MAX_WORKERS) {
            if (pthread_create(&pool.threads[pool.workers], 0, worker, (void *)epoch)) break;
            pool.workers++;
        }
    }
    int now_running = pool.workers + 1;
    pthread_mutex_unlock(&pool.job_lock);
    return now_running;
}
