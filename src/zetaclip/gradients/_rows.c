/* Norms and weighted sums over the rows of small matrices, many matrices in one call.
 *
 * On a small network the arithmetic of clipping takes less time than the calls that ask for it.
 * Here all layers of a chunk are one call: once for the norms, once for what the factors
 * multiply. gradients/rows.py says which matrices come here and what happens without this file.
 *
 * Everything is passed as a buffer, whose type and length are checked here: no caller can make
 * this file read or write beyond the memory that it was given.
 *
 * Sums are taken in lanes, and a bounded number of values at a time, so that every processor
 * rounds alike and wide rows lose no digits.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "../_team.h"
#include "_buffers.h"

#define LANES 8
/* Values per turn of the inner loop: four sums side by side hide the latency of an addition. */
#define STRIDE (4 * LANES)
#define PIECE 2048         /* values that are summed in float32 before the sum goes on in double */
#define COLUMNS 2048       /* of a sum over rows that are worked through at once */
#define SHARE 64           /* columns are shared by threads in multiples of this */

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

/* The norms of the rows of a matrix: inf or nan where float32 can't hold the squares. */
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

/* sum += factor * row for every row, in double, in columns first to stop. */
WIDE static void weigh_rows(const float *restrict values, const double *restrict factors,
                            size_t rows, size_t width, size_t first, size_t stop,
                            double *restrict sum)
{
    /* So many sums stay in the cache while the rows go by. */
    for (size_t start = first; start < stop; start += COLUMNS) {
        size_t end = stop - start < COLUMNS ? stop : start + COLUMNS, row = 0;
        for (; row + 4 <= rows; row += 4) {
            const float *a = values + row * width, *b = a + width, *c = b + width, *d = c + width;
            double p = factors[row], q = factors[row + 1], r = factors[row + 2],
                   s = factors[row + 3];
            for (size_t i = start; i < end; i++)
                sum[i] += (p * a[i] + q * b[i]) + (r * c[i] + s * d[i]);
        }
        for (; row < rows; row++)
            for (size_t i = start; i < end; i++) sum[i] += factors[row] * values[row * width + i];
    }
}

/* out = sum over its slots of weight * row, for units first to stop; every index is in range. */
WIDE static void join_rows(const float *restrict values, const int64_t *restrict index,
                           const float *restrict weights, size_t slots, size_t width, size_t first,
                           size_t stop, float *restrict out)
{
    for (size_t unit = first; unit < stop; unit++)
        for (size_t start = 0; start < width; start += COLUMNS) {
            size_t end = width - start < COLUMNS ? width : start + COLUMNS;
            float *restrict own = out + unit * width;
            for (size_t slot = unit * slots; slot < (unit + 1) * slots; slot++) {
                const float *row = values + (size_t)index[slot] * width;
                const float weight = weights[slot];
                if (slot == unit * slots)
                    for (size_t i = start; i < end; i++) own[i] = weight * row[i];
                else
                    for (size_t i = start; i < end; i++) own[i] += weight * row[i];
            }
        }
}

/* squares += the squared lengths of multiplier * row - shift, in double. */
WIDE static void mapped_rows(const float *restrict values, const double *restrict multiplier,
                             const double *restrict shift, size_t rows, size_t width,
                             double *restrict squares)
{
    for (size_t row = 0; row < rows; row++, values += width) {
        double sums[STRIDE] = {0}, total = 0.0;
        size_t i = 0;
        for (; i + STRIDE <= width; i += STRIDE)
            for (size_t k = 0; k < STRIDE; k++) {
                double mapped = multiplier[i + k] * values[i + k] - shift[i + k];
                sums[k] += mapped * mapped;
            }
        for (; i < width; i++) {
            double mapped = multiplier[i] * values[i] - shift[i];
            total += mapped * mapped;
        }
        for (size_t k = 0; k < STRIDE; k++) total += sums[k];
        squares[row] += total;
    }
}

