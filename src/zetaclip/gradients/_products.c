/* Per-record gradients of matrices and convolutions, made in registers: their lengths, and their
 * weighted sum.
 *
 * A record's gradient is G[o][j] = sum over positions t of g[t][o] * x[t][j], where x[t] is what
 * the layer saw at position t: an input vector, or the window of a convolution. A few rows of G
 * are made at a time, in float32 and always in the same order. So `norms` measures the very numbers
 * that `add` sums, and no gradient passes through memory. `add` multiplies them by the record's
 * factor and adds records up in float64; `add_outer` does so for layers with one position, whose
 * products are taken in float64 altogether. gradients/products.py says which layers come here.
 *
 * A record's numbers depend on that record alone: neither on the number of records nor on their
 * order, and not on the thread.
 *
 * Everything is passed as a buffer, whose type and length are checked here.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "../_team.h"
#include "_buffers.h"

#define NR 3          /* vectors of a tile */
#define BLOCK 6       /* vectors, and panels of outputs, whose sums stay in the cache */
#define PANELS 2
#define DEPTH 128     /* records of one turn of add_outer */
#define FEW 12        /* outputs whose sums fit into registers, for columns as they are */
#define AHEAD 16      /* tiles of columns that are prefetched at a time */
#define GROUP 6       /* panels of records of one turn of add_mapped */
#define SHORT 128     /* products that add_mapped adds up in float32 */
#define ROUNDED ((SHORT + 8) * 0x1p-24)
#define HIDDEN 0x1p-124
#define ALIGNED 64
#define UNIT 16       /* channels of an image are read as vectors if they are a multiple of this */

/* A convolution, or (with a kernel of one) a matrix that multiplied every position. */
typedef struct {
    Py_ssize_t records, channels, height, width, outputs, out_height, out_width;
    Py_ssize_t kernel[2], stride[2], padding[2], dilation[2];
    int last; /* x is (records, positions, channels) and g likewise, not the other way round */
} shape;

/* A record's gradient as rows of vectors: rows are outputs, and vectors lie along the inputs; or,
 * if inputs are few, the other way round. */
typedef struct {
    size_t rows, columns, vectors, positions, weights;
    size_t narrow_floats, wide_floats; /* of one packed record */
    size_t step;                       /* of the wide side, from one position to the next */
    ptrdiff_t *where, *at;             /* offsets of positions, and of vectors on the wide side */
    ptrdiff_t *off;                    /* of rows, if the narrow side is an image; or NULL */
    size_t row_step, spread, *to;      /* in a sum: from row to row, lane to lane, of vectors */
    size_t kept_spread, *kept;         /* the same where gradients are stored */
} job;

static size_t up(size_t value, size_t to) { return (value + to - 1) / to * to; }

static double inverse(double value) { return value > 0 ? 1 / value : 0.0; }

/* The length of a vector; eight sums, for instructions on vectors. */
static double length(const float *values, size_t count)
{
    double part[8] = {0}, total = 0.0;
    size_t k = 0;
    for (; k + 8 <= count; k += 8)
        for (int n = 0; n < 8; n++) part[n] += (double)values[k + n] * values[k + n];
    for (; k < count; k++) part[0] += (double)values[k] * values[k];
    for (int n = 0; n < 8; n++) total += part[n];
    return sqrt(total);
}

#define JOIN(a, b) a##b
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAS_X86 1
#define TARGET __attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")))
#define NAME(x) JOIN(x, _512)
#define WIDEN(x) ((wide_512)_mm512_cvtps_pd((__m256)(x)))
#define LANES 16
#define MR 8
#include "_tiles.h"
#undef TARGET
#undef NAME
#undef WIDEN
#undef LANES
#undef MR
#define TARGET __attribute__((target("avx2,fma")))
#define NAME(x) JOIN(x, _256)
#define WIDEN(x) ((wide_256)_mm256_cvtps_pd((__m128)(x)))
#define LANES 8
#define MR 4
#include "_tiles.h"
#undef TARGET
#undef NAME
#undef WIDEN
#undef LANES
#undef MR
#endif
#define TARGET
#define NAME(x) JOIN(x, _128)
#define WIDEN(x) __builtin_convertvector(x, wide_128)
#define LANES 4
#define MR 4
#include "_tiles.h"
#undef TARGET
#undef NAME
#undef WIDEN
#undef LANES
#undef MR

