/* The inner loops of _products.c, included once for every set of instructions.
 *
 * The includer defines LANES (floats in a vector), TARGET (the attribute of every function),
 * WIDEN(x), which makes half a vector of floats a vector of doubles, and NAME(x), which gives each
 * copy names of its own. MR x NR vectors are accumulated in registers.
 */

typedef float NAME(vec) __attribute__((vector_size(4 * LANES)));
typedef float NAME(half) __attribute__((vector_size(2 * LANES)));
typedef double NAME(wide) __attribute__((vector_size(4 * LANES)));

typedef union {
    NAME(vec) whole;
    NAME(half) halves[2];
} NAME(both);

/* out[m][n] = sum over positions t of narrow[t][m] * (vector n of wide at t), for MR rows; or,
 * where `out` is NULL, sums[m][n] += factor * the same. The narrow side is a packed panel; or, if
 * `gathered`, the number at `off[m]` of each window. Loops over constants are unrolled, so that
 * all of it stays in registers. */
TARGET static inline __attribute__((always_inline)) void NAME(any)(
    const job *j, const int count, const int gathered, const float *restrict narrow,
    const float *restrict wide, size_t row, size_t vector, NAME(vec) *restrict out,
    double *restrict sums, double factor)
{
    NAME(vec) sum[MR][NR];
    const ptrdiff_t *restrict where = j->where;
    ptrdiff_t shift[NR], off[MR];
    UNROLL for (int n = 0; n < count; n++) shift[n] = j->at[vector + n];
    UNROLL for (int m = 0; m < MR; m++) off[m] = gathered ? j->off[row + m] : m;
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int n = 0; n < count; n++) sum[m][n] = (NAME(vec)){0};
    if (!gathered) narrow += row * j->positions;
    for (size_t t = 0, end = j->positions; t < end; t++) {
        const float *from = gathered ? narrow + where[t] : narrow + t * MR;
        const float *beside = gathered ? wide + t * j->step : wide + where[t];
        NAME(vec) v[NR];
        UNROLL for (int n = 0; n < count; n++) v[n] = *(const NAME(vec) *)(beside + shift[n]);
        UNROLL for (int m = 0; m < MR; m++)
            UNROLL for (int n = 0; n < count; n++) sum[m][n] += v[n] * from[off[m]];
    }
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int n = 0; n < count; n++) {
            if (out != NULL) {
                out[m * count + n] = sum[m][n];
                continue;
            }
            NAME(both) own = {sum[m][n]};
            NAME(wide) *to = (NAME(wide) *)(sums + (m * count + n) * LANES);
            to[0] += factor * WIDEN(own.halves[0]);
            to[1] += factor * WIDEN(own.halves[1]);
        }
}

#define TILE(count, gathered, name)                                                               \
    TARGET static void NAME(name##count)(const job *j, const float *narrow, const float *wide,    \
                                         size_t row, size_t vector, NAME(vec) *out)               \
    {                                                                                             \
        NAME(any)(j, count, gathered, narrow, wide, row, vector, out, NULL, 0.0);                 \
    }                                                                                             \
    TARGET static void NAME(add_##name##count)(const job *j, const float *narrow,                 \
                                               const float *wide, size_t row, size_t vector,      \
                                               double *sums, double factor)                       \
    {                                                                                             \
        NAME(any)(j, count, gathered, narrow, wide, row, vector, NULL, sums, factor);             \
    }

TILE(1, 0, panel)
TILE(2, 0, panel)
TILE(3, 0, panel)
TILE(1, 1, gather)
TILE(2, 1, gather)
TILE(3, 1, gather)
#undef TILE

TARGET static inline void NAME(tile)(const job *j, int count, const float *narrow,
                                     const float *wide, size_t row, size_t v, NAME(vec) *out)
{
    if (j->off == NULL) {
        if (count == 3) NAME(panel3)(j, narrow, wide, row, v, out);
        else if (count == 2) NAME(panel2)(j, narrow, wide, row, v, out);
        else NAME(panel1)(j, narrow, wide, row, v, out);
    } else {
        if (count == 3) NAME(gather3)(j, narrow, wide, row, v, out);
        else if (count == 2) NAME(gather2)(j, narrow, wide, row, v, out);
        else NAME(gather1)(j, narrow, wide, row, v, out);
    }
}

