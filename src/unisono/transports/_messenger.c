/* Collectives across nodes, compiled: messages through the sockets of a group, with copies and sums between.

    program   SEND payload -> rank 1, RECEIVE landing <- rank 1, PART | SUM payload, landing -> payload | ... ROUND

    message   | token | payload ... |        8 bytes that are equal on all ranks in the same call, then the payload

Addresses below 0 are places in the source or the target of a call, so that a program is made once for all tensors.

Messages to one rank go in order, and so do those from it. PART waits until those before it have arrived, ROUND until all
have gone, too: while a part is summed, the kernel sends and receives others. A wait polls, yields the core between polls,
and then sleeps until a socket has something to do. Of short messages it reads what has arrived behind them, too: calls
back to back then need fewer reads than messages. `handle` is Python's part: it is called after each such sleep of
WAIT_MILLISECONDS, for a message of another call, and for reductions that are not compiled (`sockets.py`). A connection
that has ended is no error here: whoever watches the ranks names the one that died.
*/

#include "_steps.h"
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

/* Why Python's part is called; `Interruption` in sockets.py. */
enum Interruption { FINISHED, LATE, MISMATCH, REDUCTION };

#if !defined(MSG_NOSIGNAL)
#define MSG_NOSIGNAL 0 /* Python ignores the signal of a connection that has ended */
#endif

/* First address in the source and in the target; `SOURCE`, `TARGET` in sockets.py. */
static const int64_t SOURCE = -((int64_t)1 << 62), TARGET = -((int64_t)1 << 61);

enum { HEADER_BYTES = 8, WAIT_MILLISECONDS = 100, ENDED_MILLISECONDS = 10 };

/* Largest payload behind which more is read: longer ones would copy what gains them nothing. */
enum { AHEAD_PAYLOAD_BYTES = 1024 };

/* Messages to one rank that go in one call of the kernel. */
enum { MAX_TOGETHER = 32 };

/* One rank's socket, and what has been read ahead from it, by whatever program; `CONNECTION` in sockets.py. */
typedef struct {
    int32_t descriptor; /* -1 for this rank */
    uint32_t begin, end; /* bytes of `ahead` that no message has taken yet */
    char ahead[4084];
} Connection;

typedef struct {
    PyObject *handle;
    const Row *program;
    Row *rows; /* of the program, at the addresses of this call */
    Py_ssize_t length, ranks, yields;
    Connection *connections;    /* by rank */
    int64_t *done;              /* bytes of each row's message that have gone or arrived */
    uint64_t *tokens;           /* of the messages that arrive */
    uint64_t token, scan;
    uint64_t *busy; /* by direction and rank: the last scan in which a message was still under way */
    struct pollfd *polled;
    Py_ssize_t *waiting; /* rows of the polled sockets */
    nfds_t held;         /* of them, those for which something was read ahead */
    nfds_t receiving;    /* of them, those that receive */
    Py_ssize_t first;    /* row: all messages before it have gone and arrived */
    int ended; /* 1 once some connection has ended */
} Messenger;

static int holds(const Connection *from) { return from->begin < from->end; }

/* Fill parts of a message from what was read ahead, or from the socket, as `recvmsg`; `reads_ahead` leaves room for one
   part more. */
static ssize_t receive(Connection *from, struct msghdr *message, int reads_ahead) {
    size_t wanted = 0, bytes = 0;
    if (holds(from)) {
        for (size_t part = 0; part < message->msg_iovlen && holds(from); part++) {
            size_t length = message->msg_iov[part].iov_len, there = from->end - from->begin;
            if (length > there) length = there;
            memcpy(message->msg_iov[part].iov_base, from->ahead + from->begin, length);
            from->begin += (uint32_t)length;
            bytes += length;
        }
        return (ssize_t)bytes;
    }
    for (size_t part = 0; part < message->msg_iovlen; part++) wanted += message->msg_iov[part].iov_len;
    if (reads_ahead) message->msg_iov[message->msg_iovlen++] = (struct iovec){from->ahead, sizeof(from->ahead)};
    ssize_t moved = recvmsg(from->descriptor, message, MSG_DONTWAIT);
    if (moved <= (ssize_t)wanted) return moved;
    from->begin = 0;
    from->end = (uint32_t)(moved - (ssize_t)wanted);
    return (ssize_t)wanted;
}

