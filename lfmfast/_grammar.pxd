from libcpp.memory cimport shared_ptr

from lfmfast cimport _cpp as cpp


cdef class GrammarVocabulary:
    cdef shared_ptr[const cpp.grammar_vocabulary] _vocabulary
    cdef object __weakref__


cdef class Grammar:
    cdef shared_ptr[cpp.grammar] _grammar
