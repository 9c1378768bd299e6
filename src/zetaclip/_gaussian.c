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
#define SWAP(v) ((lanes)__builtin_shuffle((halves)(v), (halves){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}))
#define QUARTER(a, b, c, d)                               \
    x[a] += x[b]; x[d] = SWAP(x[d] ^ x[a]);                \
    x[c] += x[d]; x[b] = ROTATE(x[b] ^ x[c], 12);          \
    x[a] += x[b]; x[d] = ROTATE(x[d] ^ x[a], 8);           \
    x[c] += x[d]; x[b] = ROTATE(x[b] ^ x[c], 7);

/* LANES consecutive blocks of the key stream, word by word. The nonce keeps several streams of one key apart. */
WIDE static void blocks(const uint32_t key[8], uint64_t counter, uint32_t nonce, int rounds, uint32_t *out)
{
    static const uint32_t constants[4] = {0x61707865u, 0x3320646eu, 0x79622d32u, 0x6b206574u};
    uint32_t start[16][LANES];
    lanes x[16], first[16];
    for (int l = 0; l < LANES; l++) {
        for (int w = 0; w < 4; w++) start[w][l] = constants[w];
        for (int w = 0; w < 8; w++) start[4 + w][l] = key[w];
        start[12][l] = (uint32_t)(counter + l);
        start[13][l] = (uint32_t)((counter + l) >> 32);
        start[14][l] = nonce;
        start[15][l] = 0;
    }
    memcpy(first, start, sizeof first);
    memcpy(x, start, sizeof x);
    for (int round = 0; round < rounds; round += 2) {
        QUARTER(0, 4, 8, 12) QUARTER(1, 5, 9, 13) QUARTER(2, 6, 10, 14) QUARTER(3, 7, 11, 15)
        QUARTER(0, 5, 10, 15) QUARTER(1, 6, 11, 12) QUARTER(2, 7, 8, 13) QUARTER(3, 4, 9, 14)
    }
    for (int w = 0; w < 16; w++) x[w] += first[w];
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
WIDE static void points(const uint32_t *restrict k, const float *restrict r, float *restrict out)
{
    for (int i = 0; i < HALF; i++) {
        int32_t quadrant = (int32_t)(k[i] >> 30);
        float f = ((float)(int32_t)(k[i] & 0x3fffffffu) + 0.5f) * 9.313225746154785e-10f;
        float a = (f - 0.5f) * 1.57079632679489662f;
        float z = a * a;
        float s = ((-1.9515295891e-4f * z + 8.3321608736e-3f) * z - 1.6666654611e-1f) * z * a + a;
        float c = ((2.443315711809948e-5f * z - 1.388731625493765e-3f) * z + 4.166664568298827e-2f) * z * z - 0.5f * z + 1.0f;
        float first = (quadrant & 1) ? s : c;
        float second = (quadrant & 1) ? c : s;
        first = (quadrant == 1 || quadrant == 2) ? -first : first;
        second = (quadrant >= 2) ? -second : second;
        out[i] = r[i] * first;
        out[HALF + i] = r[i] * second;
    }
}

static void gaussian(const uint32_t key[8], float *out, size_t count)
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
            points(k + HALF, r, out + done);
        } else {
            points(k + HALF, r, values);
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
    if (!PyArg_ParseTuple(args, "y#KK", &bytes, &length, &address, &count)) return NULL;
    uint32_t key[8];
    if (!read_key(bytes, length, key)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    gaussian(key, (float *)(uintptr_t)address, (size_t)count);
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
    {"fill", fill, METH_VARARGS, "fill(key, address, count): standard normal float32 values at an address."},
    {"stream", stream, METH_VARARGS, "stream(key, rounds): the first block of the key stream, to compare with ChaCha elsewhere."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_gaussian", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__gaussian(void) { return PyModule_Create(&module); }
