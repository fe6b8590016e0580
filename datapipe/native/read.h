/* Encoded images from files. */
#ifndef DATAPIPE_READ_H
#define DATAPIPE_READ_H

#include "jpeg.h"

/* Neighbours in a file that were read at once. */
typedef struct {
    Memory memory;
    const uint8_t *bytes;
    int64_t start, size; /* of the bytes, in the file */
    int end;             /* the first job behind the group */
} Group;

#define MAX_ENCODED (INT64_C(1) << 30) /* bytes of an encoded image: larger ones are left to Python */

/* Whether its size and offset can be those of an image: an index may be damaged, or made to do harm. */
bool is_sane(const Job *job);

/* Return the bytes of job `i`, which has a file and is sane; NULL if they cannot be read, or are too few. They are
 * there until the next call. Jobs are asked for in order, and `group->end` is 0 before the first of a chunk. */
const uint8_t *read_image(Group *group, const Job *jobs, int i, int count);

#endif
