/* As uring.c, but io_uring only tells when there is something to read. */
#define ONLY_WAITS
#include "uring.c"
