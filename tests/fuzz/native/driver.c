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
        default: // repeat some bytes
            if (size + 16 < LARGEST) {
                size_t bytes = 1 + next(size - at < 16 ? size - at : 16);
                memmove(data + at + bytes, data + at, size - at);
                size += bytes;
            }
        }
    }
    return size;
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
            LLVMFuzzerTestOneInput(original, size);
            for (int times = 0; times < 1000; times++, cases++) {
                memcpy(data, original, size);
                LLVMFuzzerTestOneInput(data, change(data, size));
            }
        }
    } while (time(NULL) < end);
    printf("%lu\n", cases);
    return 0;
}
