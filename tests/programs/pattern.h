/*
 * The bytes of the streams of integrity.c, and their check. Each byte is a function of a key (one a direction) and of its
 * stream offset. Included once, after die().
 */
#define LONG_AGO (1ull << 26) /* how far from its place a foreign byte is searched for */

static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

/* Writes the bytes [at, at + len) of the stream with this key. */
static void fill(unsigned char *to, uint64_t at, size_t len, uint64_t key)
{
    while (len && (at & 7)) {
        uint64_t word = mix(key + (at >> 3));
        *to++ = (unsigned char)(word >> (8 * (at & 7)));
        at++, len--;
    }
    while (len >= 8) {
        uint64_t word = mix(key + (at >> 3));
        memcpy(to, &word, 8);
        to += 8, at += 8, len -= 8;
    }
    while (len) {
        uint64_t word = mix(key + (at >> 3));
        *to++ = (unsigned char)(word >> (8 * (at & 7)));
        at++, len--;
    }
}

/* Looks for the eight bytes at `got` near `at` in the stream with this key. */
static int find_origin(const unsigned char *got, uint64_t at, uint64_t key, uint64_t *origin)
{
    uint64_t from = at > LONG_AGO ? at - LONG_AGO : 0, best = UINT64_MAX;
    unsigned char block[65536 + 8];
    for (uint64_t base = from; base < at + LONG_AGO; base += 65536) {
        fill(block, base, sizeof block, key);
        for (size_t i = 0; i < 65536; i++) {
            if (memcmp(block + i, got, 8) == 0) {
                uint64_t place = base + i;
                uint64_t far = place > at ? place - at : at - place;
                if (best == UINT64_MAX || far < (best > at ? best - at : at - best))
                    best = place;
            }
        }
    }
    *origin = best;
    return best != UINT64_MAX;
}

static void check(const unsigned char *got, uint64_t at, size_t len, uint64_t key, uint64_t other_key, const char *what)
{
    unsigned char want[8192];
    while (len) {
        size_t part = len < sizeof want ? len : sizeof want;
        fill(want, at, part, key);
        if (memcmp(want, got, part) != 0) {
            size_t i = 0;
            uint64_t origin;
            while (got[i] == want[i])
                i++;
            fprintf(stderr, "%s: wrong byte at stream offset %llu: got %02x, expected %02x", what,
                    (unsigned long long)(at + i), got[i], want[i]);
            if (len - i >= 8) {
                int zero = 1;
                for (int k = 0; k < 8; k++)
                    zero = zero && got[i + k] == 0;
                if (zero)
                    fprintf(stderr, "; eight zero bytes here");
                else if (find_origin(got + i, at + i, key, &origin))
                    fprintf(stderr, "; these bytes belong to offset %llu of this direction (%lld away)",
                            (unsigned long long)origin, (long long)(origin - (at + i)));
                else if (find_origin(got + i, at + i, other_key, &origin))
                    fprintf(stderr, "; these bytes belong to offset %llu of the OTHER direction", (unsigned long long)origin);
                else
                    fprintf(stderr, "; these bytes were not found within 64 MiB of either direction");
            }
            fprintf(stderr, "\n");
            die("%s: damaged stream", what);
        }
        got += part, at += part, len -= part;
    }
}

