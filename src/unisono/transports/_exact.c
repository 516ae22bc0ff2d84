/* Exact sums, compiled: what `exact.py` does by PyTorch, with the same bits.

    rank 0's block   256 numbers ┐  magnitudes ─▶ exponent ─▶ integers, summed ─▶ 256 numbers     sum of a row
    rank 1's block   256 numbers ┘                in registers, while the blocks are in the first cache

Who sees the block of every rank agrees with nobody, and writes no integer: memory is read and written as for any sum.
Elsewhere `measure`, `encode` and `decode` are steps by themselves: for shares that a rank adds up before, and integers
that any schedule or library sums.
*/

#include "_steps.h"
#include <math.h>

enum { EXACT_BLOCK = 256, GROUP = 6 };

static inline int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

static inline void prefetch(const char *memory, size_t bytes) {
    for (size_t line = 0; line < bytes; line += 64) __builtin_prefetch(memory + line);
}

/* FLOAT has MANTISSA bits and the exponent's BIAS; a sum has WIDTH bits besides its sign. Magnitudes are compared as
   integers, of which that of NaN is the largest. */
#define EXACT(NAME, FLOAT, INT, UINT, MANTISSA, BIAS, WIDTH, RINT)                                                     \
    static inline FLOAT power_##NAME(INT exponent) { /* of two; 0 where it is too small */                             \
        const INT bits = (exponent + BIAS > 0 ? exponent + BIAS : 0) << MANTISSA;                                      \
        FLOAT power;                                                                                                   \
        memcpy(&power, &bits, sizeof power);                                                                           \
        return power;                                                                                                  \
    }                                                                                                                  \
                                                                                                                       \
    /* Return the exponent of a block's quantum, of which a term has at most 2^`bits`; BIAS or more: it is NaN. */     \
    static inline INT quantum_##NAME(INT magnitude, INT bits) {                                                        \
        const INT stored = magnitude >> MANTISSA;                                                                      \
        return stored > 2 * BIAS ? BIAS + 1 : (stored > WIDTH ? stored : WIDTH) - (BIAS - 1) - bits;                   \
    }                                                                                                                  \
                                                                                                                       \
    /* Return the largest of a magnitude and those of two blocks, which may be the same. */                            \
    static inline INT larger_##NAME(const FLOAT *one, const FLOAT *other, int64_t count, INT largest) {                \
        const INT *bits = (const INT *)one, *more = (const INT *)other, magnitude = (INT)((~(UINT)0) >> 1);            \
        for (int64_t i = 0; i < count; i++) {                                                                          \
            const INT left = bits[i] & magnitude, right = more[i] & magnitude;                                         \
            const INT larger = left > right ? left : right;                                                            \
            largest = larger > largest ? larger : largest;                                                             \
        }                                                                                                              \
        return largest;                                                                                                \
    }                                                                                                                  \
                                                                                                                       \
    FOR_EACH_VECTOR_WIDTH                                                                                              \
    static void measure_##NAME(const FLOAT *values, int64_t length, FLOAT weight, INT *maxima) {                       \
        for (int64_t first = 0; first < length; first += EXACT_BLOCK, maxima++) {                                      \
            INT largest = larger_##NAME(values + first, values + first, least(length - first, EXACT_BLOCK), 0);        \
            FLOAT found;                                                                                               \
            memcpy(&found, &largest, sizeof found);                                                                    \
            found *= weight;                                                                                           \
            *maxima = larger_##NAME(&found, &found, 1, *maxima);                                                       \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    FOR_EACH_VECTOR_WIDTH                                                                                              \
    static void encode_##NAME(const FLOAT *values, int64_t length, int64_t inside, const INT *maxima, INT bits,        \
                              FLOAT weight, UINT *into, int add) {                                                     \
        for (int64_t first = 0, last; first < length; first = last, maxima++) {                                        \
            last = least(length, first + EXACT_BLOCK - inside), inside = 0;                                            \
            const INT exponent = quantum_##NAME(*maxima, bits);                                                        \
            const FLOAT factor = power_##NAME(-exponent) * weight;                                                     \
            if (exponent > BIAS) { /* whatever is there becomes NaN */                                                 \
                memset(into + first, 0, (size_t)(last - first) * sizeof *into);                                        \
            } else if (add) {                                                                                          \
                for (int64_t i = first; i < last; i++) into[i] += (UINT)RINT(values[i] * factor);                      \
            } else {                                                                                                   \
                for (int64_t i = first; i < last; i++) into[i] = (UINT)RINT(values[i] * factor);                       \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    FOR_EACH_VECTOR_WIDTH                                                                                              \
    static void decode_##NAME(const INT *sums, int64_t length, int64_t inside, const INT *maxima, INT bits,            \
                              FLOAT *into) {                                                                           \
        for (int64_t first = 0, last; first < length; first = last, maxima++) {                                        \
            last = least(length, first + EXACT_BLOCK - inside), inside = 0;                                            \
            const INT exponent = quantum_##NAME(*maxima, bits);                                                        \
            const FLOAT quantum = exponent > BIAS ? (FLOAT)NAN : power_##NAME(exponent);                               \
            _Pragma("GCC ivdep") /* the numbers may take the place of the integers */                                  \
            for (int64_t i = first; i < last; i++) into[i] = (FLOAT)sums[i] * quantum;                                 \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    /* Sum the sources of a row, and of the rows of kind MORE after it, of which each is a rank's. Exponents of several\
       blocks come first, so that none waits for its own. While one is summed, the block that many further on comes    \
       from memory, or from the cache of the rank that has written it. */                                              \
    FOR_EACH_VECTOR_WIDTH                                                                                              \
    static void sum_##NAME(const Row *row, Py_ssize_t more, INT bits) {                                                \
        FLOAT *into = (FLOAT *)(intptr_t)row->into;                                                                    \
        const FLOAT *one = (const FLOAT *)(intptr_t)row->one, *other = (const FLOAT *)(intptr_t)row->other;            \
        for (int64_t first = 0, last; first < row->count; first = last) {                                              \
            last = least(first + GROUP * EXACT_BLOCK, row->count);                                                     \
            INT maxima[GROUP];                                                                                         \
            for (int64_t begin = first, block = 0; begin < last; begin += EXACT_BLOCK, block++) {                      \
                const int64_t count = least(last - begin, EXACT_BLOCK);                                                \
                maxima[block] = larger_##NAME(one + begin, other + begin, count, 0);                                   \
                for (Py_ssize_t number = 1; number <= more; number++) {                                                \
                    const FLOAT *next = (const FLOAT *)(intptr_t)row[number].one + begin;                              \
                    maxima[block] = larger_##NAME(next, next, count, maxima[block]);                                   \
                }                                                                                                      \
            }                                                                                                          \
            for (int64_t begin = first, block = 0; begin < last; begin += EXACT_BLOCK, block++) {                      \
                const int64_t count = least(last - begin, EXACT_BLOCK), end = begin + count;                           \
                const int64_t ahead = least(begin + GROUP * EXACT_BLOCK, row->count);                                  \
                const size_t bytes = (size_t)least(row->count - ahead, EXACT_BLOCK) * sizeof(FLOAT);                   \
                prefetch((const char *)(one + ahead), bytes), prefetch((const char *)(other + ahead), bytes);          \
                const INT exponent = quantum_##NAME(maxima[block], bits);                                              \
                const FLOAT factor = power_##NAME(-exponent), quantum = power_##NAME(exponent);                        \
                INT sums[EXACT_BLOCK];                                                                                 \
                if (exponent > BIAS) {                                                                                 \
                    for (int64_t i = begin; i < end; i++) into[i] = (FLOAT)NAN;                                        \
                } else if (more == 0) {                                                                                \
                    _Pragma("GCC ivdep")                                                                               \
                    for (int64_t i = begin; i < end; i++)                                                              \
                        into[i] = (FLOAT)(RINT(one[i] * factor) + RINT(other[i] * factor)) * quantum;                  \
                } else {                                                                                               \
                    for (int64_t i = 0; i < count; i++)                                                                \
                        sums[i] = RINT(one[begin + i] * factor) + RINT(other[begin + i] * factor);                     \
                    for (Py_ssize_t number = 1; number <= more; number++) {                                            \
                        const FLOAT *next = (const FLOAT *)(intptr_t)row[number].one + begin;                          \
                        prefetch((const char *)(next + (ahead - begin)), bytes);                                       \
                        for (int64_t i = 0; i < count; i++) sums[i] += RINT(next[i] * factor);                         \
                    }                                                                                                  \
                    for (int64_t i = 0; i < count; i++) into[begin + i] = (FLOAT)sums[i] * quantum;                    \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }

/* One instruction for several numbers, where errno need not be set (`hatch_build.py`). */
#if defined(__GNUC__) && !defined(__clang__)
#define NEAREST_INT32(NUMBER) __builtin_irintf(NUMBER)
#else
#define NEAREST_INT32(NUMBER) ((int32_t)lrintf(NUMBER))
#endif
#define NEAREST_INT64(NUMBER) ((int64_t)nearbyint(NUMBER))

EXACT(float32, float32, int32, uint32, 23, 127, 30, NEAREST_INT32)
EXACT(float64, float64, int64, uint64, 52, 1023, 62, NEAREST_INT64)

/* Return the bits of a term besides its sign, of as many as sum to `width` bits. */
static inline int bits_of(int width, int64_t summands) {
    for (summands--; summands > 0; summands >>= 1) width--;
    return width;
}

void sum_exactly(const Row *row, Py_ssize_t more) {
    if (row->kind == EXACT_FLOAT32) {
        sum_float32(row, more, bits_of(30, more + 2));
    } else {
        sum_float64(row, more, bits_of(62, more + 2));
    }
}

/* The steps by themselves, for tensors: addresses, then numbers, as the functions of these names in `exact.py`. */

/* Call a function for numbers of 4 or 8 bytes, without Python's lock. */
#define CALL(FUNCTION, ...)                                                                                            \
    Py_BEGIN_ALLOW_THREADS                                                                                             \
    if (itemsize == 4) FUNCTION##_float32(__VA_ARGS__);                                                                \
    else FUNCTION##_float64(__VA_ARGS__);                                                                              \
    Py_END_ALLOW_THREADS

static PyObject *measure(PyObject *module, PyObject *arguments) {
    long long values, length, maxima;
    double weight;
    int itemsize;
    if (!PyArg_ParseTuple(arguments, "iLLdL", &itemsize, &values, &length, &weight, &maxima)) return NULL;
    CALL(measure, (void *)(intptr_t)values, length, weight, (void *)(intptr_t)maxima)
    Py_RETURN_NONE;
}

static PyObject *encode(PyObject *module, PyObject *arguments) {
    long long values, length, inside, maxima, summands, into;
    double weight;
    int itemsize, add;
    if (!PyArg_ParseTuple(arguments, "iLLLLLdLp", &itemsize, &values, &length, &inside, &maxima, &summands, &weight,
                          &into, &add))
        return NULL;
    void *from = (void *)(intptr_t)values, *exponents = (void *)(intptr_t)maxima, *to = (void *)(intptr_t)into;
    CALL(encode, from, length, inside, exponents, bits_of(8 * itemsize - 2, summands), weight, to, add)
    Py_RETURN_NONE;
}

static PyObject *decode(PyObject *module, PyObject *arguments) {
    long long sums, length, inside, maxima, summands, into;
    int itemsize;
    if (!PyArg_ParseTuple(arguments, "iLLLLLL", &itemsize, &sums, &length, &inside, &maxima, &summands, &into))
        return NULL;
    void *from = (void *)(intptr_t)sums, *exponents = (void *)(intptr_t)maxima, *to = (void *)(intptr_t)into;
    CALL(decode, from, length, inside, exponents, bits_of(8 * itemsize - 2, summands), to)
    Py_RETURN_NONE;
}

/* Products of integers and factors, summed modulo 2^64. */
#define PRODUCTS(NAME, INT)                                                                                            \
    FOR_EACH_VECTOR_WIDTH                                                                                              \
    static uint64_t products_##NAME(const INT *values, const uint64_t *factors, int64_t count) {                       \
        uint64_t total = 0;                                                                                            \
        for (int64_t i = 0; i < count; i++) total += (uint64_t)(int64_t)values[i] * factors[i];                        \
        return total;                                                                                                  \
    }

PRODUCTS(int8, int8_t)
PRODUCTS(int32, int32)
PRODUCTS(int64, int64)

static PyObject *checksum(PyObject *module, PyObject *arguments) {
    long long address, length, start, number, factors, tile;
    int itemsize;
    uint64_t total = 0;
    if (!PyArg_ParseTuple(arguments, "iLLLLLL", &itemsize, &address, &length, &number, &start, &factors, &tile))
        return NULL;
    const char *values = (const char *)(intptr_t)address;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t at = 0, count; at < length; at += count) {
        const int64_t inside = (start + at) % tile;
        const uint64_t *mine = (const uint64_t *)(intptr_t)factors + inside;
        const void *from = values + at * itemsize;
        count = least(length - at, tile - inside);
        uint64_t found = itemsize == 1   ? products_int8(from, mine, count)
                         : itemsize == 4 ? products_int32(from, mine, count)
                                         : products_int64(from, mine, count);
        total += found * (2 * ((uint64_t)number << 32 | (uint64_t)((start + at) / tile)) + 1);
    }
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(total);
}

static PyMethodDef exact_functions[] = {
    {"measure", measure, METH_VARARGS, "Raise maxima of blocks to the largest magnitudes of values."},
    {"encode", encode, METH_VARARGS, "Make integers of values."},
    {"decode", decode, METH_VARARGS, "Make numbers of integers."},
    {"checksum", checksum, METH_VARARGS, "Return the sum of integers times odd factors."},
    {NULL, NULL, 0, NULL},
};

int add_exact(PyObject *module) { return PyModule_AddFunctions(module, exact_functions); }