typedef struct {
    const char *name;
    size_t lanes, rows;
    double (*one_record)(const job *, const float *, const float *, float *);
    void (*add_panels)(const job *, const float *, const float *, size_t, const double *, size_t,
                       size_t, size_t, double *);
    void (*widen)(const float *, size_t, size_t, size_t, size_t, double *);
    void (*add_outer)(const double *, const double *, size_t, double *, size_t, size_t, size_t);
    void (*add_mapped)(const float *, const float *, const double *, const double *, double, double,
                       double, size_t, size_t, size_t, size_t, double *, double *);
    /* or NULL: */
    void (*add_few)(const float *, size_t, size_t, size_t, const double *, double *, size_t);
} kernels;

static const kernels all[] = {
    {"128", 4, 4, one_record_128, add_panels_128, widen_128,
     add_outer_128, add_mapped_128, NULL},
#ifdef HAS_X86
    {"256", 8, 4, one_record_256, add_panels_256, widen_256,
     add_outer_256, add_mapped_256, NULL},
    {"512", 16, 8, one_record_512, add_panels_512, widen_512,
     add_outer_512, add_mapped_512, add_few_512},
#endif
};

static const kernels *chosen = all;

static void choose(void)
{
#ifdef HAS_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) chosen = all + 1;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("fma"))
        chosen = all + 2;
#endif
}

static void *room(size_t bytes)
{
    void *found = NULL;
    return posix_memalign(&found, ALIGNED, bytes ? up(bytes, ALIGNED) : ALIGNED) ? NULL : found;
}

/* How x is packed: as it is, as an image with channels last, or as an image with a margin, whose
 * pixels are taken one by one. */
enum way { PLAIN, CHANNELS_LAST, PIXELS };

static enum way way_of(const shape *s)
{
    return s->last ? PLAIN : s->channels % UNIT == 0 ? CHANNELS_LAST : PIXELS;
}

static void forget(job *j)
{
    free(j->where);
    free(j->at);
    free(j->off);
    free(j->to);
    free(j->kept);
}

static int plan(const shape *s, job *j)
{
    const size_t lanes = chosen->lanes, channels = s->channels, outputs = s->outputs;
    const size_t area = s->kernel[0] * s->kernel[1], inputs = channels * area;
    const size_t wide = s->width + 2 * s->padding[1], high = s->height + 2 * s->padding[0];
    const enum way way = way_of(s);
    j->positions = s->out_height * s->out_width;
    j->weights = inputs * outputs;
    j->rows = way == PIXELS ? inputs : outputs;
    j->columns = way == PIXELS ? outputs : inputs;
    j->vectors = up(j->columns, lanes) / lanes;
    j->step = j->vectors * lanes;
    const size_t rows = up(j->rows, chosen->rows);
    /* One more channel, of zeros, for rows beyond the last. */
    j->narrow_floats = up(way == PIXELS ? (channels + 1) * high * wide : rows * j->positions, UNIT);
    const size_t broad = way == CHANNELS_LAST ? high * wide * channels : j->positions * j->step;
    j->wide_floats = up(broad, UNIT);
    j->row_step = way == PIXELS ? 1 : inputs;
    j->spread = way == PIXELS ? inputs : way == CHANNELS_LAST ? area : 1;
    j->kept_spread = way == CHANNELS_LAST ? 1 : j->spread;
    j->where = malloc((j->positions + 1) * sizeof *j->where);
    j->at = malloc((j->vectors + NR) * sizeof *j->at);
    j->off = way == PIXELS ? malloc(rows * sizeof *j->off) : NULL;
    j->to = malloc((j->vectors + NR) * sizeof *j->to);
    j->kept = malloc((j->vectors + NR) * sizeof *j->kept);
    if (!j->where || !j->at || !j->to || !j->kept || (way == PIXELS && !j->off)) {
        forget(j);
        return 0;
    }
    for (size_t t = 0; t < j->positions; t++) {
        size_t row = t / s->out_width * s->stride[0], column = t % s->out_width * s->stride[1];
        j->where[t] = way == PLAIN ? t * j->step : row * wide + column;
        if (way == CHANNELS_LAST) j->where[t] *= channels;
    }
    for (size_t v = 0; v < j->vectors; v++) {
        j->at[v] = v * lanes;
        j->to[v] = j->kept[v] = v * lanes * j->kept_spread;
        if (way != CHANNELS_LAST) continue;
        /* UNIT channels at a time, and for these all places of the kernel. */
        size_t place = v * lanes / UNIT % area, row = place / s->kernel[1];
        size_t channel = v * lanes / UNIT / area * UNIT + v * lanes % UNIT;
        size_t column = place % s->kernel[1];
        j->at[v] = (row * s->dilation[0] * wide + column * s->dilation[1]) * channels + channel;
        j->to[v] = channel * area + place;
    }
    for (size_t i = 0; way == PIXELS && i < rows; i++) {
        size_t place = i % area, row = place / s->kernel[1], column = place % s->kernel[1];
        j->off[i] = i < inputs ? (i / area * high + row * s->dilation[0]) * wide +
                                     column * s->dilation[1]
                               : channels * high * wide;
    }
    return 1;
}

