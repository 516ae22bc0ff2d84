/* Copies and sums of memory: what rows say but barriers and messages. */

#include "_steps.h"

/* Sums of blocks in the caches gain by wide vectors; elsewhere memory is the limit. The bits do not depend on them. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#define FOR_EACH_VECTOR_WIDTH __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_VECTOR_WIDTH
#endif

/* Payloads may begin at any byte. */
typedef float float32 __attribute__((aligned(1), may_alias));
typedef double float64 __attribute__((aligned(1), may_alias));
typedef uint16_t bfloat16 __attribute__((aligned(1), may_alias));

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

void move(const Row *row, Py_ssize_t more) {
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
    }
}
