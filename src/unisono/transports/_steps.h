/* Rows of programs, and what the files of the module share. */

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* The numbers of `RowKind` in steps.py. */
enum Kind {
    COPY, SUM_FLOAT32, SUM_FLOAT64, SUM_BFLOAT16, MORE, BARRIER, OTHER, SEND, RECEIVE, ROUND,
    SUM_INT32, SUM_INT64, MAXIMUM_INT32, MAXIMUM_INT64, EXACT_FLOAT32, EXACT_FLOAT64, SUM_FLOAT16, PART
};

/* Sums of blocks in the caches gain by wide vectors; elsewhere memory is the limit. The bits do not depend on them.
   GCC before 12 refuses these names of processors (PR 101696). */
#if defined(__x86_64__) && defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__) && defined(__GLIBC__)
#define FOR_EACH_VECTOR_WIDTH __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_VECTOR_WIDTH
#endif

/* Payloads may begin at any byte. */
#define ANYWHERE __attribute__((aligned(1), may_alias))
typedef float float32 ANYWHERE;
typedef double float64 ANYWHERE;
typedef uint16_t half ANYWHERE; /* float16 or bfloat16 */
typedef int32_t int32 ANYWHERE;
typedef int64_t int64 ANYWHERE;
typedef uint32_t uint32 ANYWHERE;
typedef uint64_t uint64 ANYWHERE;

typedef struct {
    int64_t kind, count; /* bytes of a copy or a message, elements of a sum */
    int64_t into, one, other;
} Row;

/* Copy or sum as a row says. `more` is the number of rows of kind MORE after it. */
void move(const Row *row, Py_ssize_t more);
void sum_exactly(const Row *row, Py_ssize_t more);

/* Return the number of rows of kind MORE after a row; `end` is the end of the program. */
static inline Py_ssize_t count_more(const Row *row, const Row *end) {
    Py_ssize_t more = 0;
    while (row + more + 1 < end && row[more + 1].kind == MORE) more++;
    return more;
}

/* Fill `names` with strings, so that attributes are found fast. Return -1 with an error. */
static inline int intern(PyObject **names, const char *const *spelled, int count) {
    for (int i = 0; i < count; i++)
        if ((names[i] = PyUnicode_InternFromString(spelled[i])) == NULL) return -1;
    return 0;
}

/* Return the function of Python of a definition: its `self` is `memory`, from `calloc`, and `kept`, which live as long.
   NULL with an error: then `memory` is freed. */
PyObject *make_function(PyMethodDef *definition, void *memory, PyObject *kept);

static inline void *memory_of(PyObject *self) { return PyCapsule_GetPointer(PyTuple_GET_ITEM(self, 0), NULL); }

/* Return the memory of an object that never moves it, and its size; NULL with an error. */
void *memory_in(PyObject *object, int flags, Py_ssize_t *nbytes);

/* Make the functions or types of a file, and add them to the module. Return -1 with an error. */
int add_exact(PyObject *module);
int add_ready(PyObject *module);
int add_messenger(PyObject *module);
int add_socket_call(PyObject *module);

/* Return the `self` of a function that `make_messenger` has made, a borrowed reference; NULL for other objects. */
PyObject *messages_of(PyObject *messenger);

/* Carry out what a messenger does, by its `self`. Return a new reference to None, or NULL. */
PyObject *play_messages(PyObject *self, uint64_t token, int64_t source, int64_t target);

/* Carry out what a found play does: without a call by Python if it is compiled. Return a new reference, or NULL. */
PyObject *start_play(PyObject *play);
