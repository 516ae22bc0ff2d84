/* Collectives within one node, compiled: copies, sums and barriers on memory that the ranks share.

    program   COPY payload -> own slot | BARRIER | SUM slot 0, slot 1 -> payload        one row of five numbers each

`steps.py` makes programs, and plays the same rows by NumPy where this file was not compiled. A player does here what
takes nanoseconds. Whatever may take long it leaves to Python: a barrier whose other ranks are late, or in another call,
calls `late`, which waits, raises, and keeps MPI and signals going. `Ready` finds the collective that was prepared for
a tensor (`collectives/ready.py`): in Python that takes longer than a short collective.

Barriers are those of `barriers.py`. A token is stored with release order and read with acquire order, so that what a
rank has written before a barrier is seen by all after it, on any processor.
*/

#include "_steps.h"
#include <sched.h>

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ __volatile__("yield")
#else
#define PAUSE()
#endif

typedef struct {
    const Row *rows;
    Py_ssize_t length;
    int64_t nbytes; /* that are moved: long programs run without Python's lock */
} Program;

/* Numbers that Python and the players of a group share: `State` in barriers.py. */
typedef struct {
    int64_t sequence, label, before, ended;
} State;

typedef struct {
    PyObject *late;
    State *state;
    int64_t *own;
    Py_ssize_t other_count, program_count, token_words;
    int64_t number, spins, yields;
    Program *programs;
    int64_t *others[];
} Player;

/* Bytes of what a row counts, by kind. */
static const int64_t SIZES[SUM_FLOAT16 + 1] = {1, 4, 8, 2, 0, 0, 0, 0, 0, 0, 4, 8, 4, 8, 4, 8, 2};

static const int64_t MIN_UNLOCKED_BYTES = 32 << 10;

/* Enter the next barrier. Return 1 once all ranks have entered it in the same call; 0 if Python must go on. */
static int enter_barrier(Player *self) {
    State *state = self->state;
    if (state->ended) return 0;
    int64_t sequence = ++state->sequence, token = self->number + sequence + state->label;
    Py_ssize_t index = sequence & 1 ? self->token_words : 0;
    int64_t before = state->before = self->own[index];
    __atomic_store_n(&self->own[index], token, __ATOMIC_RELEASE);
    int64_t spins = self->spins, yields = self->yields;
    for (Py_ssize_t peer = 0; peer < self->other_count; peer++) {
        int64_t *word = &self->others[peer][index], found;
        while ((found = __atomic_load_n(word, __ATOMIC_ACQUIRE)) == before) {
            if (spins > 0) {
                spins--;
                PAUSE();
            } else if (yields > 0) {
                yields--;
                sched_yield();
            } else {
                return 0;
            }
        }
        if (found != token) return 0;
    }
    return 1;
}

/* Play a program from a row on. Return its length at its end, or the index of a barrier that Python must complete. */
static Py_ssize_t run(Player *self, const Program *program, Py_ssize_t first) {
    const Row *end = program->rows + program->length;
    for (Py_ssize_t index = first; index < program->length; index++) {
        const Row *row = &program->rows[index];
        if (row->kind == BARRIER) {
            if (!enter_barrier(self)) return index;
            continue;
        }
        Py_ssize_t more = count_more(row, end);
        move(row, more);
        index += more;
    }
    return program->length;
}

static PyObject *play(PyObject *object, PyObject *none) {
    Player *self = memory_of(object);
    const Program *program = &self->programs[(self->state->sequence + 1) % self->program_count];
    int unlocked = program->nbytes >= MIN_UNLOCKED_BYTES || self->yields;
    for (Py_ssize_t next = 0;; next++) {
        if (unlocked) {
            Py_BEGIN_ALLOW_THREADS
            next = run(self, program, next);
            Py_END_ALLOW_THREADS
        } else {
            next = run(self, program, next);
        }
        if (next == program->length) break;
        PyObject *waited = PyObject_CallNoArgs(self->late);
        if (waited == NULL) return NULL;
        Py_DECREF(waited);
        __atomic_thread_fence(__ATOMIC_ACQUIRE); /* Python has read the tokens without an order */
    }
    Py_RETURN_NONE;
}

static PyMethodDef play_definition = {"play", play, METH_NOARGS, "Carry a collective out, again and again."};

/* make_player(state, own, others, token_words, spins, yields, number, programs, late): `own` and `others` are addresses
   of tokens, `programs` arrays of rows, of which the number of the next barrier chooses one. Whoever calls it keeps the
   memory alive that the rows name. */
