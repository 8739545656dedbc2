/* LD_PRELOAD: a flush to disk takes as many more milliseconds as the file SLOW_DISK_FILE says at its time. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static void wait_as_told(void)
{
    const char *path = getenv("SLOW_DISK_FILE");
    char said[16] = "";
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    if (read(file, said, sizeof said - 1) > 0) {
        long milliseconds = atol(said);
        struct timespec left = {milliseconds / 1000, milliseconds % 1000 * 1000000};
        while (nanosleep(&left, &left))
            ; /* a signal is no reason to be done earlier */
    }
    close(file);
}

#define SLOWER(name)                                      \
    int name(int file)                                    \
    {                                                     \
        static int (*flush)(int);                         \
        if (!flush)                                       \
            flush = (int (*)(int))dlsym(RTLD_NEXT, #name); \
        wait_as_told();                                   \
        return flush(file);                               \
    }

SLOWER(fdatasync)
SLOWER(fsync)
