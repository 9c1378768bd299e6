/* Gaussian noise and uniform numbers from a 256-bit key: bits by ChaCha12, normal values by the
 * Box-Muller transform.
 *
 * Without the key the output of ChaCha cannot be distinguished from random bits, so nobody can
 * compute a part of the noise from the rest. _numpy.py does the same without a compiler, bit for
 * bit: change both files together.
 *
 * Only +, -, *, / and square roots of doubles are used, in a fixed order and never fused, so every
 * processor rounds in the same way and a replay is exact. The loops have no branches, so that a
 * compiler can vectorize them.
 */
#define PY_SSIZE_T_CLEAN
#define _DEFAULT_SOURCE
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "../_team.h"

#define LANES 8            /* parallel blocks: one 32-bit word of each fills a 256-bit register */
#define WORDS (16 * LANES) /* 32-bit words in LANES blocks */
#define PAIRS (WORDS / 4)  /* a pair of normal values needs 64 bits for radius and 64 for angle */
#define VALUES (2 * PAIRS)
#define ROUNDS 12 /* as in Rust's standard generator; the best known attack breaks 7 */

/* The nonce makes the streams of one key independent. */
enum { NOISE = 0, TAIL = 1, COINS = 2 };

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#if __GNUC__ >= 12
#define WIDE __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define WIDE __attribute__((target_clones("avx2", "default")))
#endif
#else
#define WIDE
#endif

typedef uint32_t lanes __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(4 * LANES)));

#define ROTATE(v, n) (((v) << (n)) | ((v) >> (32 - (n))))
/* Rotation by half a word as a swap of neighbours: one instruction instead of three. */
#ifdef __clang__ /* has no such shuffle, but finds the instruction by itself */
#define SWAP(v) ROTATE(v, 16)
#else
#define SWAPPED {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}
#define SWAP(v) ((lanes)__builtin_shuffle((halves)(v), (halves)SWAPPED))
#endif
#define QUARTER(a, b, c, d, half_turn)                    \
    x[a] += x[b]; x[d] = half_turn(x[d] ^ x[a]);           \
    x[c] += x[d]; x[b] = ROTATE(x[b] ^ x[c], 12);          \
    x[a] += x[b]; x[d] = ROTATE(x[d] ^ x[a], 8);           \
    x[c] += x[d]; x[b] = ROTATE(x[b] ^ x[c], 7);

#define ALL(word) ((lanes){0} + (word))

/* Overwrites secret memory. Compilers may remove a memset of memory that is not read again. */
static void wipe(void *secret, size_t size)
{
#ifdef __GLIBC__
    explicit_bzero(secret, size);
#else
    volatile unsigned char *bytes = secret;
    while (size--) *bytes++ = 0;
#endif
}

/* LANES consecutive blocks of the key stream, word by word. The counter is a multiple of LANES, so
 * that its lower half does not overflow within them. */
WIDE static void blocks(const uint32_t key[8], uint64_t counter, uint32_t nonce, int rounds,
                        uint32_t *out)
{
    const lanes low = ALL((uint32_t)counter) + (lanes){0, 1, 2, 3, 4, 5, 6, 7};
    const lanes high = ALL((uint32_t)(counter >> 32));
    lanes x[16] = {
        ALL(0x61707865u), ALL(0x3320646eu), ALL(0x79622d32u), ALL(0x6b206574u),
        ALL(key[0]), ALL(key[1]), ALL(key[2]), ALL(key[3]),
        ALL(key[4]), ALL(key[5]), ALL(key[6]), ALL(key[7]),
        low, high, ALL(nonce), ALL(0),
    };
    for (int round = 0; round < rounds; round += 2) {
        QUARTER(0, 4, 8, 12, SWAP) QUARTER(1, 5, 9, 13, SWAP)
        QUARTER(2, 6, 10, 14, SWAP) QUARTER(3, 7, 11, 15, SWAP)
        QUARTER(0, 5, 10, 15, SWAP) QUARTER(1, 6, 11, 12, SWAP)
        QUARTER(2, 7, 8, 13, SWAP) QUARTER(3, 4, 9, 14, SWAP)
    }
    x[0] += 0x61707865u; x[1] += 0x3320646eu; x[2] += 0x79622d32u; x[3] += 0x6b206574u;
    for (int w = 0; w < 8; w++) x[4 + w] += key[w];
    x[12] += low; x[13] += high; x[14] += nonce;
    memcpy(out, x, sizeof x);
}

