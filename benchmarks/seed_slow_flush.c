/* LD_PRELOAD: every flush to disk takes 1 ms more, as on network storage. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>

#define SLOWER(name)                                             \
    int name(int file)                                           \
    {                                                            \
        static int (*flush)(int);                                \
        if (!flush)                                              \
            flush = (int (*)(int))dlsym(RTLD_NEXT, #name);       \
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL); \
        return flush(file);                                      \
    }

SLOWER(fdatasync)
SLOWER(fsync)
