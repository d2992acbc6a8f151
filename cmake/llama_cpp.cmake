# lookahead::llama_cpp, the adapter for llama.cpp: where there is a target `llama`, of a build of llama.cpp in the same
# project, or else of its package (CMAKE_PREFIX_PATH; examples/fetch_llama_cpp.sh prints one).
if(NOT TARGET llama)
  find_package(llama CONFIG QUIET)
endif()
if(TARGET llama)
  add_library(lookahead::llama_cpp INTERFACE IMPORTED GLOBAL)
  target_link_libraries(lookahead::llama_cpp INTERFACE lookahead::lookahead llama)
endif()
