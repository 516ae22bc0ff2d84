/* Copies and sums of memory: what rows say but barriers and messages. */

#include "_steps.h"

enum { BLOCK = 1024 }; /* elements that are summed in float32 at a time */

static inline float of_bits(uint32_t bits) {
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

static inline uint32_t bits_of(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    return bits;
}

static inline float widened(uint16_t number) { return of_bits((uint32_t)number << 16); }

/* The nearest bfloat16, of two the even one, as PyTorch rounds; NaN has one form. */
static inline uint16_t narrowed(float number) {
    uint32_t bits = bits_of(number);
    uint16_t rounded = (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
    return number != number ? 0x7FC0 : rounded;
}

/* float16: its exponent is float32's less 112. Below 2**-14 its steps are 2**-24, as those of float32 from 0.5 to 1. */
enum { BIAS = 112 << 23, HALF = 0x3F000000, LEAST = 0x38800000, TOO_LARGE = 0x47800000, INFINITE = 0x7F800000 };

/* Chosen by a mask: with a branch, compilers add one element at a time. */
static inline uint32_t chosen(int condition, uint32_t then, uint32_t other) {
    uint32_t mask = 0u - (uint32_t)condition;
    return (then & mask) | (other & ~mask);
}

static inline float widened_half(uint16_t number) {
    uint32_t rest = number & 0x7FFF, normal = (rest << 13) + BIAS + chosen(rest < 0x7C00, 0, BIAS);
    uint32_t small = bits_of(of_bits(rest + HALF) - 0.5f), sign = (uint32_t)(number & 0x8000) << 16;
    return of_bits(chosen(rest < 0x400, small, normal) | sign);
}

/* The nearest float16, of two the even one; NaN has one form. */
static inline uint16_t narrowed_half(float number) {
    uint32_t bits = bits_of(number), rest = bits & 0x7FFFFFFF;
    uint32_t normal = (rest + 0xFFF + ((rest >> 13) & 1) - BIAS) >> 13, small = bits_of(of_bits(rest) + 0.5f) - HALF;
    uint32_t large = chosen(rest < TOO_LARGE, normal, chosen(rest > INFINITE, 0x7E00, 0x7C00));
    return (uint16_t)((bits >> 16 & 0x8000) | chosen(rest < LEAST, small, large));
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
REDUCE(sum_bfloat16, half, float, widened, narrowed, ADDED)
REDUCE(sum_float16, half, float, widened_half, narrowed_half, ADDED)
REDUCE(sum_int32, uint32, uint32_t, SAME, SAME, ADDED)
REDUCE(sum_int64, uint64, uint64_t, SAME, SAME, ADDED)
REDUCE(maximum_int32, int32, int32_t, SAME, SAME, LARGER)
REDUCE(maximum_int64, int64, int64_t, SAME, SAME, LARGER)

/* By kind; NULL for rows that are no reductions, which `move` leaves out, as kinds beyond the last. */
static void (*const REDUCTIONS[])(const Row *row, Py_ssize_t more) = {
    [SUM_FLOAT32] = sum_float32,        [SUM_FLOAT64] = sum_float64,     [SUM_BFLOAT16] = sum_bfloat16,
    [SUM_INT32] = sum_int32,            [SUM_INT64] = sum_int64,         [MAXIMUM_INT32] = maximum_int32,
    [MAXIMUM_INT64] = maximum_int64,    [EXACT_FLOAT32] = sum_exactly,   [EXACT_FLOAT64] = sum_exactly,
    [SUM_FLOAT16] = sum_float16,
};

void move(const Row *row, Py_ssize_t more) {
    if (row->kind == COPY) {
        memcpy((void *)(intptr_t)row->into, (const void *)(intptr_t)row->one, (size_t)row->count);
    } else if ((uint64_t)row->kind < sizeof REDUCTIONS / sizeof *REDUCTIONS && REDUCTIONS[row->kind] != NULL) {
        REDUCTIONS[row->kind](row, more);
    }
}
