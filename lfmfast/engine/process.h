// The process id: objects made before a fork() belong to the parent, whose threads do not exist in the child.
#pragma once

#ifdef _WIN32
#include <process.h>
#else
#include <unistd.h>
#endif

namespace lfmfast {

inline int current_pid() noexcept {
#ifdef _WIN32
    return _getpid();
#else
    return static_cast<int>(getpid());
#endif
}

}  // namespace lfmfast
