# cython: language_level=3, freethreading_compatible=True
from libc.stdint cimport int64_t
from libcpp.string cimport string

from lfmfast import errors

cdef extern from "engine/error.h" namespace "lfmfast" nogil:
    cdef struct error_info:
        int code
        string message
        int64_t seen
        int64_t limit
    error_info current_error() noexcept

# In the order of lfmfast::error_code (engine/error.h).
_CLASSES = (errors.LfmfastError, errors.ParameterError, errors.ModelLoadError, errors.ContextFullError, errors.DecodeError,
            errors.ClosedError, errors.BusyError, errors.ForkError, errors.StateError, errors.TemplateError, MemoryError,
            errors.CancelledError, errors.SamplingError, errors.QueueFullError, errors.DeadlineError, errors.ConstraintError)


def make_error(int code, message: str, seen=0, limit=0):
    """The Python exception for a code of lfmfast::error_code."""
    cls = _CLASSES[code]
    if cls is errors.ContextFullError:
        return cls(message, seen, limit)
    return cls(message)


cdef int raise_error() except -1 with gil:
    cdef error_info info = current_error()
    raise make_error(info.code, info.message.decode("utf-8", "replace"), info.seen, info.limit)
