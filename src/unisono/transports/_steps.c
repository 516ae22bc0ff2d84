/* Collectives within one node, compiled: copies, sums and barriers on memory that the ranks share.

    program   COPY payload -> own slot | BARRIER | SUM slot 0, slot 1 -> payload        one row of five numbers each

`steps.py` makes programs, and plays the same rows by NumPy where this file was not compiled. A player does here what
takes nanoseconds. Whatever may take long it leaves to Python: a barrier whose other ranks are late, or in another call,
calls `late`, which waits, raises, and keeps MPI and signals going. `Ready` finds the collective that was prepared for
a tensor (`collectives/ready.py`): in Python that takes longer than a short collective.

Barriers are those of `signals.py`. A token is stored with release order and read with acquire order, so that what a
rank has written before a barrier is seen by all after it, on any processor.
*/

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum Kind { COPY, SUM_FLOAT32, SUM_FLOAT64, SUM_BFLOAT16, MORE, BARRIER };

/* Sums of blocks in the caches gain by wide vectors; elsewhere memory is the limit. The bits do not depend on them. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#define FOR_EACH_VECTOR_WIDTH __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_VECTOR_WIDTH
#endif

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ __volatile__("yield")
#else
#define PAUSE()
#endif

/* Payloads may begin at any byte. */
typedef float float32 __attribute__((aligned(1), may_alias));
typedef double float64 __attribute__((aligned(1), may_alias));
typedef uint16_t bfloat16 __attribute__((aligned(1), may_alias));

typedef struct {
    int64_t kind, count; /* bytes of a copy, elements of a sum */
    int64_t into, one, other;
} Row;

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
static const int64_t SIZES[] = {1, 4, 8, 2, 0, 0};

static const int64_t MIN_UNLOCKED_BYTES = 32 << 10;

enum { BLOCK = 1024 }; /* elements that are summed in float32 at a time */

