/* Gaussian elimination over GF(2), eight columns at a time. Rows are `words` 64-bit words; the last
 * bit is the right side. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define BIT(row, column) ((row)[(column) >> 6] >> ((column) & 63) & 1)

static void add(uint64_t *to, const uint64_t *from, long start, long words) {
    for (long k = start; k < words; k++) to[k] ^= from[k];
}

/* Row echelon form in place. pivots[r] is the column that row r stands for; returns the rank. */
long eliminate(uint64_t *matrix, long rows, long words, long columns, int32_t *pivots) {
    uint64_t *table = malloc(256 * words * sizeof *table), *spare = malloc(words * sizeof *spare);
    long rank = 0;
    for (long first = 0; first < columns && rank < rows; first += 8) {
        long start = first >> 6, found = 0;
        long end = first + 8 < columns ? first + 8 : columns;
        for (long column = first; column < end && rank + found < rows; column++) {
            for (long i = rank + found; i < rows; i++) {
                uint64_t *row = matrix + i * words;
                for (long t = 0; t < found; t++)
                    if (BIT(row, pivots[rank + t]))
                        add(row, matrix + (rank + t) * words, start, words);
                if (!BIT(row, column)) continue;
                uint64_t *home = matrix + (rank + found) * words;
                if (home != row) {
                    memcpy(spare, home, words * sizeof *spare);
                    memcpy(home, row, words * sizeof *spare);
                    memcpy(row, spare, words * sizeof *spare);
                }
                for (long t = 0; t < found; t++) {
                    uint64_t *other = matrix + (rank + t) * words;
                    if (BIT(other, column)) add(other, home, start, words);
                }
                pivots[rank + found++] = (int32_t)column;
                break;
            }
        }
        /* All sums of the rows that were found; then every other row needs one addition. */
        memset(table, 0, words * sizeof *table);
        for (long t = 0; t < found; t++)
            for (long k = 0; k < 1L << t; k++) {
                uint64_t *sum = table + ((1L << t) + k) * words;
                memcpy(sum + start, table + k * words + start, (words - start) * sizeof *sum);
                add(sum, matrix + (rank + t) * words, start, words);
            }
        for (long i = rank + found; i < rows; i++) {
            uint64_t *row = matrix + i * words;
            long which = 0;
            for (long t = 0; t < found; t++) which |= (long)BIT(row, pivots[rank + t]) << t;
            if (which) add(row, table + which * words, start, words);
        }
        rank += found;
    }
    free(table);
    free(spare);
    return rank;
}