static PyObject *make_player(PyObject *module, PyObject *arguments) {
    PyObject *state, *others, *programs, *late;
    long long own, token_words, spins, yields, number;
    if (!PyArg_ParseTuple(arguments, "OLO!LLLLO!O", &state, &own, &PyTuple_Type, &others, &token_words, &spins,
                          &yields, &number, &PyTuple_Type, &programs, &late))
        return NULL;
    const Py_ssize_t other_count = PyTuple_Size(others), program_count = PyTuple_Size(programs);
    const size_t address_bytes = (size_t)other_count * sizeof(int64_t *);
    Player *self = calloc(1, sizeof(Player) + address_bytes + (size_t)program_count * sizeof(Program));
    if (self == NULL) return PyErr_NoMemory();
    *self = (Player){
        .late = late, .own = (int64_t *)(intptr_t)own, .token_words = (Py_ssize_t)token_words, .spins = spins,
        .yields = yields, .number = number, .other_count = other_count, .program_count = program_count,
        .programs = (Program *)(self->others + other_count),
    };
    for (Py_ssize_t i = 0; i < other_count; i++) self->others[i] = PyLong_AsVoidPtr(PyTuple_GetItem(others, i));
    Py_ssize_t nbytes;
    if (!PyErr_Occurred()) self->state = memory_in(state, PyBUF_WRITABLE, &nbytes);
    for (Py_ssize_t i = 0; i < program_count && !PyErr_Occurred(); i++) {
        Program *program = &self->programs[i];
        program->rows = memory_in(PyTuple_GetItem(programs, i), PyBUF_SIMPLE, &nbytes);
        program->length = nbytes / (Py_ssize_t)sizeof(Row);
        for (Py_ssize_t j = 0; j < program->length; j++) {
            const Row *row = &program->rows[j];
            program->nbytes += SIZES[row->kind] * row->count;
        }
    }
    if (!PyErr_Occurred()) return make_function(&play_definition, self, arguments);
    free(self);
    return NULL;
}

PyObject *start_play(PyObject *found) {
    const int is_compiled = PyCFunction_CheckExact(found) && PyCFunction_GET_FUNCTION(found) == play;
    return is_compiled ? play(PyCFunction_GET_SELF(found), NULL) : PyObject_CallNoArgs(found);
}

static PyObject *poll_word(PyObject *module, PyObject *arguments) {
    Py_buffer words;
    Py_ssize_t index;
    long long before, polls;
    if (!PyArg_ParseTuple(arguments, "y*nLL", &words, &index, &before, &polls)) return NULL;
    const int64_t *word = (const int64_t *)words.buf + index;
    Py_BEGIN_ALLOW_THREADS
    while (polls-- > 0 && __atomic_load_n(word, __ATOMIC_ACQUIRE) == before) PAUSE();
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&words);
    Py_RETURN_NONE;
}

static void free_memory(PyObject *capsule) { free(PyCapsule_GetPointer(capsule, NULL)); }

PyObject *make_function(PyMethodDef *definition, void *memory, PyObject *kept) {
    PyObject *capsule = PyCapsule_New(memory, NULL, free_memory);
    if (capsule == NULL) free(memory);
    PyObject *self = capsule == NULL ? NULL : PyTuple_Pack(2, capsule, kept);
    PyObject *function = self == NULL ? NULL : PyCFunction_New(definition, self);
    Py_XDECREF(capsule);
    Py_XDECREF(self);
    return function;
}

void *memory_in(PyObject *object, int flags, Py_ssize_t *nbytes) {
    Py_buffer buffer = {.len = 0};
    if (PyObject_GetBuffer(object, &buffer, flags) < 0) buffer.buf = NULL;
    *nbytes = buffer.len;
    void *memory = buffer.buf;
    PyBuffer_Release(&buffer);
    return memory;
}

static PyMethodDef functions[] = {
    {"make_player", make_player, METH_VARARGS, "Return a function that carries a collective out within a node."},
    {"poll_word", poll_word, METH_VARARGS, "Poll a word of 8 bytes until it differs, for a number of polls."},
    {NULL, NULL, 0, NULL},
};

static int fill(PyObject *module) {
    if (PyModule_AddStringConstant(module, "SOURCES", SOURCES) < 0) return -1; /* their digest: `hatch_build.py` */
    if (PyModule_AddFunctions(module, functions) < 0 || add_exact(module) < 0 || add_ready(module) < 0) return -1;
    return add_messenger(module) < 0 || add_socket_call(module) < 0 ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, fill}, {0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_steps", "Collectives within one node, compiled.", 0, NULL, module_slots,
};

PyMODINIT_FUNC PyInit__steps(void) { return PyModuleDef_Init(&module); }