static inline float widened(uint16_t number) {
    uint32_t bits = (uint32_t)number << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

/* The nearest bfloat16, of two the even one, as PyTorch rounds; NaN has one form. */
static inline uint16_t narrowed(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    uint16_t rounded = (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
    return number != number ? 0x7FC0 : rounded;
}

static inline float widened_float32(float number) { return number; }
static inline double widened_float64(double number) { return number; }
static inline float narrowed_float32(float number) { return number; }
static inline double narrowed_float64(double number) { return number; }

/* Sums of two sources, and of one more for each row of kind MORE after the row; NARROW rounds once, at the end. The
   result may replace a source: so "ivdep", without which the compiler would add one element at a time there. */
#define SUM(NAME, TYPE, WIDE, WIDEN, NARROW)                                                                           \
    FOR_EACH_VECTOR_WIDTH                                                                                              \
    static void NAME(const Row *row, Py_ssize_t more) {                                                                \
        TYPE *into = (TYPE *)(intptr_t)row->into;                                                                      \
        const TYPE *one = (const TYPE *)(intptr_t)row->one, *other = (const TYPE *)(intptr_t)row->other;               \
        const int64_t length = row->count;                                                                             \
        if (more == 0) {                                                                                               \
            _Pragma("GCC ivdep")                                                                                       \
            for (int64_t i = 0; i < length; i++) into[i] = NARROW(WIDEN(one[i]) + WIDEN(other[i]));                    \
            return;                                                                                                    \
        }                                                                                                              \
        for (int64_t first = 0; first < length; first += BLOCK) {                                                      \
            WIDE sum[BLOCK];                                                                                           \
            const int64_t count = length - first < BLOCK ? length - first : BLOCK;                                     \
            for (int64_t i = 0; i < count; i++) sum[i] = WIDEN(one[first + i]) + WIDEN(other[first + i]);              \
            for (Py_ssize_t number = 1; number <= more; number++) {                                                    \
                const TYPE *next = (const TYPE *)(intptr_t)row[number].one + first;                                    \
                for (int64_t i = 0; i < count; i++) sum[i] += WIDEN(next[i]);                                          \
            }                                                                                                          \
            for (int64_t i = 0; i < count; i++) into[first + i] = NARROW(sum[i]);                                      \
        }                                                                                                              \
    }

SUM(sum_float32, float32, float, widened_float32, narrowed_float32)
SUM(sum_float64, float64, double, widened_float64, narrowed_float64)
SUM(sum_bfloat16, bfloat16, float, widened, narrowed)

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
    for (Py_ssize_t index = first; index < program->length; index++) {
        const Row *row = &program->rows[index];
        Py_ssize_t more = 0;
        while (index + more + 1 < program->length && row[more + 1].kind == MORE) more++;
        switch (row->kind) {
        case COPY:
            memcpy((void *)(intptr_t)row->into, (const void *)(intptr_t)row->one, (size_t)row->count);
            break;
        case SUM_FLOAT32:
            sum_float32(row, more);
            break;
        case SUM_FLOAT64:
            sum_float64(row, more);
            break;
        case SUM_BFLOAT16:
            sum_bfloat16(row, more);
            break;
        default:
            if (!enter_barrier(self)) return index;
        }
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

static PyTypeObject *player_type;

/* Names of attributes and methods of tensors. */
enum { DATA_PTR, NUMEL, DTYPE, IS_CPU, IS_CONTIGUOUS, IS_NEG, IS_CONJ, IS_COMPLEX, NAMES };
static const char *const spelled[NAMES] = {"data_ptr", "numel", "dtype", "is_cpu", "is_contiguous", "is_neg", "is_conj",
                                           "is_complex"};
static PyObject *names[NAMES];

/* Return 1 if what a method returns, or an attribute is, is `expected`; 0 if not; -1 with an error. */
static int is(PyObject *found, PyObject *expected) {
    if (found == NULL) return -1;
    Py_DECREF(found);
    return found == expected;
}

/* Append what tells a tensor from others to a key. Return 0 if it is not plain, -1 with an error. */
static int describe(PyObject *key, Py_ssize_t at, PyObject *tensor) {
    int found = is(PyObject_GetAttr(tensor, names[IS_CPU]), Py_True);
    if (found > 0) found = is(PyObject_CallMethodNoArgs(tensor, names[IS_CONTIGUOUS]), Py_True);
    if (found > 0) found = is(PyObject_CallMethodNoArgs(tensor, names[IS_NEG]), Py_False);
    if (found <= 0) return found;
    PyObject *address = PyObject_CallMethodNoArgs(tensor, names[DATA_PTR]);
    if (address == NULL) return -1;
    PyTuple_SET_ITEM(key, at, address);
    PyObject *count = PyObject_CallMethodNoArgs(tensor, names[NUMEL]);
    if (count == NULL) return -1;
    PyTuple_SET_ITEM(key, at + 1, count);
    PyObject *dtype = PyObject_GetAttr(tensor, names[DTYPE]);
    if (dtype == NULL) return -1;
    PyTuple_SET_ITEM(key, at + 2, dtype);
    found = is(PyObject_GetAttr(dtype, names[IS_COMPLEX]), Py_True);
    return found > 0 ? is(PyObject_CallMethodNoArgs(tensor, names[IS_CONJ]), Py_False) : found + 1;
}

enum { RECENT = 64 };

/* Collective of one tensor that was carried out lately. */
typedef struct {
    PyObject *tensor; /* weak reference */
    PyObject *parameters, *play;
    long long address, count;
} Recent;

typedef struct {
    PyObject_HEAD
    PyObject *plays; /* by parameters, and the address, the length and the dtype of each tensor */
    Py_ssize_t largest;
    Recent recent[RECENT];
} Ready;

static Recent *place_of(Ready *self, PyObject *tensor) { return &self->recent[((uintptr_t)tensor >> 5) % RECENT]; }

static void forget(Recent *recent) {
    Recent gone = *recent;
    memset(recent, 0, sizeof(Recent));
    Py_XDECREF(gone.tensor);
    Py_XDECREF(gone.parameters);
    Py_XDECREF(gone.play);
}

/* Return the number that a method returns, which must not be negative; -1 with an error. */
static long long number_of(PyObject *tensor, int name) {
    PyObject *found = PyObject_CallMethodNoArgs(tensor, names[name]);
    if (found == NULL) return -1;
    long long number = PyLong_AsLongLong(found);
    Py_DECREF(found);
    return number;
}

static int same_objects(PyObject *one, PyObject *other) {
    Py_ssize_t size = PyTuple_GET_SIZE(one);
    if (size != PyTuple_GET_SIZE(other)) return 0;
    for (Py_ssize_t i = 0; i < size; i++)
        if (PyTuple_GET_ITEM(one, i) != PyTuple_GET_ITEM(other, i)) return 0;
    return 1;
}

/* Return a new reference to the play of a tensor that was seen lately, or NULL. The object has kept its dtype and its
   device; its memory, its length and its strides may be others. What asks for them may run Python that clears `self`. */
static PyObject *find_recent(Ready *self, PyObject *parameters, PyObject *tensor) {
    Recent *recent = place_of(self, tensor);
    if (recent->tensor == NULL || PyWeakref_GET_OBJECT(recent->tensor) != tensor) return NULL;
    if (!same_objects(recent->parameters, parameters)) return NULL;
    PyObject *play = Py_NewRef(recent->play);
    const long long address = recent->address, count = recent->count;
    if (number_of(tensor, DATA_PTR) == address && number_of(tensor, NUMEL) == count &&
        is(PyObject_CallMethodNoArgs(tensor, names[IS_CONTIGUOUS]), Py_True) > 0)
        return play;
    Py_DECREF(play);
    return NULL;
}

static PyObject *key_of(PyObject *parameters, PyObject *const *tensors, Py_ssize_t count, int *plain) {
    Py_ssize_t first = PyTuple_GET_SIZE(parameters);
    PyObject *key = PyTuple_New(first + 3 * count);
    if (key == NULL) return NULL;
    for (Py_ssize_t i = 0; i < first; i++) PyTuple_SET_ITEM(key, i, Py_NewRef(PyTuple_GET_ITEM(parameters, i)));
    *plain = 1;
    for (Py_ssize_t i = 0; i < count && *plain > 0; i++) *plain = describe(key, first + 3 * i, tensors[i]);
    return key;
}

/* play(parameters, *tensors): carry out what is kept for them, and return True; else return False. */
static PyObject *ready_play(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    Ready *self = (Ready *)object;
    if (count < 2 || !PyTuple_Check(arguments[0])) {
        PyErr_SetString(PyExc_TypeError, "play takes a tuple and tensors");
        return NULL;
    }
    PyObject *found = count == 2 ? find_recent(self, arguments[0], arguments[1]) : NULL;
    if (found == NULL && !PyErr_Occurred()) {
        int plain = 0;
        PyObject *key = key_of(arguments[0], arguments + 1, count - 1, &plain);
        found = plain > 0 ? PyDict_GetItemWithError(self->plays, key) : NULL;
        Py_XINCREF(found);
        Py_XDECREF(key);
    }
    if (found == NULL) {
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_RuntimeError)) return NULL;
        PyErr_Clear(); /* a sparse tensor has no memory: the checks name what it is */
        Py_RETURN_FALSE;
    }
    PyObject *played = Py_IS_TYPE(found, player_type) ? play((Player *)found) : PyObject_CallNoArgs(found);
    Py_DECREF(found);
    if (played == NULL) return NULL;
    Py_DECREF(played);
    Py_RETURN_TRUE;
}

static PyObject *ready_clear(PyObject *object, PyObject *none) {
    Ready *self = (Ready *)object;
    for (int i = 0; i < RECENT; i++) forget(&self->recent[i]);
    PyDict_Clear(self->plays);
    Py_RETURN_NONE;
}

/* add(parameters, play, *tensors): keep the play of plain tensors; of too many, all others are dropped. */
static PyObject *ready_add(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    Ready *self = (Ready *)object;
    if (count < 3 || !PyTuple_Check(arguments[0])) {
        PyErr_SetString(PyExc_TypeError, "add takes a tuple, a function and tensors");
        return NULL;
    }
    int plain = 0;
    PyObject *key = key_of(arguments[0], arguments + 2, count - 2, &plain);
    if (key == NULL || plain < 0) {
        Py_XDECREF(key);
        return NULL;
    }
    if (PyDict_GET_SIZE(self->plays) >= self->largest) Py_DECREF(ready_clear(object, NULL));
    int failed = plain && PyDict_SetItem(self->plays, key, arguments[1]) < 0;
    Py_DECREF(key);
    if (failed) return NULL;
    if (plain && count == 3) {
        Recent *recent = place_of(self, arguments[2]);
        forget(recent);
        recent->tensor = PyWeakref_NewRef(arguments[2], NULL);
        recent->parameters = Py_NewRef(arguments[0]);
        recent->play = Py_NewRef(arguments[1]);
        recent->address = number_of(arguments[2], DATA_PTR);
        recent->count = number_of(arguments[2], NUMEL);
        if (PyErr_Occurred()) {
            forget(recent);
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

static PyObject *ready_new(PyTypeObject *type, PyObject *arguments, PyObject *named) {
    Py_ssize_t largest;
    if (!PyArg_ParseTuple(arguments, "n", &largest)) return NULL;
    Ready *self = (Ready *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->largest = largest;
    if ((self->plays = PyDict_New()) == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static Py_ssize_t ready_length(PyObject *object) { return PyDict_GET_SIZE(((Ready *)object)->plays); }

static int ready_traverse(PyObject *object, visitproc visit, void *arg) {
    Ready *self = (Ready *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->plays);
    for (int i = 0; i < RECENT; i++) {
        Py_VISIT(self->recent[i].tensor);
        Py_VISIT(self->recent[i].parameters);
        Py_VISIT(self->recent[i].play);
    }
    return 0;
}

static int ready_forget(PyObject *object) {
    Ready *self = (Ready *)object;
    for (int i = 0; i < RECENT; i++) forget(&self->recent[i]);
    if (self->plays != NULL) PyDict_Clear(self->plays);
    return 0;
}

static void ready_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    ready_forget(object);
    Py_XDECREF(((Ready *)object)->plays);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef ready_methods[] = {
    {"play", (PyCFunction)(void (*)(void))ready_play, METH_FASTCALL, "Carry out what is kept for tensors."},
    {"add", (PyCFunction)(void (*)(void))ready_add, METH_FASTCALL, "Keep the play of plain tensors."},
    {"clear", ready_clear, METH_NOARGS, "Drop all that is kept."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot ready_slots[] = {
    {Py_tp_doc, "Plays of collectives that were carried out, by all that determines them."},
    {Py_tp_new, ready_new},
    {Py_tp_methods, ready_methods},
    {Py_mp_length, ready_length},
    {Py_tp_dealloc, ready_dealloc},
    {Py_tp_traverse, ready_traverse},
    {Py_tp_clear, ready_forget},
    {0, NULL},
};

static PyType_Spec ready_spec = {
    "unisono.transports._steps.Ready", sizeof(Ready), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, ready_slots,
};

static int fill(PyObject *module) {
    for (int i = 0; i < NAMES; i++)
        if ((names[i] = PyUnicode_InternFromString(spelled[i])) == NULL) return -1;
    player_type = (PyTypeObject *)PyType_FromSpec(&player_spec);
    if (player_type == NULL || PyModule_AddObjectRef(module, "Player", (PyObject *)player_type) < 0) return -1;
    PyObject *ready_type = PyType_FromSpec(&ready_spec);
    int failed = ready_type == NULL || PyModule_AddObjectRef(module, "Ready", ready_type) < 0;
    Py_XDECREF(ready_type);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, fill}, {0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_steps", "Collectives within one node, compiled.", 0, NULL, module_slots,
};

PyMODINIT_FUNC PyInit__steps(void) { return PyModuleDef_Init(&module); }