TARGET static inline void NAME(add_tile)(const job *j, int count, const float *narrow,
                                         const float *wide, size_t row, size_t v, double *sums,
                                         double factor)
{
    if (j->off == NULL) {
        if (count == 3) NAME(add_panel3)(j, narrow, wide, row, v, sums, factor);
        else if (count == 2) NAME(add_panel2)(j, narrow, wide, row, v, sums, factor);
        else NAME(add_panel1)(j, narrow, wide, row, v, sums, factor);
    } else {
        if (count == 3) NAME(add_gather3)(j, narrow, wide, row, v, sums, factor);
        else if (count == 2) NAME(add_gather2)(j, narrow, wide, row, v, sums, factor);
        else NAME(add_gather1)(j, narrow, wide, row, v, sums, factor);
    }
}

/* The squared length of one record's gradient, and the gradient itself where `stored` is given. */
TARGET static double NAME(one_record)(const job *j, const float *narrow, const float *wide,
                                      float *stored)
{
    NAME(vec) made[MR * NR];
    NAME(wide) low = {0}, high = {0};
    for (size_t row = 0; row < j->rows; row += MR) {
        size_t some = j->rows - row < MR ? j->rows - row : MR;
        for (size_t v = 0; v < j->vectors; v += NR) {
            int count = j->vectors - v < NR ? (int)(j->vectors - v) : NR;
            NAME(tile)(j, count, narrow, wide, row, v, made);
            NAME(both) squares = {{0}};
            for (int i = 0; i < MR * count; i++) squares.whole += made[i] * made[i];
            low += WIDEN(squares.halves[0]);
            high += WIDEN(squares.halves[1]);
            if (stored == NULL) continue;
            for (size_t m = 0; m < some; m++)
                for (int n = 0; n < count; n++) {
                    size_t left = j->columns - (v + n) * LANES;
                    float *to = stored + (row + m) * j->row_step + j->kept[v + n];
                    const float *from = (const float *)(made + m * count + n);
                    if (j->kept_spread == 1 && left >= LANES)
                        memcpy(to, from, sizeof *made);
                    else
                        for (size_t k = 0; k < LANES && k < left; k++)
                            to[k * j->kept_spread] = from[k];
                }
        }
    }
    double total = 0.0;
    low += high;
    for (int i = 0; i < LANES / 2; i++) total += low[i];
    return total;
}

/* total += factor_i * gradient_i over `records` packed records, for the rows from `row` to `stop`,
 * at most PANELS * MR of them. The sums of a few vectors stay in the cache while the records go by.
 */
TARGET static void NAME(add_panels)(const job *j, const float *narrow, const float *wide,
                                    size_t step, const double *factors, size_t records, size_t row,
                                    size_t stop, double *total)
{
    _Alignas(ALIGNED) double sums[PANELS * MR * BLOCK * LANES];
    for (size_t start = 0; start < j->vectors; start += BLOCK) {
        size_t end = j->vectors - start < BLOCK ? j->vectors : start + BLOCK;
        memset(sums, 0, sizeof sums);
        for (size_t i = 0; i < records; i++) {
            double *to = sums;
            for (size_t panel = row; panel < stop; panel += MR)
                for (size_t v = start; v < end; v += NR) {
                    int count = end - v < NR ? (int)(end - v) : NR;
                    NAME(add_tile)(j, count, narrow + i * step, wide + i * step, panel, v, to,
                                   factors[i]);
                    to += MR * count * LANES;
                }
        }
        const double *from = sums;
        for (size_t panel = row; panel < stop; panel += MR)
            for (size_t v = start; v < end; v += NR) {
                size_t count = end - v < NR ? end - v : NR;
                size_t some = stop - panel < MR ? stop - panel : MR;
                for (size_t m = 0; m < some; m++)
                    for (size_t n = 0; n < count; n++) {
                        double *to = total + (panel + m) * j->row_step + j->to[v + n];
                        const double *own = from + (m * count + n) * LANES;
                        size_t left = j->columns - (v + n) * LANES;
                        size_t width = left < LANES ? left : LANES;
                        for (size_t k = 0; k < width; k++) to[k * j->spread] += own[k];
                    }
                from += MR * count * LANES;
            }
    }
}

/* A panel of `width` columns in float64, NR vectors a record, from rows that are `columns` apart;
 * the `next` columns behind it are prefetched meanwhile, because rows are far apart. */
TARGET static void NAME(widen)(const float *restrict x, size_t records, size_t columns,
                               size_t width, size_t next, double *restrict to)
{
    const size_t whole = NR * (LANES / 2);
    for (size_t i = 0; i < records; i++, x += columns, to += whole) {
        if (next > 0) __builtin_prefetch(x + width);
        if (next > UNIT) __builtin_prefetch(x + width + next - 1);
        if (width == whole)
            for (int k = 0; k < NR * (LANES / 2); k++) to[k] = x[k];
        else
            for (size_t k = 0; k < whole; k++) to[k] = k < width ? x[k] : 0.0;
    }
}

