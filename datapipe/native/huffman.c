/* Tables for Huffman codes (ITU-T T.81, annex C and F.2.2.3): one look for most codes, or for several at once. */
#include "huffman.h"

enum { MAX_DC_SIZE = 11, MAX_AC_SIZE = 10, MAX_CODE = 16 }; /* of 8-bit images (F.1.2.1.1, F.1.2.2.1) */

/* The code of a symbol, with what it means. */
static Entry entry_of(unsigned symbol, unsigned length, bool is_ac)
{
    if (!is_ac)
        return entry(length, symbol, 0);
    unsigned run = symbol >> 4, size = symbol & 15;
    bool ends = size == 0 && run != 15; /* as libjpeg, which takes every run without a coefficient as the end */
    return entry(length, size, ends ? END_OF_BLOCK : run + 1);
}

Entry find_long_code(const Huffman *table, uint64_t bits)
{
    for (unsigned length = 1; length <= MAX_CODE; length++) {
        int32_t code = (int32_t)(bits >> (64 - length));
        if (code < table->end_code[length] && code >= table->first_code[length]) {
            int32_t symbol = table->first_symbol[length] + code - table->first_code[length];
            return entry_of(table->spec.symbols[symbol], length, table->is_ac);
        }
    }
    return entry(1, 0, NO_CODE);
}

/* What the decoder does at once: see `coefficients_of`. */
static uint32_t pack(unsigned length, unsigned advance, unsigned total, int value, int last)
{
    return length | advance << 4 | total << 10 | (uint32_t)(value & 127) << 17 | (uint32_t)(last & 255) << 24;
}

/* Return what the decoder does at once with bits, which begin with a code: one or two coefficients that lie within
 * LOOKUP_BITS of them, and are small.
 *
 * Bits 0 to 3: their length. 4 to 9: how far the first one lies from the place before; if that is the block's last place
 * or beyond, none of this holds, since the second may belong to the next block. 10 to 16: the same of the last one.
 * 17 to 23 and 24 to 31: their values. Of a single one, first and last are the same. Of an end of block alone, the first
 * is a zero in the next place, where there is one already.
 */
static uint32_t coefficients_of(const Huffman *table, uint64_t bits)
{
    const uint32_t none = pack(0, 63, 0, 0, 0);
    Entry first = table->codes[bits >> (64 - LOOKUP_BITS)];
    unsigned length = first & 255, advance = first >> 24;
    if (!first || length > LOOKUP_BITS)
        return none;
    if (advance == END_OF_BLOCK)
        return pack(length, 1, END_OF_BLOCK, 0, 0);
    int value = additional(bits, first);
    if (value < -64 || value > 63)
        return none;
    Entry second = table->codes[bits << length >> (64 - LOOKUP_BITS)];
    unsigned more = second >> 24, total = more == END_OF_BLOCK ? END_OF_BLOCK : advance + more;
    int last = additional(bits << length, second);
    if (!second || length + (second & 255) > LOOKUP_BITS || last < -128 || last > 127)
        return pack(length, advance, advance, value, value);
    return pack(length + (second & 255), advance, total, value, last);
}

/* Codes that follow each other within the bits that are looked up; the additional bits of the last may lie beyond. */
static void fill_skips(Huffman *table)
{
    for (unsigned i = 0; i < 1 << SKIP_BITS; i++) {
        unsigned length = 0, advance = 0, ends = 0;
        while (length < SKIP_BITS && !ends) {
            unsigned next = i << length & ((1 << SKIP_BITS) - 1);
            Entry code = table->codes[next >> (SKIP_BITS - LOOKUP_BITS)];
            unsigned more = code >> 24 == END_OF_BLOCK ? 0 : code >> 24;
            if (!code || length + (code >> 8 & 255) > SKIP_BITS || advance + more > 62)
                break;
            length += code & 255;
            ends = !more;
            advance += more;
        }
        table->skips[i] = length ? (uint16_t)(length | advance << 6 | ends << 13) : (uint16_t)(63 << 6);
    }
}

/* Make the table of a specification, unless it is that already. False for one that is not valid. */
bool build_huffman(Huffman *table, const HuffmanSpec *spec, bool is_ac)
{
    if (!memcmp(&table->spec, spec, sizeof *spec) && table->is_ac == is_ac)
        return true;
    table->spec.counts[0] = 0; /* until it is whole, it is nobody's */
    memset(table->codes, 0, sizeof table->codes);
    int32_t code = 0, symbol = 0;
    for (unsigned length = 1; length <= MAX_CODE; length++, code <<= 1) {
        table->first_code[length] = code;
        table->first_symbol[length] = symbol;
        for (int i = 0; i < spec->counts[length]; i++, code++, symbol++) {
            unsigned value = spec->symbols[symbol];
            if (code >= 1 << length || (is_ac ? value & 15 : value) > (is_ac ? MAX_AC_SIZE : MAX_DC_SIZE))
                return false;
            if (length > LOOKUP_BITS)
                continue;
            unsigned shift = LOOKUP_BITS - length;
            for (unsigned rest = 0; rest < 1u << shift; rest++)
                table->codes[((unsigned)code << shift) + rest] = entry_of(value, length, is_ac);
        }
        table->end_code[length] = code;
    }
    table->is_ac = is_ac;
    if (is_ac) {
        for (unsigned i = 0; i < 1 << LOOKUP_BITS; i++)
            table->coefficients[i] = coefficients_of(table, (uint64_t)i << (64 - LOOKUP_BITS));
        fill_skips(table);
    }
    table->spec = *spec;
    return true;
}