typedef float four __attribute__((vector_size(16), aligned(4)));
typedef int order __attribute__((vector_size(16)));

/* to[column][row] = from[row][column], in squares of four. */
static void transpose(const float *restrict from, size_t rows, size_t columns, size_t from_step,
                      float *restrict to, size_t to_step)
{
    size_t r = 0;
    for (; r + 4 <= rows; r += 4) {
        const float *own = from + r * from_step;
        size_t c = 0;
        for (; c + 4 <= columns; c += 4) {
            four a = *(const four *)(own + c), b = *(const four *)(own + from_step + c);
            four d = *(const four *)(own + 2 * from_step + c);
            four e = *(const four *)(own + 3 * from_step + c);
            four ab = __builtin_shuffle(a, b, (order){0, 4, 1, 5});
            four AB = __builtin_shuffle(a, b, (order){2, 6, 3, 7});
            four de = __builtin_shuffle(d, e, (order){0, 4, 1, 5});
            four DE = __builtin_shuffle(d, e, (order){2, 6, 3, 7});
            float *here = to + c * to_step + r;
            *(four *)here = __builtin_shuffle(ab, de, (order){0, 1, 4, 5});
            *(four *)(here + to_step) = __builtin_shuffle(ab, de, (order){2, 3, 6, 7});
            *(four *)(here + 2 * to_step) = __builtin_shuffle(AB, DE, (order){0, 1, 4, 5});
            *(four *)(here + 3 * to_step) = __builtin_shuffle(AB, DE, (order){2, 3, 6, 7});
        }
        for (; c < columns; c++)
            for (size_t i = r; i < r + 4; i++) to[c * to_step + i] = from[i * from_step + c];
    }
    for (; r < rows; r++)
        for (size_t c = 0; c < columns; c++) to[c * to_step + r] = from[r * from_step + c];
}

/* One record as the tiles read it. Margins, and what fills up a vector, must be zero already. */
static void pack(const shape *s, const job *j, const float *restrict x, const float *restrict g,
                 float *restrict narrow, float *restrict wide)
{
    const size_t channels = s->channels, outputs = s->outputs, positions = j->positions;
    const size_t rows = chosen->rows, panel = rows * positions;
    const size_t broad = s->width + 2 * s->padding[1], high = s->height + 2 * s->padding[0];
    switch (way_of(s)) {
    case PLAIN:
        for (size_t t = 0; t < positions; t++) {
            memcpy(wide + t * j->step, x + t * channels, channels * sizeof(float));
            float *own = narrow + t * rows;
            size_t o = 0;
            for (; o + rows <= outputs; o += rows, own += panel) {
                memcpy(own, g + o, 4 * sizeof(float));
                if (rows == 8) memcpy(own + 4, g + o + 4, 4 * sizeof(float));
            }
            for (; o < outputs; o++) *own++ = g[o];
            g += outputs;
        }
        break;
    case CHANNELS_LAST:
        for (Py_ssize_t row = 0; row < s->height; row++)
            transpose(x + row * s->width, channels, s->width, s->height * s->width,
                      wide + ((row + s->padding[0]) * broad + s->padding[1]) * channels, channels);
        for (size_t o = 0; o < outputs; o += rows, narrow += panel)
            transpose(g + o * positions, outputs - o < rows ? outputs - o : rows, positions,
                      positions, narrow, rows);
        break;
    case PIXELS:
        for (size_t c = 0; c < channels; c++)
            for (Py_ssize_t row = 0; row < s->height; row++, x += s->width)
                memcpy(narrow + (c * high + row + s->padding[0]) * broad + s->padding[1], x,
                       s->width * sizeof(float));
        transpose(g, outputs, positions, positions, wide, j->step);
    }
}

