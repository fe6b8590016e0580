/* The heads of binary PNM images, which hold pixels as they are: netpbm's P5 (grey) and P6 (RGB), with 8 bits. */
#include "pixels.h"

#include <string.h>

enum { MAX_DIGITS = 5 };

typedef struct {
    const uint8_t *at, *end;
} Text;

static bool is_space(uint8_t byte)
{
    return byte == ' ' || (byte >= '\t' && byte <= '\r');
}

/* Read white space and a number; -1 if they are not there. */
static int read_number(Text *text)
{
    const uint8_t *before = text->at;
    int number = 0, digits = 0;
    while (text->at < text->end && is_space(*text->at))
        text->at++;
    if (text->at == before)
        return -1;
    while (text->at < text->end && *text->at >= '0' && *text->at <= '9' && digits++ < MAX_DIGITS)
        number = 10 * number + (*text->at++ - '0');
    return digits && digits <= MAX_DIGITS ? number : -1;
}

/* Return the pixels of a PNM image of this size; NULL for anything else. */
const uint8_t *find_pnm_pixels(const uint8_t *data, size_t size, int width, int height, int channels)
{
    if (size < 2 || memcmp(data, channels == 1 ? "P5" : "P6", 2) != 0)
        return NULL;
    Text text = {data + 2, data + size};
    if (read_number(&text) != width || read_number(&text) != height || read_number(&text) != 255)
        return NULL;
    if (text.at == text.end || !is_space(*text.at))
        return NULL;
    text.at++;
    return (size_t)(text.end - text.at) == (size_t)width * (size_t)height * (size_t)channels ? text.at : NULL;
}