/* Takes a float32 matrix of so many rows, of any width. */
static int take_matrix(PyObject *object, Py_buffer *view, size_t rows, size_t *width)
{
    if (PyObject_GetBuffer(object, view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0) return 0;
    size_t count = (size_t)view->len / sizeof(float);
    if (view->format == NULL || strcmp(view->format, "f") || view->itemsize != sizeof(float))
        PyErr_SetString(PyExc_TypeError, "the values must be float32");
    else if (rows == 0 || count % rows)
        PyErr_Format(PyExc_ValueError, "%zu numbers are no matrix of %zu rows", count, rows);
    else {
        *width = count / rows;
        return 1;
    }
    PyBuffer_Release(view);
    return 0;
}

/* One task of `norms` or `weigh`: two buffers. One that is None has obj == NULL. */
typedef struct {
    Py_buffer first, second;
    size_t first_width, second_width;
} task;

static void release(task *tasks, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        PyBuffer_Release(&tasks[i].first); /* does nothing for a buffer that was never taken */
        PyBuffer_Release(&tasks[i].second);
    }
    PyMem_Free(tasks);
}

/* Reads a list of tuples by `read`, which returns 0 after it has set an error. */
static task *read_tasks(PyObject *list, size_t rows, int (*read)(PyObject *, size_t, task *),
                        Py_ssize_t *count)
{
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "tasks are a list of tuples");
        return NULL;
    }
    *count = PyList_GET_SIZE(list);
    task *tasks = PyMem_Calloc(*count ? *count : 1, sizeof *tasks);
    if (tasks == NULL) return (task *)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < *count; i++)
        if (!read(PyList_GET_ITEM(list, i), rows, tasks + i)) {
            release(tasks, i + 1);
            return NULL;
        }
    return tasks;
}

static int read_norm_task(PyObject *tuple, size_t rows, task *to)
{
    PyObject *x, *g;
    if (!PyArg_ParseTuple(tuple, "OO", &x, &g)) return 0;
    return (x == Py_None || take_matrix(x, &to->first, rows, &to->first_width)) &&
           take_matrix(g, &to->second, rows, &to->second_width);
}

static PyObject *norms(PyObject *self, PyObject *args)
{
    PyObject *list, *array;
    int fresh;
    double lost, scale;
    Py_ssize_t count, rows;
    Py_buffer values;
    if (!PyArg_ParseTuple(args, "OnOpdd", &list, &rows, &array, &fresh, &lost, &scale)) return NULL;
    if (rows < 0 || !take(array, &values, 'd', 1, rows)) {
        if (rows < 0) PyErr_SetString(PyExc_ValueError, "a negative number of rows");
        return NULL;
    }
    task *tasks = read_tasks(list, rows, read_norm_task, &count);
    double *first = tasks == NULL ? NULL : PyMem_Malloc(2 * (rows ? rows : 1) * sizeof *first);
    if (first == NULL) {
        if (tasks != NULL) {
            release(tasks, count);
            PyErr_NoMemory();
        }
        PyBuffer_Release(&values);
        return NULL;
    }
    double *second = first + rows, *out = values.buf, largest = 0.0;
    int finite = 1;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; fresh && i < rows; i++) out[i] = 0.0;
    for (Py_ssize_t done = 0; done < count; done++) {
        const task *t = tasks + done, *before = done ? t - 1 : NULL;
        /* A layer's weight and bias share a matrix: its norms are in `second` already. */
        if (before == NULL || t->second.buf != before->second.buf ||
            t->second_width != before->second_width)
            row_norms(t->second.buf, rows, t->second_width, second);
        if (t->first.obj != NULL) {
            /* A product: what underflow hid in one factor must not vanish when the other is
             * huge. */
            size_t wider = t->first_width > t->second_width ? t->first_width : t->second_width;
            double hidden = sqrt((double)wider * FLT_MIN);
            row_norms(t->first.buf, rows, t->first_width, first);
            for (Py_ssize_t i = 0; i < rows; i++) {
                double product = (first[i] + hidden) * (second[i] + hidden);
                out[i] += product * product;
            }
        } else {
            for (Py_ssize_t i = 0; i < rows; i++) out[i] += second[i] * second[i];
        }
    }
    for (Py_ssize_t i = 0; i < rows; i++) {
        out[i] = (sqrt(out[i]) + lost) * scale;
        finite = finite && isfinite(out[i]);
        largest = out[i] > largest ? out[i] : largest;
    }
    Py_END_ALLOW_THREADS
    PyMem_Free(first);
    release(tasks, count);
    PyBuffer_Release(&values);
    return PyFloat_FromDouble(finite ? largest : INFINITY);
}

