/* Norms and weighted sums over the rows of small matrices, many matrices in one call.
 *
 * On a small network the arithmetic of clipping takes less time than the calls to it. Here all
 * layers of a chunk are one call: one for the norms, one for the weighted sums. rows.py decides
 * which matrices are processed here, and does the work if this file was not compiled. The same
 * holds for the few columns that a rule releases beside the sum, and for perturbed weights.
 *
 * Sums are computed in lanes and in pieces of bounded length, so that every processor rounds in the
 * same way and wide rows lose no precision.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 8
#define STRIDE (4 * LANES) /* values per iteration: four parallel sums hide an addition's latency */
#define PIECE 2048         /* values that are added in float32; such sums are added in double */
#define COLUMNS 2048       /* columns of a sum over rows that are processed at once */
#define FIELDS 4           /* numbers that describe one task */

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#if __GNUC__ >= 12
#define WIDE __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define WIDE __attribute__((target_clones("avx2", "default")))
#endif
#else
#define WIDE
#endif

typedef float lanes __attribute__((vector_size(4 * LANES)));

/* The norms of the rows of a matrix: inf or nan if the squares overflow float32. */
WIDE static void row_norms(const float *restrict values, size_t rows, size_t width,
                           double *restrict norms)
{
    for (size_t row = 0; row < rows; row++, values += width) {
        double total = 0.0;
        for (size_t start = 0; start < width; start += PIECE) {
            size_t end = width - start < PIECE ? width : start + PIECE, i = start;
            lanes a = {0}, b = {0}, c = {0}, d = {0}, v, w, x, y;
            for (; i + STRIDE <= end; i += STRIDE) {
                memcpy(&v, values + i, sizeof v);
                memcpy(&w, values + i + LANES, sizeof w);
                memcpy(&x, values + i + 2 * LANES, sizeof x);
                memcpy(&y, values + i + 3 * LANES, sizeof y);
                a += v * v;
                b += w * w;
                c += x * x;
                d += y * y;
            }
            for (; i + LANES <= end; i += LANES) {
                memcpy(&v, values + i, sizeof v);
                a += v * v;
            }
            a = (a + b) + (c + d);
            float rest = ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
            for (; i < end; i++) rest += values[i] * values[i];
            total += rest;
        }
        norms[row] = total;
    }
    for (size_t row = 0; row < rows; row++) norms[row] = sqrt(norms[row]);
}

/* scaled = factor * row for every row, and sum += their sum, in double; either may be NULL. */
WIDE static void weigh_rows(const float *restrict values, const double *restrict factors,
                            size_t rows, size_t width, double *restrict scaled,
                            double *restrict sum)
{
    if (scaled != NULL)
        for (size_t row = 0; row < rows; row++)
            for (size_t i = 0; i < width; i++)
                scaled[row * width + i] = factors[row] * values[row * width + i];
    if (sum == NULL) return;
    for (size_t start = 0; start < width; start += COLUMNS) { /* these sums stay in the cache */
        size_t end = width - start < COLUMNS ? width : start + COLUMNS, row = 0;
        for (; row + 4 <= rows; row += 4) {
            const float *a = values + row * width, *b = a + width, *c = b + width, *d = c + width;
            double p = factors[row], q = factors[row + 1];
            double r = factors[row + 2], s = factors[row + 3];
            for (size_t i = start; i < end; i++)
                sum[i] += (p * a[i] + q * b[i]) + (r * c[i] + s * d[i]);
        }
        for (; row < rows; row++)
            for (size_t i = start; i < end; i++) sum[i] += factors[row] * values[row * width + i];
    }
}

/* Reads a list of integers, FIELDS per task; free the result with PyMem_Free. */
static uint64_t *read_tasks(PyObject *list, Py_ssize_t *tasks)
{
    Py_ssize_t length = PyList_Check(list) ? PyList_GET_SIZE(list) : -1;
    if (length < 0 || length % FIELDS) {
        PyErr_SetString(PyExc_TypeError, "tasks are a list of integers, four per task");
        return NULL;
    }
    uint64_t *fields = PyMem_Malloc((length ? length : 1) * sizeof *fields);
    if (fields == NULL) return (uint64_t *)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < length; i++) {
        fields[i] = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(list, i));
        if (PyErr_Occurred()) {
            PyMem_Free(fields);
            return NULL;
        }
    }
    *tasks = length / FIELDS;
    return fields;
}

