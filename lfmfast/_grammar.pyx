# cython: language_level=3, freethreading_compatible=True
"""Grammars for constrained answers: llguidance's matcher, for the engine to call without Python."""

import ctypes
import glob
import importlib.util
import os

from libc.stdint cimport int32_t, uintptr_t
from libcpp cimport bool as cbool
from libcpp.memory cimport shared_ptr
from libcpp.string cimport string
from libcpp.vector cimport vector

from lfmfast cimport _cpp as cpp
from lfmfast._model cimport Model, to_utf8

from lfmfast.errors import LfmfastError


# In the order of lfmfast::llg_api (engine/grammar.h).
_NAMES = ("new_tokenizer_v2", "free_tokenizer", "constraint_init_set_defaults", "new_matcher", "clone_matcher",
          "free_matcher", "matcher_get_error", "matcher_validate_tokens", "matcher_compute_mask_into",
          "matcher_get_mask_byte_size", "matcher_consume_token", "matcher_reset", "matcher_is_stopped")


cdef class GrammarVocabulary:
    """A model's tokens as llguidance wants them.

    Parameters
    ----------
    model : lfmfast._model.Model
    markers : collection of str
        Texts of tokens that no text becomes, beside the control tokens.

    Raises
    ------
    LfmfastError
        This version of llguidance lacks what is needed of it.
    """

    def __cinit__(self, Model model not None, markers=()):
        cdef cpp.llg_api api
        cdef shared_ptr[cpp.model] native = model.alive()
        cdef vector[string] data
        cdef vector[cbool] control
        cdef vector[int32_t] ends
        cdef cbool marked
        cdef int32_t token
        fill_api(&api)
        marker_ids = {model.token_id(text) for text in markers}
        for token in range(native.get().n_vocab()):
            marked = native.get().is_control(token) or token in marker_ids
            control.push_back(marked)
            data.push_back(native.get().piece(token, marked))
            if native.get().is_eog(token):
                ends.push_back(token)
        with nogil:  # it takes most of a second for 65,536 tokens
            self._vocabulary = cpp.make_grammar_vocabulary(api, data, control, ends)


cdef class Grammar:
    """What an answer has to be, compiled. Each request works on a copy: one may serve many, also at a time.

    Parameters
    ----------
    vocabulary : GrammarVocabulary
    kind : str
        "json_schema", "lark" or "regex".
    text : str
        In llguidance's syntax for that kind.

    Raises
    ------
    ParameterError
        It can't be compiled; the message has llguidance's reason.
    """

    def __cinit__(self, GrammarVocabulary vocabulary not None, str kind not None, str text not None):
        cdef string a = to_utf8(kind, "kind")
        cdef string b = to_utf8(text, "grammar")
        if "\0" in text:
            raise ValueError("a grammar can't have NUL in it")
        with nogil:
            self._grammar = cpp.make_grammar(vocabulary._vocabulary, a, b)


cdef int fill_api(cpp.llg_api * api) except -1:
    # Its library alone: to import the module of a version without free threading would switch the GIL on.
    package = importlib.util.find_spec("llguidance")
    found = [] if package is None else [path for folder in package.submodule_search_locations
                                        for path in glob.glob(os.path.join(glob.escape(folder), "_lib*"))
                                        if path.endswith((".so", ".pyd"))]
    if len(found) != 1:
        raise LfmfastError(f"llguidance is not installed as it should be: its library is {found or 'missing'}")
    library = ctypes.CDLL(found[0])
    try:
        for i, name in enumerate(_NAMES):
            (<uintptr_t *>api)[i] = <uintptr_t>ctypes.cast(getattr(library, "llg_" + name), ctypes.c_void_p).value
    except AttributeError as error:
        raise LfmfastError(f"llguidance is too old or too new for lfmfast ({error}): 1.8 to 1.x is needed") from None
    return 0
