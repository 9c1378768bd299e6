/* Standard normal values from a 256-bit key: ChaCha12 for the bits, Box and Muller for the law.
 *
 * ChaCha is a stream cipher: without the key its output can't be told from random bits, so from some of the noise
 * nobody can compute the rest. It also runs many blocks side by side, which a Mersenne Twister does not.
 *
 * The loops over LANES have no branches, so that a compiler can make vector code of them. Multiplications and additions
 * are kept apart (no fused ones), so that every processor rounds alike and a replay is exact.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 8            /* blocks side by side: one 32-bit word of each fills a 256-bit register */
#define HALF (8 * LANES)   /* of the 16 words of a block, 8 give radii and 8 give angles */
#define VALUES (2 * HALF)  /* normal values from one round of LANES blocks */
#define ROUNDS 12          /* as in the standard generator of Rust; 7 is the most that anybody has broken */
#define NEAR 16007u        /* below this the radius is beyond 5, and 32 bits are too few to place it */

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

typedef uint32_t lanes __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(4 * LANES)));

#define ROTATE(v, n) (((v) << (n)) | ((v) >> (32 - (n))))
/* By half a word: an exchange of neighbours, which is one instruction where a rotation is three. */
#ifdef __clang__ /* has no such shuffle, and finds the instruction by itself */
#define SWAP(v) ROTATE(v, 16)
#else
#define SWAP(v) ((lanes)__builtin_shuffle((halves)(v), (halves){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}))
#endif
#define QUARTER(a, b, c, d)                               \
    x[a] += x[b]; x[d] = SWAP(x[d] ^ x[a]);                \
    x[c] += x[d]; x[b] = ROTATE(x[b] ^ x[c], 12);          \
    x[a] += x[b]; x[d] = ROTATE(x[d] ^ x[a], 8);           \
    x[c] += x[d]; x[b] = ROTATE(x[b] ^ x[c], 7);

#define ALL(word) ((lanes){0} + (word))

/* LANES consecutive blocks of the key stream, word by word. The nonce keeps several streams of one key apart; the counter
 * is a multiple of LANES, so that its lower half does not overflow within them. */
WIDE static void blocks(const uint32_t key[8], uint64_t counter, uint32_t nonce, int rounds, uint32_t *out)
{
    const lanes low = ALL((uint32_t)counter) + (lanes){0, 1, 2, 3, 4, 5, 6, 7}, high = ALL((uint32_t)(counter >> 32));
    lanes x[16] = {
        ALL(0x61707865u), ALL(0x3320646eu), ALL(0x79622d32u), ALL(0x6b206574u), ALL(key[0]), ALL(key[1]), ALL(key[2]), ALL(key[3]),
        ALL(key[4]), ALL(key[5]), ALL(key[6]), ALL(key[7]), low, high, ALL(nonce), ALL(0),
    };
    for (int round = 0; round < rounds; round += 2) {
        QUARTER(0, 4, 8, 12) QUARTER(1, 5, 9, 13) QUARTER(2, 6, 10, 14) QUARTER(3, 7, 11, 15)
        QUARTER(0, 5, 10, 15) QUARTER(1, 6, 11, 12) QUARTER(2, 7, 8, 13) QUARTER(3, 4, 9, 14)
    }
    x[0] += 0x61707865u; x[1] += 0x3320646eu; x[2] += 0x79622d32u; x[3] += 0x6b206574u;
    for (int w = 0; w < 8; w++) x[4 + w] += key[w];
    x[12] += low; x[13] += high; x[14] += nonce;
    memcpy(out, x, sizeof x);
}

/* Radii sqrt(-2 ln u) for u = (k + 1/2) / 2^32, by a polynomial for the logarithm of the mantissa. */
WIDE static void radii(const uint32_t *restrict k, float *restrict r)
{
    for (int i = 0; i < HALF; i++) {
        /* The upper 31 bits convert exactly enough, and as a signed number, which processors are good at. */
        float u = ((float)(int32_t)(k[i] >> 1) + 0.25f) * 4.656612873077393e-10f;
        union { float f; int32_t i; } bits = {u};
        int32_t exponent = ((bits.i >> 23) & 0xff) - 126;
        bits.i = (bits.i & 0x007fffff) | 0x3f000000;
        float m = bits.f; /* in [1/2, 1) */
        int32_t low = m < 0.707106781186547524f;
        float e = (float)(exponent - low);
        m = (low ? m + m : m) - 1.0f;
        float z = m * m;
        float y = 7.0376836292e-2f;
        y = y * m - 1.1514610310e-1f;
        y = y * m + 1.1676998740e-1f;
        y = y * m - 1.2420140846e-1f;
        y = y * m + 1.4249322787e-1f;
        y = y * m - 1.6668057665e-1f;
        y = y * m + 2.0000714765e-1f;
        y = y * m - 2.4999993993e-1f;
        y = y * m + 3.3333331174e-1f;
        y = y * m * z;
        y = y - 2.12194440e-4f * e;
        y = y - 0.5f * z;
        float log_u = (m + y) + 0.693359375f * e;
        float square = -2.0f * log_u;
        r[i] = sqrtf(square > 0.0f ? square : 0.0f);
    }
}

