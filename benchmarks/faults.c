/* Loaded into a process with LD_PRELOAD: counts the calls that change files under one folder, and at one of
   them kills the process or fails with an error, as a crash, a full disk or a broken disk would. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[PATH_MAX];
static volatile long calls;
static long chosen;
static int fault;

/* Starts counting. At call `at` the process is killed (error 0) or the call fails; ENOSPC and EROFS stay. */
void faults_arm(const char *folder, long at, int error) {
  strncpy(root, folder, sizeof root - 1);
  calls = 0;
  chosen = at;
  fault = error;
}

long faults_count(void) { return calls; }

static int below(const char *path) {
  size_t length = strlen(root);
  return length && !strncmp(path, root, length) && (path[length] == '/' || !path[length]);
}

static int at_place(int folder, const char *name) {
  char whole[2 * PATH_MAX], link[64];
  if (!root[0] || !name) return 0;
  if (name[0] == '/') return below(name);
  if (folder == AT_FDCWD) {
    if (!getcwd(whole, PATH_MAX)) return 0;
  } else {
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    ssize_t size = readlink(link, whole, PATH_MAX - 1);
    if (size < 0) return 0;
    whole[size] = 0;
  }
  strncat(whole, "/", 2);
  strncat(whole, name, PATH_MAX - 1);
  return below(whole);
}

static int at_descriptor(int descriptor) {
  char link[64], path[PATH_MAX];
  if (!root[0]) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t size = readlink(link, path, sizeof path - 1);
  if (size < 0) return 0;
  path[size] = 0;
  return below(path);
}

/* 1: this call fails; 2: the process dies in it. */
static int due(int needs_space) {
  long now = __sync_add_and_fetch(&calls, 1);
  if (chosen <= 0 || now < chosen) return 0;
  if (!fault) return 2;
  if (fault == ENOSPC ? !needs_space : fault != EROFS && now != chosen) return 0;
  errno = fault;
  return 1;
}

static void die(void) {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

#define REAL(name) static __typeof__(name) *real; if (!real) real = dlsym(RTLD_NEXT, #name)
#define CHECK(here, needs_space) do { if (here) { int what = due(needs_space); if (what == 2) die(); if (what) return -1; } } while (0)

#define WRITES(flags) ((flags) & (O_CREAT | O_TRUNC) || ((flags) & O_ACCMODE) != O_RDONLY)
#define OPEN(name) \
  int name(const char *path, int flags, ...) { \
    va_list more; va_start(more, flags); mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; va_end(more); \
    REAL(name); CHECK(WRITES(flags) && at_place(AT_FDCWD, path), 1); return real(path, flags, mode); }
#define OPENAT(name) \
  int name(int folder, const char *path, int flags, ...) { \
    va_list more; va_start(more, flags); mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; va_end(more); \
    REAL(name); CHECK(WRITES(flags) && at_place(folder, path), 1); return real(folder, path, flags, mode); }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)

#define FOPEN(name) \
  FILE *name(const char *path, const char *mode) { \
    REAL(name); \
    if (mode[0] != 'r' && at_place(AT_FDCWD, path)) { int what = due(1); if (what == 2) die(); if (what) return NULL; } \
    return real(path, mode); }
FOPEN(fopen) FOPEN(fopen64)

/* A killed write has written its first half. */
ssize_t write(int descriptor, const void *data, size_t size) {
  REAL(write);
  if (at_descriptor(descriptor)) {
    int what = due(1);
    if (what == 2) { if (real(descriptor, data, size / 2) >= 0) die(); die(); }
    if (what) return -1;
  }
  return real(descriptor, data, size);
}
#define PWRITE(name) \
  ssize_t name(int descriptor, const void *data, size_t size, off_t place) { \
    REAL(name); \
    if (at_descriptor(descriptor)) { \
      int what = due(1); \
      if (what == 2) { if (real(descriptor, data, size / 2, place) >= 0) die(); die(); } \
      if (what) return -1; } \
    return real(descriptor, data, size, place); }
PWRITE(pwrite) PWRITE(pwrite64)
ssize_t writev(int descriptor, const struct iovec *parts, int count) {
  REAL(writev); CHECK(at_descriptor(descriptor), 1); return real(descriptor, parts, count); }
ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t size, unsigned flags) {
  REAL(copy_file_range); CHECK(at_descriptor(out), 1); return real(in, from, out, to, size, flags); }
ssize_t sendfile(int out, int in, off_t *from, size_t size) {
  static ssize_t (*real)(int, int, off_t *, size_t); if (!real) real = dlsym(RTLD_NEXT, "sendfile");
  CHECK(at_descriptor(out), 1); return real(out, in, from, size); }
ssize_t sendfile64(int out, int in, off64_t *from, size_t size) {
  static ssize_t (*real)(int, int, off64_t *, size_t); if (!real) real = dlsym(RTLD_NEXT, "sendfile64");
  CHECK(at_descriptor(out), 1); return real(out, in, from, size); }
int ftruncate(int descriptor, off_t size) { REAL(ftruncate); CHECK(at_descriptor(descriptor), 1); return real(descriptor, size); }
int ftruncate64(int descriptor, off64_t size) { REAL(ftruncate64); CHECK(at_descriptor(descriptor), 1); return real(descriptor, size); }
int fsync(int descriptor) { REAL(fsync); CHECK(at_descriptor(descriptor), 0); return real(descriptor); }
int fdatasync(int descriptor) { REAL(fdatasync); CHECK(at_descriptor(descriptor), 0); return real(descriptor); }
int chmod(const char *path, mode_t mode) { REAL(chmod); CHECK(at_place(AT_FDCWD, path), 0); return real(path, mode); }
int mkdir(const char *path, mode_t mode) { REAL(mkdir); CHECK(at_place(AT_FDCWD, path), 1); return real(path, mode); }
int rmdir(const char *path) { REAL(rmdir); CHECK(at_place(AT_FDCWD, path), 0); return real(path); }
int unlink(const char *path) { REAL(unlink); CHECK(at_place(AT_FDCWD, path), 0); return real(path); }
int unlinkat(int folder, const char *path, int flags) { REAL(unlinkat); CHECK(at_place(folder, path), 0); return real(folder, path, flags); }
int link(const char *from, const char *to) { REAL(link); CHECK(at_place(AT_FDCWD, to), 1); return real(from, to); }
int linkat(int a, const char *from, int b, const char *to, int flags) { REAL(linkat); CHECK(at_place(b, to), 1); return real(a, from, b, to, flags); }
int rename(const char *from, const char *to) { REAL(rename); CHECK(at_place(AT_FDCWD, to), 0); return real(from, to); }
int renameat(int a, const char *from, int b, const char *to) { REAL(renameat); CHECK(at_place(b, to), 0); return real(a, from, b, to); }
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) { REAL(renameat2); CHECK(at_place(b, to), 0); return real(a, from, b, to, flags); }
