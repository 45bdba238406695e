/*
 * A shared library that replaces malloc and its family, as allocators that are preloaded do: on the first call it takes its
 * lock and opens, reads and closes a file under it. A call of malloc in between means that somebody allocates in a hook
 * that is reached while the allocator starts: that ends the process.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int starting __attribute__((tls_model("initial-exec")));
static int started;
static char *area, *area_end;

static void fail(const char *text)
{
    (void)!write(2, text, strlen(text));
    _exit(97);
}

static void *get(size_t size, size_t align)
{
    if (starting)
        fail("malloc was called while the allocator starts\n");
    pthread_mutex_lock(&lock);
    if (!started) {
        starting = 1;
        char buffer[64];
        int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
        if (fd < 0 || read(fd, buffer, sizeof buffer) <= 0 || close(fd) != 0)
            fail("the allocator could not read its file\n");
        starting = 0;
        started = 1;
    }
    size = (size + 15) & ~(size_t)15;
    if (align < 16)
        align = 16;
    for (int turn = 0; turn < 2; turn++) {
        char *at = (char *)(((uintptr_t)area + 16 + align - 1) & ~(uintptr_t)(align - 1));
        if (area && at + size <= area_end) {
            area = at + size;
            ((size_t *)at)[-1] = size;
            pthread_mutex_unlock(&lock);
            return at;
        }
        size_t room = size + align + (1 << 22);
        area = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (area == MAP_FAILED)
            break;
        area_end = area + room;
    }
    pthread_mutex_unlock(&lock);
    errno = ENOMEM;
    return NULL;
}

void *malloc(size_t size) { return get(size, 16); }
void free(void *p) { (void)p; }
void *memalign(size_t align, size_t size) { return get(size, align); }
void *aligned_alloc(size_t align, size_t size) { return get(size, align); }

int posix_memalign(void **to, size_t align, size_t size)
{
    *to = get(size, align);
    return *to ? 0 : ENOMEM;
}

void *calloc(size_t count, size_t size)
{
    void *p = get(count * size, 16);
    return p ? memset(p, 0, count * size) : p;
}

void *realloc(void *old, size_t size)
{
    void *p = get(size, 16);
    if (p && old) {
        size_t before = ((size_t *)old)[-1];
        memcpy(p, old, before < size ? before : size);
    }
    return p;
}
