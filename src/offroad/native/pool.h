/* A small pool of worker threads: see pool.c. */
#pragma once
#include <stdint.h>

typedef void (*task_fn)(void *argument, int64_t index);
/* Runs fn(argument, i) for i in [0, tasks) on the caller and the workers, and returns when all have ended. */
void pool_run(task_fn fn, void *argument, int64_t tasks);
int pool_threads(void);