static PyObject *norms(PyObject *self, PyObject *args)
{
    PyObject *list;
    unsigned long long rows, address;
    int fresh;
    double lost, scale;
    Py_ssize_t tasks;
    if (!PyArg_ParseTuple(args, "OKKpdd", &list, &rows, &address, &fresh, &lost, &scale))
        return NULL;
    uint64_t *fields = read_tasks(list, &tasks);
    if (fields == NULL) return NULL;
    double *first = PyMem_Malloc(2 * (rows ? rows : 1) * sizeof *first), *second = first + rows;
    if (first == NULL) {
        PyMem_Free(fields);
        return PyErr_NoMemory();
    }
    double *out = (double *)(uintptr_t)address, largest = 0.0;
    int finite = 1;
    Py_BEGIN_ALLOW_THREADS
    /* The matrix whose norms are in `second`: a layer's weight and bias share one. */
    uint64_t done = 0, wide = 0;
    for (size_t i = 0; fresh && i < rows; i++) out[i] = 0.0;
    for (Py_ssize_t task = 0; task < tasks; task++) {
        const uint64_t *f = fields + FIELDS * task;
        if (task == 0 || f[2] != done || f[3] != wide)
            row_norms((const float *)(uintptr_t)f[2], rows, f[3], second);
        done = f[2];
        wide = f[3];
        if (f[0]) {
            /* What underflow hid in one factor counts if the other factor is huge. */
            double hidden = sqrt((double)(f[1] > f[3] ? f[1] : f[3]) * FLT_MIN);
            row_norms((const float *)(uintptr_t)f[0], rows, f[1], first);
            for (size_t i = 0; i < rows; i++) {
                double product = (first[i] + hidden) * (second[i] + hidden);
                out[i] += product * product;
            }
        } else {
            for (size_t i = 0; i < rows; i++) out[i] += second[i] * second[i];
        }
    }
    for (size_t i = 0; i < rows; i++) {
        out[i] = (sqrt(out[i]) + lost) * scale;
        finite = finite && isfinite(out[i]);
        largest = out[i] > largest ? out[i] : largest;
    }
    Py_END_ALLOW_THREADS
    PyMem_Free(first);
    PyMem_Free(fields);
    return PyFloat_FromDouble(finite ? largest : INFINITY);
}

static PyObject *weigh(PyObject *self, PyObject *args)
{
    PyObject *list;
    unsigned long long rows, address;
    double by;
    Py_ssize_t tasks;
    if (!PyArg_ParseTuple(args, "OKKd", &list, &rows, &address, &by)) return NULL;
    uint64_t *fields = read_tasks(list, &tasks);
    if (fields == NULL) return NULL;
    double *factors = PyMem_Malloc((rows ? rows : 1) * sizeof *factors);
    if (factors == NULL) {
        PyMem_Free(fields);
        return PyErr_NoMemory();
    }
    const double *given = (const double *)(uintptr_t)address;
    Py_BEGIN_ALLOW_THREADS
    for (size_t i = 0; i < rows; i++) factors[i] = given[i] * by;
    for (Py_ssize_t task = 0; task < tasks; task++) {
        const uint64_t *f = fields + FIELDS * task;
        weigh_rows((const float *)(uintptr_t)f[0], factors, rows, f[1], (double *)(uintptr_t)f[2],
                   (double *)(uintptr_t)f[3]);
    }
    Py_END_ALLOW_THREADS
    PyMem_Free(factors);
    PyMem_Free(fields);
    Py_RETURN_NONE;
}

static PyObject *flat(PyObject *self, PyObject *args)
{
    unsigned long long rows, norms, factors;
    double clip;
    if (!PyArg_ParseTuple(args, "KdKK", &rows, &clip, &norms, &factors)) return NULL;
    const double *given = (const double *)(uintptr_t)norms;
    double *out = (double *)(uintptr_t)factors;
    for (size_t i = 0; i < rows; i++) out[i] = clip / (given[i] > clip ? given[i] : clip);
    Py_RETURN_NONE;
}

static PyObject *farthest(PyObject *self, PyObject *args)
{
    unsigned long long rows, norms, factors, columns, width;
    if (!PyArg_ParseTuple(args, "KKKKK", &rows, &norms, &factors, &columns, &width)) return NULL;
    const double *norm = (const double *)(uintptr_t)norms;
    const double *factor = (const double *)(uintptr_t)factors;
    const double *column = (const double *)(uintptr_t)columns;
    double largest = 0.0;
    for (size_t i = 0; i < rows; i++) {
        double moved = norm ? fabs(norm[i] * factor[i]) : 0.0;
        if (column) {
            double squares = moved * moved;
            for (size_t j = 0; j < width; j++, column++) squares += *column * *column;
            moved = sqrt(squares);
        }
        largest = moved <= largest ? largest : moved; /* nan if `moved` is nan */
        if (isnan(moved)) break;                      /* the next row would overwrite it */
    }
    return PyFloat_FromDouble(largest);
}

static PyObject *halves(PyObject *self, PyObject *args)
{
    unsigned long long rows, norms, columns;
    double limit;
    if (!PyArg_ParseTuple(args, "KdKK", &rows, &limit, &norms, &columns)) return NULL;
    const double *given = (const double *)(uintptr_t)norms;
    double *out = (double *)(uintptr_t)columns;
    for (size_t i = 0; i < rows; i++) out[i] = copysign(0.5, limit - given[i]);
    Py_RETURN_NONE;
}

