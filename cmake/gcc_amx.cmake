# To be included after add_subdirectory("${llama_dir}").
# gcc before 12.4 and 13.3 lets _tile_loadconfig read 8 bytes of the 64, and drops the rest of ggml's AMX tile set-up as dead
# stores: the first quantised matrix product then kills the process with SIGILL (GCC PR 114098, llama.cpp pull request 26954).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set_source_files_properties("${llama_dir}/ggml/src/ggml-cpu/amx/mmq.cpp" DIRECTORY "${llama_dir}/ggml/src"
                              PROPERTIES COMPILE_OPTIONS "-fno-tree-dse;-fno-dse")
endif()
