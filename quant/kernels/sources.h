/* Check that a compiled module belongs to the sources beside it.
 *
 * The build defines SOURCES, their names relative to the module, each followed by a line feed, and DIGEST, that of their
 * bytes. Installed modules have no sources beside them. */
#ifndef CHORUS_SOURCES_H
#define CHORUS_SOURCES_H

#include <Python.h>

#if defined(DIGEST) && !defined(_WIN32)
#include <dlfcn.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* FNV-1a of a file's bytes, from a digest on; 0 if it cannot be read. */
static uint64_t add_file(uint64_t digest, const char *path) {
    unsigned char bytes[1 << 14];
    FILE *file = fopen(path, "rb");
    if (file == NULL) return 0;
    for (size_t count; (count = fread(bytes, 1, sizeof bytes, file)) > 0;)
        for (size_t at = 0; at < count; at++) digest = (digest ^ bytes[at]) * 0x100000001b3u;
    fclose(file);
    return digest;
}

/* 0, or -1 with an ImportError if the module `name` was built from other sources than those beside it. */
static int check_sources(const char *name) {
    static const char list[] = SOURCES;
    Dl_info found;
    char path[PATH_MAX];
    const char *slash = dladdr(list, &found) && found.dli_fname ? strrchr(found.dli_fname, '/') : NULL;
    if (slash == NULL) return 0;
    uint64_t digest = 0xcbf29ce484222325u;
    for (const char *file = list, *end; digest && (end = strchr(file, '\n')); file = end + 1) {
        int length = snprintf(path, sizeof path, "%.*s%.*s", (int)(slash + 1 - found.dli_fname), found.dli_fname,
                              (int)(end - file), file);
        digest = length < (int)sizeof path ? add_file(digest, path) : 0;
    }
    if (digest == 0 || digest == DIGEST) return 0;
    PyErr_Format(PyExc_ImportError, "%s (%s) was built from other sources; build it again: python setup.py build_ext "
                 "--inplace --force", name, found.dli_fname);
    return -1;
}
#else
static int check_sources(const char *name) { return (void)name, 0; }
#endif

#endif
