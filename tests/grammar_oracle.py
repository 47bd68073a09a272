"""llama.cpp's own reading of GBNF, out of the libllama that the package ships, through ctypes: what `from_gbnf` must equal."""

from __future__ import annotations

import ctypes as ct
import functools
from typing import Any

import oracle


class _Vector(ct.Structure):
    """std::vector of libstdc++ and libc++: three pointers."""

    _fields_ = (("begin", ct.c_void_p), ("end", ct.c_void_p), ("capacity", ct.c_void_p))


@functools.cache
def _library() -> Any:
    lib = ct.CDLL(str(oracle.library_path()))
    # What llama.cpp keeps for its own tests (src/llama-grammar.h); the public sampler takes tokens of a model only.
    lib.init = lib._Z23llama_grammar_init_implPK11llama_vocabPKcS3_bPS3_mPKim
    lib.init.argtypes = [ct.c_void_p, ct.c_char_p, ct.c_char_p, ct.c_bool, ct.c_void_p, ct.c_size_t, ct.c_void_p, ct.c_size_t]
    lib.init.restype = ct.c_void_p
    lib.stacks = lib._Z24llama_grammar_get_stacksP13llama_grammar
    lib.stacks.argtypes, lib.stacks.restype = [ct.c_void_p], ct.POINTER(_Vector)
    lib.accept = lib._Z20llama_grammar_acceptP13llama_grammarj
    lib.accept.argtypes, lib.accept.restype = [ct.c_void_p, ct.c_uint32], None
    lib.release = lib._Z23llama_grammar_free_implP13llama_grammar
    lib.release.argtypes, lib.release.restype = [ct.c_void_p], None
    return lib


class OracleGrammar:
    """A grammar as llama.cpp reads it, or `ok` False where it refuses it. Token elements need a model and are not for it."""

    def __init__(self, text: str, root: str = "root") -> None:
        self._arguments = (None, text.encode(), root.encode(), False, None, 0, None, 0)
        grammar = _library().init(*self._arguments)
        self.ok = grammar is not None
        if self.ok:
            _library().release(grammar)

    def accepts(self, text: str) -> bool:
        """Whether the whole text fits and may end there."""
        return any(self._ends(text))

    def begins(self, text: str) -> bool:
        """Whether something that fits begins with the text."""
        return bool(self._ends(text))

    def _ends(self, text: str) -> list[bool]:
        """Of each way to read the text, whether it may end there; none if it does not fit."""
        lib = _library()
        grammar = lib.init(*self._arguments)
        try:
            for char in text:
                lib.accept(grammar, ord(char))
                if not self._stacks(grammar):
                    return []
            return [stack.begin == stack.end for stack in self._stacks(grammar)]
        finally:
            lib.release(grammar)

    def _stacks(self, grammar: int) -> list[_Vector]:
        found = _library().stacks(grammar).contents
        size = ((found.end or 0) - (found.begin or 0)) // ct.sizeof(_Vector)
        return list((_Vector * size).from_address(found.begin)) if size else []