static PyObject *slots(PyObject *self, PyObject *args)
{
    unsigned long long rows, width, norms, columns;
    double clip;
    if (!PyArg_ParseTuple(args, "KdKKK", &rows, &clip, &width, &norms, &columns)) return NULL;
    const double *given = (const double *)(uintptr_t)norms;
    double *out = (double *)(uintptr_t)columns, root = sqrt((double)width), full = clip / root;
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < width; j++) {
            double rest = (root * clip - (double)j * full) - root * given[i];
            *out++ = rest > full ? full : rest > 0.0 ? rest : 0.0;
        }
    Py_RETURN_NONE;
}

static PyObject *sums(PyObject *self, PyObject *args)
{
    unsigned long long rows, columns, width;
    if (!PyArg_ParseTuple(args, "KKK", &rows, &columns, &width)) return NULL;
    const double *column = (const double *)(uintptr_t)columns;
    PyObject *list = PyList_New((Py_ssize_t)width);
    for (size_t j = 0; list != NULL && j < width; j++) {
        double total = 0.0;
        for (size_t i = 0; i < rows; i++) total += column[i * width + j];
        PyObject *value = PyFloat_FromDouble(total);
        if (value == NULL) Py_CLEAR(list);
        else PyList_SET_ITEM(list, (Py_ssize_t)j, value);
    }
    return list;
}

/* sum = one + by * other; the sum may be one of the two. */
WIDE static void add_scaled(float *sum, const float *one, const float *other, size_t count,
                            float by)
{
    for (size_t i = 0; i < count; i++) sum[i] = one[i] + by * other[i];
}

static PyObject *advance(PyObject *self, PyObject *args)
{
    PyObject *list;
    unsigned long long address, count;
    double distance, length;
    Py_ssize_t tasks;
    if (!PyArg_ParseTuple(args, "OKKd", &list, &address, &count, &distance)) return NULL;
    uint64_t *fields = read_tasks(list, &tasks);
    if (fields == NULL) return NULL;
    row_norms((const float *)(uintptr_t)address, 1, count, &length);
    float by = (float)(distance / length);
    int moves = isfinite(length) && isfinite(by);
    for (Py_ssize_t task = 0; moves && task < tasks; task++) {
        const uint64_t *f = fields + FIELDS * task;
        add_scaled((float *)(uintptr_t)f[0], (const float *)(uintptr_t)f[2],
                   (const float *)(uintptr_t)f[3], f[1], by);
    }
    PyMem_Free(fields);
    return PyBool_FromLong(moves);
}

static PyMethodDef methods[] = {
    {"norms", norms, METH_VARARGS,
     "norms(tasks, rows, address, fresh, lost, scale) -> largest\n\n"
     "A task is (address, width, address, width) of two float32 matrices, whose row norms are\n"
     "multiplied; the first address may be 0. The float64 values at `address` are sums of squares\n"
     "(uninitialized if fresh) and become scale * (lost + sqrt(sum + squares of all tasks)). The\n"
     "largest is returned, or inf if one is not finite."},
    {"weigh", weigh, METH_VARARGS,
     "weigh(tasks, rows, factors, by)\n\n"
     "A task is (address, width, scaled, sum): a float32 matrix, where to put its rows times\n"
     "factor * by, and where to add their sum, both float64; the last two may be 0. `factors` is\n"
     "the address of float64 values."},
    {"flat", flat, METH_VARARGS,
     "flat(rows, clip, norms, factors)\n\n"
     "factor = clip / max(norm, clip), float64 at two addresses."},
    {"farthest", farthest, METH_VARARGS,
     "farthest(rows, norms, factors, columns, width) -> the largest norm, or nan if one is nan\n\n"
     "The norm of a row is that of norm * factor together with its `width` columns; either the\n"
     "first two addresses or the third may be 0. All are float64."},
    {"halves", halves, METH_VARARGS,
     "halves(rows, limit, norms, column)\n\n"
     "+1/2 for a norm up to the limit, -1/2 above it, float64 at two addresses."},
    {"slots", slots, METH_VARARGS,
     "slots(rows, clip, width, norms, columns)\n\n"
     "Distributes sqrt(width) * (clip - norm) over `width` float64 columns, one after the other,\n"
     "at most clip / sqrt(width) in each; a norm above clip gives zeros."},
    {"sums", sums, METH_VARARGS, "sums(rows, columns, width) -> the sum of each float64 column"},
    {"advance", advance, METH_VARARGS,
     "advance(tasks, vector, count, distance) -> bool\n\n"
     "A task is (sum, count, one, other), all float32: sum = one + distance / |vector| * other;\n"
     "sum may be one of the two. If the vector has no direction, nothing is written and False is\n"
     "returned."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_rows", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__rows(void) { return PyModule_Create(&module); }
