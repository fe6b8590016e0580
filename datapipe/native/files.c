/* Whole files, one behind the other: what packing reads. */
#define _POSIX_C_SOURCE 200809L /* openat */

#include "chunk.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

/* Read a file to its end, which finds only a read that returns nothing. Returns its size; -1 where Python must read. */
static int64_t read_file(const File *file, int flags, uint8_t *to, int64_t room)
{
    int64_t size = 0;
    ssize_t count = -1;
    int fd = openat(file->folder, file->name, flags);
    if (fd < 0)
        return -1;
    while (size < room) {
        count = read(fd, to + size, (size_t)(room - size));
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            break;
        size += count;
    }
    close(fd);
    return count == 0 ? size : -1;
}

int64_t native_read_files(Workspace *workspace, File *files, int count, int flags, uint8_t *memory, int64_t room,
                          const volatile uint8_t *is_abandoned, volatile Progress *progress)
{
    int64_t used = 0;
    double start = now();
    for (int i = 0; i < count && !*is_abandoned; i++) {
        File *file = &files[i];
        progress->since_ns = (int64_t)(1e9 * (now() - start));
        progress->number = i + 1;
        file->size = file->folder < 0 || !workspace->hash ? -1 : read_file(file, flags, memory + used, room - used);
        progress->number = 0;
        if (file->size >= 0) {
            file->checksum = (uint32_t)workspace->hash(memory + used, (size_t)file->size);
            used += file->size;
        }
    }
    return used;
}
