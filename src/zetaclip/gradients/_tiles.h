/* The inner loops of _products.c, included once for every set of instructions.
 *
 * The includer defines LANES (floats in a vector), TARGET (the attribute of every function) and
 * NAME(x), which gives each copy names of its own. MR x NR vectors are accumulated in registers.
 */

typedef float NAME(vec) __attribute__((vector_size(4 * LANES)));
typedef double NAME(wide) __attribute__((vector_size(4 * LANES)));

/* out[m][n] = sum over t of g[t][m] * x[where[t] + at[n]], for MR outputs and `count` vectors. */
#define TILE(count)                                                                               \
    TARGET static void NAME(tile##count)(const float *restrict g, const float *restrict x,        \
                                         const ptrdiff_t *restrict where, size_t positions,       \
                                         const ptrdiff_t *restrict at, NAME(vec) *restrict out)   \
    {                                                                                             \
        NAME(vec) sum[MR][count] = {0};                                                           \
        ptrdiff_t shift[count];                                                                   \
        for (int n = 0; n < count; n++) shift[n] = at[n];                                         \
        for (size_t t = 0; t < positions; t++, g += MR) {                                         \
            const float *from = x + where[t];                                                     \
            NAME(vec) v[count];                                                                   \
            for (int n = 0; n < count; n++) v[n] = *(const NAME(vec) *)(from + shift[n]);         \
            for (int m = 0; m < MR; m++)                                                          \
                for (int n = 0; n < count; n++) sum[m][n] += v[n] * g[m];                         \
        }                                                                                         \
        for (int m = 0; m < MR; m++)                                                              \
            for (int n = 0; n < count; n++) out[m * count + n] = sum[m][n];                       \
    }

TILE(1)
TILE(2)
TILE(3)
#undef TILE

TARGET static inline void NAME(tile)(int count, const float *g, const float *x,
                                     const ptrdiff_t *where, size_t positions, const ptrdiff_t *at,
                                     NAME(vec) *out)
{
    if (count == 3)
        NAME(tile3)(g, x, where, positions, at, out);
    else if (count == 2)
        NAME(tile2)(g, x, where, positions, at, out);
    else
        NAME(tile1)(g, x, where, positions, at, out);
}

/* The squared length of one record's gradient, and the gradient itself where `stored` is given. */
TARGET static double NAME(one_record)(const job *j, const float *x, const float *g, float *stored)
{
    NAME(vec) made[MR * NR];
    double total = 0.0;
    for (size_t o = 0; o < j->outputs; o += MR, g += MR * j->positions) {
        size_t some = j->outputs - o < MR ? j->outputs - o : MR;
        for (size_t v = 0; v < j->vectors; v += NR) {
            int count = j->vectors - v < NR ? (int)(j->vectors - v) : NR;
            NAME(tile)(count, g, x, j->where, j->positions, j->at + v, made);
            NAME(vec) squares = {0};
            for (int i = 0; i < MR * count; i++) squares += made[i] * made[i];
            for (int i = 0; i < LANES; i++) total += squares[i];
            if (stored == NULL) continue;
            size_t first = v * LANES, width = count * LANES;
            if (width > j->columns - first) width = j->columns - first;
            for (size_t m = 0; m < some; m++)
                memcpy(stored + (o + m) * j->columns + first, made + m * count,
                       width * sizeof(float));
        }
    }
    return total;
}

/* total += factor_i * gradient_i over `records` packed records, for the outputs from `o` to `stop`,
 * at most PANELS * MR of them. The sums of a few vectors stay in the cache while the records go by.
 */
TARGET static void NAME(add_panels)(const job *j, const float *x, const float *g, size_t step,
                                    const double *factors, size_t records, size_t o, size_t stop,
                                    double *total)
{
    NAME(vec) made[MR * NR];
    double sums[PANELS * MR * BLOCK * LANES];
    for (size_t start = 0; start < j->vectors; start += BLOCK) {
        size_t end = j->vectors - start < BLOCK ? j->vectors : start + BLOCK;
        memset(sums, 0, sizeof sums);
        for (size_t i = 0; i < records; i++) {
            double *to = sums, factor = factors[i];
            for (size_t panel = o; panel < stop; panel += MR)
                for (size_t v = start; v < end; v += NR) {
                    int count = end - v < NR ? (int)(end - v) : NR;
                    NAME(tile)(count, g + i * step + panel * j->positions, x + i * step, j->where,
                               j->positions, j->at + v, made);
                    const float *from = (const float *)made;
                    for (int k = 0; k < MR * count * LANES; k++) to[k] += factor * from[k];
                    to += MR * count * LANES;
                }
        }
        const double *from = sums;
        for (size_t panel = o; panel < stop; panel += MR)
            for (size_t v = start; v < end; v += NR) {
                size_t count = end - v < NR ? end - v : NR;
                size_t some = stop - panel < MR ? stop - panel : MR;
                for (size_t m = 0; m < some; m++)
                    for (size_t n = 0; n < count; n++) {
                        double *row = total + (panel + m) * j->columns + j->to[v + n];
                        const double *own = from + (m * count + n) * LANES;
                        size_t left = j->columns - j->to[v + n];
                        size_t width = j->spread == 1 && left < LANES ? left : LANES;
                        for (size_t k = 0; k < width; k++) row[k * j->spread] += own[k];
                    }
                from += MR * count * LANES;
            }
    }
}

/* total[o][i] += sum over records of g[o] * x[i] in double, from packed panels: MR values of g and
 * NR vectors of x for each record. */
TARGET static void NAME(add_outer)(const double *restrict g, const double *restrict x,
                                   size_t records, double *restrict total, size_t columns,
                                   size_t rows, size_t width)
{
    NAME(wide) sum[MR][NR] = {0};
    for (size_t i = 0; i < records; i++, g += MR, x += NR * (LANES / 2)) {
        NAME(wide) v[NR];
        for (int n = 0; n < NR; n++) v[n] = ((const NAME(wide) *)x)[n];
        for (int m = 0; m < MR; m++)
            for (int n = 0; n < NR; n++) sum[m][n] += v[n] * g[m];
    }
    NAME(wide) made[MR][NR];
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NR; n++) made[m][n] = sum[m][n];
    for (size_t m = 0; m < rows; m++) {
        const double *from = (const double *)made[m];
        for (size_t k = 0; k < width; k++) total[m * columns + k] += from[k];
    }
}
