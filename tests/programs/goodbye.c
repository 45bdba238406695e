/* A shared library whose destructor sends one byte on the descriptor that the program left in `goodbye_fd`. */
#include <sys/socket.h>

int goodbye_fd = -1;

__attribute__((destructor)) static void goodbye(void)
{
    if (goodbye_fd >= 0)
        send(goodbye_fd, "D", 1, MSG_NOSIGNAL);
}
