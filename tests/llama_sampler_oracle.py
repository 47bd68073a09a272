"""llama.cpp's own sampler chain, out of the libllama that the package ships, through ctypes: what SamplerChain must equal."""

from __future__ import annotations

import ctypes as ct
import functools
import math
from typing import Any

import numpy as np
import oracle

from lfmfast.params import SamplingParams

_TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class _TokenDataArray(ct.Structure):
    _fields_ = (("data", ct.c_void_p), ("size", ct.c_size_t), ("selected", ct.c_int64), ("sorted", ct.c_bool))


class _ChainParams(ct.Structure):
    _fields_ = (("no_perf", ct.c_bool),)


class _LogitBias(ct.Structure):
    _fields_ = (("token", ct.c_int32), ("bias", ct.c_float))


class _Vector(ct.Structure):
    """std::vector of libstdc++ and libc++: three pointers."""

    _fields_ = (("begin", ct.c_void_p), ("end", ct.c_void_p), ("capacity", ct.c_void_p))


@functools.cache
def library() -> Any:
    lib = ct.CDLL(str(oracle.library_path()))
    f, i, u, size, pointer = ct.c_float, ct.c_int32, ct.c_uint32, ct.c_size_t, ct.c_void_p
    for name, arguments in {
        "chain_init": [_ChainParams],
        "init_logit_bias": [i, i, pointer],
        "init_penalties": [i, i, f, f, f],
        "init_top_n_sigma": [f],
        "init_top_k": [i],
        "init_typical": [f, size],
        "init_top_p": [f, size],
        "init_min_p": [f, size],
        "init_xtc": [f, f, size, u],
        "init_temp": [f],
        "init_temp_ext": [f, f, f],
        "init_dist": [u],
        "init_mirostat": [i, u, f, f, i],
        "init_mirostat_v2": [u, f, f],
    }.items():
        function = getattr(lib, f"llama_sampler_{name}")
        function.argtypes, function.restype = arguments, pointer
    for name, arguments in {"chain_add": [pointer] * 2, "apply": [pointer] * 2, "accept": [pointer, i], "reset": [pointer],
                            "free": [pointer]}.items():  # fmt: skip
        function = getattr(lib, f"llama_sampler_{name}")
        function.argtypes, function.restype = arguments, None
    return lib


def _dry(params: SamplingParams, breakers: list[list[int]] | None, n: int) -> int | None:
    """llama.cpp's entry for its own tests; the public one needs a vocabulary. It can't make a sampler that is off."""
    if params.dry_multiplier == 0 or params.dry_base < 1 or n == 0 or not breakers:
        return None
    function = library()._Z30llama_sampler_init_dry_testingffiiRKSt6vectorIS_IiSaIiEESaIS1_EE
    function.argtypes, function.restype = [ct.c_float, ct.c_float, ct.c_int32, ct.c_int32, ct.c_void_p], ct.c_void_p
    inner = (_Vector * len(breakers))()
    keep = []
    for vector, tokens in zip(inner, breakers, strict=True):
        data = (ct.c_int32 * len(tokens))(*tokens)
        keep.append(data)
        vector.begin = ct.addressof(data)
        vector.end = vector.capacity = ct.addressof(data) + ct.sizeof(data)
    end = ct.addressof(inner) + ct.sizeof(inner)
    outer = _Vector(ct.addressof(inner), end, end)
    result: int = function(params.dry_multiplier, params.dry_base, params.dry_allowed_length, n, ct.byref(outer))
    return result


class OracleChain:
    """The chain that llama.cpp's common/sampling.cpp builds for these parameters.

    `window` stands for a repeat_last_n or dry_penalty_last_n of -1, which llama.cpp's tools replace by the context's size.
    """

    def __init__(self, n_vocab: int, params: SamplingParams, breakers: list[list[int]] | None = None, window: int = 1 << 20):
        p = params.resolved()
        assert p.samplers is not None and p.logit_bias is not None and p.seed is not None and p.seed >= 0
        lib = self._lib = library()
        self._chain = lib.llama_sampler_chain_init(_ChainParams(True))
        self._data = np.zeros(n_vocab, _TOKEN_DATA)
        self._ids = np.arange(n_vocab, dtype=np.int32)
        parts = []
        if p.logit_bias:
            bias = (_LogitBias * len(p.logit_bias))(*p.logit_bias.items())
            parts.append(lib.llama_sampler_init_logit_bias(n_vocab, len(bias), bias))
        make = {
            "penalties": lambda: lib.llama_sampler_init_penalties(
                n_vocab, window if p.repeat_last_n == -1 else p.repeat_last_n, p.repeat_penalty, p.frequency_penalty,
                p.presence_penalty),
            "dry": lambda: _dry(p, breakers, window if p.dry_penalty_last_n == -1 else p.dry_penalty_last_n),
            "top_n_sigma": lambda: lib.llama_sampler_init_top_n_sigma(p.top_n_sigma),
            "top_k": lambda: lib.llama_sampler_init_top_k(p.top_k),
            "typ_p": lambda: lib.llama_sampler_init_typical(p.typical_p, p.min_keep),
            "top_p": lambda: lib.llama_sampler_init_top_p(p.top_p, p.min_keep),
            "min_p": lambda: lib.llama_sampler_init_min_p(p.min_p, p.min_keep),
            "xtc": lambda: lib.llama_sampler_init_xtc(p.xtc_probability, p.xtc_threshold, p.min_keep, p.seed),
            "temperature": lambda: lib.llama_sampler_init_temp_ext(p.temperature, p.dynatemp_range, p.dynatemp_exponent),
        }  # fmt: skip
        if p.mirostat:
            parts.append(lib.llama_sampler_init_temp(p.temperature))
            if p.mirostat == 1:
                parts.append(lib.llama_sampler_init_mirostat(n_vocab, p.seed, p.mirostat_tau, p.mirostat_eta, 100))
            else:
                parts.append(lib.llama_sampler_init_mirostat_v2(p.seed, p.mirostat_tau, p.mirostat_eta))
        else:
            parts += [make[name]() for name in p.samplers] + [lib.llama_sampler_init_dist(p.seed)]
        for part in parts:
            if part is not None:
                lib.llama_sampler_chain_add(self._chain, part)

    def sample(self, logits: np.ndarray) -> int | None:
        """The token; None where the logits overflowed in llama.cpp, which then draws from NaN."""
        self._data["id"] = self._ids
        self._data["logit"] = logits
        array = _TokenDataArray(self._data.ctypes.data, len(self._data), -1, False)
        self._lib.llama_sampler_apply(self._chain, ct.byref(array))
        # xtc moves the array's start, so the data is read where the array says it is
        picked = array.data + array.selected * _TOKEN_DATA.itemsize
        return None if math.isnan(ct.c_float.from_address(picked + 8).value) else ct.c_int32.from_address(picked).value

    def accept(self, token: int) -> None:
        self._lib.llama_sampler_accept(self._chain, token)

    def reset(self) -> None:
        self._lib.llama_sampler_reset(self._chain)

    def __del__(self) -> None:
        if getattr(self, "_chain", None):
            self._lib.llama_sampler_free(self._chain)