static int read_weigh_task(PyObject *tuple, size_t rows, task *to)
{
    PyObject *matrix, *sum;
    if (!PyArg_ParseTuple(tuple, "OO", &matrix, &sum)) return 0;
    return take_matrix(matrix, &to->first, rows, &to->first_width) &&
           take(sum, &to->second, 'd', 1, to->first_width);
}

/* Tasks whose work is shared, by columns of their rows or by units. */
typedef struct {
    const task *tasks;
    Py_ssize_t count, rows, slots;
    const double *factors;
    const int64_t *index;
    const float *weights;
} shared;

static void weigh_columns(void *given, size_t first, size_t stop)
{
    const shared *s = given;
    for (const task *t = s->tasks; t < s->tasks + s->count; t++)
        weigh_rows(t->first.buf, s->factors, s->rows, t->first_width, first,
                   stop < t->first_width ? stop : t->first_width, t->second.buf);
}

static PyObject *weigh(PyObject *self, PyObject *args)
{
    PyObject *list, *array;
    Py_ssize_t count, rows;
    Py_buffer factors;
    team t;
    if (!PyArg_ParseTuple(args, "OnOO&", &list, &rows, &array, read_team, &t)) return NULL;
    if (rows < 0 || !take(array, &factors, 'd', 0, rows)) {
        if (rows < 0) PyErr_SetString(PyExc_ValueError, "a negative number of rows");
        return NULL;
    }
    task *tasks = read_tasks(list, rows, read_weigh_task, &count);
    if (tasks == NULL) {
        PyBuffer_Release(&factors);
        return NULL;
    }
    shared s = {tasks, count, rows, 0, factors.buf, NULL, NULL};
    size_t widest = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        if (tasks[i].first_width > widest) widest = tasks[i].first_width;
    Py_BEGIN_ALLOW_THREADS
    deal(&t, widest, SHARE, TURNS, weigh_columns, &s);
    Py_END_ALLOW_THREADS
    release(tasks, count);
    PyBuffer_Release(&factors);
    Py_RETURN_NONE;
}

static int read_join_task(PyObject *tuple, size_t rows, task *to)
{
    PyObject *matrix, *out;
    if (!PyArg_ParseTuple(tuple, "OO", &matrix, &out)) return 0;
    return take_matrix(matrix, &to->first, rows, &to->first_width) &&
           take_matrix(out, &to->second, 1, &to->second_width);
}

static void join_units(void *given, size_t first, size_t stop)
{
    const shared *s = given;
    for (const task *t = s->tasks; t < s->tasks + s->count; t++)
        join_rows(t->first.buf, s->index, s->weights, s->slots, t->first_width, first, stop,
                  t->second.buf);
}

