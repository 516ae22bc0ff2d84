/* Collectives within one node, compiled: copies, sums and barriers on memory that the ranks share.

    program   COPY payload -> own slot | BARRIER | SUM slot 0, slot 1 -> payload        one row of five numbers each

`steps.py` makes programs, and plays the same rows by NumPy where this file was not compiled. A player does here what
takes nanoseconds. Whatever may take long it leaves to Python: a barrier whose other ranks are late, or in another call,
calls `late`, which waits, raises, and keeps MPI and signals going. `Ready` finds the collective that was prepared for
a tensor (`collectives/ready.py`): in Python that takes longer than a short collective.

Barriers are those of `signals.py`. A token is stored with release order and read with acquire order, so that what a
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

/* Numbers that Python and the players of a group share: `State` in signals.py. */
typedef struct {
    int64_t sequence, label, before, ended;
} State;

typedef struct {
    PyObject_HEAD
    PyObject *late;
    State *state;
    int64_t *own;
    int64_t **others;
    Py_ssize_t other_count, program_count, token_words;
    int64_t number, spins, yields;
    Program *programs;
    Py_buffer *buffers; /* of the state, then of the programs */
    Py_ssize_t buffer_count;
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

static PyObject *play(Player *self) {
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

static PyObject *player_call(PyObject *object, PyObject *arguments, PyObject *named) { return play((Player *)object); }

/* Player(state, own, others, token_words, spins, yields, number, programs, late): `own` and `others` are addresses of
   tokens, `programs` arrays of rows, of which the number of the next barrier chooses one. Whoever makes it keeps the
   memory alive that the rows name. */
static PyObject *player_new(PyTypeObject *type, PyObject *arguments, PyObject *named) {
    PyObject *state, *others, *programs, *late;
    long long own, token_words, spins, yields, number;
    if (!PyArg_ParseTuple(arguments, "OLO!LLLLO!O", &state, &own, &PyTuple_Type, &others, &token_words, &spins,
                          &yields, &number, &PyTuple_Type, &programs, &late))
        return NULL;
    Player *self = (Player *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->own = (int64_t *)(intptr_t)own;
    self->token_words = (Py_ssize_t)token_words;
    self->spins = spins;
    self->yields = yields;
    self->number = number;
    Py_INCREF(late);
    self->late = late;
    self->other_count = PyTuple_Size(others);
    self->program_count = PyTuple_Size(programs);
    self->others = calloc((size_t)self->other_count + 1, sizeof(int64_t *));
    self->programs = calloc((size_t)self->program_count + 1, sizeof(Program));
    self->buffers = calloc((size_t)self->program_count + 1, sizeof(Py_buffer));
    if (!self->others || !self->programs || !self->buffers) {
        PyErr_NoMemory();
        goto failed;
    }
    for (Py_ssize_t i = 0; i < self->other_count; i++)
        self->others[i] = PyLong_AsVoidPtr(PyTuple_GetItem(others, i));
    if (PyErr_Occurred()) goto failed;
    if (PyObject_GetBuffer(state, &self->buffers[0], PyBUF_WRITABLE) < 0) goto failed;
    self->buffer_count = 1;
    self->state = self->buffers[0].buf;
    for (Py_ssize_t i = 0; i < self->program_count; i++) {
        Py_buffer *buffer = &self->buffers[i + 1];
        if (PyObject_GetBuffer(PyTuple_GetItem(programs, i), buffer, PyBUF_SIMPLE) < 0) goto failed;
        self->buffer_count++;
        Program *program = &self->programs[i];
        program->rows = buffer->buf;
        program->length = buffer->len / (Py_ssize_t)sizeof(Row);
        for (Py_ssize_t j = 0; j < program->length; j++) {
            const Row *row = &program->rows[j];
            program->nbytes += SIZES[row->kind] * row->count;
        }
    }
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static void player_dealloc(PyObject *object) {
    Player *self = (Player *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    for (Py_ssize_t i = 0; i < self->buffer_count; i++) PyBuffer_Release(&self->buffers[i]);
    free(self->others);
    free(self->programs);
    free(self->buffers);
    Py_XDECREF(self->late);
    type->tp_free(object);
    Py_DECREF(type);
}

static int player_traverse(PyObject *object, visitproc visit, void *arg) {
    Player *self = (Player *)object;
    Py_VISIT(self->late);
    Py_VISIT(Py_TYPE(object));
    return 0;
}

static int player_clear(PyObject *object) {
    Player *self = (Player *)object;
    Py_CLEAR(self->late);
    return 0;
}

static PyType_Slot player_slots[] = {
    {Py_tp_doc, "Function that carries a collective out, again and again."},
    {Py_tp_new, player_new},
    {Py_tp_call, player_call},
    {Py_tp_dealloc, player_dealloc},
    {Py_tp_traverse, player_traverse},
    {Py_tp_clear, player_clear},
    {0, NULL},
};

static PyType_Spec player_spec = {
    "unisono.transports._steps.Player", sizeof(Player), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, player_slots,
};

PyObject *start_play(PyObject *found) {
    return Py_TYPE(found)->tp_call == player_call ? play((Player *)found) : PyObject_CallNoArgs(found);
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

static PyMethodDef player_functions[] = {
    {"poll_word", poll_word, METH_VARARGS, "Poll a word of 8 bytes until it differs, for a number of polls."},
    {NULL, NULL, 0, NULL},
};

int add_type(PyObject *module, PyType_Spec *spec) {
    PyObject *type = PyType_FromSpec(spec);
    int failed = type == NULL || PyModule_AddType(module, (PyTypeObject *)type) < 0;
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

int add_player(PyObject *module) {
    return PyModule_AddFunctions(module, player_functions) < 0 ? -1 : add_type(module, &player_spec);
}

static int fill(PyObject *module) {
    if (PyModule_AddStringConstant(module, "SOURCES", SOURCES) < 0) return -1; /* their digest: `hatch_build.py` */
    if (add_player(module) < 0 || add_exact(module) < 0 || add_ready(module) < 0) return -1;
    return add_messenger(module) < 0 || add_socket_call(module) < 0 ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, fill}, {0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_steps", "Collectives within one node, compiled.", 0, NULL, module_slots,
};

PyMODINIT_FUNC PyInit__steps(void) { return PyModuleDef_Init(&module); }