#if defined(__x86_64__) && defined(__GNUC__)
#define PAIRED 1
typedef uint32_t twice __attribute__((vector_size(8 * LANES)));

/* 2 * LANES blocks in wide registers: the same words as from two calls of `blocks`. The counter is
 * a multiple of 2 * LANES. */
__attribute__((target("avx512f"))) static void paired(const uint32_t key[8], uint64_t counter,
                                                      uint32_t nonce, int rounds, uint32_t *out)
{
#define BOTH(word) ((twice){0} + (word))
#define HALF_TURN(v) ROTATE(v, 16)
    const twice low = BOTH((uint32_t)counter) +
                      (twice){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const twice high = BOTH((uint32_t)(counter >> 32));
    twice x[16] = {
        BOTH(0x61707865u), BOTH(0x3320646eu), BOTH(0x79622d32u), BOTH(0x6b206574u),
        BOTH(key[0]), BOTH(key[1]), BOTH(key[2]), BOTH(key[3]),
        BOTH(key[4]), BOTH(key[5]), BOTH(key[6]), BOTH(key[7]),
        low, high, BOTH(nonce), BOTH(0),
    };
    for (int round = 0; round < rounds; round += 2) {
        QUARTER(0, 4, 8, 12, HALF_TURN) QUARTER(1, 5, 9, 13, HALF_TURN)
        QUARTER(2, 6, 10, 14, HALF_TURN) QUARTER(3, 7, 11, 15, HALF_TURN)
        QUARTER(0, 5, 10, 15, HALF_TURN) QUARTER(1, 6, 11, 12, HALF_TURN)
        QUARTER(2, 7, 8, 13, HALF_TURN) QUARTER(3, 4, 9, 14, HALF_TURN)
    }
    x[0] += 0x61707865u; x[1] += 0x3320646eu; x[2] += 0x79622d32u; x[3] += 0x6b206574u;
    for (int w = 0; w < 8; w++) x[4 + w] += key[w];
    x[12] += low; x[13] += high; x[14] += nonce;
    for (int w = 0; w < 16; w++) {
        memcpy(out + w * LANES, &x[w], 4 * LANES);
        memcpy(out + WORDS + w * LANES, (const uint32_t *)&x[w] + LANES, 4 * LANES);
    }
    wipe(x, sizeof x);
}
#endif

/* The words of two groups of LANES blocks, one after the other; the group is even. */
static void two_groups(const uint32_t key[8], uint64_t group, uint32_t nonce, uint32_t *out)
{
#ifdef PAIRED
    if (__builtin_cpu_supports("avx512f")) {
        paired(key, group * LANES, nonce, ROUNDS, out);
        return;
    }
#endif
    blocks(key, group * LANES, nonce, ROUNDS, out);
    blocks(key, (group + 1) * LANES, nonce, ROUNDS, out + WORDS);
}

typedef union { double value; uint64_t bits; } number;

#define MANTISSA 0x000fffffffffffffu
#define ONE 0x3ff0000000000000u         /* the bits of 1.0 */
#define INTEGER 0x4330000000000000u     /* with a small integer i in the mantissa: 2^52 + i */
#define TWO52 4503599627370496.0        /* 2^52 */
#define ROUNDER 6755399441055744.0      /* 1.5 * 2^52: adding and subtracting it rounds */
#define LN2 0.6931471805599453
#define HALF_PI 1.5707963267948966
#define ROOT2 1.4142135623730951

/* sqrt(-2 ln u) for u = (1 + m / 2^52) * 2^exponent, from the 52 bits of m.
 *
 * With the mantissa f in [sqrt(1/2), sqrt(2)) and s = (f - 1) / (f + 1),
 * ln f = 2 (s + s^3/3 + s^5/5 + ...). s^2 is below 0.0295, so the first omitted term is below
 * 2^-55. f - 1 is exact, so no precision is lost near u = 1. */
static inline double radius_of(uint64_t m, double exponent)
{
    number f = {.bits = m | ONE};
    int half = f.value >= ROOT2;
    double mantissa = half ? 0.5 * f.value : f.value;
    double power = half ? exponent + 1.0 : exponent;
    double x = mantissa - 1.0;
    double s = x / (x + 2.0);
    double z = s * s;
    double p = 1.0 / 21.0;
    p = p * z + 1.0 / 19.0;
    p = p * z + 1.0 / 17.0;
    p = p * z + 1.0 / 15.0;
    p = p * z + 1.0 / 13.0;
    p = p * z + 1.0 / 11.0;
    p = p * z + 1.0 / 9.0;
    p = p * z + 1.0 / 7.0;
    p = p * z + 1.0 / 5.0;
    p = p * z + 1.0 / 3.0;
    p = p * z * s + s;
    return sqrt(-2.0 * (power * LN2 + 2.0 * p));
}

/* A radius uses a word of 64 bits: 52 for the mantissa of u, 12 to draw its exponent. u is in
 * [1/2, 1) if the first of the 12 is set, in [1/4, 1/2) if the second is the first that is set, and
 * so on. If none is set, `tail` draws further bits. */
WIDE static void radii(const uint32_t *restrict low, const uint32_t *restrict high,
                       double *restrict r)
{
    for (int i = 0; i < PAIRS; i++) {
        uint64_t word = (uint64_t)high[i] << 32 | low[i];
        number leading = {.bits = word >> 52 | INTEGER};
        leading.value -= TWO52; /* the 12 bits as a number, whose exponent is needed */
        number exponent = {.bits = leading.bits >> 52 | INTEGER};
        r[i] = radius_of(word & MANTISSA, exponent.value - (TWO52 + 1035.0));
    }
}

/* The radius of a pair whose 12 bits are all zero, from 64 more bits of a separate stream. */
static double tail(const uint32_t key[8], uint64_t pair, uint64_t m)
{
    uint32_t more[WORDS];
    blocks(key, pair * LANES, TAIL, ROUNDS, more);
    uint64_t word = (uint64_t)more[LANES] << 32 | more[0];
    double exponent = -13.0;
    for (int bit = 63; bit >= 0 && !(word >> bit & 1); bit--) exponent -= 1.0;
    wipe(more, sizeof more);
    return radius_of(m, exponent);
}

/* Sine and cosine of an angle a in (-pi/4, pi/4) by their power series; the first omitted terms are
 * below 2^-54. Two further bits choose the quadrant. */
WIDE static void points(const uint32_t *restrict low, const uint32_t *restrict high,
                        const double *restrict r, double *restrict out)
{
    for (int i = 0; i < PAIRS; i++) {
        uint64_t word = (uint64_t)high[i] << 32 | low[i];
        number f = {.bits = (word >> 10 & MANTISSA) | ONE};
        /* The middle of one of 2^52 intervals, so never 0. */
        double a = ((f.value - 1.5) + 1.1102230246251565e-16) * HALF_PI;
        double z = a * a;
        double p = -1.0 / 1307674368000.0;
        p = p * z + 1.0 / 6227020800.0;
        p = p * z - 1.0 / 39916800.0;
        p = p * z + 1.0 / 362880.0;
        p = p * z - 1.0 / 5040.0;
        p = p * z + 1.0 / 120.0;
        p = p * z - 1.0 / 6.0;
        number s = {.value = p * z * a + a};
        double q = 1.0 / 20922789888000.0;
        q = q * z - 1.0 / 87178291200.0;
        q = q * z + 1.0 / 479001600.0;
        q = q * z - 1.0 / 3628800.0;
        q = q * z + 1.0 / 40320.0;
        q = q * z - 1.0 / 720.0;
        q = q * z + 1.0 / 24.0;
        q = q * z - 0.5;
        number c = {.value = q * z + 1.0};
        /* A quarter turn swaps the two and changes one sign; on bits, to avoid a branch. */
        uint64_t turned = 0 - (word >> 62 & 1), both = (s.bits ^ c.bits) & turned;
        c.bits = c.bits ^ both ^ ((word ^ word << 1) & 0x8000000000000000u);
        s.bits = s.bits ^ both ^ (word & 0x8000000000000000u);
        out[i] = r[i] * c.value;
        out[PAIRS + i] = r[i] * s.value;
    }
}

/* VALUES standard normal values, starting with number `VALUES * group`, from the words k. */
static void normal_group(const uint32_t key[8], uint64_t group, const uint32_t *k, double *r,
                         double *out)
{
    radii(k, k + PAIRS, r);
    int far = 0;
    for (int i = 0; i < PAIRS; i++) far |= k[PAIRS + i] < 1u << 20;
    for (int i = 0; far && i < PAIRS; i++)
        if (k[PAIRS + i] < 1u << 20)
            r[i] = tail(key, group * PAIRS + i, (uint64_t)k[PAIRS + i] << 32 | k[i]);
    points(k + 2 * PAIRS, k + 3 * PAIRS, r, out);
}

/* sum = round(sum * inverse) + round(normal * scale), for integers below 2^51. */
WIDE static void add_rounded(double *restrict sum, const double *restrict normal, size_t count,
                             double inverse, double scale)
{
    for (size_t i = 0; i < count; i++) {
        double whole = (sum[i] * inverse + ROUNDER) - ROUNDER;
        sum[i] = whole + ((normal[i] * scale + ROUNDER) - ROUNDER);
    }
}

static int read_key(const Py_buffer *bytes, uint32_t key[8])
{
    if (bytes->len != 32) {
        PyErr_SetString(PyExc_ValueError, "the key has 32 bytes");
        return 0;
    }
    for (int w = 0; w < 8; w++) {
        const unsigned char *b = (const unsigned char *)bytes->buf + 4 * w;
        key[w] = (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
    }
    return 1;
}

/* Reads a key, and opens a contiguous writable buffer of doubles. */
static int read_arguments(PyObject *given, PyObject *array, uint32_t key[8], Py_buffer *values)
{
    Py_buffer bytes;
    if (PyObject_GetBuffer(given, &bytes, PyBUF_SIMPLE) < 0) return 0;
    int fine = read_key(&bytes, key);
    PyBuffer_Release(&bytes);
    const int wanted = PyBUF_WRITABLE | PyBUF_FORMAT | PyBUF_C_CONTIGUOUS;
    if (!fine || PyObject_GetBuffer(array, values, wanted) < 0) return 0;
    if (values->itemsize != sizeof(double) || !values->format || strcmp(values->format, "d")) {
        PyBuffer_Release(values);
        PyErr_SetString(PyExc_TypeError, "the values are float64");
        return 0;
    }
    return 1;
}

/* Standard normal values into `values`, or their rounded multiples added to rounded `values`, from
 * number `first`, which begins two groups, to `stop`. */
static void draw(uint32_t key[8], double *values, size_t first, size_t stop, int add,
                 double inverse, double scale)
{
    uint32_t k[2 * WORDS];
    double r[PAIRS], made[VALUES];
    for (size_t done = first; done < stop; done += VALUES) {
        size_t some = stop - done < VALUES ? stop - done : VALUES, group = done / VALUES;
        if (group % 2 == 0) two_groups(key, group, NOISE, k);
        normal_group(key, group, k + group % 2 * WORDS, r, made);
        if (add)
            add_rounded(values + done, made, some, inverse, scale);
        else
            memcpy(values + done, made, some * sizeof(double));
    }
    wipe(key, 8 * sizeof *key);
    wipe(k, sizeof k);
    wipe(r, sizeof r);
    wipe(made, sizeof made);
}

static PyObject *normals(PyObject *self, PyObject *args)
{
    PyObject *given, *array;
    uint32_t key[8];
    Py_buffer values;
    if (!PyArg_ParseTuple(args, "OO", &given, &array)) return NULL;
    if (!read_arguments(given, array, key, &values)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    draw(key, values.buf, 0, values.len / sizeof(double), 0, 1.0, 1.0);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&values);
    Py_RETURN_NONE;
}

typedef struct {
    const uint32_t *key;
    double *values, inverse, scale;
} sums;

static void add_some_noise(void *given, size_t first, size_t stop)
{
    const sums *s = given;
    uint32_t key[8]; /* draw() wipes it */
    memcpy(key, s->key, sizeof key);
    draw(key, s->values, first, stop, 1, s->inverse, s->scale);
}

static PyObject *add_noise(PyObject *self, PyObject *args)
{
    PyObject *given, *array;
    double inverse, scale;
    uint32_t key[8];
    Py_buffer values;
    team t;
    if (!PyArg_ParseTuple(args, "OOddO&", &given, &array, &inverse, &scale, read_team, &t))
        return NULL;
    if (!read_arguments(given, array, key, &values)) return NULL;
    sums s = {key, values.buf, inverse, scale};
    Py_BEGIN_ALLOW_THREADS
    deal(&t, values.len / sizeof(double), 2 * VALUES, TURNS, add_some_noise, &s);
    Py_END_ALLOW_THREADS
    wipe(key, sizeof key);
    PyBuffer_Release(&values);
    Py_RETURN_NONE;
}

static PyObject *uniforms(PyObject *self, PyObject *args)
{
    PyObject *given, *array;
    uint32_t key[8], k[2 * WORDS];
    Py_buffer values;
    if (!PyArg_ParseTuple(args, "OO", &given, &array)) return NULL;
    if (!read_arguments(given, array, key, &values)) return NULL;
    size_t count = values.len / sizeof(double);
    double *out = values.buf;
    Py_BEGIN_ALLOW_THREADS
    for (size_t done = 0; done < count; done += WORDS / 2) {
        size_t some = count - done < WORDS / 2 ? count - done : WORDS / 2;
        size_t group = done / (WORDS / 2);
        if (group % 2 == 0) two_groups(key, group, COINS, k);
        const uint32_t *low = k + group % 2 * WORDS, *high = low + WORDS / 2;
        for (size_t i = 0; i < some; i++)
            out[done + i] = (double)(((uint64_t)high[i] << 32 | low[i]) >> 11) * 0x1p-53;
    }
    wipe(key, sizeof key);
    wipe(k, sizeof k);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&values);
    Py_RETURN_NONE;
}

static PyObject *stream(PyObject *self, PyObject *args)
{
    Py_buffer given;
    unsigned long long counter;
    unsigned int nonce;
    int rounds;
    uint32_t key[8], words[WORDS];
    if (!PyArg_ParseTuple(args, "y*KIi", &given, &counter, &nonce, &rounds)) return NULL;
    int fine = read_key(&given, key);
    PyBuffer_Release(&given);
    if (!fine) return NULL;
    blocks(key, counter, nonce, rounds, words);
    PyObject *made = PyBytes_FromStringAndSize((const char *)words, sizeof words);
    wipe(key, sizeof key);
    wipe(words, sizeof words);
    return made;
}

static PyMethodDef methods[] = {
    {"normals", normals, METH_VARARGS,
     "normals(key, values): fills a float64 buffer with standard normal values."},
    {"add_noise", add_noise, METH_VARARGS,
     "add_noise(key, values, inverse, scale, team)\n\n"
     "In a float64 buffer: value = round(value * inverse) + round(standard normal * scale).\n"
     "All must stay below 2^51."},
    {"uniforms", uniforms, METH_VARARGS,
     "uniforms(key, values): fills a float64 buffer with multiples of 2^-53 in [0, 1)."},
    {"stream", stream, METH_VARARGS,
     "stream(key, counter, nonce, rounds)\n\n"
     "Eight blocks of the key stream from a counter that is a multiple of eight, word by word\n"
     "(word 0 of all blocks, then word 1, ...), in the machine's byte order."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_chacha", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__chacha(void) { return PyModule_Create(&module); }