/* Take note of a connection that has ended, from what a call has returned. */
static void note(Messenger *self, ssize_t bytes) {
    if (bytes == 0 || (bytes < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) self->ended = 1;
}

/* Move some of a message. Return 1 if any byte has moved, else 0. */
static int progress(Messenger *self, Py_ssize_t index) {
    const Row *row = &self->rows[index];
    int64_t *done = &self->done[index];
    int sends = row->kind == SEND;
    uint64_t *token = sends ? &self->token : &self->tokens[index];
    char *payload = (char *)(intptr_t)(sends ? row->one : row->into);
    struct iovec parts[3];
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 0};
    if (*done < HEADER_BYTES)
        parts[message.msg_iovlen++] = (struct iovec){(char *)token + *done, (size_t)(HEADER_BYTES - *done)};
    int64_t moved = *done < HEADER_BYTES ? 0 : *done - HEADER_BYTES;
    if (row->count > moved)
        parts[message.msg_iovlen++] = (struct iovec){payload + moved, (size_t)(row->count - moved)};
    Connection *other = &self->connections[row->other];
    ssize_t bytes = sends ? sendmsg(other->descriptor, &message, MSG_DONTWAIT | MSG_NOSIGNAL)
                          : receive(other, &message, row->count <= AHEAD_PAYLOAD_BYTES);
    note(self, bytes);
    if (bytes > 0) *done += bytes;
    return bytes > 0;
}

static int is_message(const Row *row) { return row->kind == SEND || row->kind == RECEIVE; }

/* Return 0 for a message that has not gone, or arrived, whole. */
static int has_ended(const Messenger *self, Py_ssize_t index) {
    const Row *row = &self->rows[index];
    return !is_message(row) || self->done[index] == HEADER_BYTES + row->count;
}

/* Collect the sockets of the messages that are under way, one of each direction and rank. Return their number. */
static nfds_t collect(Messenger *self, Py_ssize_t first, Py_ssize_t end) {
    nfds_t count = 0;
    self->scan++;
    self->held = self->receiving = 0;
    for (Py_ssize_t index = first; index < end; index++) {
        const Row *row = &self->rows[index];
        if (has_ended(self, index)) continue;
        uint64_t *busy = &self->busy[(row->kind == SEND ? self->ranks : 0) + row->other];
        if (*busy == self->scan) continue;
        *busy = self->scan;
        const Connection *other = &self->connections[row->other];
        int held = row->kind == RECEIVE && holds(other);
        self->held += (nfds_t)held;
        self->receiving += row->kind == RECEIVE;
        self->waiting[count] = index;
        self->polled[count++] = (struct pollfd){
            other->descriptor, row->kind == SEND ? POLLOUT : POLLIN, held ? POLLIN : 0
        };
    }
    return count;
}

/* Send messages from row `index` on that go to one rank, at once: most of a short one's time is that of the call. */
static void send_together(Messenger *self, Py_ssize_t index, Py_ssize_t end) {
    struct iovec parts[2 * MAX_TOGETHER];
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 0};
    int64_t other = self->rows[index].other;
    if (end > index + MAX_TOGETHER) end = index + MAX_TOGETHER;
    for (Py_ssize_t next = index; next < end; next++) {
        const Row *row = &self->rows[next];
        if (row->kind != SEND || row->other != other) break;
        parts[message.msg_iovlen++] = (struct iovec){&self->token, HEADER_BYTES};
        if (row->count) parts[message.msg_iovlen++] = (struct iovec){(void *)(intptr_t)row->one, (size_t)row->count};
    }
    ssize_t bytes = sendmsg(self->connections[other].descriptor, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    note(self, bytes);
    for (; bytes > 0; index++) {
        int64_t length = HEADER_BYTES + self->rows[index].count;
        self->done[index] = bytes < length ? bytes : length;
        bytes -= self->done[index];
    }
}

