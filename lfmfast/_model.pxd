from libcpp.memory cimport shared_ptr
from libcpp.string cimport string

from lfmfast cimport _cpp as cpp


cdef class Model:
    cdef shared_ptr[cpp.model] _model  # contexts and engines hold copies, so a closed Model lives until they end
    cdef int _pid
    cdef object __weakref__

    cdef shared_ptr[cpp.model] alive(self) except *


cdef int check_pid(int pid, str what) except -1
cdef string to_utf8(text, str name) except *
