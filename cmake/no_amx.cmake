# To be included after add_subdirectory("${llama_dir}").
# ggml's AMX code is left out, for two faults of it:
# - A matrix product with more than one sequence (LFM2's short convolutions make such) takes the offset into the second operand
#   for one into the weights too: it reads past their end, and gives wrong results or a crash (ggml_batch_offset in amx/mmq.cpp).
# - gcc before 12.4 and 13.3 lets _tile_loadconfig read 8 bytes of the 64, and drops the rest of the tile set-up as dead stores:
#   the first quantised product ends the process with SIGILL (GCC PR 114098, llama.cpp pull request 26954).
if(CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang" AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  foreach(target IN ITEMS ggml-cpu ggml-cpu-sapphirerapids)
    if(TARGET ${target})
      target_compile_options(${target} PRIVATE -mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
    endif()
  endforeach()
endif()