/* Send what the sockets take at once; of several messages to one rank, none before the end of the one before it. */
static void begin_sends(Messenger *self, Py_ssize_t first, Py_ssize_t end) {
    self->scan++;
    for (Py_ssize_t index = first; index < end; index++) {
        const Row *row = &self->rows[index];
        uint64_t *busy = &self->busy[self->ranks + row->other];
        if (row->kind != SEND || *busy == self->scan) continue;
        if (self->done[index] == 0) send_together(self, index, end);
        if (self->done[index] < HEADER_BYTES + row->count) *busy = self->scan;
    }
}

/* Wait until a collected socket is ready, for no time or for WAIT_MILLISECONDS. Return 0 if none is. */
static int poll_sockets(Messenger *self, nfds_t count, int sleeps) {
    if (self->held) return 1; /* their sockets may stay empty */
    if (self->ended && sleeps) { /* its socket would always be ready */
        struct timespec pause = {0, ENDED_MILLISECONDS * 1000000L};
        nanosleep(&pause, NULL);
        return 0;
    }
    if (count == 1 && !sleeps) { /* to try is as cheap as to ask */
        self->polled[0].revents = self->polled[0].events;
        return 1;
    }
    return poll(self->polled, count, sleeps ? WAIT_MILLISECONDS : 0) > 0;
}

/* Move the messages before row `end` until those have ended that the row there waits for; else `*number` is the rank
   whose message does not match. */
static enum Interruption exchange(Messenger *self, Py_ssize_t end, Py_ssize_t *number) {
    int part = self->rows[end].kind == PART;
    while (self->first < end && has_ended(self, self->first)) self->first++;
    begin_sends(self, self->first, end);
    for (Py_ssize_t yields = 0;;) {
        nfds_t count = collect(self, self->first, end);
        if (count == 0 || (part && self->receiving == 0)) return FINISHED;
        int sleeps = yields >= self->yields, moved = 0;
        int ready = poll_sockets(self, count, sleeps);
        for (nfds_t place = 0; ready && place < count; place++) {
            if (!self->polled[place].revents) continue;
            Py_ssize_t index = self->waiting[place];
            const Row *row = &self->rows[index];
            moved += progress(self, index);
            if (row->kind == RECEIVE && self->done[index] >= HEADER_BYTES && self->tokens[index] != self->token) {
                *number = (Py_ssize_t)row->other;
                return MISMATCH;
            }
        }
        if (moved) {
            yields = 0;
        } else if (!sleeps) {
            yields++;
            sched_yield();
        } else if (!ready) {
            return LATE;
        }
    }
}

/* Play from row `*at` on, until Python has a part to do. Messages move in the waits behind them. */
static enum Interruption run(Messenger *self, Py_ssize_t *at, Py_ssize_t *number) {
    const Row *rows = self->rows, *last = rows + self->length;
    while (*at < self->length) {
        int64_t kind = rows[*at].kind;
        if (kind == ROUND || kind == PART) {
            enum Interruption event = exchange(self, *at, number);
            if (event != FINISHED) return event;
        } else if (!is_message(&rows[*at])) {
            Py_ssize_t more = count_more(&rows[*at], last);
            *number = *at;
            if (kind != OTHER) move(&rows[*at], more);
            *at += more;
        }
        ++*at;
        if (kind == OTHER) return REDUCTION;
    }
    return FINISHED;
}

static int64_t resolve(int64_t address, int64_t source, int64_t target) {
    return address >= 0 ? address : address >= TARGET ? target + (address - TARGET) : source + (address - SOURCE);
}

