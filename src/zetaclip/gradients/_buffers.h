/* Reading the memory of numpy arrays, whose type and length are checked: no caller can make the
 * compiled parts read or write beyond what they were given. */
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Takes a contiguous buffer of one type of number, "f", "d" or "l" (64 bits), and an exact count of
 * them. */
static int take(PyObject *object, Py_buffer *view, char type, int writable, size_t count)
{
    const size_t size = type == 'f' ? sizeof(float) : sizeof(double);
    if (PyObject_GetBuffer(object, view,
                           PyBUF_FORMAT | PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0)) < 0)
        return 0;
    if (view->format == NULL || view->format[0] != type || view->format[1] ||
        (size_t)view->itemsize != size)
        PyErr_Format(PyExc_TypeError, "the values must be %s%d", type == 'l' ? "int" : "float",
                     (int)(8 * size));
    else if ((size_t)view->len / size != count)
        PyErr_Format(PyExc_ValueError, "%zu numbers where %zu are needed", (size_t)view->len / size,
                     count);
    else
        return 1;
    PyBuffer_Release(view);
    return 0;
}
