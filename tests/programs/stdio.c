/* A connection used through stdio: fprintf, fgets, fscanf, fread, fwrite, getline, dprintf. */
#include "peer.h"

#define LINES 2000
#define BLOCK 300000

int main(int argc, char **argv)
{
    int is_server, fd = peer_open(argc, argv, &is_server);
    static unsigned char block[BLOCK], got[BLOCK];
    char line[200], *long_line = NULL;
    size_t room = 0;
    peer_fill(block, BLOCK, 5);
    peer_warm(fd, is_server);
    /* Bytes that are under way when the stream changes hands. */
    if (!is_server)
        send_fully(fd, "early line\n", 11);
    FILE *in = fdopen(fd, "r"), *out = fdopen(dup(fd), "w");
    CHECK(in && out);
    if (is_server) {
        CHECK(fgets(line, sizeof line, in) && strcmp(line, "early line\n") == 0);
        for (int i = 0; i < LINES; i++) {
            char want[100];
            snprintf(want, sizeof want, "line %d of the client\n", i);
            CHECK(fgets(line, sizeof line, in) && strcmp(line, want) == 0);
            fprintf(out, "%d %s\n", i * 7, "answer");
            if (i % 100 == 0)
                fflush(out);
        }
        fflush(out);
        setvbuf(out, NULL, _IONBF, 0);
        CHECK(fread(got, 1, BLOCK, in) == BLOCK && memcmp(got, block, BLOCK) == 0);
        CHECK(fwrite(block, 1, BLOCK, out) == BLOCK);
        CHECK(dprintf(fd, "by dprintf %d\n", 42) == 14);
        CHECK(fputs("last line without end", out) >= 0);
        CHECK(fclose(out) == 0);
        CHECK(shutdown(fd, SHUT_WR) == 0);
        CHECK(getline(&long_line, &room, in) == -1 && feof(in));
    } else {
        for (int i = 0; i < LINES; i++) {
            CHECK(fprintf(out, "line %d of the client\n", i) > 0);
            if (i % 50 == 49)
                CHECK(fflush(out) == 0);
        }
        CHECK(fflush(out) == 0);
        for (int i = 0; i < LINES; i++) {
            int number;
            char word[20];
            CHECK(fscanf(in, "%d %19s\n", &number, word) == 2 && number == i * 7 && strcmp(word, "answer") == 0);
            if (i == LINES - 2) {
                /* The last scan would wait for what follows the line's end. */
                CHECK(fgets(line, sizeof line, in) && strncmp(line, "13993 answer", 12) == 0);
                break;
            }
        }
        CHECK(fwrite(block, 1, BLOCK, out) == BLOCK && fflush(out) == 0);
        CHECK(fread(got, 1, BLOCK, in) == BLOCK && memcmp(got, block, BLOCK) == 0);
        CHECK(getline(&long_line, &room, in) == 14 && strcmp(long_line, "by dprintf 42\n") == 0);
        CHECK(getline(&long_line, &room, in) == 21 && strcmp(long_line, "last line without end") == 0);
        CHECK(getline(&long_line, &room, in) == -1 && feof(in));
        CHECK(fclose(out) == 0);
    }
    CHECK(fclose(in) == 0);
    CHECK(fcntl(fd, F_GETFL) == -1 && errno == EBADF);
    puts("ok");
    return 0;
}
