/* Rows of pixels: where they come from, and how a box of them gets into the batch's slot. */
#ifndef DATAPIPE_PIXELS_H
#define DATAPIPE_PIXELS_H

#include "jpeg.h"

#define ROW_SLACK 64 /* bytes behind a row that vectors may touch */

/* Rows of a box: uint8[width, channels] each. */
typedef struct {
    int width, height, channels;
    const Header *header; /* of a JPEG; NULL: `samples` are pixels already */
    const Window *window;
    int left, top;          /* of the box: in the image; of pixels: 0 */
    const uint8_t *pixels;  /* the first of the box, where it is pixels */
    size_t stride;          /* bytes between rows of them */
    uint8_t *chroma[2];     /* room for a row of each, twice as wide as the samples */
    uint16_t *sums;         /* room for a row of samples, and one more at both ends */
} Rows;

const uint8_t *find_pnm_pixels(const uint8_t *data, size_t size, int width, int height, int channels);

/* Give `chroma` and `sums` their room. False without memory. */
bool place_chroma(Rows *rows, Memory *memory);

/* Write row `y` of the box to `out`, which has ROW_SLACK bytes behind it. */
void read_row(const Rows *rows, int y, uint8_t *out);

/* Resize a box to uint8[out_size, out_size, channels]. False without memory. */
bool resize(const Rows *rows, bool flip, int out_size, uint8_t *out, Memory *memory);

#endif
