# The one door from a C++ exception to a Python one: declare every C++ function that can throw `except +raise_error`.
cdef int raise_error() except -1 with gil
