/* Collectives that were prepared for tensors, found by all that determines them (`collectives/ready.py`): in Python that
   takes longer than a short collective. */

#include "_steps.h"

/* Names of attributes and methods of tensors. */
enum { DATA_PTR, NUMEL, NBYTES, DTYPE, IS_CPU, IS_CONTIGUOUS, IS_NEG, IS_CONJ, IS_COMPLEX, NAMES };
static const char *const spelled[NAMES] = {"data_ptr",      "numel",  "nbytes",  "dtype",     "is_cpu",
                                           "is_contiguous", "is_neg", "is_conj", "is_complex"};
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
    if (!PyObject_IsTrue(address) && PyObject_IsTrue(count)) return 0; /* a wrapper of other tensors */
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
    PyObject *parameters, *play, *dtype;
    long long address, nbytes;
    int is_complex;
} Recent;

typedef struct {
    PyObject_HEAD
    PyObject *plays;  /* by parameters, and the address, the length and the dtype of each tensor */
    PyObject *starts; /* functions of the first and the last one's address, by the same with None for addresses */
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
    Py_XDECREF(gone.dtype);
}

/* Return a number that was found, which must not be negative; -1 with an error. */
static long long number_of(PyObject *found) {
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

/* Return a new reference to the play of a tensor that was seen lately, or NULL. The object may have been given other
   data. What asks for it may run Python that clears `self`. */
static PyObject *find_recent(Ready *self, PyObject *parameters, PyObject *tensor) {
    Recent *recent = place_of(self, tensor);
    if (recent->tensor == NULL || PyWeakref_GET_OBJECT(recent->tensor) != tensor) return NULL;
    if (!same_objects(recent->parameters, parameters)) return NULL;
    PyObject *play = Py_NewRef(recent->play);
    PyObject *dtype = recent->dtype; /* compared, and not read */
    const long long address = recent->address, nbytes = recent->nbytes;
    const int is_complex = recent->is_complex;
    if (number_of(PyObject_CallMethodNoArgs(tensor, names[DATA_PTR])) == address &&
        number_of(PyObject_GetAttr(tensor, names[NBYTES])) == nbytes &&
        is(PyObject_GetAttr(tensor, names[DTYPE]), dtype) > 0 &&
        is(PyObject_CallMethodNoArgs(tensor, names[IS_CONTIGUOUS]), Py_True) > 0 &&
        is(PyObject_CallMethodNoArgs(tensor, names[IS_NEG]), Py_False) > 0 &&
        (!is_complex || is(PyObject_CallMethodNoArgs(tensor, names[IS_CONJ]), Py_False) > 0))
        return play;
    Py_DECREF(play);
    return NULL;
}

/* Return a new key; NULL if a tensor is not plain, or with an error. */
static PyObject *key_of(PyObject *parameters, PyObject *const *tensors, Py_ssize_t count) {
    Py_ssize_t first = PyTuple_GET_SIZE(parameters);
    PyObject *key = PyTuple_New(first + 3 * count);
    if (key == NULL) return NULL;
    for (Py_ssize_t i = 0; i < first; i++) PyTuple_SET_ITEM(key, i, Py_NewRef(PyTuple_GET_ITEM(parameters, i)));
    int plain = 1;
    for (Py_ssize_t i = 0; i < count && plain > 0; i++) plain = describe(key, first + 3 * i, tensors[i]);
    if (plain <= 0) Py_CLEAR(key);
    return key;
}

/* Return a key with None in the place of its addresses, a new reference; NULL with an error. A tuple keeps its hash from
   Python 3.14 on, so it is another one. */
static PyObject *without_addresses(PyObject *key, Py_ssize_t first) {
    PyObject *anywhere = PyTuple_New(PyTuple_GET_SIZE(key));
    for (Py_ssize_t at = 0; anywhere != NULL && at < PyTuple_GET_SIZE(key); at++) {
        const int is_address = at >= first && (at - first) % 3 == 0;
        PyTuple_SET_ITEM(anywhere, at, Py_NewRef(is_address ? Py_None : PyTuple_GET_ITEM(key, at)));
    }
    return anywhere;
}

/* Call the function that is kept for tensors of such lengths and dtypes anywhere. Return what it does, a new reference;
   NULL if there is none, or with an error. */
static PyObject *start_anywhere(Ready *self, PyObject *key, Py_ssize_t first) {
    PyObject *addresses[] = {PyTuple_GET_ITEM(key, first), PyTuple_GET_ITEM(key, PyTuple_GET_SIZE(key) - 3)};
    PyObject *anywhere = without_addresses(key, first);
    PyObject *start = anywhere == NULL ? NULL : PyDict_GetItemWithError(self->starts, anywhere);
    Py_XINCREF(start);
    Py_XDECREF(anywhere);
    PyObject *started = start == NULL ? NULL : PyObject_Vectorcall(start, addresses, 2, NULL);
    Py_XDECREF(start);
    return started;
}

/* play(parameters, *tensors): carry out what is kept for them, and return True; else return False. */
static PyObject *ready_play(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    Ready *self = (Ready *)object;
    if (count < 2 || !PyTuple_Check(arguments[0])) {
        PyErr_SetString(PyExc_TypeError, "play takes a tuple and tensors");
        return NULL;
    }
    PyObject *found = count == 2 ? find_recent(self, arguments[0], arguments[1]) : NULL, *played = NULL;
    if (found == NULL && !PyErr_Occurred()) {
        PyObject *key = key_of(arguments[0], arguments + 1, count - 1);
        found = key != NULL ? PyDict_GetItemWithError(self->plays, key) : NULL;
        Py_XINCREF(found);
        if (key != NULL && found == NULL && !PyErr_Occurred() && PyDict_GET_SIZE(self->starts) > 0) {
            played = start_anywhere(self, key, PyTuple_GET_SIZE(arguments[0]));
            if (played == NULL && PyErr_Occurred()) {
                Py_DECREF(key);
                return NULL;
            }
        }
        Py_XDECREF(key);
    }
    if (found == NULL && played == NULL) {
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) return NULL;
        PyErr_Clear(); /* a sparse tensor has no memory: the checks name what it is */
        Py_RETURN_FALSE;
    }
    if (found != NULL) {
        played = start_play(found);
        Py_DECREF(found);
    }
    if (played == NULL) return NULL;
    Py_DECREF(played);
    Py_RETURN_TRUE;
}