static PyObject *join(PyObject *self, PyObject *args)
{
    PyObject *list, *given_index, *given_weights;
    Py_ssize_t count, rows, units, slots;
    Py_buffer index, weights;
    team t;
    if (!PyArg_ParseTuple(args, "OOO(nnn)O&", &list, &given_index, &given_weights, &rows, &units,
                          &slots, read_team, &t))
        return NULL;
    if (rows < 1 || units < 0 || slots < 1) {
        PyErr_SetString(PyExc_ValueError, "there are no such units");
        return NULL;
    }
    if (!take(given_index, &index, 'l', 0, units * slots)) return NULL;
    if (!take(given_weights, &weights, 'f', 0, units * slots)) {
        PyBuffer_Release(&index);
        return NULL;
    }
    task *tasks = read_tasks(list, rows, read_join_task, &count);
    int fine = tasks != NULL;
    const int64_t *at = index.buf;
    for (Py_ssize_t i = 0; fine && i < units * slots; i++)
        if (at[i] < 0 || at[i] >= rows) {
            PyErr_SetString(PyExc_ValueError, "there is no such row");
            fine = 0;
        }
    for (Py_ssize_t i = 0; fine && i < count; i++)
        if (tasks[i].second.readonly || tasks[i].second_width != units * tasks[i].first_width) {
            PyErr_SetString(PyExc_ValueError, "the sums don't fit into what they are written to");
            fine = 0;
        }
    if (fine) {
        shared s = {tasks, count, rows, slots, NULL, at, weights.buf};
        Py_BEGIN_ALLOW_THREADS
        deal(&t, units, 1, TURNS, join_units, &s);
        Py_END_ALLOW_THREADS
    }
    if (tasks != NULL) release(tasks, count);
    PyBuffer_Release(&index);
    PyBuffer_Release(&weights);
    if (!fine) return NULL;
    Py_RETURN_NONE;
}

static PyObject *mapped(PyObject *self, PyObject *args)
{
    PyObject *given[4];
    Py_ssize_t rows;
    size_t width;
    Py_buffer matrix, multiplier, shift, squares;
    if (!PyArg_ParseTuple(args, "OOOOn", given, given + 1, given + 2, given + 3, &rows))
        return NULL;
    if (rows < 1) {
        PyErr_SetString(PyExc_ValueError, "no rows");
        return NULL;
    }
    PyObject *result = NULL;
    if (!take_matrix(given[0], &matrix, rows, &width)) return NULL;
    if (take(given[1], &multiplier, 'd', 0, width)) {
        if (take(given[2], &shift, 'd', 0, width)) {
            if (take(given[3], &squares, 'd', 1, rows)) {
                Py_BEGIN_ALLOW_THREADS
                mapped_rows(matrix.buf, multiplier.buf, shift.buf, rows, width, squares.buf);
                Py_END_ALLOW_THREADS
                result = Py_NewRef(Py_None);
                PyBuffer_Release(&squares);
            }
            PyBuffer_Release(&shift);
        }
        PyBuffer_Release(&multiplier);
    }
    PyBuffer_Release(&matrix);
    return result;
}

static PyMethodDef methods[] = {
    {"norms", norms, METH_VARARGS,
     "norms(tasks, rows, values, fresh, lost, scale) -> largest\n\n"
     "A task is (x, g): two float32 matrices whose row norms are multiplied; x may be None. The\n"
     "float64 values are sums of squares (nothing yet, if fresh), one per row, and become\n"
     "scale * (lost + sqrt(sum + squares of all tasks)). The largest is returned, or inf if one\n"
     "is not finite."},
    {"weigh", weigh, METH_VARARGS,
     "weigh(tasks, rows, factors, team)\n\n"
     "A task is (matrix, sum): a float32 matrix, and the float64 sum that its rows times their\n"
     "factors are added to. `factors` holds one float64 value per row."},
    {"join", join, METH_VARARGS,
     "join(tasks, index, weights, (rows, units, slots), team)\n\n"
     "A task is (matrix, out), both float32: out[u] becomes the sum over slots of\n"
     "weights[u, slot] * matrix[index[u, slot]]. The index is int64."},
    {"mapped", mapped, METH_VARARGS,
     "mapped(matrix, multiplier, shift, squares, rows)\n\n"
     "Adds the squared length of multiplier * row - shift to each row's square, in float64."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_rows", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__rows(void) { return PyModule_Create(&module); }