/* A point of the circle: two bits choose the quadrant, the others the angle in [-pi/4, pi/4) within it. */
WIDE static void points(const uint32_t *restrict k, const float *restrict r, float scale, float *restrict out)
{
    for (int i = 0; i < HALF; i++) {
        float f = ((float)(int32_t)(k[i] & 0x3fffffffu) + 0.5f) * 9.313225746154785e-10f;
        float a = (f - 0.5f) * 1.57079632679489662f;
        float z = a * a;
        union { float f; uint32_t i; } s, c;
        s.f = ((-1.9515295891e-4f * z + 8.3321608736e-3f) * z - 1.6666654611e-1f) * z * a + a;
        c.f = ((2.443315711809948e-5f * z - 1.388731625493765e-3f) * z + 4.166664568298827e-2f) * z * z - 0.5f * z + 1.0f;
        /* A quarter turn exchanges the two and changes one sign; in bits, because that needs no choice of a path. */
        uint32_t both = (s.i ^ c.i) & (uint32_t)((int32_t)(k[i] << 1) >> 31);
        c.i = c.i ^ both ^ ((k[i] ^ (k[i] << 1)) & 0x80000000u);
        s.i = s.i ^ both ^ (k[i] & 0x80000000u);
        out[i] = r[i] * c.f * scale;
        out[HALF + i] = r[i] * s.f * scale;
    }
}

static void gaussian(const uint32_t key[8], float *out, size_t count, float scale)
{
    uint32_t k[16 * LANES], more[16 * LANES];
    float r[HALF], values[VALUES];
    uint64_t counter = 0;
    for (size_t done = 0; done < count; done += VALUES, counter += LANES) {
        blocks(key, counter, 0, ROUNDS, k);
        radii(k, r);
        uint32_t least = UINT32_MAX;
        for (int i = 0; i < HALF; i++) least = k[i] < least ? k[i] : least;
        for (int i = 0; least < NEAR && i < HALF; i++)
            if (k[i] < NEAR) { /* a far value, about one in 270 000: 32 more bits, in double precision */
                blocks(key, (counter / LANES * HALF + i) * LANES, 1, ROUNDS, more);
                double u = ((double)k[i] + ((double)more[0] + 0.5) / 4294967296.0) / 4294967296.0;
                r[i] = (float)sqrt(-2.0 * log(u));
            }
        size_t rest = count - done;
        if (rest >= VALUES) {
            points(k + HALF, r, scale, out + done);
        } else {
            points(k + HALF, r, scale, values);
            memcpy(out + done, values, rest * sizeof(float));
        }
    }
    memset(k, 0, sizeof k);
}

static int read_key(const char *bytes, Py_ssize_t length, uint32_t key[8])
{
    if (length != 32) {
        PyErr_SetString(PyExc_ValueError, "the key has 32 bytes");
        return 0;
    }
    for (int w = 0; w < 8; w++) {
        const unsigned char *b = (const unsigned char *)bytes + 4 * w;
        key[w] = (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
    }
    return 1;
}

static PyObject *fill(PyObject *self, PyObject *args)
{
    const char *bytes;
    Py_ssize_t length;
    unsigned long long address, count;
    float scale = 1.0f;
    if (!PyArg_ParseTuple(args, "y#KK|f", &bytes, &length, &address, &count, &scale)) return NULL;
    uint32_t key[8];
    if (!read_key(bytes, length, key)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    gaussian(key, (float *)(uintptr_t)address, (size_t)count, scale);
    Py_END_ALLOW_THREADS
    memset(key, 0, sizeof key);
    Py_RETURN_NONE;
}

static PyObject *stream(PyObject *self, PyObject *args)
{
    const char *bytes;
    Py_ssize_t length;
    int rounds;
    if (!PyArg_ParseTuple(args, "y#i", &bytes, &length, &rounds)) return NULL;
    uint32_t key[8], words[16 * LANES];
    unsigned char block[64];
    if (!read_key(bytes, length, key)) return NULL;
    blocks(key, 0, 0, rounds, words);
    for (int w = 0; w < 16; w++)
        for (int b = 0; b < 4; b++) block[4 * w + b] = (unsigned char)(words[w * LANES] >> (8 * b));
    return PyBytes_FromStringAndSize((const char *)block, 64);
}

static PyMethodDef methods[] = {
    {"fill", fill, METH_VARARGS, "fill(key, address, count, scale=1): float32 values at an address, standard normal times scale."},
    {"stream", stream, METH_VARARGS, "stream(key, rounds): the first block of the key stream, to compare with ChaCha elsewhere."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_gaussian", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__gaussian(void) { return PyModule_Create(&module); }