static int ready_forget(PyObject *object) {
    Ready *self = (Ready *)object;
    for (int i = 0; i < RECENT; i++) forget(&self->recent[i]);
    if (self->plays != NULL) PyDict_Clear(self->plays);
    if (self->starts != NULL) PyDict_Clear(self->starts);
    return 0;
}

static PyObject *ready_clear(PyObject *object, PyObject *none) {
    ready_forget(object);
    Py_RETURN_NONE;
}

/* Return the key of what is kept: arguments are its parameters, a function, and plain tensors; NULL as `key_of`. */
static PyObject *key_to_keep(PyObject *const *arguments, Py_ssize_t count) {
    if (count >= 3 && PyTuple_Check(arguments[0])) return key_of(arguments[0], arguments + 2, count - 2);
    PyErr_SetString(PyExc_TypeError, "a tuple, a function and tensors are added");
    return NULL;
}

static PyObject *none_unless_failed(void) { return PyErr_Occurred() ? NULL : Py_NewRef(Py_None); }

/* add(parameters, play, *tensors): keep the play of plain tensors; of too many, all others are dropped. */
static PyObject *ready_add(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    Ready *self = (Ready *)object;
    PyObject *key = key_to_keep(arguments, count);
    if (key == NULL) return none_unless_failed();
    if (PyDict_GET_SIZE(self->plays) >= self->largest) {
        for (int i = 0; i < RECENT; i++) forget(&self->recent[i]);
        PyDict_Clear(self->plays);
    }
    int failed = PyDict_SetItem(self->plays, key, arguments[1]) < 0;
    Py_DECREF(key);
    if (!failed && count == 3) {
        Recent *recent = place_of(self, arguments[2]);
        forget(recent);
        recent->tensor = PyWeakref_NewRef(arguments[2], NULL);
        recent->parameters = Py_NewRef(arguments[0]);
        recent->play = Py_NewRef(arguments[1]);
        recent->dtype = PyObject_GetAttr(arguments[2], names[DTYPE]);
        recent->address = number_of(PyObject_CallMethodNoArgs(arguments[2], names[DATA_PTR]));
        recent->nbytes = number_of(PyObject_GetAttr(arguments[2], names[NBYTES]));
        recent->is_complex = is(PyObject_CallMethodNoArgs(arguments[2], names[IS_COMPLEX]), Py_True);
        if (PyErr_Occurred()) forget(recent);
    }
    return none_unless_failed();
}

/* add_anywhere(parameters, start, *tensors): keep a function of the first and the last one's address for all plain
   tensors of these lengths and dtypes. */
static PyObject *ready_add_anywhere(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    Ready *self = (Ready *)object;
    PyObject *key = key_to_keep(arguments, count);
    if (key == NULL) return none_unless_failed();
    if (PyDict_GET_SIZE(self->starts) >= self->largest) PyDict_Clear(self->starts);
    PyObject *anywhere = without_addresses(key, PyTuple_GET_SIZE(arguments[0]));
    if (anywhere != NULL) PyDict_SetItem(self->starts, anywhere, arguments[1]);
    Py_XDECREF(anywhere);
    Py_DECREF(key);
    return none_unless_failed();
}

static PyObject *ready_new(PyTypeObject *type, PyObject *arguments, PyObject *named) {
    Py_ssize_t largest;
    if (!PyArg_ParseTuple(arguments, "n", &largest)) return NULL;
    Ready *self = (Ready *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->largest = largest;
    if ((self->plays = PyDict_New()) == NULL || (self->starts = PyDict_New()) == NULL) {
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
    Py_VISIT(self->starts);
    for (int i = 0; i < RECENT; i++) {
        Py_VISIT(self->recent[i].tensor);
        Py_VISIT(self->recent[i].parameters);
        Py_VISIT(self->recent[i].play);
        Py_VISIT(self->recent[i].dtype);
    }
    return 0;
}

static void ready_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    ready_forget(object);
    Py_XDECREF(((Ready *)object)->plays);
    Py_XDECREF(((Ready *)object)->starts);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef ready_methods[] = {
    {"play", (PyCFunction)(void (*)(void))ready_play, METH_FASTCALL, "Carry out what is kept for tensors."},
    {"add", (PyCFunction)(void (*)(void))ready_add, METH_FASTCALL, "Keep the play of plain tensors."},
    {"add_anywhere", (PyCFunction)(void (*)(void))ready_add_anywhere, METH_FASTCALL, "Keep a function of addresses."},
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

int add_ready(PyObject *module) {
    PyObject *type = intern(names, spelled, NAMES) < 0 ? NULL : PyType_FromSpec(&ready_spec);
    const int failed = type == NULL || PyModule_AddType(module, (PyTypeObject *)type) < 0;
    Py_XDECREF(type);
    return failed ? -1 : 0;
}
