/* Copies and sums of memory: what rows say but barriers and messages. */

#include "_steps.h"

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

#define SAME(NUMBER) (NUMBER)
#define ADDED(ONE, OTHER) ((ONE) + (OTHER))
#define LARGER(ONE, OTHER) ((ONE) > (OTHER) ? (ONE) : (OTHER))

/* Reductions of two sources, and of one more for each row of kind MORE after the row; NARROW rounds once, at the end.
   The result may replace a source: so "ivdep", without which the compiler would add one element at a time there. */
#define REDUCE(NAME, TYPE, WIDE, WIDEN, NARROW, BOTH)                                                                           \
    FOR_EACH_VECTOR_WIDTH                                                                                              \
    static void NAME(const Row *row, Py_ssize_t more) {                                                                \
        TYPE *into = (TYPE *)(intptr_t)row->into;                                                                      \
        const TYPE *one = (const TYPE *)(intptr_t)row->one, *other = (const TYPE *)(intptr_t)row->other;               \
        const int64_t length = row->count;                                                                             \
        if (more == 0) {                                                                                               \
            _Pragma("GCC ivdep")                                                                                       \
            for (int64_t i = 0; i < length; i++) into[i] = NARROW(BOTH(WIDEN(one[i]), WIDEN(other[i])));              \
            return;                                                                                                    \
        }                                                                                                              \
        for (int64_t first = 0; first < length; first += BLOCK) {                                                      \
            WIDE sum[BLOCK];                                                                                           \
            const int64_t count = length - first < BLOCK ? length - first : BLOCK;                                     \
            for (int64_t i = 0; i < count; i++) sum[i] = BOTH(WIDEN(one[first + i]), WIDEN(other[first + i]));        \
            for (Py_ssize_t number = 1; number <= more; number++) {                                                    \
                const TYPE *next = (const TYPE *)(intptr_t)row[number].one + first;                                    \
                for (int64_t i = 0; i < count; i++) sum[i] = BOTH(sum[i], WIDEN(next[i]));                            \
            }                                                                                                          \
            for (int64_t i = 0; i < count; i++) into[first + i] = NARROW(sum[i]);                                      \
        }                                                                                                              \
    }

REDUCE(sum_float32, float32, float, SAME, SAME, ADDED)
REDUCE(sum_float64, float64, double, SAME, SAME, ADDED)
REDUCE(sum_bfloat16, bfloat16, float, widened, narrowed, ADDED)
REDUCE(sum_int32, uint32, uint32_t, SAME, SAME, ADDED)
REDUCE(sum_int64, uint64, uint64_t, SAME, SAME, ADDED)
REDUCE(maximum_int32, int32, int32_t, SAME, SAME, LARGER)
REDUCE(maximum_int64, int64, int64_t, SAME, SAME, LARGER)

/* By kind; NULL for rows that are no reductions, which `move` leaves out, as kinds beyond the last. */
static void (*const REDUCTIONS[])(const Row *row, Py_ssize_t more) = {
    [SUM_FLOAT32] = sum_float32,        [SUM_FLOAT64] = sum_float64,     [SUM_BFLOAT16] = sum_bfloat16,
    [SUM_INT32] = sum_int32,            [SUM_INT64] = sum_int64,         [MAXIMUM_INT32] = maximum_int32,
    [MAXIMUM_INT64] = maximum_int64,    [EXACT_FLOAT32] = sum_exactly,   [EXACT_FLOAT64] = sum_exactly,
};

void move(const Row *row, Py_ssize_t more) {
    if (row->kind == COPY) {
        memcpy((void *)(intptr_t)row->into, (const void *)(intptr_t)row->one, (size_t)row->count);
    } else if ((uint64_t)row->kind < sizeof REDUCTIONS / sizeof *REDUCTIONS && REDUCTIONS[row->kind] != NULL) {
        REDUCTIONS[row->kind](row, more);
    }
}
