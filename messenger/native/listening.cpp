// For those who take what has come themselves.
#include "listening.h"

extern "C" int listen_to(int fd, int64_t for_ns) { return hears(fd, for_ns); }
