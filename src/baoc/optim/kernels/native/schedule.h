#ifndef BAOC_SCHEDULE_H
#define BAOC_SCHEDULE_H

#include "kernel.h"

/* Runs one optimizer step, and says in `spiked` whether some gradient is beyond SPIKE or no number. Returns 0, or -1 if
 * scratch memory could not be had (nothing has changed then). */
int run_jobs(const job_words *words, const job_scalars *scalars, int64_t count, int threads, const kernel *k, int *spiked);

#endif
