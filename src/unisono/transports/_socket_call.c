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

/* Places of what a call knows, the arguments of `make_socket_call`. */
enum { MESSENGER, START, GROUP, CALLS, DESCRIPTION, DIGEST };

static PyObject *part(PyObject *call, int place) { return PyTuple_GET_ITEM(call, place); }

/* Return 1 if a call is a plain one, else 0; -1 with an error. */
static int is_plain(PyObject *call) {
    PyObject *label = PyObject_GetAttr(part(call, GROUP), names[LABEL]);
    PyObject *failure = PyObject_GetAttr(part(call, CALLS), names[FAILURE]);
    PyObject *busy = PyObject_GetAttr(part(call, CALLS), names[BUSY]);
    int plain = label == NULL || failure == NULL || busy == NULL
                    ? -1
                    : PyUnicode_GetLength(label) == 0 && failure == Py_None && busy == Py_False;
    Py_XDECREF(label);
    Py_XDECREF(failure);
    Py_XDECREF(busy);
    return plain;
}

/* Record that a plain call begins. Return its number; 0 with an error. */
static unsigned long long begin_call(PyObject *call) {
    PyObject *calls = part(call, CALLS), *before = PyObject_GetAttr(calls, names[NUMBER]);
    unsigned long long number = before == NULL ? 0 : PyLong_AsUnsignedLongLong(before) + 1;
    Py_XDECREF(before);
    PyObject *descriptions = number ? PyObject_GetAttr(calls, names[DESCRIPTIONS]) : NULL;
    PyObject *counted = descriptions ? PyLong_FromUnsignedLongLong(number) : NULL;
    Py_ssize_t kept = counted && PyList_Check(descriptions) ? PyList_GET_SIZE(descriptions) : 0;
    const Py_ssize_t place = kept ? (Py_ssize_t)(number % (size_t)kept) : 0;
    if (kept && (PyList_SetItem(descriptions, place, Py_NewRef(part(call, DESCRIPTION))) < 0 ||
                 PyObject_SetAttr(calls, names[NUMBER], counted) < 0 ||
                 PyObject_SetAttr(calls, names[BUSY], Py_True) < 0))
        kept = 0;
    Py_XDECREF(descriptions);
    Py_XDECREF(counted);
    return kept ? number : 0;
}

/* Record that a call has ended. Where it has failed, the messages of the call may be anywhere. */
static int end_call(PyObject *call, int failed) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    int wrong = failed && PyObject_SetAttr(part(call, GROUP), names[BROKEN], Py_True) < 0;
    wrong |= PyObject_SetAttr(part(call, CALLS), names[BUSY], Py_False) < 0;
    if (!wrong) PyErr_Restore(type, error, trace);
    return wrong ? -1 : 0;
}

static PyObject *start_call(PyObject *call, PyObject *arguments) {
    long long source, target;
    if (!PyArg_ParseTuple(arguments, "LL", &source, &target)) return NULL;
    int plain = is_plain(call);
    if (plain <= 0) return plain < 0 ? NULL : PyObject_CallObject(part(call, START), arguments);
    unsigned long long number = begin_call(call), digest = PyLong_AsUnsignedLongLongMask(part(call, DIGEST));
    PyObject *messages = messages_of(part(call, MESSENGER));
    PyObject *played = number ? play_messages(messages, digest + number, source, target) : NULL;
    if (end_call(call, played == NULL) == 0) return played;
    Py_XDECREF(played);
    return NULL;
}

static PyMethodDef call_definition = {
    "socket_call", start_call, METH_VARARGS, "Record a call through sockets, and carry it out at two addresses."
};

/* make_socket_call(messenger, start, group, calls, description, digest): return the function (source, target) that
   carries a call out; `start` carries out what is no plain call. */
static PyObject *make_socket_call(PyObject *module, PyObject *arguments) {
    PyObject *messenger, *start, *group, *calls, *description;
    unsigned long long digest;
    if (!PyArg_ParseTuple(arguments, "OOOOUK", &messenger, &start, &group, &calls, &description, &digest)) return NULL;
    if (messages_of(messenger) != NULL) return PyCFunction_New(&call_definition, arguments);
    PyErr_SetString(PyExc_TypeError, "a call through sockets needs a function of make_messenger");
    return NULL;
}

static PyMethodDef functions[] = {
    {"make_socket_call", make_socket_call, METH_VARARGS, "Return a function that records and carries out a call."},
    {NULL, NULL, 0, NULL},
};

int add_socket_call(PyObject *module) {
    return intern(names, spelled, NAMES) < 0 ? -1 : PyModule_AddFunctions(module, functions);
}
