# cython: language_level=3, auto_pickle=False, autotestdict=False, freethreading_compatible=True
"""The C++ chat formatter. Checks and conversions of messages are in lfmfast.templates."""
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libcpp cimport bool as cbool
from libcpp.memory cimport unique_ptr
from libcpp.string cimport string
from libcpp.vector cimport vector

from lfmfast._error cimport raise_error

from lfmfast.templates import Segment

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL

cdef extern from "engine/chat_template.h" namespace "lfmfast" nogil:
    cdef enum class chat_family(int):
        lfm2
    cdef struct chat_segment:
        string text
        cbool special
    ctypedef vector[chat_segment] chat_block
    ctypedef vector[string] chat_content
    cdef cppclass chat_message:
        string role
        chat_content content
        cbool has_thinking
        cbool has_calls
        string thinking
        string calls
    cdef cppclass chat_head:
        cbool has_system
        chat_content system
        string tools
        string date
    cdef cppclass chat_options:
        cbool keep_thinking
        cbool add_generation_prompt
        cbool open_end
    cdef cppclass chat_rendering:
        size_t n_kept
        vector[chat_block] blocks
    cdef cppclass string_view "std::string_view":
        const char* data()
        size_t size()
    cdef cppclass chat_template:
        chat_template(chat_family, const string&, const vector[string]&) except +raise_error
        chat_block head(const chat_head&) except +raise_error
        chat_rendering render(const vector[chat_message]&, size_t, const chat_options&) except +raise_error
        string_view pivot()


cdef int assign(string& target, str text) except -1:
    cdef Py_ssize_t size = 0
    cdef const char* data = PyUnicode_AsUTF8AndSize(text, &size)
    target.assign(data, <size_t>size)
    return 0


cdef int assign_content(chat_content& target, tuple pieces) except -1:
    cdef str piece
    target.resize(len(pieces))
    cdef size_t i = 0
    for piece in pieces:
        assign(target[i], piece)
        i += 1
    return 0


cdef tuple segments_of(const chat_block& block):
    cdef size_t i
    cdef list result = []
    for i in range(block.size()):
        result.append(tuple.__new__(Segment, (
            PyUnicode_DecodeUTF8(block[i].text.data(), <Py_ssize_t>block[i].text.size(), "strict"), bool(block[i].special))))
    return tuple(result)


cdef class Formatter:
    cdef unique_ptr[chat_template] native

    def __cinit__(self, int family, str bos, special):
        cdef string bos_text
        cdef vector[string] texts
        assign(bos_text, bos)
        for text in special:
            texts.push_back(string())
            assign(texts.back(), text)
        self.native.reset(new chat_template(<chat_family>family, bos_text, texts))

    @property
    def pivot(self):
        cdef string_view view = self.native.get().pivot()
        return PyUnicode_DecodeUTF8(view.data(), <Py_ssize_t>view.size(), "strict")

    def head(self, tuple system, str tools, str date):
        cdef chat_head head
        head.has_system = system is not None
        if system is not None:
            assign_content(head.system, system)
        assign(head.tools, tools)
        assign(head.date, date)
        return segments_of(self.native.get().head(head))

    def render(self, list messages, size_t n_known, bint keep_thinking, bint add_generation_prompt, bint open_end):
        cdef vector[chat_message] natives
        cdef chat_message* native
        cdef chat_options options
        cdef chat_rendering rendering
        cdef size_t i = 0
        natives.resize(len(messages))
        for role, content, thinking, calls in messages:
            native = &natives[i]
            assign(native.role, role)
            if content is not None:
                assign_content(native.content, content)
            native.has_thinking = thinking is not None
            if thinking is not None:
                assign(native.thinking, thinking)
            native.has_calls = calls is not None
            if calls is not None:
                assign(native.calls, calls)
            i += 1
        options.keep_thinking = keep_thinking
        options.add_generation_prompt = add_generation_prompt
        options.open_end = open_end
        with nogil:
            rendering = self.native.get().render(natives, n_known, options)
        return rendering.n_kept, [segments_of(rendering.blocks[i]) for i in range(rendering.blocks.size())]
