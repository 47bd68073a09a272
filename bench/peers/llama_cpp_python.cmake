# Run inside llama-cpp-python's own CMakeLists.txt, after project().
set(LLAMA_BUILD_COMMON OFF)  # nothing of what is installed uses it: half of the build
# Its targets are not there yet.
cmake_language(EVAL CODE "cmake_language(DEFER CALL include [[${CMAKE_CURRENT_LIST_DIR}/../../cmake/no_amx.cmake]])")
