// A fuzzer without a fuzzer, for where there is no libFuzzer: files, each as it is and then changed by chance.
//
//   driver SECONDS SEED FILE...
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define LARGEST (1 << 16)
// CPU time of a case: the sanitizers make a byte take some nanoseconds, or a microsecond in the slowest target.
#define MOST_S 0.05
#define MOST_S_PER_BYTE 20e-6

static uint64_t state;

static uint64_t next(uint64_t below) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return below ? state % below : 0;
}

static size_t change(uint8_t *data, size_t size) {
    static const uint8_t notable[] = {0, 1, 0x40, 0x41, 0x43, 0x45, 0x52, 0x53, 0x70, 0x73, 0x7F, 0x80, 0xA0, 0xA1, 0xA3,
                                      0xB0, 0xB1, 0xC0, 0xC1, 0xD0, 0xD1, 0xFF};
    for (uint64_t changes = 1 + next(4); changes && size; changes--) {
        size_t at = next(size);
        switch (next(4)) {
        case 0: data[at] = (uint8_t)next(256); break;
        case 1: data[at] = notable[next(sizeof notable)]; break;
        case 2: // take some bytes out
            memmove(data + at, data + at + 1, size - at - 1);
            size--;
            break;
        default: // repeat some bytes, perhaps very often
            if (size + 16 < LARGEST) {
                size_t bytes = 1 + next(size - at < 16 ? size - at : 16);
                size_t times = next(500) ? 1 : 1 + next((LARGEST - size) / bytes);
                memmove(data + at + bytes * times, data + at, size - at);
                for (size_t each = 0; each < times; each++) memmove(data + at + bytes * each, data + at + bytes * times, bytes);
                size += bytes * times;
            }
        }
    }
    return size;
}

static double cpu_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// Run a case; one whose work is out of proportion to its bytes fails.
static void run(const uint8_t *data, size_t size) {
    double began = cpu_s();
    LLVMFuzzerTestOneInput(data, size);
    double spent = cpu_s() - began;
    if (spent > MOST_S + MOST_S_PER_BYTE * (double)size) {
        fprintf(stderr, "%zu bytes took %.3f s:", size, spent);
        for (size_t at = 0; at < size && at < 1000; at++) fprintf(stderr, "%s%02x", at ? "" : " ", data[at]);
        fprintf(stderr, "\n");
        exit(1);
    }
}

int main(int count, char **arguments) {
    static uint8_t original[LARGEST], data[LARGEST];
    time_t end = time(NULL) + atoi(arguments[1]);
    unsigned long cases = 0;
    state = strtoull(arguments[2], NULL, 10) | 1;
    do {
        for (int file = 3; file < count; file++) {
            FILE *input = fopen(arguments[file], "rb");
            size_t size = input ? fread(original, 1, LARGEST, input) : 0;
            if (input) fclose(input);
            run(original, size);
            for (int times = 0; times < 1000; times++, cases++) {
                memcpy(data, original, size);
                run(data, change(data, size));
            }
        }
    } while (time(NULL) < end);
    printf("%lu\n", cases);
    return 0;
}
