/* A wall clock that a test can set, for processes that have this library preloaded: see clocks.py.

   Each process maps a file with one number, the nanoseconds that its clock is ahead. Waits until a time of the wall
   clock end when this clock says so, also if it is set while they wait: so does the kernel when its clock is set. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL
#define SLICE (10 * 1000000LL) /* how late a wait may notice that the clock was set */

static const int64_t none = 0;
static const volatile int64_t *ahead = &none;

int tests_use_clock(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    void *page = mmap(NULL, sizeof *ahead, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (page == MAP_FAILED)
        return -1;
    ahead = page;
    return 0;
}

static int64_t nanoseconds(const struct timespec *t) { return t->tv_sec * SECOND + t->tv_nsec; }

static struct timespec timespec_of(int64_t n)
{
    struct timespec t = {n / SECOND, n % SECOND};
    return t;
}

int clock_gettime(clockid_t clock, struct timespec *t)
{
    static int (*real)(clockid_t, struct timespec *);
    if (!real)
        real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, t);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) && *ahead)
        *t = timespec_of(nanoseconds(t) + *ahead);
    return failed;
}

static int64_t wall_clock(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return nanoseconds(&t);
}

int gettimeofday(struct timeval *restrict t, void *restrict zone)
{
    (void)zone;
    int64_t now = wall_clock();
    t->tv_sec = now / SECOND;
    t->tv_usec = now % SECOND / 1000;
    return 0;
}

time_t time(time_t *t)
{
    time_t now = wall_clock() / SECOND;
    if (t)
        *t = now;
    return now;
}

/* The real clock's time at which a slice of a wait ends; 0 if the wait is over. */
static struct timespec end_of_slice(const struct timespec *until, int *over)
{
    int64_t left = nanoseconds(until) - wall_clock();
    *over = left <= 0;
    return timespec_of(wall_clock() - *ahead + (left < SLICE ? left : SLICE));
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until)
{
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real)
        real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (cond->__data.__wrefs & 2) /* it waits by the monotonic clock */
        return real(cond, mutex, until);
    for (;;) {
        int over;
        struct timespec slice = end_of_slice(until, &over);
        int failed = real(cond, mutex, &slice);
        if (failed != ETIMEDOUT || over)
            return failed;
    }
}

int sem_timedwait(sem_t *restrict sem, const struct timespec *restrict until)
{
    static int (*real)(sem_t *, const struct timespec *);
    if (!real)
        real = dlsym(RTLD_NEXT, "sem_timedwait");
    for (;;) {
        int over;
        struct timespec slice = end_of_slice(until, &over);
        if (!real(sem, &slice))
            return 0;
        if (errno != ETIMEDOUT || over)
            return -1;
    }
}
