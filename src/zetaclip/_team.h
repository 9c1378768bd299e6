/* Work for several threads, which an OpenMP library keeps; see threads.py. */
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

typedef void (*share_of_work)(void *data, size_t first, size_t stop);

/* What threads.team() returns: the library's function that runs another one in all its threads,
 * or NULL, and their number. */
typedef struct {
    void (*start)(void (*)(void *), void *, unsigned, unsigned);
    unsigned threads;
} team;

#define TURNS 4 /* for `deal` */

typedef struct {
    share_of_work work;
    void *data;
    size_t count, share, next;
} shares;

static void take_shares(void *given)
{
    shares *all = given;
    size_t first;
    while ((first = __atomic_fetch_add(&all->next, all->share, __ATOMIC_RELAXED)) < all->count)
        all->work(all->data, first,
                  all->count - first < all->share ? all->count : first + all->share);
}

/* Calls work(data, first, stop) for all of 0 to count - 1, once each; every share but the last is
 * a multiple of `step`. With several `turns`, shares are so many times smaller, and a thread that
 * wakes up late or is interrupted takes fewer of them. That pays where a share of its own costs
 * little. The result must be the same whatever the shares are. */
static void deal(const team *t, size_t count, size_t step, size_t turns, share_of_work work,
                 void *data)
{
    const size_t per_round = t->threads * turns * step;
    shares all = {work, data, count, (count + per_round - 1) / per_round * step, 0};
    if (t->start == NULL || all.share >= count)
        work(data, 0, count);
    else
        t->start(take_shares, &all, t->threads, 0);
}

/* For PyArg_ParseTuple, "O&". */
static int read_team(PyObject *given, void *to)
{
    team *t = to;
    Py_ssize_t start, threads;
    if (!PyArg_ParseTuple(given, "nn", &start, &threads)) return 0;
    if (threads < 1 || threads > 1 << 16) {
        PyErr_SetString(PyExc_ValueError, "a team has one thread or more");
        return 0;
    }
    t->start = (void (*)(void (*)(void *), void *, unsigned, unsigned))start;
    t->threads = (unsigned)threads;
    return 1;
}