static int countable(const Py_ssize_t *sizes, int count)
{
    Py_ssize_t product = (Py_ssize_t)1 << 8; /* bytes of a number, and what is padded */
    for (int i = 0; i < count; i++)
        if (__builtin_mul_overflow(product, sizes[i], &product)) return 0;
    return 1;
}

static int read_shape(PyObject *tuple, shape *s)
{
    Py_ssize_t reach[2], size[2], out[2];
    if (!PyArg_ParseTuple(tuple, "nnnnnnnnnnnnnnnp", &s->records, &s->channels, &s->height,
                          &s->width, &s->outputs, &s->out_height, &s->out_width, s->kernel,
                          s->kernel + 1, s->stride, s->stride + 1, s->padding, s->padding + 1,
                          s->dilation, s->dilation + 1, &s->last))
        return 0;
    const Py_ssize_t most = (Py_ssize_t)1 << 40;
    int fine = s->records >= 0 && s->channels > 0 && s->outputs > 0 && s->height > 0 &&
               s->width > 0 && s->out_height > 0 && s->out_width > 0;
    size[0] = s->height, size[1] = s->width, out[0] = s->out_height, out[1] = s->out_width;
    for (int i = 0; fine && i < 2; i++) {
        fine = s->kernel[i] > 0 && s->stride[i] > 0 && s->padding[i] >= 0 && s->dilation[i] > 0 &&
               size[i] < most && s->padding[i] < most && s->dilation[i] < most &&
               s->kernel[i] < most / s->dilation[i] && s->stride[i] < most;
        if (!fine) break;
        reach[i] = size[i] + 2 * s->padding[i] - s->dilation[i] * (s->kernel[i] - 1) - 1;
        fine = reach[i] >= 0 && out[i] == reach[i] / s->stride[i] + 1;
    }
    /* No product of sizes may be too large to be counted. */
    const Py_ssize_t x[] = {s->records + 1, s->channels + 1, s->height + 2 * s->padding[0],
                            s->width + 2 * s->padding[1]};
    const Py_ssize_t g[] = {s->records + 1, s->outputs + 64, s->out_height, s->out_width};
    const Py_ssize_t weights[] = {s->channels, s->outputs + 64, s->kernel[0], s->kernel[1]};
    fine = fine && countable(x, 4) && countable(g, 4) && countable(weights, 4);
    if (fine && s->last)
        fine = s->kernel[0] * s->kernel[1] == 1 && s->padding[0] + s->padding[1] == 0 &&
               s->stride[0] * s->stride[1] == 1;
    if (!fine) PyErr_SetString(PyExc_ValueError, "these sizes are not those of a layer");
    return fine;
}

/* Reads x, g and their shape; what follows is released by the caller. */
static int read_layer(PyObject *given_x, PyObject *given_g, PyObject *sizes, shape *s, Py_buffer *x,
                      Py_buffer *g)
{
    if (!read_shape(sizes, s)) return 0;
    if (!take(given_x, x, 'f', 0, s->records * s->channels * s->height * s->width)) return 0;
    if (take(given_g, g, 'f', 0, s->records * s->outputs * s->out_height * s->out_width)) return 1;
    PyBuffer_Release(x);
    return 0;
}

/* A layer, and what its records are for: their norms, or their sum. */
typedef struct {
    shape s;
    job j;
    const float *x, *g;
    double *squares, *total;
    const double *factors;
    float *stored;
    int failed;
} layer;

