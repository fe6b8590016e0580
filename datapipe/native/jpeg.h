/* What the parts of the decoder know of a JPEG. Sections are those of ITU-T T.81. */
#ifndef DATAPIPE_JPEG_H
#define DATAPIPE_JPEG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "native.h"

#define MAX_COMPONENTS 3
#define BLOCK 8                /* samples across and down (A.3.1) */
#define MAX_LUMA_BLOCKS 4      /* per MCU: 4:2:0 and 4:1:1 have four */
#define MAX_SIDE 65500         /* pixels: libjpeg's limit */
#define MAX_PIXELS (1 << 30)   /* of an image, so that no size here overflows */
#define MAX_WINDOW_BYTES (512 << 20) /* of one image's decoded samples: larger ones are left to Python */

/* Markers: their second bytes (B.1.1.3). */
enum Marker {
    SOF0 = 0xc0, /* baseline */
    SOF1 = 0xc1, /* extended sequential */
    DHT = 0xc4,
    RST0 = 0xd0, /* to RST7 */
    SOI = 0xd8,
    EOI = 0xd9,
    SOS = 0xda,
    DQT = 0xdb,
    DRI = 0xdd,
    APP0 = 0xe0,
    APP14 = 0xee,
    APP15 = 0xef,
    COM = 0xfe,
};

/* A Huffman table as a DHT segment gives it (B.2.4.2). */
typedef struct {
    uint8_t counts[17]; /* codes of each length, from 1; counts[0] is 1 where the table is given at all */
    uint8_t symbols[256];
} HuffmanSpec;

/* What the segments before the scan say. Component 0 is luma, or grey, or red. */
typedef struct {
    int width, height;      /* pixels */
    int components;         /* 1 or 3 */
    int across, down;       /* luma blocks per MCU; the other components have one block */
    int restart_interval;   /* MCUs, 0 for none */
    bool is_rgb;            /* the components are not YCbCr */
    uint16_t quantisation[4][64]; /* in zigzag order */
    uint8_t given_quantisation;   /* a bit for each table */
    HuffmanSpec dc[4], ac[4];
    uint8_t quantisation_of[MAX_COMPONENTS], dc_of[MAX_COMPONENTS], ac_of[MAX_COMPONENTS];
    size_t frame_at; /* where the marker of the frame lies, bytes */
    size_t scan_at;  /* where entropy-coded data begin, bytes */
} Header;

/* A part of the image that consists of whole MCUs, and the samples of each component in it. Pixels are those of the
 * image at its scale, at which a block has fewer samples. */
typedef struct {
    int scale;
    int width, height;                   /* of the whole image, pixels */
    int across, down;                    /* pixels per sample of chroma */
    int block[MAX_COMPONENTS];           /* samples of a block across and down */
    int left, top;                       /* pixels */
    int first_column, end_column;        /* MCUs */
    int first_row, end_row;              /* MCUs */
    uint8_t *samples[MAX_COMPONENTS];    /* the first sample of each */
    size_t stride[MAX_COMPONENTS];       /* bytes between rows */
} Window;

/* Memory that grows. */
typedef struct {
    uint8_t *bytes;
    size_t size;
} Memory;

typedef struct Huffman Huffman;

/* What decoding needs, of one thread. */
typedef struct {
    Huffman *dc, *ac; /* four tables each */
    Memory entropy;   /* entropy-coded data without stuffed zeros */
    Memory samples;
} Decoder;

/* Return at least `size` bytes, aligned to 64, with old content lost; NULL if there are none. */
uint8_t *make_room(Memory *memory, size_t size);

#define OUTSIDE 64 /* place of a coefficient that no block has */
/* The place in a block, row by row, of the k-th coefficient (figure A.6), or OUTSIDE: k is at most 62 + END_OF_BLOCK. */
extern const uint8_t ZIGZAG[192];

bool read_header(const uint8_t *data, size_t size, Header *header);
bool decode_window(Decoder *decoder, const uint8_t *data, size_t size, const Header *header, Box box, int scale,
                   Window *window);
bool check_scan(Decoder *decoder, const uint8_t *data, size_t size, const Header *header);

#endif
