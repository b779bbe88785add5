// Calls of the C kernels from a file, for a machine that this one emulates: `native_calls FILE` reads a call, makes it, and writes the
// arrays as they are after it in their places. The file: the function's name, the count of threads, the arguments, each a number or an
// array, and the places in arrays that hold the address of another array.

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void function(const int64_t *call, int64_t threads);
struct entry { const char *name; function *function; };

#include "entries.h"                     // written by the test: struct entry ENTRIES[]

enum { MOST = 1024, LONGEST_NAME = 64 };

static int64_t number(FILE *file) {
    int64_t found;
    if (fread(&found, sizeof found, 1, file) != 1) exit(3);
    return found;
}

int main(int count, char **arguments) {
    FILE *file = count == 2 ? fopen(arguments[1], "r+b") : 0;
    char name[LONGEST_NAME];
    int64_t call[MOST], at[MOST] = {0}, size[MOST] = {0}, *pointer[MOST], before[MOST];
    if (!file || fread(name, sizeof name, 1, file) != 1) return 2;
    int64_t threads = number(file), n = number(file);
    for (int64_t i = 0; i < n; i++) {
        int64_t is_array = number(file);
        call[i] = number(file);
        if (!is_array) continue;
        size[i] = call[i], at[i] = ftell(file);
        void *array = aligned_alloc(64, (size_t)(size[i] + 127) / 64 * 64);
        if (fread(array, 1, (size_t)size[i], file) != (size_t)size[i]) return 3;
        call[i] = (intptr_t)array;
    }
    int64_t pointers = number(file);
    for (int64_t i = 0; i < pointers; i++) {
        char *array = (char *)(intptr_t)call[number(file)];
        pointer[i] = (int64_t *)(array + number(file));
        before[i] = *pointer[i];
        *pointer[i] = call[number(file)];
    }
    for (size_t i = 0; i < sizeof ENTRIES / sizeof *ENTRIES; i++) {
        if (strcmp(ENTRIES[i].name, name)) continue;
        ENTRIES[i].function(call, threads);
        for (int64_t p = 0; p < pointers; p++) *pointer[p] = before[p];
        for (int64_t a = 0; a < n; a++) {
            if (!at[a]) continue;
            fseek(file, at[a], SEEK_SET);
            if (fwrite((void *)(intptr_t)call[a], 1, (size_t)size[a], file) != (size_t)size[a]) return 4;
        }
        return fclose(file);
    }
    return 5;
}