static void some_norms(void *given, size_t first, size_t stop)
{
    layer *l = given;
    const size_t own = l->j.narrow_floats + l->j.wide_floats;
    const size_t in = l->s.channels * l->s.height * l->s.width;
    const size_t out = l->s.outputs * l->j.positions;
    float *narrow = room(own * sizeof(float));
    if (narrow == NULL) {
        __atomic_store_n(&l->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    float *wide = narrow + l->j.narrow_floats;
    memset(narrow, 0, own * sizeof(float));
    for (size_t i = first; i < stop; i++) {
        pack(&l->s, &l->j, l->x + i * in, l->g + i * out, narrow, wide);
        float *to = l->stored ? l->stored + i * l->j.weights : NULL;
        l->squares[i] = chosen->one_record(&l->j, narrow, wide, to);
    }
    free(narrow);
}

static PyObject *norms(PyObject *self, PyObject *args)
{
    PyObject *given_x, *given_g, *sizes, *given_squares, *given_stored;
    Py_buffer x, g, squares, stored = {0};
    team t;
    layer l = {0};
    if (!PyArg_ParseTuple(args, "OOOOOO&", &given_x, &given_g, &sizes, &given_squares,
                          &given_stored, read_team, &t))
        return NULL;
    if (!read_layer(given_x, given_g, sizes, &l.s, &x, &g)) return NULL;
    int fine = take(given_squares, &squares, 'd', 1, l.s.records);
    if (fine && given_stored != Py_None) {
        fine = take(given_stored, &stored, 'f', 1,
                    l.s.records * l.s.outputs * l.s.channels * l.s.kernel[0] * l.s.kernel[1]);
        if (!fine) PyBuffer_Release(&squares);
    }
    if (!fine) {
        PyBuffer_Release(&x);
        PyBuffer_Release(&g);
        return NULL;
    }
    l.failed = !plan(&l.s, &l.j);
    if (!l.failed) {
        l.x = x.buf, l.g = g.buf, l.squares = squares.buf, l.stored = stored.buf;
        Py_BEGIN_ALLOW_THREADS
        deal(&t, l.s.records, 1, TURNS, some_norms, &l);
        Py_END_ALLOW_THREADS
        forget(&l.j);
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&g);
    PyBuffer_Release(&squares);
    PyBuffer_Release(&stored);
    if (l.failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static void some_sums(void *given, size_t first, size_t stop)
{
    layer *l = given;
    const job *j = &l->j;
    const size_t records = l->s.records, own = j->narrow_floats + j->wide_floats;
    const size_t in = l->s.channels * l->s.height * l->s.width, out = l->s.outputs * j->positions;
    /* The sums pass through the cache once for so many records: by the layer alone, so that
     * threads change no rounding. */
    size_t some = 4 * j->weights / own + 4;
    if (some > records) some = records;
    /* Rows of pixels are few: one thread, the first, takes them all. */
    const size_t from = j->off == NULL ? first : 0;
    const size_t until = j->off == NULL ? stop : first == 0 ? j->rows : 0;
    if (from >= until) return;
    float *memory = room(some * own * sizeof(float));
    if (memory == NULL) {
        __atomic_store_n(&l->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    memset(memory, 0, some * own * sizeof(float));
    for (size_t begin = 0; begin < records; begin += some) {
        size_t count = records - begin < some ? records - begin : some;
        for (size_t i = 0; i < count; i++)
            pack(&l->s, j, l->x + (begin + i) * in, l->g + (begin + i) * out, memory + i * own,
                 memory + i * own + j->narrow_floats);
        for (size_t row = from; row < until; row += PANELS * chosen->rows) {
            size_t end = row + PANELS * chosen->rows;
            chosen->add_panels(j, memory, memory + j->narrow_floats, own, l->factors + begin, count,
                               row, end > until ? until : end, l->total);
        }
    }
    free(memory);
}

static PyObject *add(PyObject *self, PyObject *args)
{
    PyObject *given_x, *given_g, *sizes, *given_factors, *given_total;
    Py_buffer x, g, factors, total;
    team t;
    layer l = {0};
    if (!PyArg_ParseTuple(args, "OOOOOO&", &given_x, &given_g, &sizes, &given_factors,
                          &given_total, read_team, &t))
        return NULL;
    if (!read_layer(given_x, given_g, sizes, &l.s, &x, &g)) return NULL;
    int fine = take(given_factors, &factors, 'd', 0, l.s.records);
    if (fine) {
        fine = take(given_total, &total, 'd', 1,
                    l.s.outputs * l.s.channels * l.s.kernel[0] * l.s.kernel[1]);
        if (!fine) PyBuffer_Release(&factors);
    }
    if (!fine) {
        PyBuffer_Release(&x);
        PyBuffer_Release(&g);
        return NULL;
    }
    l.failed = !plan(&l.s, &l.j);
    if (!l.failed) {
        l.x = x.buf, l.g = g.buf, l.factors = factors.buf, l.total = total.buf;
        Py_BEGIN_ALLOW_THREADS
        deal(&t, l.s.outputs, chosen->rows, 1, some_sums, &l);
        Py_END_ALLOW_THREADS
        forget(&l.j);
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&g);
    PyBuffer_Release(&factors);
    PyBuffer_Release(&total);
    if (l.failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* A matrix that multiplied one vector of every record, for add_outer and add_mapped. */
typedef struct {
    size_t records, inputs, outputs;
    const float *x, *g;
    const double *factors, *multiplier, *shift;
    double *total, *squares;
    double scale, long_map, long_shift;
    int failed;
} matrix;

static void some_outer(void *given, size_t first, size_t stop)
{
    matrix *m = given;
    const size_t rows = chosen->rows, width = NR * chosen->lanes / 2, inputs = m->inputs;
    double *memory = room(DEPTH * (up(stop - first, rows) + width) * sizeof(double));
    if (memory == NULL) {
        __atomic_store_n(&m->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    double *panel = memory, *scaled = memory + DEPTH * width;
    for (size_t begin = 0; begin < m->records; begin += DEPTH) {
        size_t count = m->records - begin < DEPTH ? m->records - begin : DEPTH;
        for (size_t o = first; o < stop; o += rows) {
            size_t some = stop - o < rows ? stop - o : rows;
            double *to = scaled + (o - first) * DEPTH;
            for (size_t i = 0; i < count; i++) {
                double factor = m->factors[begin + i];
                const float *from = m->g + (begin + i) * m->outputs + o;
                for (size_t k = 0; k < rows; k++)
                    to[i * rows + k] = k < some ? factor * from[k] : 0.0;
            }
        }
        for (size_t c = 0; c < inputs; c += width) {
            size_t left = inputs - c, some = left < width ? left : width;
            size_t next = left - some < width ? left - some : width;
            chosen->widen(m->x + begin * inputs + c, count, inputs, some, next, panel);
            for (size_t o = first; o < stop; o += rows)
                chosen->add_outer(scaled + (o - first) * DEPTH, panel, count,
                                  m->total + o * inputs + c, inputs,
                                  stop - o < rows ? stop - o : rows, some);
        }
    }
    free(memory);
}

/* The same for columns first to stop, and all outputs at once. */
static void some_columns(void *given, size_t first, size_t stop)
{
    matrix *m = given;
    const size_t outputs = m->outputs, step = up(outputs, 4);
    double scaled[DEPTH * FEW] = {0};
    for (size_t begin = 0; begin < m->records; begin += DEPTH) {
        size_t count = m->records - begin < DEPTH ? m->records - begin : DEPTH;
        for (size_t i = 0; i < count; i++)
            for (size_t o = 0; o < outputs; o++)
                scaled[i * step + o] = m->factors[begin + i] * m->g[(begin + i) * outputs + o];
        chosen->add_few(m->x + begin * m->inputs + first, count, m->inputs, stop - first, scaled,
                        m->total + first, outputs);
    }
}

static void some_mapped(void *given, size_t first, size_t stop)
{
    matrix *m = given;
    const size_t most = GROUP * NR * chosen->lanes;
    double *memory = room((2 * m->outputs + 3) * most * sizeof(double) +
                          2 * (chosen->rows + most) * SHORT * sizeof(float));
    if (memory == NULL) {
        __atomic_store_n(&m->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    chosen->add_mapped(m->x, m->g, m->multiplier, m->shift, m->scale, m->long_map, m->long_shift,
                       m->inputs, m->outputs, first, stop, m->squares, memory);
    free(memory);
}

/* Takes buffers of so many numbers, the first two of float32, the last one to be written. */
static int take_all(PyObject *const *given, Py_buffer *taken, int buffers, const size_t *counts)
{
    int held = 0;
    while (held < buffers && take(given[held], taken + held, held < 2 ? 'f' : 'd',
                                  held == buffers - 1, counts[held]))
        held++;
    if (held == buffers) return 1;
    while (held) PyBuffer_Release(taken + --held);
    return 0;
}

/* Shares the work, and releases the buffers. */
static PyObject *finish(matrix *m, const team *t, size_t count, size_t step, share_of_work work,
                        Py_buffer *taken, int buffers)
{
    Py_BEGIN_ALLOW_THREADS
    deal(t, count, step, 1, work, m);
    Py_END_ALLOW_THREADS
    while (buffers) PyBuffer_Release(taken + --buffers);
    if (m->failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static int is_layer(Py_ssize_t records, Py_ssize_t inputs, Py_ssize_t outputs)
{
    if (records >= 0 && inputs >= 1 && outputs >= 1) return 1;
    PyErr_SetString(PyExc_ValueError, "these sizes are not those of a layer");
    return 0;
}

static PyObject *add_outer(PyObject *self, PyObject *args)
{
    PyObject *given[4]; /* x, g, factors, total */
    Py_buffer taken[4];
    Py_ssize_t records, inputs, outputs;
    team t;
    if (!PyArg_ParseTuple(args, "OOOO(nnn)O&", given, given + 1, given + 2, given + 3, &records,
                          &inputs, &outputs, read_team, &t))
        return NULL;
    if (!is_layer(records, inputs, outputs)) return NULL;
    const size_t counts[4] = {records * inputs, records * outputs, records, inputs * outputs};
    if (!take_all(given, taken, 4, counts)) return NULL;
    matrix m = {records, inputs, outputs, taken[0].buf, taken[1].buf};
    m.factors = taken[2].buf, m.total = taken[3].buf;
    if (chosen->add_few != NULL && outputs <= FEW)
        return finish(&m, &t, inputs, chosen->lanes, some_columns, taken, 4);
    return finish(&m, &t, outputs, chosen->rows, some_outer, taken, 4);
}

static PyObject *add_mapped(PyObject *self, PyObject *args)
{
    PyObject *given[5]; /* x, g, multiplier, shift, squares */
    Py_buffer taken[5];
    Py_ssize_t records, inputs, outputs;
    double scale, long_map, long_shift;
    team t;
    if (!PyArg_ParseTuple(args, "OOOOO(ddd)(nnn)O&", given, given + 1, given + 2, given + 3,
                          given + 4, &scale, &long_map, &long_shift, &records, &inputs, &outputs,
                          read_team, &t))
        return NULL;
    if (!is_layer(records, inputs, outputs)) return NULL;
    const size_t counts[5] = {records * inputs, records * outputs, inputs * outputs,
                              inputs * outputs, records};
    if (!take_all(given, taken, 5, counts)) return NULL;
    matrix m = {records, inputs, outputs, taken[0].buf, taken[1].buf};
    m.multiplier = taken[2].buf, m.shift = taken[3].buf, m.squares = taken[4].buf;
    m.scale = scale, m.long_map = long_map, m.long_shift = long_shift;
    return finish(&m, &t, records, 1, some_mapped, taken, 5);
}

static PyObject *width(PyObject *self, PyObject *args)
{
    int bits = 0;
    if (!PyArg_ParseTuple(args, "|i", &bits)) return NULL;
    if (bits) { /* for tests: a narrower set of instructions than the widest */
        choose();
        const kernels *widest = chosen;
        for (const kernels *k = all; k <= widest; k++)
            if (atoi(k->name) == bits) chosen = k;
    }
    return PyLong_FromSize_t(chosen->lanes * 32);
}

static PyMethodDef methods[] = {
    {"norms", norms, METH_VARARGS,
     "norms(x, g, shape, squares, stored, team)\n\n"
     "Squared lengths of the gradients of all records, and the gradients themselves where\n"
     "`stored` is not None. Shape: records, channels, height, width, outputs, their height and\n"
     "width, then kernel, stride, padding, dilation (two each), and whether channels come\n"
     "last. Stored columns are in the order of the parameter, or, if channels come first and are\n"
     "a multiple of 16: 16 channels at a time, with (row, column of the kernel, channel) inside."},
    {"add", add, METH_VARARGS,
     "add(x, g, shape, factors, total, team)\n\n"
     "Adds factor * gradient of all records to the float64 total."},
    {"add_outer", add_outer, METH_VARARGS,
     "add_outer(x, g, factors, total, (records, inputs, outputs), team)\n\n"
     "total += factor_i * g_i x_i^T for all records, in float64."},
    {"add_mapped", add_mapped, METH_VARARGS,
     "add_mapped(x, g, multiplier, shift, squares, (scale, |multiplier|, |shift|),\n"
     "             (records, inputs, outputs), team)\n\n"
     "Adds an upper bound of |scale * multiplier * g_i x_i^T - shift|^2 to squares[i]."},
    {"width", width, METH_VARARGS,
     "width(bits=0): bits of a vector; another set of instructions is chosen by its bits."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_products", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__products(void)
{
    choose();
    return PyModule_Create(&module);
}