/* total[o][i] += sum over records of g[o] * x[i] in double, from packed panels: MR values of g and
 * NR vectors of x for each record. */
TARGET static void NAME(add_outer)(const double *restrict g, const double *restrict x,
                                   size_t records, double *restrict total, size_t columns,
                                   size_t rows, size_t width)
{
    /* The sums are far away in memory, so they are prefetched. */
    for (size_t m = 0; m < rows; m++)
        for (size_t k = 0; k < width; k += 8) __builtin_prefetch(total + m * columns + k, 1);
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

#if LANES == 16 /* narrower vectors have too few registers */
/* total[o][i] += sum over records of g[o] * x[i] in double for `outputs` (a constant) values of g a
 * record, and for LANES columns of x as it is, whose rows are `columns` apart. Meanwhile it
 * prefetches tiles of LANES columns from `ahead` on, AHEAD of them from each row. */
TARGET static inline __attribute__((always_inline)) void NAME(few)(
    const float *restrict x, size_t records, size_t columns, const double *restrict g,
    const int outputs, const float *ahead, double *restrict total, size_t apart, size_t rows,
    size_t width)
{
    NAME(wide) sum[FEW][2] = {0}, made[FEW][2];
    for (size_t i = 0; i < records; i++, g += outputs, x += columns) {
        NAME(both) own;
        memcpy(&own, x, sizeof own);
        if (ahead != NULL) __builtin_prefetch(ahead + i / AHEAD * apart + i % AHEAD * LANES);
        NAME(wide) low = WIDEN(own.halves[0]), high = WIDEN(own.halves[1]);
        UNROLL for (int m = 0; m < outputs; m++) sum[m][0] += low * g[m], sum[m][1] += high * g[m];
    }
    UNROLL for (int m = 0; m < outputs; m++) made[m][0] = sum[m][0], made[m][1] = sum[m][1];
    for (size_t m = 0; m < rows; m++)
        for (size_t k = 0; k < width; k++)
            total[m * apart + k] += ((const double *)made[m])[k];
}

/* The same for `width` columns, and for `rows` outputs, padded with zeros to a multiple of 4. Rows
 * are far apart in memory, so AHEAD tiles are prefetched at a time, row after row, while the tiles
 * before them are worked on. */
TARGET static void NAME(add_few)(const float *restrict x, size_t records, size_t columns,
                                 size_t width, const double *restrict g, double *restrict total,
                                 size_t rows)
{
    float last[DEPTH * LANES];
    for (size_t c = 0; c < width; c += LANES, total += LANES) {
        const float *from = x + c, *ahead = NULL;
        size_t some = width - c < LANES ? width - c : LANES, between = columns;
        size_t tile = c / LANES % AHEAD, next = c + (AHEAD - tile) * LANES;
        if (next + AHEAD * LANES <= width && (tile + 1) * (DEPTH / AHEAD) <= records)
            ahead = x + tile * (DEPTH / AHEAD) * columns + next;
        if (some < LANES) {
            memset(last, 0, sizeof last);
            for (size_t i = 0; i < records; i++)
                memcpy(last + i * LANES, from + i * columns, some * sizeof(float));
            from = last, between = LANES;
        }
        if (rows <= 4)
            NAME(few)(from, records, between, g, 4, ahead, total, columns, rows, some);
        else if (rows <= 8)
            NAME(few)(from, records, between, g, 8, ahead, total, columns, rows, some);
        else
            NAME(few)(from, records, between, g, FEW, ahead, total, columns, rows, some);
    }
}
#endif

/* total[o][i] += sum over d of a[d][o] * x[d][i] in float32, from packed panels: MR values of a and
 * NR vectors of x for each d. */
TARGET static void NAME(add_dots)(const float *restrict a, const float *restrict x, size_t depth,
                                  double *restrict total, size_t columns, size_t rows)
{
    NAME(vec) sum[MR][NR] = {0};
    for (size_t d = 0; d < depth; d++, a += MR, x += NR * LANES) {
        NAME(vec) v[NR];
        for (int n = 0; n < NR; n++) v[n] = ((const NAME(vec) *)x)[n];
        for (int m = 0; m < MR; m++)
            for (int n = 0; n < NR; n++) sum[m][n] += v[n] * a[m];
    }
    NAME(vec) made[MR][NR];
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NR; n++) made[m][n] = sum[m][n];
    for (size_t m = 0; m < rows; m++)
        for (int n = 0; n < NR; n++) {
            NAME(both) own = {made[m][n]};
            NAME(wide) *to = (NAME(wide) *)(total + m * columns + n * LANES);
            to[0] += WIDEN(own.halves[0]);
            to[1] += WIDEN(own.halves[1]);
        }
}

