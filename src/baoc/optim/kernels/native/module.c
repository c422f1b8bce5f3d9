/* The Python module: one function that takes addresses, and what it can run on this processor. */
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "schedule.h"

extern const kernel kernel_plain;
#if defined(__x86_64__) && defined(__GNUC__)
extern const kernel kernel_avx2, kernel_avx512;
#endif

typedef struct {
    const char *name;
    const kernel *kernel;
} isa;

#define MOST_ISAS 3

/* Best first. */
static int supported(isa *found)
{
    int count = 0;
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
        isa avx512 = {"avx512", &kernel_avx512};
        found[count++] = avx512;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        isa avx2 = {"avx2", &kernel_avx2};
        found[count++] = avx2;
    }
#endif
    isa plain = {"plain", &kernel_plain};
    found[count++] = plain;
    return count;
}

static PyObject *run(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long words, scalars;
    long long count;
    int threads;
    const char *name;
    if (!PyArg_ParseTuple(args, "KKLis", &words, &scalars, &count, &threads, &name))
        return NULL;
    isa isas[MOST_ISAS];
    const kernel *chosen = NULL;
    for (int i = 0, n = supported(isas); i < n; i++)
        if (strcmp(isas[i].name, name) == 0)
            chosen = isas[i].kernel;
    if (!chosen) {
        PyErr_Format(PyExc_ValueError, "this processor or build has no kernels for %s", name);
        return NULL;
    }
    int failed, spiked = 0;
    Py_BEGIN_ALLOW_THREADS
    failed = run_jobs((const job_words *)(uintptr_t)words, (const job_scalars *)(uintptr_t)scalars, count, threads, chosen,
                      &spiked);
    Py_END_ALLOW_THREADS
    if (failed)
        return PyErr_NoMemory();
    return PyBool_FromLong(spiked);
}

static PyObject *isas(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    isa found[MOST_ISAS];
    int count = supported(found);
    PyObject *names = PyTuple_New(count);
    for (int i = 0; names && i < count; i++)
        PyTuple_SetItem(names, i, PyUnicode_FromString(found[i].name));
    return names;
}

#define NAME(name) #name,

static const char *const types[] = {TYPES(NAME) NULL};
static const char *const mechanisms[] = {MECHANISMS(NAME) NULL};
static const char *const array_parts[] = {ARRAY_PARTS(NAME) NULL};
static const char *const job_numbers[] = {JOB_NUMBERS(NAME) NULL};
static const char *const job_arrays[] = {JOB_ARRAYS(NAME) NULL};
static const char *const scalar_names[] = {JOB_SCALARS(NAME) NULL};

static int add_names(PyObject *module, const char *as, const char *const *names)
{
    Py_ssize_t count = 0;
    while (names[count])
        count++;
    PyObject *tuple = PyTuple_New(count);
    for (Py_ssize_t i = 0; tuple && i < count; i++)
        PyTuple_SetItem(tuple, i, PyUnicode_FromString(names[i]));
    int failed = !tuple || PyModule_AddObjectRef(module, as, tuple);
    Py_XDECREF(tuple);
    return failed;
}

static PyMethodDef methods[] = {
    {"run", run, METH_VARARGS, "run(words, scalars, count, threads, isa): one step; the first two are addresses. "
     "Returns whether a gradient is beyond 2**56 or no number"},
    {"isas", isas, METH_NOARGS, "instruction sets that this processor can run, best first"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", NULL, 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (!module)
        return NULL;
    if (add_names(module, "TYPES", types) || add_names(module, "MECHANISMS", mechanisms) ||
        add_names(module, "ARRAY_PARTS", array_parts) || add_names(module, "JOB_NUMBERS", job_numbers) ||
        add_names(module, "JOB_ARRAYS", job_arrays) || add_names(module, "JOB_SCALARS", scalar_names)) {
        Py_DECREF(module);
        return NULL;
    }
    PyModule_AddIntConstant(module, "JOB_BYTES", (long)sizeof(job_words));
    PyModule_AddIntConstant(module, "SCALAR_BYTES", (long)sizeof(job_scalars));
#ifdef _OPENMP
    PyModule_AddIntConstant(module, "OPENMP", 1);
#else
    PyModule_AddIntConstant(module, "OPENMP", 0);
#endif
    return module;
}
