/* Loaded into ranks before libc (LD_PRELOAD): lets gloo's event loops wait for a lock instead of asking for it again
   and again. See event_loops.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

/* Less than the 10 ms that a loop sleeps by itself: the holder may be one that waits for the loop's next turn. */
static const long LIMIT = 2000000; /* nanoseconds */
static const long SECOND = 1000000000;

static int is_event_loop(void) {
  static __thread int known;
  if (!known) {
    char name[16];
    known = prctl(PR_GET_NAME, name) == 0 && strcmp(name, "gloo_tcp_loop") == 0 ? 1 : -1;
  }
  return known == 1;
}

int pthread_mutex_trylock(pthread_mutex_t *mutex) {
  static int (*original)(pthread_mutex_t *);
  if (!original) original = (int (*)(pthread_mutex_t *))dlsym(RTLD_NEXT, "pthread_mutex_trylock");
  int result = original(mutex);
  if (result != EBUSY || !is_event_loop()) return result;
  struct timespec end;
  clock_gettime(CLOCK_REALTIME, &end);
  end.tv_nsec += LIMIT;
  if (end.tv_nsec >= SECOND) {
    end.tv_nsec -= SECOND;
    end.tv_sec++;
  }
  return pthread_mutex_timedlock(mutex, &end) == 0 ? 0 : EBUSY;
}
