/* Bits and Huffman codes of entropy-coded data (ITU-T T.81, annex F.2.2), for the innermost loops. */
#ifndef DATAPIPE_HUFFMAN_H
#define DATAPIPE_HUFFMAN_H

#include <string.h>

#include "jpeg.h"

#define LOOKUP_BITS 11
#define SKIP_BITS 12
#define READ_AHEAD 16 /* bytes behind the data that a reader may touch */

/* How far a code moves on in its block, its `advance`: its run of zeros and the coefficient itself, at most 16. These two
 * are more: from a place of at most 62 they lead to 127 and beyond, and to 64 to 126, as `is_damaged` tells them apart. */
#define END_OF_BLOCK 127
#define NO_CODE 64

/* A code and the additional bits behind it, in 32 bits: see `entry`. */
typedef uint32_t Entry;

struct Huffman {
    Entry codes[1 << LOOKUP_BITS]; /* by the next bits; 0: a longer code */
    /* For AC: up to two coefficients that lie within the next bits: see `coefficients_of`. */
    uint32_t coefficients[1 << LOOKUP_BITS];
    /* For AC: as many codes as fit into the next bits: length | advance << 6 | whether the block ends << 13; of none, an
     * advance of 63. */
    uint16_t skips[1 << SKIP_BITS];
    int32_t end_code[18];  /* of each length: the code behind the last */
    int32_t first_code[17], first_symbol[17];
    HuffmanSpec spec; /* of which this was made */
    bool is_ac;
};

typedef struct {
    const uint8_t *next; /* the first byte that is not wholly in `bits` */
    uint64_t bits;       /* the next bits, from the highest; what lies below `count` is zero, or right as well */
    int count;           /* of valid bits */
} BitReader;

bool build_huffman(Huffman *table, const HuffmanSpec *spec, bool is_ac);
Entry find_long_code(const Huffman *table, uint64_t bits);

static inline Entry entry(unsigned length, unsigned size, unsigned advance)
{
    return (length + size) | length << 8 | size << 16 | advance << 24;
}

static inline uint64_t load_big_endian(const uint8_t *bytes)
{
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

/* Have at least 56 bits: two codes of 16 with 10 additional bits each, or one of DC (16 and 11) and one of AC. */
static inline void refill(BitReader *reader)
{
    reader->bits |= load_big_endian(reader->next) >> reader->count;
    reader->next += (63 - reader->count) >> 3;
    reader->count |= 56;
}

static inline void consume(BitReader *reader, unsigned length)
{
    reader->bits <<= length;
    reader->count -= (int)length;
}

/* Additional bits to a number (F.2.2.1, RECEIVE and EXTEND). */
static inline int additional(uint64_t bits, Entry code)
{
    unsigned length = code >> 8 & 255, size = code >> 16 & 255;
    uint64_t rest = bits << length;
    int number = (int)(rest >> 1 >> (63 - size)); /* in two steps: `size` may be 0 */
    int is_negative = (int)(rest >> 63) - 1;      /* all ones where the first bit is 0 */
    return number - (is_negative & ((1 << size) - 1));
}

static inline Entry find_code(const Huffman *table, uint64_t bits)
{
    Entry code = table->codes[bits >> (64 - LOOKUP_BITS)];
    return __builtin_expect(code != 0, 1) ? code : find_long_code(table, bits);
}

/* Whether a block ended neither with its last coefficient nor with an end of block: beyond it, or at no code. */
static inline bool is_damaged(unsigned place)
{
    return place > 63 && place < END_OF_BLOCK;
}

#endif
