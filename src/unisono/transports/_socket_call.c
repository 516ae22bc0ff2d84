/* Calls through sockets: recorded for the watch of this rank, and played (`collectives/socket_calls.py`).

    plain call    no failure, no label, within no other  │ number + 1, description │ busy │ messages │ not busy
    others        `start`, in Python

Recorded by Python, a broadcast of 4 bytes to 8 ranks on 2 cores takes a tenth longer: their caches are full of others.
*/

#include "_steps.h"

/* Attributes of groups and of their calls, by which a call is recorded; `Calls` in states.py. */
enum { LABEL, FAILURE, BUSY, NUMBER, DESCRIPTIONS, BROKEN, NAMES };
static const char *const spelled[NAMES] = {"label", "failure", "busy", "number", "descriptions", "broken"};
static PyObject *names[NAMES];

typedef struct {
    PyObject_HEAD
    PyObject *messenger, *start, *group, *calls, *description;
    unsigned long long digest;
} SocketCall;

/* Return 1 if a call is a plain one, else 0; -1 with an error. */
static int is_plain(SocketCall *self) {
    PyObject *label = PyObject_GetAttr(self->group, names[LABEL]);
    PyObject *failure = PyObject_GetAttr(self->calls, names[FAILURE]);
    PyObject *busy = PyObject_GetAttr(self->calls, names[BUSY]);
    int plain = label == NULL || failure == NULL || busy == NULL
                    ? -1
                    : PyUnicode_GetLength(label) == 0 && failure == Py_None && busy == Py_False;
    Py_XDECREF(label);
    Py_XDECREF(failure);
    Py_XDECREF(busy);
    return plain;
}

/* Record that a plain call begins. Return its number; 0 with an error. */
static unsigned long long begin_call(SocketCall *self) {
    PyObject *before = PyObject_GetAttr(self->calls, names[NUMBER]);
    unsigned long long number = before == NULL ? 0 : PyLong_AsUnsignedLongLong(before) + 1;
    Py_XDECREF(before);
    PyObject *descriptions = number ? PyObject_GetAttr(self->calls, names[DESCRIPTIONS]) : NULL;
    PyObject *counted = descriptions ? PyLong_FromUnsignedLongLong(number) : NULL;
    Py_ssize_t kept = counted && PyList_Check(descriptions) ? PyList_GET_SIZE(descriptions) : 0;
    if (kept && (PyList_SetItem(descriptions, (Py_ssize_t)(number % (size_t)kept), Py_NewRef(self->description)) < 0 ||
                 PyObject_SetAttr(self->calls, names[NUMBER], counted) < 0 ||
                 PyObject_SetAttr(self->calls, names[BUSY], Py_True) < 0))
        kept = 0;
    Py_XDECREF(descriptions);
    Py_XDECREF(counted);
    return kept ? number : 0;
}

/* Record that a call has ended. Where it has failed, the messages of the call may be anywhere. */
static int end_call(SocketCall *self, int failed) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    int wrong = failed && PyObject_SetAttr(self->group, names[BROKEN], Py_True) < 0;
    wrong |= PyObject_SetAttr(self->calls, names[BUSY], Py_False) < 0;
    if (!wrong) PyErr_Restore(type, error, trace);
    return wrong ? -1 : 0;
}

/* socket_call(source, target): carry the collective out at two addresses. */
static PyObject *socket_call_call(PyObject *object, PyObject *arguments, PyObject *named) {
    SocketCall *self = (SocketCall *)object;
    long long source, target;
    if (!PyArg_ParseTuple(arguments, "LL", &source, &target)) return NULL;
    int plain = is_plain(self);
    if (plain <= 0) return plain < 0 ? NULL : PyObject_CallObject(self->start, arguments);
    unsigned long long number = begin_call(self);
    PyObject *played = number ? play_messages(self->messenger, self->digest + number, source, target) : NULL;
    if (end_call(self, played == NULL) == 0) return played;
    Py_XDECREF(played);
    return NULL;
}

/* SocketCall(messenger, start, group, calls, description, digest): `start` carries out what is no plain call. */
static PyObject *socket_call_new(PyTypeObject *type, PyObject *arguments, PyObject *named) {
    PyObject *messenger, *start, *group, *calls, *description;
    unsigned long long digest;
    if (!PyArg_ParseTuple(arguments, "OOOOUK", &messenger, &start, &group, &calls, &description, &digest)) return NULL;
    if (!is_messenger(messenger)) {
        PyErr_SetString(PyExc_TypeError, "a call through sockets needs a Messenger");
        return NULL;
    }
    SocketCall *self = (SocketCall *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->messenger = Py_NewRef(messenger);
    self->start = Py_NewRef(start);
    self->group = Py_NewRef(group);
    self->calls = Py_NewRef(calls);
    self->description = Py_NewRef(description);
    self->digest = digest;
    return (PyObject *)self;
}

static int socket_call_traverse(PyObject *object, visitproc visit, void *arg) {
    SocketCall *self = (SocketCall *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->messenger);
    Py_VISIT(self->start);
    Py_VISIT(self->group);
    Py_VISIT(self->calls);
    return 0;
}

static int socket_call_clear(PyObject *object) {
    SocketCall *self = (SocketCall *)object;
    Py_CLEAR(self->messenger);
    Py_CLEAR(self->start);
    Py_CLEAR(self->group);
    Py_CLEAR(self->calls);
    return 0;
}

static void socket_call_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    socket_call_clear(object);
    Py_XDECREF(((SocketCall *)object)->description);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyType_Slot socket_call_slots[] = {
    {Py_tp_doc, "Function of two addresses that records a call through sockets and carries it out."},
    {Py_tp_new, socket_call_new},
    {Py_tp_call, socket_call_call},
    {Py_tp_dealloc, socket_call_dealloc},
    {Py_tp_traverse, socket_call_traverse},
    {Py_tp_clear, socket_call_clear},
    {0, NULL},
};

static PyType_Spec socket_call_spec = {
    "unisono.transports._steps.SocketCall", sizeof(SocketCall), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    socket_call_slots,
};

int add_socket_call(PyObject *module) {
    for (int i = 0; i < NAMES; i++)
        if ((names[i] = PyUnicode_InternFromString(spelled[i])) == NULL) return -1;
    return add_type(module, &socket_call_spec);
}