/* Place the rows of the program at the addresses of a call. */
static void place(Messenger *self, int64_t source, int64_t target) {
    for (Py_ssize_t index = 0; index < self->length; index++) {
        Row row = self->program[index];
        row.into = resolve(row.into, source, target);
        row.one = resolve(row.one, source, target);
        row.other = resolve(row.other, source, target);
        self->rows[index] = row;
    }
}

PyObject *play_messages(PyObject *object, uint64_t token, int64_t source, int64_t target) {
    Messenger *self = memory_of(object);
    self->token = token;
    self->ended = 0;
    self->first = 0;
    memset(self->done, 0, (size_t)self->length * sizeof(int64_t));
    place(self, source, target);
    for (Py_ssize_t at = 0, number = 0;;) {
        enum Interruption event;
        Py_BEGIN_ALLOW_THREADS
        event = run(self, &at, &number);
        Py_END_ALLOW_THREADS
        if (event == FINISHED) Py_RETURN_NONE;
        PyObject *handled = PyObject_CallFunction(self->handle, "in", (int)event, number);
        if (handled == NULL) return NULL;
        Py_DECREF(handled);
    }
}

static PyObject *messenger_call(PyObject *object, PyObject *arguments) {
    unsigned long long token;
    long long source, target;
    if (!PyArg_ParseTuple(arguments, "KLL", &token, &source, &target)) return NULL;
    return play_messages(object, token, source, target);
}

static PyMethodDef messenger_definition = {
    "play_messages", messenger_call, METH_VARARGS, "Carry a collective across nodes out, again and again."
};

PyObject *messages_of(PyObject *object) {
    const int is_messenger = PyCFunction_CheckExact(object) && PyCFunction_GET_FUNCTION(object) == messenger_call;
    return is_messenger ? PyCFunction_GET_SELF(object) : NULL;
}

/* make_messenger(connections, program, yields, handle): connections by rank, which all programs of a group share; rows;
   polls before it sleeps. Whoever calls it keeps memory alive that the rows name, and the sockets open. It returns a
   function (token, source, target) that carries the collective out at two addresses. */
static PyObject *make_messenger(PyObject *module, PyObject *arguments) {
    PyObject *sockets, *program, *handle;
    Py_ssize_t yields, sockets_bytes = 0, program_bytes = 0;
    if (!PyArg_ParseTuple(arguments, "OOnO", &sockets, &program, &yields, &handle)) return NULL;
    Connection *connections = memory_in(sockets, PyBUF_WRITABLE, &sockets_bytes);
    const Row *rows = connections == NULL ? NULL : memory_in(program, PyBUF_SIMPLE, &program_bytes);
    if (PyErr_Occurred()) return NULL;
    const size_t ranks = (size_t)sockets_bytes / sizeof(Connection), length = (size_t)program_bytes / sizeof(Row);
    const size_t each = sizeof(Row) + sizeof(int64_t) + sizeof(uint64_t) + sizeof(Py_ssize_t) + sizeof(struct pollfd);
    Messenger *self = calloc(1, sizeof(Messenger) + 2 * ranks * sizeof(uint64_t) + length * each);
    if (self == NULL) return PyErr_NoMemory();
    self->handle = handle;
    self->program = rows;
    self->yields = yields;
    self->connections = connections;
    self->ranks = (Py_ssize_t)ranks;
    self->length = (Py_ssize_t)length;
    self->rows = (Row *)(self + 1);
    self->done = (int64_t *)(self->rows + length);
    self->tokens = (uint64_t *)(self->done + length);
    self->busy = self->tokens + length;
    self->waiting = (Py_ssize_t *)(self->busy + 2 * ranks);
    self->polled = (struct pollfd *)(self->waiting + length);
    return make_function(&messenger_definition, self, arguments);
}

static PyMethodDef functions[] = {
    {"make_messenger", make_messenger, METH_VARARGS, "Return a function that carries a collective across nodes out."},
    {NULL, NULL, 0, NULL},
};

int add_messenger(PyObject *module) { return PyModule_AddFunctions(module, functions); }
