/* Replaces sched_yield in the engines of the tests by a sleep of 50 microseconds.
 *
 * vLLM's processes wait for each other in loops of sched_yield. On Linux 6.18 with fewer cores than processes, such
 * loops were seen to keep every other process of the machine from running for more than a minute: kvferry's leader
 * waited 68 s in the run queue. docs/vllm.md has the measurement. */
#include <time.h>

int sched_yield(void)
{
    const struct timespec pause = {0, 50000};
    nanosleep(&pause, 0);
    return 0;
}