/* Adds upper bounds of the squared lengths of G - shift to squares, where G = scale * multiplier *
 * g_i x_i^T, for records first to stop. With F = |G| and L = |shift| the square is
 *
 *     F^2 - 2 sum(G * shift) + L^2,
 *
 * and both sums over G are matrix products with the records as vectors. They are taken in float32,
 * SHORT products at a time, which are added up in float64. What this can hide is added. By Cauchy
 * and Schwarz no sum of the sizes of terms exceeds (F + L)^2; ROUNDED of that is enough for SHORT
 * additions and the roundings of each term. Factors are divided by their lengths, so that none
 * exceeds 1, and nothing overflows. Where one underflows, or is flushed to zero, at most 2^-126 of
 * the product of all lengths is lost: HIDDEN for each number of G. */
TARGET static void NAME(add_mapped)(const float *x, const float *g, const double *multiplier,
                                    const double *shift, double scale, double long_map,
                                    double long_shift, size_t inputs, size_t outputs, size_t first,
                                    size_t stop, double *squares, double *memory)
{
    enum { rows = MR, width = NR * LANES, most = GROUP * width };
    const double unit = inverse(long_map), unit_shift = inverse(long_shift);
    double *sums[2] = {memory, memory + most * outputs}, *long_x = memory + 2 * most * outputs;
    double *found = long_x + most;
    float *own[2], *panel[2], *floats = (float *)(found + 2 * most);
    for (int way = 0; way < 2; way++) {
        panel[way] = floats + way * most * SHORT;
        own[way] = floats + 2 * most * SHORT + way * rows * SHORT;
    }
    for (size_t begin = first; begin < stop; begin += most) {
        size_t count = stop - begin < most ? stop - begin : most;
        memset(sums[0], 0, 2 * most * outputs * sizeof(double));
        for (size_t i = 0; i < count; i++) long_x[i] = length(x + (begin + i) * inputs, inputs);
        for (size_t k = 0; k < inputs; k += SHORT) {
            size_t depth = inputs - k < SHORT ? inputs - k : SHORT;
            for (size_t i = 0; i < up(count, width); i++) {
                const float *from = x + (begin + i) * inputs + k;
                const double unit_x = i < count ? inverse(long_x[i]) : 0.0;
                size_t to = i / width * width * SHORT + i % width;
                for (size_t d = 0; d < depth; d++, to += width) {
                    float value = i < count ? (float)(from[d] * unit_x) : 0.0f;
                    panel[0][to] = value * value;
                    panel[1][to] = value;
                }
            }
            for (size_t o = 0; o < outputs; o += rows) {
                size_t some = outputs - o < rows ? outputs - o : rows;
                for (size_t m = 0; m < rows; m++)
                    for (size_t d = 0; d < depth; d++) {
                        size_t at = (o + m) * inputs + k + d;
                        double value = m < some ? multiplier[at] * unit : 0.0;
                        double away = m < some ? shift[at] * unit_shift : 0.0;
                        own[0][d * rows + m] = (float)(value * value);
                        own[1][d * rows + m] = (float)(value * away);
                    }
                for (int way = 0; way < 2; way++)
                    for (size_t i = 0; i < count; i += width)
                        NAME(add_dots)(own[way], panel[way] + i * SHORT, depth,
                                       sums[way] + o * most + i, most, some);
            }
        }
        double *square = found, *middle = found + most;
        memset(found, 0, 2 * most * sizeof(double));
        for (size_t o = 0; o < outputs; o++)
            for (size_t i = 0; i < count; i++) {
                double value = g[(begin + i) * outputs + o];
                square[i] += sums[0][o * most + i] * (value * value);
                middle[i] += sums[1][o * most + i] * value;
            }
        for (size_t i = 0; i < count; i++) {
            const double all = scale * long_map * long_x[i];
            const double of_g = all * sqrt(square[i]) + long_shift;
            const double of_all = all * length(g + (begin + i) * outputs, outputs) + long_shift;
            squares[begin + i] += all * all * square[i] - 2 * all * long_shift * middle[i] +
                                  long_shift * long_shift + ROUNDED * of_g * of_g +
                                  HIDDEN * inputs * outputs * of_all * of_all;
        }
    }
}
